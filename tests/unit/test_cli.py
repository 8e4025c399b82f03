"""The command line without torch."""

from __future__ import annotations

import sys

import pytest

from pyalloc import cli


def test_overview_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert {"run", "doctor"} <= set(cli.names())
    for name in cli.names():
        assert name in text


def test_each_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.names():
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0
        assert name in capsys.readouterr().out


def test_unknown_subcommand_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out[0].isdigit()


def test_run_without_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run"]) == 2
    assert "pyalloc run python train.py" in capsys.readouterr().err


def test_run_with_a_bad_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--conf", "memroy:tight", "python", "x.py"]) == 2
    assert "memory" in capsys.readouterr().err


def test_run_passes_exit_code_arguments_and_settings(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        """
        import sys
        from pyalloc.cli import main
        code = "import os, sys; print(os.environ['PYALLOC_CONF'], sys.argv[1:]); sys.exit(7)"
        main(["run", "--conf", "memory:tight", sys.executable, "-c", code, "--flag", "x y"])
        """,
        expect=7,
    )
    assert done.stdout.strip() == "memory:tight ['--flag', 'x y']"


def test_run_program_forms() -> None:
    from pyalloc.cli.run import program

    assert program("package.module", ["a"]) == [sys.executable, "-m", "package.module", "a"]
    assert program(None, ["train_it.py", "a"]) == [sys.executable, "train_it.py", "a"]
    assert program(None, ["--", sys.executable, "x.py"]) == [sys.executable, "x.py"]
