"""pyalloc report."""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any

from pyalloc import planning, replaying, trace
from pyalloc.analysis import advice, allocators, leaks
from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console
from pyalloc.errors import PlanError, TraceError, UsageError
from pyalloc.report import data, html, ranks, text

_REPLAY_OPERATIONS = 2_000_000  # longer traces are replayed only when asked
_SCRUB_MOMENTS = 24


class Command:
    """Explain a recording: who holds the peak, what is idle, what to change.

    pyalloc report out.pya                 on the terminal
    pyalloc report out.pya -o report.html  as one page that needs no network
    pyalloc report rank*.pya               compare ranks; -o: page of the odd one

    Reads recordings written by `pyalloc run --record` and snapshots written by torch.cuda.memory._dump_snapshot().
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Files and where the report goes."""
        parser.add_argument(
            "file", type=Path, nargs="+", help="a recording, or a snapshot written by torch"
        )
        console.add_device(parser)
        parser.add_argument(
            "--oom",
            type=_oom,
            metavar="N",
            help="which out-of-memory error to explain if there are several: a number, or last (default: the first)",
        )
        parser.add_argument(
            "--step",
            type=_steps,
            metavar="N",
            help="what the page shows block by block: step N (the last of that number), steps N-M, or all "
            "(default: the step of the peak)",
        )
        parser.add_argument(
            "--no-replay",
            action="store_true",
            help="do not replay the recording on other allocators",
        )
        console.add_output(parser, has_page=True)

    def run(self, args: argparse.Namespace) -> int:
        """Prints the summary; writes the page where -o names one."""
        console.prepare_output(args, has_page=True)
        if args.step is not None and not console.is_page(args.output):
            raise UsageError("--step applies to the page only; add -o report.html")
        found = self._with_memory(args, [self._read(args, path) for path in args.file])
        one = ranks.odd_one(found)
        if len(found) == 1 < len(args.file):
            self._replay(args, one)
        if console.is_page(args.output):
            console.write(args.output, html.page(one, found), args.force)
            if not args.quiet:
                several = len(found) > 1
                told = (
                    ranks.compare(found)
                    if several
                    else text.summary(one, color=console.has_color())
                )
                print(console.printable(told))
            console.tell(args, f"wrote {args.output}")
            console.tell(args, f"next: {_next(one)}")
        elif len(found) > 1:
            console.deliver(
                args,
                ranks.compare(found),
                {"ranks": ranks.rows(found), "reports": [data.summary(each) for each in found]},
                f"pyalloc report {console.quoted(one.path)}",
            )
        else:
            color = console.has_color() and args.output is None
            console.deliver(args, text.summary(one, color=color), data.summary(one), _next(one))
        return 0

    def _read(self, args: argparse.Namespace, path: Path) -> Analysis:
        """Analyses a file; replays it only if there is no other, because ranks are compared by memory alone."""
        progress = console.Progress(f"reading {path.name}", quiet=args.quiet)
        with trace.read_once(path, progress):
            found = self._analyse(args, path, progress)
            if len(args.file) == 1:
                self._replay(args, found)
        return found

    @staticmethod
    def _analyse(args: argparse.Namespace, path: Path, progress: console.Progress) -> Analysis:
        found = trace.analyse(
            path,
            device=args.device,
            moments=_SCRUB_MOMENTS,
            step=args.step,
            oom=args.oom,
            progress=progress,
        )
        progress.close()
        trace.check_device(found, args.device)
        return found

    @staticmethod
    def _with_memory(args: argparse.Namespace, found: list[Analysis]) -> list[Analysis]:
        """Leaves out processes that allocated nothing, such as torch.compile's workers: they are not ranks."""
        kept = [each for each in found if each.totals["n_allocs"]] or found
        left = [each.path.name for each in found if each not in kept]
        if left:
            console.tell(args, f"left out because they hold no allocation: {', '.join(left)}")
        return kept

    @staticmethod
    def _replay(args: argparse.Namespace, found: Analysis) -> None:
        if args.no_replay or found.is_moment or found.totals["n_events"] > _REPLAY_OPERATIONS:
            return
        try:
            found.replays = _replays(found.path, args)
        except TraceError as error:  # the rest of the report needs none
            console.complain(f"pyalloc report: the report has no replays: {error}")


def _oom(text: str) -> int:
    """Argument type: the number of an error, from 1 on, as an index from 0 on; -1: the last."""
    return -1 if text == "last" else console.count(text) - 1


def _steps(text: str) -> trace.Steps:
    """Argument type: steps."""
    if text == "all":
        return "all"
    named = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    if named is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step N nor steps N-M nor 'all'")
    found = console.step(named[1]), console.step(named[2] or named[1])
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first step must not come after the last")
    return found


def _replays(path: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    reading = console.Progress(f"reading {path.name}", quiet=args.quiet)
    progress = console.Progress("replaying", "M operations", quiet=args.quiet)
    with trace.program(path, reading) as program:
        reading.close()
        if args.device >= 0 and program.info()["n_devices"] > 1:
            return {}  # a replay covers all devices, so it does not compare with one
        results = replaying.compare(program, replaying.policies(), progress=progress)
        if _may_save(program.info(), results["pyalloc"]):
            with contextlib.suppress(PlanError):
                searching = console.Progress("looking for steps", "M comparisons", quiet=args.quiet)
                placing = console.Progress("placing", "M comparisons", quiet=args.quiet)
                plan = planning.make(
                    path, progress=reading, searching=searching, placing=placing, needs_steps=True
                ).packed()
                planned = replaying.compare(program, ["pyalloc"], progress=progress, plan=plan)
                results[allocators.PLANNED] = planned["pyalloc"]
    progress.close()
    return results


def _may_save(info: dict[str, Any], unplanned: dict[str, Any]) -> bool:
    """Is a plan worth the search?"""
    spare = unplanned["peak_bytes"] - info["peak_live_bytes"]
    return allocators.is_worth_a_plan(spare, info["peak_live_bytes"])


def _next(found: Analysis) -> str:
    path = console.quoted(found.path)
    if found.is_empty:
        return console.RECORD
    if found.totals["n_events"] > _REPLAY_OPERATIONS:
        return f"pyalloc replay {path}"  # not replayed here
    if leaks.growth(found) or leaks.jumps(found):
        return f"pyalloc top {path} --over-time"
    if any(item.kind == "policy" for item in advice.advise(found)):
        return f"pyalloc replay {path} --find-min"
    has_lines = any(found.frames(block.stack) for block in found.peak.blocks)
    return f"pyalloc top {path} --by {'line' if has_lines else 'size'}"
