"""Steps and phases of a program, for whoever listens: recordings, memory tables.  Nothing happens while nobody does."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Protocol

from pyalloc.errors import ConfigError


class Listener(Protocol):
    """What hears of marks; called in the thread that makes them."""

    def on_step(self, number: int) -> None:
        """Step `number` begins."""

    def on_phase(self, name: str, begins: bool) -> None:
        """A phase begins or ends."""


listeners: list[Listener] = []
_steps = itertools.count()  # the number of the next; threads may take theirs at once


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Names a part of the program: `with pyalloc.phase("forward"):`; phases may be nested.

    Reports then show how much memory each phase holds at its end and at its peak.  The cost is negligible while
    nothing is being recorded.

    Args:
        name: what reports call the phase.

    Raises:
        TypeError: the name is not a string.
    """
    begin_phase(name)
    try:
        yield
    finally:
        end_phase(name)


def begin_phase(name: str) -> None:
    """Where a `with` block does not fit; every begin needs its end_phase()."""
    if not isinstance(name, str):
        raise TypeError(
            f"a phase's name must be a string, not {name!r}; for example phase(f'batch {{n}}')"
        )
    for listener in tuple(listeners):  # one that gives up leaves
        listener.on_phase(name, True)


def end_phase(name: str) -> None:
    """Ends what begin_phase() of the same name began."""
    for listener in tuple(listeners):
        listener.on_phase(name, False)


def step(number: int | None = None) -> int:
    """Marks the beginning of a training step.

    Args:
        number: from 0 to 2**63 - 1; None for one more than the last.

    Returns:
        The number.

    Raises:
        TypeError: the number is not an integer.
        ConfigError: the number is out of range.
    """
    global _steps
    if number is None:
        current = next(_steps)
    else:
        current = _checked(number)
        _steps = itertools.count(current + 1)
    for listener in tuple(listeners):
        listener.on_step(current)
    return current


def _checked(number: int) -> int:
    """What a recording has room for, told where it is asked for: the recording would end at it later."""
    try:
        whole = operator.index(number)
    except TypeError:
        raise TypeError(f"a step's number must be an integer, not {number!r}") from None
    if not 0 <= whole < 2**63:
        raise ConfigError(f"a step's number must be from 0 to 2**63 - 1, not {whole}")
    return whole
