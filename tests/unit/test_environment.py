"""The environments that the makefile makes: PyTorch is not fetched twice, and tests that passed do not run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_torch_of_an_environment_is_seen(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "their own", tmp_path / "ours"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", theirs], check=True)
    (packages,) = (theirs / "lib").glob("python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("class version:\n    cuda = '13.0'\n")
    python = theirs / "bin" / "python-without-pip"  # whose installation takes seconds
    python.write_text(
        '#!/bin/sh\n[ "$2" != venv ] || set -- "$@" --without-pip\nexec "${0%/*}/python" "$@"\n'
    )
    python.chmod(0o755)

    def make(python: Path, env: dict[str, str] | None = None) -> int:
        command = [".ci/make-venv", python, ours]
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode

    def seen() -> str:
        command = [ours / "bin" / "python", "-c", "import torch; print(torch.__file__)"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={}, cwd=tmp_path
        )
        return done.stdout.strip()

    assert make(python) == 0
    assert seen() == str(packages / "torch" / "__init__.py")
    # Interrupted before it sees them, and activated.
    shutil.rmtree(ours)
    remove = tmp_path / "remove"
    remove.mkdir()
    (remove / "rm").write_text("#!/bin/sh\nexit 1\n")
    (remove / "rm").chmod(0o755)
    assert make(python, {**os.environ, "PATH": f"{remove}:{os.environ['PATH']}"})
    assert (ours / ".unfinished").exists()
    for path in ours.glob("lib/python*/site-packages/theirs.pth"):
        path.unlink()
    assert not seen()
    assert make(ours / "bin" / "python") == 0
    assert seen() == str(packages / "torch" / "__init__.py")


def test_a_tool_of_an_environment_is_seen(tmp_path: Path) -> None:
    """make test failed beside an active environment that had torch and ruff: pip puts no second one into ours."""
    script = tmp_path / "bin" / "a-tool"
    script.parent.mkdir()
    script.touch()
    packages = tmp_path / "lib" / "python3" / "site-packages"
    (packages / "a_tool-1.dist-info").mkdir(parents=True)
    (packages / "a_tool-1.dist-info" / "METADATA").write_text("Name: a-tool\nVersion: 1\n")
    record = packages / "a_tool-1.dist-info" / "RECORD"
    record.write_text("a_tool/data/bin/a-tool,,\n../../../bin/a-tool,,\n")

    def find(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [".ci/find-tool", sys.executable, name],
            **{"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": str(packages)}},
            capture_output=True,
            text=True,
            check=False,
        )

    assert find("a-tool").stdout.strip() == str(script)
    script.unlink()
    for name in ("a-tool", "no-tool"):
        assert "make build installs it" in find(name).stderr


def test_an_environment_broken_off_is_made_again(tmp_path: Path) -> None:
    python, ours = tmp_path / "python", tmp_path / "ours"
    python.write_text(
        f"#!/bin/sh\n[ $1 = -c ] && exec '{sys.executable}' -c 'raise SystemExit(1)'\n"
        'mkdir -p "$3/bin" && ln -s /bin/true "$3/bin/python" && touch "$3/$WHAT" && [ $WHAT = whole ]\n'
    )
    python.chmod(0o755)

    def make(what: str) -> int:
        command = [".ci/make-venv", python, ours]
        return subprocess.run(
            command, cwd=ROOT, env={**os.environ, "WHAT": what}, check=False
        ).returncode

    assert make("half") == 1 and (ours / "bin" / "python").exists()
    assert make("whole") == 0 and (ours / "whole").exists() and not (ours / "half").exists()
    assert make("whole") == 0  # it stays, as one that somebody else made does


@pytest.mark.parametrize("how", ["--symlinks", "--copies"])
def test_an_environment_broken_off_may_be_the_active_one(tmp_path: Path, how: str) -> None:
    ours = tmp_path / "ours"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", how, ours], check=True)
    (ours / ".unfinished").touch()
    (ours / "left").touch()
    python = ours / "bin" / "python"
    subprocess.run([".ci/make-venv", python, ours, "--alone"], cwd=ROOT, check=True)
    assert not (ours / "left").exists()
    subprocess.run([python, "-m", "pip", "--version"], check=True)


def test_why_a_python_does_not_start_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho cannot open shared object file >&2\nexit 127\n")
    broken.chmod(0o755)
    for python, why in (broken, "cannot open shared object file"), ("/no/python", "No such file"):
        command = ["make", "-s", f"VENV={tmp_path}/ours", f"PYTHON={python}", "torch"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and why in done.stdout.splitlines()[1]


def test_no_python_is_told_in_one_line(tmp_path: Path) -> None:
    for missing in ("", "/no/python"):
        command = ["make", "-s", f"VENV={tmp_path}/ours", f"PYTHON={missing}", "torch"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and done.stdout.startswith("pyalloc needs Python 3.10")
        assert [line[:4] for line in done.stderr.splitlines()] == ["make"]


def test_an_active_environment_comes_first(tmp_path: Path) -> None:
    theirs = tmp_path / "bin"
    theirs.mkdir()
    (theirs / "python").symlink_to(sys.executable)
    (theirs / "python3.11").symlink_to(sys.executable)

    def chosen(**variables: str) -> str:
        env = {"PATH": f"{theirs}:/usr/bin:/bin", **variables}
        command = ["make", "-s", "--eval=tell:;@echo $(PYTHON)", "tell"]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert chosen(VIRTUAL_ENV=str(tmp_path)) == str(theirs / "python")
    assert chosen(CONDA_PREFIX=str(tmp_path)) == str(theirs / "python")
    removed = str(tmp_path / "removed")
    assert chosen(VIRTUAL_ENV=removed) == str(theirs / "python3.11")
    assert chosen(VIRTUAL_ENV=removed, CONDA_PREFIX=str(tmp_path)) == str(theirs / "python")
    (theirs / "python").unlink()
    (theirs / "python").write_text("#!/bin/sh\nexit 1\n")  # what one that is too old says
    (theirs / "python").chmod(0o755)
    assert chosen(VIRTUAL_ENV=str(tmp_path)) == str(theirs / "python3.11")


def test_versions_go_on_where_they_were_broken_off(tmp_path: Path) -> None:
    for name in (".ci", "tests/versions"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    names = ("unit/test_install", "unit/test_install_undone", "unit/test_installed")
    names += ("unit/test_children", "unit/test_ipc")
    names += ("hostcuda/test_dryrun_made", "hostcuda/test_dryrun_values", "parity/test_two")
    for name in names:
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    path.write_text(
        "import os\ndef test_1(): pass\ndef test_12():\n    if os.path.exists('stop'):\n"
        "        os.kill(os.getppid(), 2)\n        raise KeyboardInterrupt\n"
        "    assert not os.path.exists('broken')\n"
    )
    for name in ("csrc", "cuda", "docs", "pyalloc"):
        (tmp_path / name).mkdir()
    venv = tmp_path / ".venv-1.0"

    def make_venv(venv: Path) -> None:
        (venv / "bin").mkdir(parents=True)
        python = venv / "bin" / "python"
        python.write_text(  # all is installed
            f'#!/bin/sh\n[ "$2 $3" != "pip index" ] || echo "torch ($NEWEST)"\n'
            f'[ "$2" = pip ] || exec "{sys.executable}" "$@"\n'
        )
        python.chmod(0o755)
        for name in (".has-torch", ".goes"):
            (venv / name).touch()

    def run(version: str = "1.0", newest: str = "") -> tuple[int, str]:
        command = [tmp_path / ".ci/test-versions", sys.executable, version]
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NEWEST": newest}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    make_venv(venv)
    (tmp_path / "stop").touch()
    code, said = run()
    assert code == 130 and "left: 1.0\n" in said and "goes on from here" in said, said
    (tmp_path / "stop").unlink()
    (tmp_path / "broken").touch()
    code, said = run()
    assert (
        code == 1 and "1 failed, 1 deselected" in said and "1.0: tests failed; left: none" in said
    )
    (tmp_path / "broken").unlink()
    code, said = run()
    assert code == 0 and "1 passed, 1 deselected" in said and "1.0 passed;" in said, said
    assert not venv.exists()
    code, said = run()
    assert code == 0 and "1.0 passed before" in said
    for newest, outcome in ("1.0", "passed before"), ("1.1", "passed"), ("1.1", "passed before"):
        make_venv(tmp_path / ".venv-newest")
        code, said = run("newest", newest)
        assert code == 0 and f"newest {outcome};" in said, said
    # Other sources, also by their names.
    (tmp_path / "docs" / "one.md").touch()
    make_venv(venv)
    assert "1.0 passed;" in run()[1]
    assert "1.0 passed before;" in run()[1]
    (tmp_path / "docs" / "one.md").rename(tmp_path / "docs" / "two.md")
    make_venv(venv)
    assert "1.0 passed;" in run()[1]
