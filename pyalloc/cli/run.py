"""pyalloc run."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from pyalloc import live, recording
from pyalloc._bootstrap import environment
from pyalloc.config import ENVIRONMENT, Config
from pyalloc.errors import UsageError


class Command:
    """Run a program, its torch with CUDA memory from pyalloc.

    pyalloc run [--conf key:value,...] python train.py ...
    pyalloc run -m package.module ...
    pyalloc run --record out.pya python train.py ...   then: pyalloc report out.pya
    pyalloc run torchrun --nproc-per-node 2 train.py ...

    The program is not edited: pyalloc is installed in it, and in each Python process that it starts, when torch is
    imported.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The program's own arguments are left as they are."""
        parser.add_argument(
            "--conf", default="", metavar="KEY:VALUE,...", help="settings, as in PYALLOC_CONF"
        )
        parser.add_argument(
            "-m", dest="module", metavar="MODULE", help="run a module, as python -m does"
        )
        recording.prepare_parser(parser)
        parser.add_argument(
            "command", nargs=argparse.REMAINDER, help="the program and its arguments"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Becomes the program: exit code, signals and terminal are its own."""
        text = ",".join(part for part in (os.environ.get(ENVIRONMENT, ""), args.conf) if part)
        Config(text)  # a mistake is told here, not by each child
        command = program(args.module, args.command)
        env = environment(dict(os.environ))
        env["PYALLOC_INSTALL"] = "1"
        env[live.ENABLE] = "1"
        env.update(recording.from_arguments(args))
        env[ENVIRONMENT] = text
        sys.stdout.flush()
        os.execvpe(command[0], command, env)


def program(module: str | None, words: list[str]) -> list[str]:
    """The command to execute: a .py file and -m get this Python in front."""
    words = words[1:] if words[:1] == ["--"] else words
    if module is not None:
        return [sys.executable, "-m", module, *words]
    if not words:
        raise UsageError("which program? For example: pyalloc run python train.py")
    if words[0].endswith(".py") and shutil.which(words[0]) is None:
        return [sys.executable, *words]
    if shutil.which(words[0]) is None:
        raise UsageError(f"{words[0]!r} was not found; for a module: pyalloc run -m {words[0]}")
    return words
