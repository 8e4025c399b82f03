"""pyalloc sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyalloc import replaying, sweeping
from pyalloc.common import console
from pyalloc.common.folding import column
from pyalloc.common.units import size
from pyalloc.errors import UsageError
from pyalloc.report.text import hung, wrapped


class Command:
    """Replay many recordings under many policies and limits.

    The work is spread over all cores, or over a Dask cluster.

    pyalloc sweep *.pya --limit 8GB --limit 16GB [--dask ADDRESS]
    pyalloc sweep *.pya --policy pyalloc --conf memory:tight --conf memory:fast
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The traces, and what to vary; each option may be repeated."""
        parser.add_argument("file", type=Path, nargs="+", help="recordings or snapshots")
        parser.add_argument(
            "--policy",
            action="append",
            choices=replaying.policies(),
            help="replay this policy only; may be repeated (default: all)",
        )
        parser.add_argument(
            "--limit",
            action="append",
            metavar="SIZE",
            help="memory of each device, e.g. 8GB; may be repeated (default: more than enough)",
        )
        parser.add_argument(
            "--conf",
            action="append",
            metavar="KEY:VALUE",
            help="settings for the policy pyalloc; may be repeated",
        )
        parser.add_argument(
            "--workers",
            type=console.count,
            metavar="N",
            help="number of processes (default: one per core)",
        )
        parser.add_argument(
            "--dask",
            metavar="ADDRESS",
            help="replay on a running Dask cluster; the address of its scheduler",
        )
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one row per combination; returns 2 if a trace is damaged, after printing the others' rows."""
        console.prepare_output(args)
        limits = [replaying.limit_of("--limit", text) for text in args.limit] if args.limit else [0]
        typed = dict(zip(limits, args.limit or [], strict=False))  # two may round to the same
        policies = args.policy or replaying.policies()
        if args.conf:
            replaying.check_settings(policies, "--conf")
        if args.dask and args.workers:
            raise UsageError("give one of --workers and --dask: a Dask cluster has its own workers")
        todo = sweeping.points(args.file, policies, limits, args.conf or [""])
        for path in args.file:
            path.stat()  # a missing file is reported before anything is replayed
        progress = console.Progress("sweeping", "replays", 1, quiet=args.quiet)
        if args.dask:
            results = list(sweeping.on_dask(todo, args.dask, progress))
        else:
            results = list(sweeping.on_cores(todo, args.workers, progress))
        progress.close()
        lines = [
            f"{'recording':<22}{'policy':<12}{'limit':>10}{'fits':>5}{'peak':>12}{'/live':>8}{'calls':>10}"
        ]
        failed = dict.fromkeys(row["error"] for row in results if "error" in row)
        replayed = [row for row in results if "error" not in row]
        for row in replayed:
            ratio = f"{row['peak_bytes'] / max(row['peak_live_bytes'], 1):.3f}"
            head = (
                f"{column(Path(row['path']).name, 22)}{row['policy']:<12}"
                f"{typed.get(row['limit'], 'none'):>10}"
                f"{'yes' if row['completed'] else 'no':>5}{size(row['peak_bytes']):>12}"
                f"{ratio if row['completed'] else '':>8}{row['n_calls']:>10,}"
            )
            # The columns take the whole width, so settings go on a line below.
            lines.append(hung(head, row["conf"].replace(",", ", ")))
        used = [row["path"] for row in replayed if row["peak_live_bytes"]]
        told = {
            f"{Path(row['path']).name}: {each}": None for row in replayed for each in row["caveats"]
        }
        lines += [wrapped(each, "") for each in told]
        console.deliver(
            args,
            "\n".join(lines),
            results,
            f"pyalloc replay {console.quoted(used[0])} --find-min" if used else console.RECORD,
        )
        for why in failed:
            console.complain(f"pyalloc sweep: {why}")
        return 2 if failed else 0
