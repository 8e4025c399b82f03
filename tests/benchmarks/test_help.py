"""--help of the benchmarks, in a terminal of 80 columns."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.helping import HelpFormatter

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_descriptions_fit_and_lose_no_word() -> None:
    formatter = HelpFormatter("benchmarks", width=80)
    found = [ast.get_docstring(ast.parse(path.read_text())) for path in BENCHMARKS.rglob("*.py")]
    assert any("\n* " in (text or "") for text in found)
    for text in filter(None, found):
        fitted = formatter._fill_text(text, 78, "")
        assert fitted.split() == text.split()
        assert max(map(len, fitted.splitlines())) <= 78, fitted


def test_what_fits_stays_as_it_is() -> None:
    text = "A line.\n\n    $ indented   code\n    $ more\n\n* an item\n* another"
    assert HelpFormatter("x", width=80)._fill_text(text, 78, "") == text
