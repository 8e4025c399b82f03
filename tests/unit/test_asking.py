"""Which any() of a mask has to be True in a dry run, by the source of the line that asks (_bootstrap/asking.py)."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyalloc._bootstrap import asking

# The frames of torch lie between the program and the question.
TORCH = """
class Mask:
    def any(self, *dim):
        answers.append(takes_if_any())
        return Flag()

class Flag:
    def item(self):
        return True

def any(mask):
    return mask.any()
"""
numbers = itertools.count()


def answers(program: str, folder: Path, seen_as: str | None = None) -> list[bool]:
    """What each any() of the program was told; seen_as: what its file holds by then."""
    found: list[bool] = []
    torch: dict[str, Any] = {
        "__name__": "torch.fake",
        "answers": found,
        "takes_if_any": asking.takes_if_any,
    }
    exec(TORCH, torch)
    path = folder / f"program{next(numbers)}.py"  # sources are kept by name
    source = "def program(mask, other, x, torch):\n" + textwrap.indent(program, "    ")
    path.write_text(source if seen_as is None else seen_as)
    theirs: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, path, "exec"), theirs)

    class Values:
        def masked_select(self, _mask: object) -> None:
            pass

        count = masked_select

        def __getitem__(self, _index: object) -> None:
            pass

        __delitem__ = __getitem__

        def __setitem__(self, _index: object, _value: object) -> None:
            pass

    with contextlib.suppress(ValueError):
        theirs["program"](torch["Mask"](), torch["Mask"](), Values(), SimpleNamespace(**torch))
    return found


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("if mask.any():\n    x[mask]", [True]),
        ("if mask.any():\n    x[mask] = 1", [True]),
        ("if mask.any(0):\n    x[None, mask]", [True]),
        ("if torch.any(mask):\n    x[mask]", [True]),
        ("if mask.any().item():\n    x.masked_select(mask)", [True]),
        ("if (\n    mask.any()\n):\n    x[mask]", [True]),
        ("x[mask] if mask.any() else None", [True]),
        ("if not mask.any():\n    return\nx[mask]", [True]),
        ("if not mask.any():\n    x[0]\nelse:\n    x[mask]", [True]),
        ("if mask.any() and other.any():\n    x[mask]", [True, True]),  # both are on that line
        ("if mask.any():\n    x[0]", [False]),
        ("if mask.any():\n    x[other]", [False]),
        ("if mask.any():\n    x.count(mask)", [False]),
        ("if mask.any():\n    del x[mask]", [False]),
        ("if mask.any():\n    x[mask]\n    raise ValueError", [False]),
        ("x[mask]\nif mask.any():\n    x[0]", [False]),
        ("x[mask]\nif not mask.any():\n    return", [False]),
        ("if not mask.any():\n    x[mask]\n    return", [False]),
        ("if not mask.any():\n    x[0]\nx[mask]", [False]),
        ("while not mask.any():\n    x[mask]", [False]),
        ("chosen = mask.any()\nif chosen:\n    x[mask]", [False]),
        ("assert mask.any()", [True]),
        ("assert mask.any().item() and other.any()", [True, True]),
        ("assert mask.any() or x", [False]),
        ("assert x and [mask.any()]", [False]),
        ("assert [mask.any()].copy()", [False]),
        ("if not mask.any():\n    raise ValueError", [True]),
        ("if not (mask.any() and other.any()):\n    raise ValueError", [True, True]),
        ("if mask.any():\n    raise ValueError", [False]),
    ],
)
def test_what_an_any_is_asked_for(program: str, told: list[bool], tmp_path: Path) -> None:
    assert answers(program, tmp_path) == told


@pytest.mark.parametrize("text", ["", "if mask.any(", "(" * 10_000])
def test_a_source_that_cannot_be_read_tells_nothing(text: str, tmp_path: Path) -> None:
    """It is gone, or was changed since: the answer is not that of another file with the same code."""
    assert answers("if mask.any():\n    x[mask]", tmp_path) == [True]
    assert answers("if mask.any():\n    x[mask]", tmp_path, text) == [False]


def test_a_thread_of_torchs_own_is_told_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no frame of the program."""
    frame = SimpleNamespace(f_globals={"__name__": "torch.autograd"}, f_back=None)
    monkeypatch.setattr(asking, "sys", SimpleNamespace(_getframe=lambda _depth: frame))
    assert asking.takes_if_any() is False
