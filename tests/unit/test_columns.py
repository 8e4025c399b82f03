"""Output fits a terminal of 80 columns."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys

import pytest
from dry_support import ROOT

import pyalloc
from benchmarks import training
from pyalloc import cli
from pyalloc.report.text import wrapped


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 80]


def test_make_help() -> None:
    done = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "demo " in done.stdout and too_long(done.stdout) == []


def test_help_of_what_one_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert too_long(training._parser().format_help()) == []
    example = ast.parse((ROOT / "examples/seq2seq.py").read_text())
    assert too_long(ast.get_docstring(example) or "") == []


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_is_as_wide_as_the_terminal_but_no_wider_than_people_read(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = min(columns, 80)
    assert cli.main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < widest
    for name in cli.names():
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        lines = capsys.readouterr().out.splitlines()
        # Commands and what an option takes are in one piece.
        long = [each for each in lines if len(each) >= widest and " " in each.strip()]
        assert [each for each in long if not each.strip().startswith(("pyalloc ", "-", "[-"))] == []


def test_the_demo_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", demo)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    monkeypatch.setattr(demo, "train", lambda name, *_: demo.Row(name, 2**31, 2**31, 9999, 4))
    demo.main()
    lines = capsys.readouterr().out.splitlines()
    assert too_long("\n".join(lines)) == []
    readme = (ROOT / "README.md").read_text().splitlines()
    assert {*lines[:2], lines[-1]} <= set(readme)


def test_status() -> None:
    text = str(pyalloc.status())
    assert too_long(text) == []
    assert text.split() == "\n".join(pyalloc.status().lines()).split()


def test_errors_are_folded_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--conf", "memory:x", sys.executable, "-V"]
    assert cli.main(arguments) == 2
    whole = capsys.readouterr().err
    assert whole.count("\n") == 1 and too_long(whole)
    ours, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream, os.fdopen(ours, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", stream)
        assert cli.main(arguments) == 2
        stream.flush()
        folded = shown.read(4096).decode()
    assert too_long(folded) == []
    assert folded.split() == whole.split()


def test_options_and_names_are_in_one_piece_in_paragraphs() -> None:
    for width in range(1, 80):
        assert " --over-time me/my-own.pya " in " ".join(
            wrapped(f"{'x' * width} --over-time me/my-own.pya y").split()
        )
