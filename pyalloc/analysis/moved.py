"""Lines of a program that changed between two recordings: where those of the first are in the second."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from pyalloc.traces import source
from pyalloc.traces.source import Frame

_ALONG = 2.0  # points for a line that moved as far as the one before it
_APART = 0.5  # for one that moved alone: less than the lines that it prevents from moving along would get
_MOST_PAIRS = 1_000_000  # of lines of a file; in larger files none are looked for
Line = tuple[int, str]  # its number and its function


def lines(before: Iterable[Frame], after: Iterable[Frame]) -> dict[Frame, Frame]:
    """Frames of the first whose line or file is another one in the second, each with that one.

    A recording has no source.  But lines keep their order and the names of their functions, and a change moves all
    lines below it equally far: of all pairings, the one in which most lines move along with others is taken.
    """
    first, second = _by_file(before), _by_file(after)
    found: dict[Frame, Frame] = {}
    for file, other in _files(first, second).items():
        known, there = sorted(first[file]), sorted(second[other])
        if file == other and set(known) <= set(there):
            continue
        for (line, name), (at, _) in _paired(known, there):
            if (file, line) != (other, at):
                found[name, file, line] = name, other, at
    return found


def _by_file(frames: Iterable[Frame]) -> dict[str, set[Line]]:
    found: dict[str, set[Line]] = defaultdict(set)
    for name, file, line in frames:
        if not source.is_cpp(file):
            found[file].add((line, name))
    return found


def _files(first: Iterable[str], second: Iterable[str]) -> dict[str, str]:
    """Pairs each file with itself, else with the one whose path ends alike, else with the only one left of the program.

    A library's files need more than their name in common: many are called __init__.py.
    """
    left, right = set(first), set(second)
    found = {file: file for file in left & right}
    left -= found.keys()
    right -= found.keys()
    for file in sorted(left):
        ends = [(_common_end(file, other), other) for other in sorted(right)]
        most = max(ends, default=(0, ""))
        if most[0] > source.is_foreign(file) and [n for n, _ in ends].count(most[0]) == 1:
            found[file] = most[1]
            right.remove(most[1])
    own = [
        [file for file in files if not source.is_foreign(file)]
        for files in (left - found.keys(), right)
    ]
    if len(own[0]) == len(own[1]) == 1:
        found[own[0][0]] = own[1][0]
    return found


def _common_end(file: str, other: str) -> int:
    """How many parts at the end of two paths are the same."""
    n = 0
    for a, b in zip(reversed(PurePath(file).parts), reversed(PurePath(other).parts), strict=False):
        if a != b:
            break
        n += 1
    return n


def _paired(before: Sequence[Line], after: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Pairs the lines of two ascending sequences; a line without a partner is left out."""
    if len(before) * len(after) > _MOST_PAIRS:
        return []
    scores: dict[tuple[int, int], float] = {}
    came: dict[tuple[int, int], tuple[int, int]] = {}
    along: dict[int, tuple[float, tuple[int, int]]] = {}  # by distance: best score, its pair
    # best[j], before row i: the best score that ends in a column before j, and its pair.
    best: list[tuple[float, tuple[int, int]]] = [(0.0, (-1, -1))] * (len(after) + 1)
    for i, (line, name) in enumerate(before):
        row = list(best)
        for j, (at, other) in enumerate(after):
            if other == name:
                far, end = at - line, best[j]
                score = end[0] + (_ALONG if far == 0 and end[1] == (-1, -1) else _APART), end[1]
                if far in along and along[far][0] + _ALONG >= score[0]:
                    score = along[far][0] + _ALONG, along[far][1]
                scores[i, j], came[i, j] = score
                along[far] = max(along.get(far, (0.0, (-1, -1))), (score[0], (i, j)))
                row[j + 1] = max(row[j + 1], (score[0], (i, j)))
            row[j + 1] = max(row[j + 1], row[j])
        best = row
    found = []
    place = best[-1][1]
    while place != (-1, -1):
        found.append((before[place[0]], after[place[1]]))
        place = came[place]
    return _without_excursions(found[::-1])


def _without_excursions(pairs: list[tuple[Line, Line]]) -> list[tuple[Line, Line]]:
    """Leaves out lines whose neighbours on both sides moved equally far, but not they: other code took their place."""
    runs = [
        (far, list(run))
        for far, run in itertools.groupby(pairs, lambda pair: pair[1][0] - pair[0][0])
    ]
    kept = [
        run
        for i, (_, run) in enumerate(runs)
        if i in (0, len(runs) - 1) or runs[i - 1][0] != runs[i + 1][0] or _has_most(runs, i)
    ]
    return [pair for run in kept for pair in run]


def _has_most(runs: Sequence[tuple[int, list[tuple[Line, Line]]]], i: int) -> bool:
    """Has run i more lines than both its neighbours?  Then these are the excursions."""
    return len(runs[i][1]) > len(runs[i - 1][1]) + len(runs[i + 1][1])
