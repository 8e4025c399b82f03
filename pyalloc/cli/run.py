"""pyalloc run."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from pyalloc import live
from pyalloc._bootstrap import INSTALL, environment
from pyalloc.common.config import ENVIRONMENT, PLAN, Config, environment_text
from pyalloc.inside import autorecord
from pyalloc.install import check_torch_settings
from pyalloc.outside import launching


class Command:
    """Run a program with pyalloc as PyTorch's CUDA allocator.

    pyalloc run [--conf key:value,...] python train.py ...
    pyalloc run -m package.module ...
    pyalloc run --record out.pya python train.py ...   then: pyalloc report out.pya
    pyalloc run --plan out.plan python train.py   after: pyalloc plan out.pya
    pyalloc run torchrun --nproc-per-node 2 train.py ...

    The program needs no changes: pyalloc installs itself in it, and in every Python process that it starts, when
    torch is imported.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The program's own arguments are left as they are."""
        parser.add_argument(
            "--conf",
            default="",
            metavar="KEY:VALUE,...",
            help="settings, written as in PYALLOC_CONF; `pyalloc doctor` lists them",
        )
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="follow this plan (a file that `pyalloc plan` wrote)",
        )
        autorecord.prepare_parser(parser)
        launching.prepare_parser(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Replaces this process by the program, so exit code, signals and terminal are its own."""
        text = ",".join(part for part in (environment_text(), args.conf) if part)
        plan = str(args.plan or os.environ.get(PLAN, ""))
        plan = os.path.abspath(plan) if plan else ""  # the program may change directory
        Config(text, plan)  # a mistake is reported here, not by each child
        if plan:
            from pyalloc import planning  # loads all that reads traces: slow

            planning.check(Path(plan))  # as above
        check_torch_settings()
        record = autorecord.from_arguments(args)
        command = launching.command("run", args.module, args.command)
        launching.check_reached(command)
        env = environment(dict(os.environ))
        env[INSTALL] = "1"
        env[live.ENABLE] = "1"
        env.update(record)
        if args.record is not None:
            env[autorecord.TELLER] = str(os.getpid())
        env[ENVIRONMENT] = text
        env[PLAN] = plan
        autorecord.remove_earlier(args.record)
        # Python ignores these signals, and the program would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, env)
