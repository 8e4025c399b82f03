"""What README.md and the pages of docs/ tell the reader to type, and the links in them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from dry_support import ROOT

from pyalloc import cli

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/README.md")])
PAGES = [page for page in PAGES if ".venv" not in page.parts]
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# `pyalloc ...` and `python -m ...`, inline or on a console line; a line may break within.
INLINE = re.compile(r"`((?:pyalloc|python -m benchmarks\.\w+) [^`]+)`")
TYPED = re.compile(r"^\$ ((?:pyalloc|python -m benchmarks\.\w+) [^#\n]+)", re.MULTILINE)
NUMBERS = {"PID": "1", "N": "1", "FOLDER": "x", "WHEN": "peak"}


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    found = (re.sub(r"[^\w\- ]", "", each.lower()) for each in HEADING.findall(page.read_text()))
    return {each.replace(" ", "-") for each in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_fit_a_window(page: Path) -> None:
    """Except tables, and what commands print."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wide = [line for line in text.splitlines() if len(line) > 120 and "|" not in line[:4]]
    assert wide == []


def variants(command: str) -> Iterator[list[str]]:
    """The words of what is typed: with and without what stands in [], and each of a|b."""
    command = " ".join(command.split())
    for form in {re.sub(r"\[[^\]]*\]", "", command), command.replace("[", "").replace("]", "")}:
        words = [word for word in shlex.split(form) if word != "..."]
        choices = [re.split(r"(?<!\\)\|", word) for word in words]
        for chosen in itertools.product(*choices):
            yield [NUMBERS.get(word, word) for word in chosen]


def commands() -> list[tuple[str, str]]:
    """Each once, with its page."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        for command in (*TYPED.findall(text), *INLINE.findall(text.replace("\\|", "|"))):
            found.setdefault(" ".join(command.split()), page.name)
    return sorted(found.items())


class Parsed(Exception):
    """In place of what the program does with its arguments."""


def parse_pyalloc(words: list[str]) -> None:
    name, *rest = words
    parser = argparse.ArgumentParser(prog=f"pyalloc {name}")
    cli.load(name).prepare_parser(parser)
    wanted = ["--to", "csv"] * (name == "export" and "--to" not in rest)
    rest += ["1", "2"] * (rest[-1:] == ["--steps"])
    # If a text only names an option, the file is missing.
    for file in ([], ["1"]):
        for form in ([*wanted, *rest, *file], [*file, *wanted, *rest]):
            with contextlib.suppress(SystemExit):
                parser.parse_args(form)
                raise Parsed


def parse_benchmark(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    real = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser) -> None:
        real(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr("sys.argv", [module, *words])
    found.main()


OF_PYALLOC = [each for each in commands() if each[0].startswith("pyalloc ")]
OF_BENCHMARKS = [each for each in commands() if each not in OF_PYALLOC]


@pytest.mark.parametrize(("command", "page"), OF_PYALLOC)
def test_commands(command: str, page: str) -> None:
    for words in variants(command):
        with pytest.raises(Parsed):
            parse_pyalloc(words[1:])


@pytest.mark.torch
@pytest.mark.parametrize(("command", "page"), OF_BENCHMARKS)
def test_commands_of_benchmarks(
    command: str, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "matplotlib.py").touch()  # looked for, not imported
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    Path("docs").mkdir()
    for words in variants(command):
        with pytest.raises(Parsed if "--help" not in words else SystemExit):
            parse_benchmark(words[2], words[3:], monkeypatch)


def test_there_are_commands() -> None:
    """There are some: with other marks around them, nothing would be tested."""
    found = [command for command, _ in commands()]
    assert "pyalloc report out.pya -o report.html" in found  # inline
    assert "python -m benchmarks.speed --scaling --loops" in found
    assert "pyalloc run --plan out.plan python train.py" in found  # typed
    assert {command.split()[1] for command in found if command.startswith("pyalloc ")} == set(
        cli.names()
    )
