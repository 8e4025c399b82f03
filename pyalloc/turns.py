"""Steps: where one begins, and which moments are alike, so that what is alive at them can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def begin_of(steps: Sequence[tuple[int, ...]], number: int, until: int | None = None) -> int | None:
    """The event with which the step of that number begins, None: there is none such.

    A training whose counter starts again has several: the last one counts, or the last that begins up to an event.

    Args:
        steps: number and event of each, in their order.
        number: the one looked for.
        until: that event, None: any.
    """
    events = (step[1] for step in reversed(steps) if step[0] == number)
    return next((event for event in events if until is None or event <= until), None)


def begins_of(steps: Sequence[tuple[int, ...]], first: int, last: int) -> tuple[int, int] | None:
    """Of two steps: the last of the second number, and of the first the last up to it; None: there are no such two."""
    end = begin_of(steps, last)
    begin = None if end is None else begin_of(steps, first, end)
    return None if begin is None or end is None else (begin, end)


def numbers_of(steps: Sequence[tuple[int, ...]]) -> str:
    """Which there are, in words."""
    numbers = [step[0] for step in steps]
    return f"steps go from {min(numbers)} to {max(numbers)}" if steps else "the file has no steps"
