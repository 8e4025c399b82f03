"""The report as plain data, for --json and for other programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pyalloc.analysis import leaks, reserved
from pyalloc.analysis.advice import advise
from pyalloc.analysis.asked import Asked, Size, by_requests
from pyalloc.analysis.meaning import Analysis
from pyalloc.traces.facts import Row


def table(rows: list[Row], limit: int = 50) -> list[dict[str, Any]]:
    """The first rows as dicts."""
    return [asdict(row) for row in rows[:limit]]


def totals(found: dict[str, Any]) -> dict[str, Any]:
    """A trace's figures, with peaks as the numbers that `events` and CSV files give to the events that reached them.

    None: no event did.
    """
    peaks = ("peak_event", "peak_reserved_event")  # moments: numbers of events before them
    return {**found, **{key: found[key] - 1 if found[key] else None for key in peaks}}


def asked(lines: list[Asked], sizes: list[Size], limit: int) -> dict[str, Any]:
    """Requests over the whole run, by size and by line; limit: lines."""
    return {
        "sizes": [
            {"least_bytes": each.least, "requests": each.requests, "bytes": each.bytes}
            for each in sizes
        ],
        **{
            key: [
                {"name": line.name, "bytes": line.bytes, "requests": line.requests}
                for line in found
            ]
            for key, found in (
                ("lines_by_bytes", lines[:limit]),
                ("lines_by_requests", by_requests(lines)[:limit]),
            )
        },
    }


def _reserved(analysis: Analysis) -> dict[str, Any] | None:
    """The moment when most was reserved; None if nearly all of it was in use."""
    found = reserved.at_most(analysis)
    if found is None:
        return None
    request = found.request
    return {
        "event": found.moment.last_event,
        "request_bytes": request.bytes if request else None,
        "request": analysis.labels([request])[0] if request else None,
        "rows": table(found.rows),
        "segments_for": [asdict(maker) for maker in found.makers],
    }


def summary(analysis: Analysis) -> dict[str, Any]:
    """Everything that the terminal report says.  Sizes are bytes."""
    peak = analysis.peak
    return {
        "file": str(analysis.path),
        "settings": analysis.notes,
        "caveats": analysis.caveats,
        "totals": totals(analysis.totals),
        "peak": {
            "phase": analysis.totals["peak_phase"],
            "contributors": table(analysis.contributors(peak)),
            "by_category": table(analysis.by_category(peak.blocks)),
            "by_line": table(analysis.by_line(peak.blocks)),
            "by_module": table(analysis.by_module(peak.blocks)),
            "by_size": table(analysis.by_size(peak.blocks)),
            "by_label": table(analysis.by_label(peak.blocks)),
            "by_stream": table(analysis.by_stream(peak.blocks)),
            "by_thread": table(analysis.by_thread(peak.blocks)),
            "by_pool": table(analysis.by_pool(peak)),
            "idle_pools": table(analysis.idle_pools(peak)),
            "idle_bytes": peak.idle_bytes,
            "pending_bytes": peak.pending_bytes,
            "temporary_bytes": peak.temporary_bytes,
            "largest_idle_bytes": peak.largest_gap,
        },
        "reserved": _reserved(analysis),
        "reserved_growth": [
            asdict(each) for each in reserved.largest(reserved.over_time(analysis), 1000)
        ],
        "phases": [asdict(phase) for phase in analysis.phases[:1000]],
        "steps": [
            dict(
                zip(("number", "event", "time_ns", "allocated_bytes", "peak_bytes"), s, strict=True)
            )
            for s in analysis.steps[:1000]
        ],
        "growth": [asdict(item) for item in leaks.growth(analysis)],
        "leak": leaks.verdict(analysis),
        "advice": [asdict(item) for item in advise(analysis)],
        "replay": analysis.replays,
        "ooms": [list(oom) for oom in analysis.ooms],
    }
