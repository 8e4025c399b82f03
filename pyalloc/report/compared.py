"""What changed between two recordings, or two moments of one, in words and tables of 80 columns."""

from __future__ import annotations

from dataclasses import asdict
from itertools import starmap
from typing import Any

from pyalloc.analysis import leaks
from pyalloc.analysis.comparing import Change, Comparison, phase_of
from pyalloc.common.folding import clip
from pyalloc.common.units import size
from pyalloc.report.text import hung, wrapped

_NAME_LINES = 6  # nearly always the whole name: two names may differ only at their ends
_LONGEST = 60  # characters of a setting
_MANY_TIMES = 10
_ROWS = {"category": 8, "phase": 8}  # of the tables besides that of lines


def signed(n_bytes: int) -> str:
    """A change as people read it: "+1.5 MiB"."""
    return ("+" if n_bytes >= 0 else "-") + size(abs(n_bytes))


def _by(n_bytes: int, of: int) -> str:
    share = f" ({100 * abs(n_bytes) / of:.1f} %)" if of else ""
    if n_bytes > _MANY_TIMES * of > 0:  # a percentage says little then
        share = f" ({(of + n_bytes) / of:.0f} times as much)"
    return f"{size(abs(n_bytes))} {'more' if n_bytes > 0 else 'less'}{share}"


def sentence(told: Comparison) -> str:
    """The answer: how high memory was and is, and which lines explain most of the change."""
    before, after = told.before, told.after
    empty = [side.name for side in (before, after) if side.found.is_empty]
    if empty and not told.is_of_one:
        has = "have" if len(empty) > 1 else "has"
        return f"There is nothing to compare: {' and '.join(empty)} {has} no allocations."
    figures = [size(side.moment.allocated_bytes) for side in (before, after)]
    what = "" if told.is_of_one else "peak "
    start = f"{before.name}: {what}{figures[0]}; {after.name}: {figures[1]}"
    if not told.main:
        return f"{start}. Every line holds as much as before."
    change = _by(told.bytes, before.moment.allocated_bytes) if told.bytes else "unchanged"
    named = ", ".join(f"{signed(row.bytes)} {row.name}" for row in told.main)
    n_more = sum(row.bytes != 0 for row in told.contributors) - len(told.main)
    rest = told.bytes - sum(row.bytes for row in told.main)
    others = f"; {n_more} other{'s' * (n_more != 1)} {signed(rest)}" if n_more and rest else ""
    return f"{start}, {change}. Most of it: {named}{others}."


def notes(told: Comparison) -> list[str]:
    """What else the reader must know, one sentence each."""
    found = []
    before, after = told.before, told.after
    phases = phase_of(before), phase_of(after)
    names = [str(side.found.totals["peak_phase"]) for side in (before, after)]
    if names[0] != names[1] and all(names) and all(phases):
        found.append(
            f"The peak is now in {phases[1]}, it was in {phases[0]} before: blocks that exist only in one of them are "
            "part of the change."
        )
    if told.settings:
        found.append(f"Settings differ: {'; '.join(starmap(_setting, told.settings))}.")
    if told.n_moved:
        found.append(
            f"{told.n_moved:,} line{'s' * (told.n_moved != 1)} of code moved between {before.name} and {after.name}; "
            "line numbers are those of the latter."
        )
    if told.has_one_passes:
        found.append(
            "Only one of the two has forward and backward phases, so the categories of blocks do not compare: "
            "categories and contributors are left out."
        )
    return found


def _reserved(told: Comparison) -> list[str]:
    sides = (told.before, told.after)
    if told.is_of_one or not all(side.found.has_segments for side in sides):
        return []
    first, second = (side.found.totals["peak_reserved_bytes"] for side in sides)
    change = _by(second - first, first) if first != second else "unchanged"
    return [f"Peak reserved: {size(first)}, then {size(second)}, {change}."]


def _setting(name: str, before: str, after: str) -> str:
    if not after:
        return f"{name} {clip(before, _LONGEST)} (only before)"
    was = f"before: {clip(before, _LONGEST)}" if before else "new"
    return f"{name} {clip(after, _LONGEST)} ({was})"


def summary(told: Comparison, limit: int) -> list[str]:
    """The answer, the notes and the tables; limit: rows of the table of lines."""
    lines = [wrapped(sentence(told), ""), *map(wrapped, [*_reserved(told), *notes(told)])]
    for kind in ("category", "phase", "line"):
        changed = [row for row in told.tables.get(kind, ()) if row.bytes]
        if changed:
            title = "phase (highest peak)" if kind == "phase" else kind
            lines += ["", *_table(title, changed, _ROWS.get(kind, limit))]
    return lines


def _table(title: str, rows: list[Change], limit: int) -> list[str]:
    lines = [f"{'change':>12}{'before':>12}{'after':>12}  {title}"]
    for row in rows[:limit]:
        head = f"{signed(row.bytes):>12}{size(row.before_bytes):>12}{size(row.after_bytes):>12}"
        lines.append(hung(head, row.name, _NAME_LINES))
    rest = rows[limit:]
    if rest:
        lines.append(f"{signed(sum(row.bytes for row in rest)):>12}{'':24}  and {len(rest)} more")
    return lines


def verdict(told: Comparison, limit: int) -> list[str]:
    """Does the second one leak?  Always about its steps, whatever is compared."""
    found = told.after.found
    of = "verdict" if told.is_of_one else f"verdict on {found.path.name} by itself"
    return [
        wrapped(f"{of}: {leaks.verdict(found)}", ""),
        *[
            hung(f"  +{size(each.per_step)} per {leaks.turn(found)}", each.name, _NAME_LINES)
            for each in leaks.growth(found)[:limit]
        ],
    ]


def caveats(told: Comparison) -> list[str]:
    """The caveats; those of two files each with the name of its file."""
    if told.is_of_one:
        return told.after.found.caveats
    return [
        f"{side.found.path.name}: {caveat}"
        for side in (told.before, told.after)
        for caveat in side.found.caveats
    ]


def data(told: Comparison) -> dict[str, Any]:
    """The same as data, for --json and for other programs.  Sizes are bytes."""
    return {
        "answer": sentence(told),
        "before": _side(told, 0),
        "after": _side(told, 1),
        "settings": [
            {"name": name, "before": before, "after": after}
            for name, before, after in told.settings
        ],
        "changes": [asdict(row) for row in told.tables["line"]],
        "by": {
            kind: [asdict(row) for row in rows]
            for kind, rows in told.tables.items()
            if kind != "line"
        },
        "verdict": leaks.verdict(told.after.found),
        "leak": [
            {"name": each.name, "bytes_per_step": each.per_step}
            for each in leaks.growth(told.after.found)
        ],
        "caveats": caveats(told),
    }


def _side(told: Comparison, which: int) -> dict[str, Any]:
    side = (told.before, told.after)[which]
    return {
        "file": str(side.found.path),
        "name": side.name,
        "event": side.moment.last_event,
        "allocated_bytes": side.moment.allocated_bytes,
        "peak_reserved_bytes": side.found.totals["peak_reserved_bytes"],
        "in": phase_of(side),
    }
