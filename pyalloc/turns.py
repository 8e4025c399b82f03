"""Which moments of a program are alike, so that what is alive at them can be compared: does it leak?"""

from __future__ import annotations

from collections.abc import Iterable

LEAST_TURNS = 5  # to tell a leak from the first steps, in which most grows
_LOOKED_AT = 8  # what is alive at each takes time and memory


def turns_of(steps: list[int], phases: Iterable[tuple[str, int, int]]) -> list[int]:
    """Events at which what is alive can be compared: where steps begin, or else where backwards end.

    A program that updates its parameters by hand has no steps.  phases: name, first and last event of each.
    """
    if len(steps) >= LEAST_TURNS:
        return steps
    ends: list[int] = []
    for name, begin, end in phases:
        if name == "backward" and begin >= max(ends[-1:], default=0):
            ends.append(end)
    return ends if len(ends) >= LEAST_TURNS else steps


def looked_at(turns: list[int]) -> list[int]:
    """Some of these events over the whole run, at most twice as many as are needed: a verdict is of them alone."""
    return turns[:: max(1, len(turns) // _LOOKED_AT)]
