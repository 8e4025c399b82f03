"""pyalloc live."""

from __future__ import annotations

import argparse
import json
import sys
import time

from pyalloc import console, live
from pyalloc.errors import UsageError
from pyalloc.report.live import screen


class Command:
    """Watch the memory of a running process.

    The process is one that `pyalloc run` started, that `pyalloc attach` records, or in which `import pyalloc.live;
    pyalloc.live.serve()` ran.

    pyalloc live PID [--interval 1] [--count N] [--lines 8]

    Ctrl-C ends it; the process goes on.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Which process, how often."""
        parser.add_argument("pid", type=console.count, metavar="PID", help="number of the process")
        parser.add_argument(
            "--interval",
            type=_seconds,
            default=1.0,
            metavar="S",
            help="seconds between two looks (1)",
        )
        parser.add_argument(
            "--count",
            type=console.index,
            default=0,
            metavar="N",
            help="end after N looks; 0: when the process ends (0)",
        )
        parser.add_argument(
            "--lines",
            type=console.index,
            default=0,
            metavar="N",
            help="show the N lines of the program that hold most, too, where stacks are kept (0)",
        )
        parser.add_argument("--json", action="store_true", help="one line of JSON for each look")

    def run(self, args: argparse.Namespace) -> int:
        """Ends well when the process does."""
        history: list[int] = []
        shown = 0
        while args.count == 0 or shown < args.count:
            if shown:
                time.sleep(args.interval)
            try:
                figures = live.ask(args.pid, args.lines)
            except UsageError:
                if shown == 0:
                    raise
                print(f"process {args.pid} has ended", file=sys.stderr if args.json else sys.stdout)
                return 0
            shown += 1
            if args.json:
                print(json.dumps(figures), flush=True)
                continue
            devices = figures["devices"].values()
            history.append(sum(d["allocated_bytes.all.current"] for d in devices))
            if console.has_color() and shown > 1:
                sys.stdout.write("\x1b[H\x1b[J")
            print(console.printable(screen(figures, history)), flush=True)
        if not args.json:
            print(f"next: pyalloc stats {args.pid}", file=sys.stderr)
        return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 86400")
    return value
