"""Running `pyalloc dryrun` as a user does."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from dry_support import PATIENCE_S, python_for

ROOT = Path(__file__).parent.parent.parent


def start(
    arguments: list[str], folder: Path, *, cold: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """Starts one.

    cold: in a fresh interpreter, even if the program imports torch first.
    """
    if not cold:
        arguments = _warm(arguments, variables)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        # Tests that run in the background inherit an ignored Ctrl-C: env undoes that.
        ["env", "--default-signal=INT", sys.executable, "-m", "pyalloc", "dryrun", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal: a signal reaches only the parent
    )


def _warm(arguments: list[str], variables: dict[str, str]) -> list[str]:
    """The same program, run by a Python that has imported torch already if the program begins with that."""
    words = list(arguments)
    for at, (python, script) in enumerate(itertools.pairwise(words)):
        if python == sys.executable and script.endswith(".py"):
            words[at] = python_for(Path(script).read_text(), variables, dryrun=True)
            break
    return words


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the children too
        raise
    return process.returncode, out, err


def program(folder: Path, source: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def end_well(folder: Path, source: str) -> str:
    """Runs a program that checks itself in a dry run.  Returns its standard error."""
    code, _, err = finish(start([sys.executable, program(folder, source)], folder))
    assert code == 0, err
    return err


def flat(text: str) -> str:
    """A summary as if the terminal had one endless line."""
    return " ".join(text.split())
