"""pyalloc stats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyalloc import live, trace
from pyalloc.common import console
from pyalloc.common.units import size
from pyalloc.errors import UsageError
from pyalloc.report import data, text

_LINES = 5


class Command:
    """Print a recording's figures, or the counters of a running process.

    For a recording also its requests by size and by line.  A process must be one that `pyalloc live` can watch.

    pyalloc stats out.pya
    pyalloc stats 12345
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """A file or a number."""
        parser.add_argument(
            "file", metavar="FILE|PID", help="a recording, a snapshot, or a process's number"
        )
        parser.add_argument(
            "-n",
            type=console.count,
            metavar="N",
            help="for a file: how many of the program's lines to show (default: 5)",
        )
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints name and value, a line each."""
        console.prepare_output(args)
        more: list[str] = []
        if args.file.isdecimal() and not Path(args.file).exists():
            if args.n is not None:
                raise UsageError(f"-n is for files; of process {args.file} only counters are known")
            content: dict[str, Any] = live.ask(int(args.file))
            rows = [
                (f"device {index}: {key}", value)
                for index, stats in content["devices"].items()
                for key, value in stats.items()
                if key.count(".") == 0 or ".all." in key
            ] or [("CUDA", "not used yet")]
            then = f"pyalloc live {args.file}"
        else:
            path = Path(args.file)
            progress = console.Progress(f"reading {path.name}", quiet=args.quiet)
            totals, lines, sizes = trace.figures(path, progress)
            progress.close()
            content = data.totals(totals)
            n = args.n or _LINES
            more = text.asked(lines, sizes, n)
            seconds = (content["last_ns"] - content["first_ns"]) / 1e9
            rows = [
                (key, value)
                for key, value in content.items()
                if not isinstance(value, dict)
                and not key.endswith("_ns")
                and value not in (None, "")
            ] + [("seconds", f"{seconds:,.3f}")]
            then = f"pyalloc report {console.quoted(path)}"
            content |= data.asked(lines, sizes, n)
        shown = [
            f"{key:<46}{value:>20,}  {size(value) if 'bytes' in key else ''}".rstrip()
            if isinstance(value, int) and not isinstance(value, bool)
            else f"{key:<46}{value!s:>20}"
            for key, value in rows
        ]
        console.deliver(args, "\n".join([*shown, *more]), content, then)
        return 0
