"""pyalloc events."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyalloc import trace, when
from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console
from pyalloc.common.folding import clip
from pyalloc.common.units import size
from pyalloc.report import text
from pyalloc.traces.told import Told


class Command:
    """List allocations and frees around a moment, event by event.

    pyalloc events out.pya [--at peak|end|oom|step:N|TIME|EVENT] [-n N]

    Events are numbered from 0, as in `pyalloc export --to csv`, which writes all of them; times are milliseconds
    since the first event.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The trace, the moment and how many."""
        parser.add_argument("file", type=Path, help="a recording, or a snapshot written by torch")
        parser.add_argument(
            "--at",
            default="peak",
            metavar="WHEN",
            help=f"{when.FORMS} (default: peak); {when.SEVERAL}",
        )
        parser.add_argument(
            "-n",
            type=console.count,
            default=40,
            metavar="N",
            help="number of events, half of them before the moment (default: 40)",
        )
        console.add_device(parser)
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints the events."""
        console.prepare_output(args)
        progress = console.Progress(f"reading {args.file.name}", quiet=args.quiet)
        with trace.read_once(args.file, progress):
            found = trace.analyse(args.file, device=args.device, progress=progress)
            trace.check_device(found, args.device)
            event, title = when.moment(found, args.at, progress=progress)
            rows = trace.events_around(args.file, event, args.n, args.device, progress)
            progress.close()
        content: dict[str, Any] = {
            "at": args.at,
            "rows": [_data(found, row) for row in rows],
            "caveats": found.caveats,
        }
        first, last = (rows[0].event, rows[-1].event) if rows else (0, 0)
        head = f"{title}: events {first:,} to {last:,} of {found.totals['n_events']:,}"
        # An out-of-memory error is an event, and its moment is the one before it.
        number = event if when.OOM.fullmatch(args.at) else max(event - 1, 0)
        lines = [head, *_lines(found, rows, number)]
        lines += [text.wrapped(caveat) for caveat in found.caveats]
        name = console.quoted(args.file)
        then = console.RECORD if found.is_empty else f"pyalloc top {name} --at {number} --by line"
        console.deliver(args, "\n".join(lines), content, then)
        return 0


def _more(found: Analysis, row: Told) -> str:
    pool = found.pool_name(row.pool) if row.pool else ""
    return row.what + (f" ({pool})" if pool else "")


def _lines(found: Analysis, rows: list[Told], event: int) -> list[str]:
    """One line per event; marks the event asked for, or the last one shown before it."""
    origin = found.totals["first_ns"]
    marked = max((row.event for row in rows if row.event <= event), default=-1)
    cells = [
        (
            ">" if row.event == marked else " ",
            f"{row.event:,}",
            f"{(row.time_ns - origin) // 1000 / 1000:.3f}",  # as on the page
            clip(_more(found, row), 32),
            size(row.bytes) if row.bytes else "",
            found.line_of(row),
        )
        for row in rows
    ]
    wide = [max((len(cell[i]) for cell in cells), default=0) for i in range(6)]
    lines = []
    for mark, number, ms, what, n_bytes, line in cells:
        head = (
            f"{mark}{number:>{wide[1]}}  {ms:>{wide[2]}}  {what:<{wide[3]}}  {n_bytes:>{wide[4]}}"
        )
        lines.append(text.hung(head, line).rstrip())
    return lines


def _data(found: Analysis, row: Told) -> dict[str, Any]:
    return {
        "event": row.event,
        "time_ns": row.time_ns - found.totals["first_ns"],
        "kind": row.name,
        "what": row.what,
        "bytes": row.bytes,
        "address": row.address,
        "device": row.device,
        "stream": row.stream,
        "pool": found.pool_id(row.pool) if row.pool else None,
        "allocated_by": row.alloc_event,
        "line": found.line_of(row),
        "stack": [list(frame) for frame in found.frames(row.stack)],
    }
