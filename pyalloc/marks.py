"""Steps and phases of a program, reported to listeners: recordings, memory tables.  Without any, nothing happens."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Protocol

from pyalloc.errors import ConfigError


class Listener(Protocol):
    """Is told of marks, in the thread that makes them."""

    def on_step(self, number: int) -> None:
        """Step `number` begins."""

    def on_phase(self, name: str, begins: bool) -> None:
        """A phase begins or ends."""


listeners: list[Listener] = []
_steps = itertools.count()  # the next step's number; threads may take one at the same time


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
    """Begins a phase where a `with` block does not fit; needs an end_phase() of the same name.

    Raises:
        TypeError: the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"a phase's name must be a string, not {name!r}; for example phase(f'batch {{n}}')"
        )
    for listener in tuple(listeners):  # a listener may remove itself
        listener.on_phase(name, True)


def end_phase(name: str) -> None:
    """Ends the phase of this name that begin_phase() began."""
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
    """Refuses here a number for which a recording has no room; otherwise the recording would fail later."""
    try:
        whole = operator.index(number)
    except TypeError:
        raise TypeError(f"a step's number must be an integer, not {number!r}") from None
    if not 0 <= whole < 2**63:
        raise ConfigError(f"a step's number must be from 0 to 2**63 - 1, not {whole}")
    return whole
