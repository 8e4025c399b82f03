"""pyalloc dryrun."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
from pathlib import Path

from pyalloc import replaying
from pyalloc.common import console
from pyalloc.common.config import PLAN
from pyalloc.errors import TraceError, UsageError
from pyalloc.inside import autorecord
from pyalloc.outside import dryrun, launching
from pyalloc.report.dryrun import summary
from pyalloc.report.text import wrapped


class Command:
    """Run a CUDA program without a GPU to see how much memory it needs.

    pyalloc dryrun python train.py ...
    pyalloc dryrun -m package.module ...
    pyalloc dryrun --memory 24GB --devices 2 --allocator pyalloc python train.py ...

    PyTorch's CUDA build runs unchanged, on host memory.  Allocations are real and happen in the real order.  Kernels
    compute nothing, so the program's own results are meaningless, and sizes that depend on what a kernel computes may
    be wrong: the summary counts how much the program read back from the device.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The program's own arguments are left as they are."""
        parser.add_argument(
            "--memory", default="80GB", metavar="SIZE", help="memory of each device (default: 80GB)"
        )
        parser.add_argument(
            "--devices",
            type=int,
            default=1,
            metavar="N",
            help=f"number of devices, from 1 to {console.ON_ONE_MACHINE} (default: 1)",
        )
        parser.add_argument(
            "--allocator",
            choices=dryrun.ALLOCATORS,
            default="native",
            help="torch's own allocator, its expandable segments, or pyalloc (default: native)",
        )
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="follow this plan (a file that `pyalloc plan` wrote); needs --allocator pyalloc",
        )
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="also write the figures to this file"
        )
        autorecord.prepare_parser(parser)
        launching.prepare_parser(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Returns the program's exit code."""
        console.check_output(args.json, args.force)
        if args.json is not None and args.json == args.record:
            raise UsageError(
                f"--json and --record both name {args.json}; write the figures to another file"
            )
        words = args.command
        if args.module is not None:
            words = launching.command("dryrun", args.module, [])
        if args.plan is not None and args.allocator != "pyalloc":
            raise UsageError("only pyalloc follows a plan; add --allocator pyalloc")
        # Another allocator ignores the environment's plan.
        plan = args.plan or (args.allocator == "pyalloc" and os.environ.get(PLAN))
        if plan:
            from pyalloc import planning  # loads all that reads traces: slow

            planning.check(Path(plan))  # a mistake is reported here, not by each child
        options = dryrun.Options(
            command=tuple(words),
            memory=replaying.limit_of("--memory", args.memory),
            devices=args.devices,
            allocator=args.allocator,
            is_recorded=args.record is not None,
            plan=str(plan or ""),
        )
        os.environ.update(autorecord.from_arguments(args))
        before = autorecord.written(args.record) - autorecord.earlier(args.record)
        result = dryrun.run(options, functools.partial(autorecord.remove_earlier, args.record))
        print(summary(result), file=sys.stderr)
        if args.record is not None:
            print(_recorded(autorecord.written(args.record) - before, result), file=sys.stderr)
        if args.json is not None:
            console.write(args.json, result.to_json() + "\n", args.force)
        return result.exit_code


def _recorded(paths: set[Path], result: dryrun.Result) -> str:
    """Which files the program was recorded to.  Another command may have begun to record to the same name meanwhile."""
    pids = (None, *result.processes)
    own = {path for path in paths if not result.processes or _pid(path) in pids}
    others = sorted(paths - own)
    told = f"another command recorded to {console.joined(others)}"
    rest = "\n" + wrapped(told, rest="    ") if others else ""
    if not own:
        return wrapped(f"recorded: {autorecord.NOTHING}", rest="    ") + rest
    cut = any(path.suffix == ".part" for path in own)
    names = console.joined(sorted(own))
    return f"  recorded{' (cut off)' if cut else ''}: pyalloc report {names}{rest}"


def _pid(path: Path) -> int | None:
    """Of the recorded process; None if the file does not say."""
    from pyalloc import reading  # loads all that reads traces: slow
    from pyalloc.traces import caveats

    try:
        first = itertools.takewhile(lambda each: each.kind == "user", reading.events(path))
        pid = caveats.notes_of(event.text for event in first).get("pid", "")
    except TraceError:  # a process was killed before it had written anything
        return None
    return int(pid) if pid.isdecimal() else None
