"""What changed between two recordings, or two moments of one, as a page that needs no network."""

from __future__ import annotations

from typing import Any

from pyalloc.analysis import aligned, leaks
from pyalloc.analysis.comparing import Comparison, Side, phase_of
from pyalloc.common.units import size
from pyalloc.report import compared
from pyalloc.report.parts import MOST_STACKS, Stacks, filled

_TOP = 100  # rows of a table
_MAX_FLAME = MOST_STACKS - 1
_SMALLER = (("smaller stacks", 0),)
Call = tuple[str, int]


def page(told: Comparison) -> str:
    """The page's HTML."""
    return filled("comparison.html", f"{told.before.name} and {told.after.name}", _content(told))


def _content(told: Comparison) -> dict[str, Any]:
    stacks = Stacks(told.after.found)
    axis = aligned.axis(told.before.found, told.after.found)
    return {
        "sentence": compared.sentence(told),
        "notes": compared.notes(told),
        "caveats": compared.caveats(told),
        "verdict": leaks.verdict(told.after.found),
        "leaks": [
            f"{size(each.per_step)} more per {leaks.turn(told.after.found)}: {each.name}"
            for each in leaks.growth(told.after.found)[:_TOP]
        ],
        "isOfOne": told.is_of_one,
        "sides": [_side(side) for side in (told.before, told.after)],
        "axis": [[a, b, round(place, 6)] for a, b, place in axis.marks],
        "steps": [[number, round(place, 6)] for number, place in axis.steps],
        "tables": {
            kind: [
                [r.name, r.before_bytes, r.after_bytes, r.before_blocks, r.after_blocks]
                for r in rows[: None if kind == "step" else _TOP]
            ]
            for kind, rows in told.tables.items()
        },
        "flame": _flame(told, stacks),
        "hasStacks": any(b.stack for side in (told.before, told.after) for b in side.moment.blocks),
        "origins": [],
        "frames": [list(frame) for frame in stacks.frames],
        "stacks": stacks.stacks,
    }


def _side(side: Side) -> dict[str, Any]:
    found = side.found
    return {
        "name": side.name,
        "at": side.moment.event,
        "allocated": side.moment.allocated_bytes,
        "reserved": found.totals["peak_reserved_bytes"] if found.has_segments else None,
        "where": phase_of(side),
        "allocs": found.totals["n_allocs"],
        "end": found.totals["n_events"],
        "bins": [[b[0], b[2], b[5]] for b in found.bins],
        "phases": [[p.name, p.begin, p.end] for p in found.phases if p.depth == 0][:400],
    }


def _flame(told: Comparison, stacks: Stacks) -> list[list[int]]:
    """[bytes before, blocks before, bytes after, blocks after, stack] for each stack.

    The stacks that hold most or change most; all others are summed up in the last row.
    """
    sums: dict[tuple[Call, ...], list[int]] = {}
    for which, side in enumerate((told.before, told.after)):
        own = stacks if which else Stacks(side.found)
        known: dict[tuple[int, str], tuple[Call, ...]] = {}
        blocks = side.moment.blocks
        for block, label in zip(blocks, side.found.labels(blocks), strict=True):
            key = block.stack, "" if block.stack else label
            if key not in known:
                known[key] = tuple(own.frames_of(*key))
            row = sums.setdefault(known[key], [0, 0, 0, 0])
            row[2 * which] += block.bytes
            row[2 * which + 1] += 1
    ordered = sorted(sums.items(), key=lambda item: -_weight(item[1]))
    found = [[*row, stacks.keep(frames)] for frames, row in ordered[:_MAX_FLAME]]
    rest = [row for _, row in ordered[_MAX_FLAME:]]
    if rest:
        found.append([*(sum(column) for column in zip(*rest, strict=True)), stacks.keep(_SMALLER)])
    return found


def _weight(row: list[int]) -> float:
    """What a stack is sorted by: a change counts four times as much as what stays."""
    before, _, after, _ = row
    return max(abs(after - before), max(before, after) / 4)
