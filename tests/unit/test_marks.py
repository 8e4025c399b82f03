"""Who gets notice of phases and steps."""

from __future__ import annotations

import itertools

import pytest

import pyalloc
from pyalloc import marks, tables


class Heard:
    def __init__(self, leaves_at: str = "") -> None:
        self.told: list[object] = []
        self.leaves_at = leaves_at

    def on_step(self, number: int) -> None:
        self._hear("step", number)

    def on_phase(self, name: str, begins: bool) -> None:
        self._hear("begin" if begins else "end", name)

    def _hear(self, what: str, told: object) -> None:
        self.told.append((what, told))
        if what == self.leaves_at:
            marks.listeners.remove(self)


@pytest.mark.parametrize("at", ["begin", "end", "step"])
def test_a_listener_that_leaves_takes_no_mark_from_the_next(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    leaving, staying = Heard(leaves_at=at), Heard()
    monkeypatch.setattr(marks, "listeners", [leaving, staying])
    monkeypatch.setattr(marks, "_steps", [0])
    assert pyalloc.step(3) == 3 and pyalloc.step() == 4
    with pytest.raises(ZeroDivisionError), pyalloc.phase("forward"):
        raise ZeroDivisionError
    assert staying.told == [("step", 3), ("step", 4), ("begin", "forward"), ("end", "forward")]
    assert leaving.told[-1][0] == at  # type: ignore[index]
    assert marks.listeners == [staying]


@pytest.mark.parametrize("name", [3, None, b"forward"])
def test_a_phase_whose_name_is_no_text_is_refused_before_anybody_hears(
    monkeypatch: pytest.MonkeyPatch, name: object
) -> None:
    """A recording would end with it."""
    heard = Heard()
    monkeypatch.setattr(marks, "listeners", [heard])
    with pytest.raises(TypeError, match="name must be a string, not"), pyalloc.phase(name):  # type: ignore[arg-type]
        pass
    assert heard.told == []


@pytest.mark.parametrize(
    ("number", "error", "why"),
    [
        ("3", TypeError, "an integer, not '3'"),
        (2.5, TypeError, "an integer, not 2.5"),
        (-1, pyalloc.ConfigError, "from 0 to .*, not -1"),
        (2**63, pyalloc.ConfigError, "from 0 to .*, not 9223372036854775808"),
    ],
)
def test_a_step_that_a_recording_could_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], why: str
) -> None:
    heard = Heard()
    monkeypatch.setattr(marks, "listeners", [heard])
    monkeypatch.setattr(marks, "_steps", itertools.count(7))
    with pytest.raises(error, match=why):
        pyalloc.step(number)
    assert heard.told == []
    assert pyalloc.step() == 7


def test_of_two_tables_the_one_that_is_closed_listens_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They look the same as long as both have the same rows."""
    monkeypatch.setattr(marks, "listeners", [])
    first, second = tables.MemoryTable(), tables.MemoryTable()
    marks.listeners.extend([first, second])
    second.close()
    second.close()
    assert len(marks.listeners) == 1 and marks.listeners[0] is first
