"""The subcommands: their list, their help, and what is told of words that are none."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pyalloc import cli


def test_overview_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert {"run", "doctor"} <= set(cli.names())
    for name in cli.names():
        assert name in text


def test_overview_without_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    # As under python -OO.
    for name in cli.names():
        monkeypatch.setattr(type(cli.load(name)), "__doc__", None)
    assert cli.main(["--help"]) == 0
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", "--help"])


def test_each_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.names():
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        assert name in capsys.readouterr().out


def test_unknown_subcommand_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "program"),
    [
        ([], "python train.py"),
        (["python", "my train.py"], "python 'my train.py'"),
        (["-o", "x.pya", "python", "my.py"], "python train.py"),
    ],
)
def test_who_types_record_is_told_of_run(
    rest: list[str], program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most similar name is that of report."""
    assert cli.main(["record", *rest]) == 2
    told = capsys.readouterr().err
    assert f"to record a program, type: pyalloc run --record out.pya {program}\n" in told


def test_help_explains_the_subcommand_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "report"])
    assert capsys.readouterr().out.startswith("usage: pyalloc report ")
    assert cli.main(["help", "reprot"]) == 2
    assert "did you mean 'report'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train.py", "--name", "a b"], ["env", "python", "train.py"]])
def test_a_program_without_a_subcommand_is_told_of_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert f"pyalloc run {shlex.join(words)}\n" in told
    # Any word may be a program's name, such as test.
    assert ("the subcommands are" in told) == (words[0] == "env")


def test_a_recording_without_a_subcommand_is_told_of_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my out.pya"
    path.touch()
    assert cli.main([str(path)]) == 2
    assert (
        f"to see what a recording holds, type: pyalloc report '{path}'\n" in capsys.readouterr().err
    )
