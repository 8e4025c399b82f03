"""One axis for the timelines of two recordings: steps of the same number, and phases of the same name, are aligned."""

from __future__ import annotations

import difflib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyalloc.analysis.meaning import Analysis

_MOST_STEPS = 400
_MOST_PHASED = 100  # steps: with more, their phases would be too narrow to see
_MOST_PAIRS = 1_000_000  # compared when looking for common elements
Mark = tuple[int, int]  # events of the first and the second at the same place


class Axis(NamedTuple):
    """marks: (event of the first, of the second, place from 0 to 1), ascending; steps: (number, place of its begin)."""

    marks: list[tuple[int, int, float]]
    steps: list[tuple[int, float]]


def axis(before: Analysis, after: Analysis) -> Axis:
    """Steps have the same width, unless one is shorter than most.

    Steps that only one recording has come last, and take at most as much room as the common ones.
    """
    ends = before.totals["n_events"], after.totals["n_events"]
    common = _alike(
        [(step[0], step[1]) for step in before.steps], [(step[0], step[1]) for step in after.steps]
    )
    common = common[:: max(1, -(-len(common) // _MOST_STEPS))]
    begins = [both for _, both in common]
    own = [  # where the common steps end
        next((step[1] for step in found.steps if begins and step[1] > begins[-1][i]), end)
        for i, (found, end) in enumerate(zip((before, after), ends, strict=True))
    ]
    edges = [(0, 0), *begins, (own[0], own[1])]
    widths = _widths(edges)
    rest = max(
        sum(step[1] >= end for step in found.steps)
        for found, end in zip((before, after), own, strict=True)
    )
    edges.append(ends)
    widths.append(min(float(rest), sum(widths)))
    marks: list[tuple[int, int, float]] = []
    place, total = 0.0, sum(widths) or 1.0
    starts: list[float] = []
    for (first, last), width in zip(itertools.pairwise(edges), widths, strict=True):
        starts.append(place / total)
        inner = _phases(before, after, first, last) if len(begins) <= _MOST_PHASED else []
        marks += _spread([first, *inner, last], place / total, (place + width) / total)
        place += width
    steps = [(number, at) for (number, _), at in zip(common, starts[1:], strict=False)]
    return Axis(marks, steps)


def _alike(
    first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> list[tuple[int, Mark]]:
    """The numbers that both have, in order, with both events; the arguments are (number, event)."""
    numbers = [[number for number, _ in steps] for steps in (first, second)]
    if all(a < b for each in numbers for a, b in itertools.pairwise(each)):
        known = dict(second)
        return [(number, (event, known[number])) for number, event in first if number in known]
    return [(first[i][0], (first[i][1], second[j][1])) for i, j in _in_both(numbers[0], numbers[1])]


def _in_both(first: Sequence[object], second: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Positions of a common subsequence, in order.

    It has the common beginning and the common end; what is between is skipped if comparing it would take long.
    """
    n = min(len(first), len(second))
    begin = next((i for i in range(n) if first[i] != second[i]), n)
    n -= begin
    n_end = next((i for i in range(n) if first[-1 - i] != second[-1 - i]), n)
    ends = len(first) - n_end, len(second) - n_end
    yield from ((i, i) for i in range(begin))
    left, right = first[begin : ends[0]], second[begin : ends[1]]
    if len(left) * len(right) <= _MOST_PAIRS:
        matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
        for a, b, length in matcher.get_matching_blocks():
            yield from ((begin + a + i, begin + b + i) for i in range(length))
    yield from ((ends[0] + i, ends[1] + i) for i in range(n_end))


def _widths(edges: Sequence[Mark]) -> list[float]:
    """Widths of the part before the first step, and of the steps: 1, or less for those shorter than most."""
    both = list(itertools.pairwise(edges))
    shares = []
    for i in (0, 1):
        events = [last[i] - first[i] for first, last in both]
        usual = statistics.median(events[1:] or events) or max(*events, 1)
        shares.append([n / usual for n in events])
    return [min(1.0, (a + b) / 2) for a, b in zip(*shares, strict=True)]


def _phases(before: Analysis, after: Analysis, first: Mark, last: Mark) -> list[Mark]:
    """Begins and ends of the phases that both have between two marks."""
    inside = [
        [p for p in found.phases if p.depth == 0 and a <= p.begin and p.end <= b]
        for found, a, b in zip((before, after), first, last, strict=True)
    ]
    names = [[phase.name for phase in phases] for phases in inside]
    found: list[Mark] = []
    for i, j in _in_both(names[0], names[1]):
        one, other = inside[0][i], inside[1][j]
        found += [(one.begin, other.begin), (one.end, other.end)]
    return found


def _spread(marks: Sequence[Mark], begin: float, end: float) -> list[tuple[int, int, float]]:
    """Places each mark between begin and end, by the share of events before it, averaged over both recordings."""
    first, last = marks[0], marks[-1]
    wide = [last[i] - first[i] for i in (0, 1)]
    found = []
    for mark in marks:
        shares = [(mark[i] - first[i]) / wide[i] for i in (0, 1) if wide[i]]
        share = sum(shares) / len(shares) if shares else float(mark is last)
        found.append((*mark, begin + share * (end - begin)))
    return found
