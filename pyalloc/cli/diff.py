"""pyalloc diff."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pyalloc import trace
from pyalloc.analysis import leaks
from pyalloc.analysis.comparing import Comparison, Side
from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console
from pyalloc.common.units import parse_allowance, size
from pyalloc.errors import UsageError
from pyalloc.report import compared, comparison, text
from pyalloc.traces.moments import Moment
from pyalloc.traces.turns import begin_of, begins_of, numbers_of


class Command:
    """Compare two runs, or two steps of one run, and look for leaks.

    pyalloc diff before.pya after.pya               their peaks
    pyalloc diff before.pya after.pya -o diff.html  the same as a page
    pyalloc diff out.pya --steps 10 100             what is alive as each begins

    The first sentence names what explains most of the change. Lines that moved in the source are matched. Inputs are
    recordings or torch's snapshots, of any allocator, including the .part file of a program that still runs or was
    killed.

    The exit code is 1 if the second leaks, or if it holds more than --fail-above (such as 5% or 100MB) beyond the
    first.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """One or two files."""
        parser.add_argument(
            "file", type=Path, nargs="+", help="two recordings or snapshots, or one with steps"
        )
        parser.add_argument(
            "--steps",
            type=console.step,
            nargs=2,
            metavar=("A", "B"),
            help="compare what is alive as steps A and B of one file begin (where several steps have number B, the "
            "last; for A the last before that)",
        )
        parser.add_argument(
            "-n", type=console.count, default=15, metavar="N", help="number of rows (default: 15)"
        )
        parser.add_argument(
            "--fail-above",
            metavar="CHANGE",
            help="exit with code 1 if the growth exceeds this, e.g. 5%% or 100MB",
        )
        console.add_device(parser)
        console.add_output(parser, has_page=True)

    def run(self, args: argparse.Namespace) -> int:
        """Prints what differs, then the verdict."""
        console.prepare_output(args, has_page=True)
        if args.fail_above is not None:
            args.fail_above = parse_allowance(args.fail_above)
        if len(args.file) > 2 or (len(args.file) == 2 and args.steps):
            raise UsageError("give two files, or one file (and --steps A B)")
        if len(args.file) == 2:
            return self._answer(args)
        progress = console.Progress(f"reading {args.file[0].name}", quiet=args.quiet)
        with trace.read_once(args.file[0], progress):
            progress.close()
            return self._answer(args)

    @staticmethod
    def _answer(args: argparse.Namespace) -> int:
        found = [_analyse(args, path) for path in args.file]
        last = found[-1]
        if len(found) == 2:
            sides = [Side(each, each.peak, each.path.name) for each in found]
            if sides[0].name == sides[1].name:  # the same name in two folders
                sides = [replace(side, name=str(side.found.path)) for side in sides]
        else:
            moments, names = _steps(last, args)
            sides = [Side(last, each, name) for each, name in zip(moments, names, strict=True)]
        told = Comparison(*sides)
        then = f"pyalloc top {console.quoted(args.file[-1])} --over-time"
        if console.is_page(args.output):
            console.write(args.output, comparison.page(told), args.force)
            if not args.quiet:
                print(console.printable(text.wrapped(compared.sentence(told), "")))
            console.tell(args, f"wrote {args.output}")
            console.tell(args, f"next: {then}")
        else:
            lines = [
                *compared.summary(told, args.n),
                "",
                *compared.verdict(told, args.n),
                *map(text.wrapped, compared.caveats(told)),
            ]
            console.deliver(args, "\n".join(lines), compared.data(told), then)
        return 1 if _is_above(told, args) or leaks.growth(last) else 0


def _is_above(told: Comparison, args: argparse.Namespace) -> bool:
    """Whether the growth exceeds --fail-above.  Says so here too, because the output may go to a file."""
    before = told.before.moment.allocated_bytes
    if args.fail_above is None or told.bytes <= args.fail_above.of(before):
        return False
    most = size(args.fail_above.of(before))
    console.complain(
        f"pyalloc diff: {told.after.name} holds {size(told.bytes)} more; --fail-above allows {most}"
    )
    return True


def _analyse(args: argparse.Namespace, path: Path) -> Analysis:
    progress = console.Progress(f"reading {path.name}", quiet=args.quiet)
    found = trace.analyse(path, device=args.device, progress=progress)
    progress.close()
    trace.check_device(found, args.device)
    return found


def _steps(found: Analysis, args: argparse.Namespace) -> tuple[list[Moment], tuple[str, str]]:
    """The moments at which two steps begin: those of --steps, or the third and the last that were analysed."""
    wanted: list[int] | None = args.steps
    if wanted is None:
        usable = [step for step in found.steps if step[1] in found.moments]
        if len(usable) < 2:
            raise UsageError(
                "this file has fewer than two steps to compare; give two files, or call pyalloc.step() in the program"
            )
        looked_at = usable[min(2, len(usable) - 2)], usable[-1]
        wanted, events = [step[0] for step in looked_at], [step[1] for step in looked_at]
    else:
        events = _events_of(wanted, found)
    absent = [event for event in events if event not in found.moments]
    if absent:
        progress = console.Progress(f"reading {found.path.name} again", quiet=args.quiet)
        found.moments.update(trace.moments_at(found.path, sorted(absent), args.device, progress))
        progress.close()
    moments = [found.moments[event] for event in events]
    end = _end_mark(found)
    before, after = (
        f"the end of step {end[0]}" if end and number == end[1] else f"step {number}"
        for number in wanted
    )
    return moments, (before, after)


def _events_of(wanted: list[int], found: Analysis) -> list[int]:
    """The events at which the steps of these numbers begin."""
    events = []
    for number in wanted:
        event = begin_of(found.steps, number)
        if event is None:
            raise UsageError(f"there is no step {number}; {_numbers(found)}")
        events.append(event)
    return list(begins_of(found.steps, *wanted) or events)


def _end_mark(found: Analysis) -> tuple[int, int] | None:
    """The numbers of the last step and of what begins after it, if no memory was requested in the latter.

    Steps that pyalloc marks begin after each step of the optimizer, so one begins after the last, too.
    """
    if len(found.steps) < 2:
        return None
    (last, *_), (number, _, _, at_begin, peak) = found.steps[-2:]
    return (last, number) if peak == at_begin else None


def _numbers(found: Analysis) -> str:
    end = _end_mark(found)
    if end is None:
        return numbers_of(found.steps)
    numbers = [step[0] for step in found.steps]
    return f"steps go from {min(numbers)} to {end[0]}; {end[1]} means the end of the last one"
