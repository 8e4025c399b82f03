"""pyalloc dryrun."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyalloc import console, dryrun, recording
from pyalloc.errors import UsageError


class Command:
    """Run a CUDA program without a GPU: how much memory does it need?

    pyalloc dryrun python train.py ...
    pyalloc dryrun --memory 24GB --devices 2 --allocator pyalloc python train.py ...

    PyTorch's CUDA build runs as it is, on host memory.  Allocations are real and in the real order; kernels compute
    nothing, so the program's own results are meaningless, and sizes that depend on them would be wrong.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The program's own arguments are left as they are."""
        parser.add_argument(
            "--memory", default="80GB", metavar="SIZE", help="memory of each device (80GB)"
        )
        parser.add_argument("--devices", type=int, default=1, metavar="N", help="devices (1)")
        parser.add_argument(
            "--allocator", choices=dryrun.ALLOCATORS, default="native", help="whose memory (native)"
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
        recording.prepare_parser(parser)
        parser.add_argument(
            "command", nargs=argparse.REMAINDER, help="the program and its arguments"
        )

    def run(self, args: argparse.Namespace) -> int:
        """The program's exit code is ours."""
        if args.json is not None and args.json.exists() and not args.force:
            raise UsageError(f"{args.json} exists; --force overwrites it")
        options = dryrun.Options(
            command=tuple(args.command),
            memory=dryrun.parse_bytes(args.memory),
            devices=args.devices,
            allocator=args.allocator,
        )
        os.environ.update(recording.from_arguments(args))
        result = dryrun.run(options)
        print(dryrun.summary(result), file=sys.stderr)
        if args.record is not None:
            print(f"  recorded: pyalloc report {args.record}", file=sys.stderr)
        if args.json is not None:
            console.write(args.json, result.to_json() + "\n", args.force)
        return result.exit_code
