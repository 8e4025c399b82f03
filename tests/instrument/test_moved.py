"""Lines of code that moved between two recordings."""

from __future__ import annotations

import pytest

from pyalloc.analysis import moved
from pyalloc.traces.source import Frame

OLD, NEW = "/home/me/old/model.py", "/home/me/new/model.py"


def frames(file: str, *lines: tuple[int, str]) -> list[Frame]:
    return [(name, file, line) for line, name in lines]


def test_what_did_not_change_is_called_as_before() -> None:
    before = frames(OLD, (10, "forward"), (20, "train"))
    assert moved.lines(before, [*before, *frames(OLD, (15, "forward"))]) == {}


def test_what_lies_below_inserted_lines_moves_with_them() -> None:
    """Line 57 is in both, but in the second it is what was line 55."""
    before = frames(OLD, (10, "embed"), (55, "forward"), (57, "forward"), (90, "train"))
    after = frames(OLD, (10, "embed"), (57, "forward"), (59, "forward"), (94, "train"))
    assert moved.lines(before, after) == {
        ("forward", OLD, 55): ("forward", OLD, 57),
        ("forward", OLD, 57): ("forward", OLD, 59),
        ("train", OLD, 90): ("train", OLD, 94),
    }


def test_other_code_between_lines_that_stayed_is_no_line_that_moved() -> None:
    """In one file, another class's forward() runs."""
    before = frames(OLD, (42, "forward"), (57, "forward"), (58, "forward"), (100, "forward"))
    after = frames(OLD, (42, "forward"), (73, "forward"), (74, "forward"), (100, "forward"))
    assert moved.lines(before, after) == {}


@pytest.mark.parametrize("other", [NEW, "/home/me/old/model_2.py"])
def test_another_checkout_or_a_copy_of_the_script_is_the_same_file(other: str) -> None:
    before, after = frames(OLD, (10, "forward"), (20, "train")), frames(other, (10, "forward"))
    assert moved.lines(before, after) == {("forward", OLD, 10): ("forward", other, 10)}


def test_files_of_libraries_need_more_than_a_name_alike() -> None:
    libraries = "/venv/lib/python3.11/site-packages"
    before = frames(f"{libraries}/one/__init__.py", (10, "call"))
    assert moved.lines(before, frames(f"{libraries}/two/__init__.py", (10, "call"))) == {}
    file = f"{libraries.replace('3.11', '3.12')}/one/__init__.py"
    assert moved.lines(before, frames(file, (12, "call"))) == {before[0]: ("call", file, 12)}
