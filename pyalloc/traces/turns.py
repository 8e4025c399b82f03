"""Steps: where each begins, and at which similar moments live memory can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LEAST_TURNS = 5  # fewer do not tell a leak from the first steps, in which much grows anyway
_LOOKED_AT = 8  # finding what is alive takes time and memory at each


def turns_of(steps: list[int], phases: Iterable[tuple[str, int, int]]) -> list[int]:
    """Events at which live memory can be compared: where steps begin, or else where backward passes end.

    A program that updates its parameters by hand has no steps.  phases: (name, first event, last event).
    """
    if len(steps) >= LEAST_TURNS:
        return steps
    ends: list[int] = []
    for name, begin, end in phases:
        if name == "backward" and begin >= max(ends[-1:], default=0):
            ends.append(end)
    return ends if len(ends) >= LEAST_TURNS else steps


def looked_at(turns: list[int]) -> list[int]:
    """Fewer than 2 * _LOOKED_AT of these events, from the whole run; the verdict is about them alone."""
    return turns[:: max(1, len(turns) // _LOOKED_AT)]


def begin_of(steps: Sequence[tuple[int, ...]], number: int, until: int | None = None) -> int | None:
    """The event with which the step of that number begins; None if there is no such step.

    A training whose counter starts again has several of them: the last one counts, or the last that begins by `until`.

    Args:
        steps: (number, event, ...) of each, in order.
        number: of the step.
        until: the latest event at which it may begin; None: any.
    """
    events = (step[1] for step in reversed(steps) if step[0] == number)
    return next((event for event in events if until is None or event <= until), None)


def begins_of(steps: Sequence[tuple[int, ...]], first: int, last: int) -> tuple[int, int] | None:
    """The events with which two steps begin: the last of number `last`, and the last `first` by then; None: no such."""
    end = begin_of(steps, last)
    begin = None if end is None else begin_of(steps, first, end)
    return None if begin is None or end is None else (begin, end)


def numbers_of(steps: Sequence[tuple[int, ...]]) -> str:
    """Which step numbers there are, in words."""
    numbers = [step[0] for step in steps]
    return f"steps go from {min(numbers)} to {max(numbers)}" if steps else "the file has no steps"
