"""The command of a program that `pyalloc run` and `pyalloc dryrun` start, from what was typed after the options."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pyalloc.common import pythons
from pyalloc.errors import UsageError

_PYTHON = re.compile(f"{pythons.PROGRAM}$")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """-m MODULE ..., or the program; its own arguments are left as they are.  To be called last."""
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module with its arguments, as `python -m` does",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="the program and its arguments; pyalloc's own options go before it",
    )


def command(name: str, module: Sequence[str] | None, words: Sequence[str]) -> list[str]:
    """The command to execute for `pyalloc <name>`: a .py file and -m get this Python in front.

    Raises:
        UsageError: there is no program, or it is not found.
    """
    if module is not None:
        if not module:
            raise UsageError(f"no module given; for example: pyalloc {name} -m package.module")
        return [sys.executable, "-m", *module]
    words = list(words)
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError(f"no program given; for example: pyalloc {name} python train.py")
    program = words[0]
    if shutil.which(program) is not None:
        return words
    if program in ("python", "python3"):  # not every system has both
        return [sys.executable, *words[1:]]
    if program == "pyalloc":  # pipx and uv keep it out of PATH, or its environment is not active
        return [sys.executable, "-m", "pyalloc", *words[1:]]
    if program == "torchrun":  # an environment that has another's torch lacks it
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    if program.endswith(".py") and Path(program).is_file():
        return [sys.executable, *words]
    raise UsageError(_why_not(name, program))


def _why_not(name: str, program: str) -> str:
    """Why a program cannot be started."""
    if Path(program).is_dir():
        return f"{program!r} is a folder; name a program in it"
    if not Path(program).is_file():
        if _VARIABLE.match(program):
            key, value = program.split("=", 1)
            variable = f"{key}={shlex.quote(value)}"
            return (
                f"{program!r} was not found; put variables in front: {variable} pyalloc {name} ..."
            )
        if " " in program and shutil.which(program.partition(" ")[0]) is not None:
            return f"{program!r} was not found; remove the quotes around the command"
        is_module = re.fullmatch(r"[\w.]+", program) and not program.endswith(".py")
        other = f"; to run a module: pyalloc {name} -m {program}" if is_module else ""
        return f"{program!r} was not found{other}"
    if os.access(program, os.X_OK):
        return f"{program!r} is not in PATH; write ./{program}"
    return f"{program!r} is not executable; run chmod +x {shlex.quote(program)}, or put its interpreter in front"


def check_reached(words: Sequence[str]) -> None:
    """Raises UsageError where Python is told to leave out what brings pyalloc into it: PYTHONPATH and sitecustomize."""
    if not _PYTHON.match(Path(words[0]).name):
        return
    rest = iter(words[1:])
    for word in rest:
        if not re.match(r"-[A-Za-z]", word):
            return
        letters, last, argument = re.findall(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.DOTALL)[0]
        hides = re.search("[IES]", letters)
        if hides:
            raise UsageError(
                f"`{words[0]} {word}` ignores PYTHONPATH or sitecustomize, through which pyalloc enters the program; "
                f"leave out -{hides[0]}, or call pyalloc.install() and pyalloc.record() in the program itself"
            )
        if last in ("c", "m"):
            return
        if last and not argument:  # it is the next word
            next(rest, None)
