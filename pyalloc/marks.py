"""Steps and phases of a program, for whoever listens: recordings, memory tables.  Nothing happens while nobody does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Listener(Protocol):
    """What hears of marks; called in the thread that makes them."""

    def on_step(self, number: int) -> None:
        """Step `number` begins."""

    def on_phase(self, name: str, begins: bool) -> None:
        """A phase begins or ends."""


listeners: list[Listener] = []
_steps = [0]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names a part of the program: `with pyalloc.phase("forward"):`; phases may be nested.

    Reports then say how much memory each phase holds and at most used.  Costs nothing to speak of when no recording
    runs.
    """
    begin_phase(name)
    try:
        yield
    finally:
        end_phase(name)


def begin_phase(name: str) -> None:
    """Where a `with` block does not fit; every begin needs its end_phase()."""
    for listener in tuple(listeners):  # one that gives up leaves
        listener.on_phase(name, True)


def end_phase(name: str) -> None:
    """Ends what begin_phase() of the same name began."""
    for listener in tuple(listeners):
        listener.on_phase(name, False)


def step(number: int | None = None) -> int:
    """A training step begins; numbered on from the last one unless a number is given.  Returns the number."""
    current = _steps[0] if number is None else number
    _steps[0] = current + 1
    for listener in tuple(listeners):
        listener.on_step(current)
    return current
