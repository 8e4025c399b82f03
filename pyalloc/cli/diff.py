"""pyalloc diff."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyalloc import console, leaks, trace
from pyalloc.analysis import Analysis, Row
from pyalloc.errors import UsageError
from pyalloc.moments import Moment
from pyalloc.report import text
from pyalloc.units import size

_NOTHING = ["every line holds as much as before"]
_NAME_LINES = 6  # whole, as good as always: what tells two names apart may stand at their ends


class Command:
    """What grew between two runs, or two steps of one; is it leaking?

    pyalloc diff before.pya after.pya          their peaks
    pyalloc diff out.pya --steps 10 100        what lives as each begins

    Exit code 1 when something leaks.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """One or two files."""
        parser.add_argument(
            "file", type=Path, nargs="+", help="two traces or snapshots to compare, or one"
        )
        parser.add_argument(
            "--steps",
            type=console.index,
            nargs=2,
            metavar=("A", "B"),
            help="compare what lives as steps A and B of one file begin",
        )
        parser.add_argument(
            "-n", type=console.count, default=15, metavar="N", help="how many rows (15)"
        )
        console.add_device(parser)
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints what differs, then the verdict."""
        console.prepare_output(args)
        if len(args.file) > 2 or (len(args.file) == 2 and args.steps):
            raise UsageError("two files, or one file (with --steps A B)")
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
            pair = (found[0], found[0].peak), (last, last.peak)
            names = args.file[0].name, args.file[1].name
        else:
            moments, names = _steps(last, args)
            pair = (last, moments[0]), (last, moments[1])
        changes = _changes(*pair)
        differing = [row for row in changes if row[1] != row[2]]
        growth, turn = leaks.growth(last), leaks.turn(last)
        caveats = _caveats(found)
        lines = [
            text.wrapped(
                f"{names[0]}: {size(pair[0][1].allocated_bytes)}; "
                f"{names[1]}: {size(pair[1][1].allocated_bytes)}",
                "",
            ),
            *([f"{'change':>12}{'before':>12}{'after':>12}  line"] if differing else _NOTHING),
            *[
                text.hung(
                    f"{_signed(after - before):>12}{size(before):>12}{size(after):>12}",
                    name,
                    _NAME_LINES,
                )
                for name, before, after in differing[: args.n]
            ],
            "",
            text.wrapped(f"{_verdict_of(found)}: {leaks.verdict(last)}", ""),
            *[
                text.hung(f"  +{size(g.per_step)} a {turn}", g.name, _NAME_LINES)
                for g in growth[: args.n]
            ],
            *[text.wrapped(caveat) for caveat in caveats],
        ]
        content: dict[str, Any] = {
            "changes": [
                {"name": name, "before_bytes": before, "after_bytes": after}
                for name, before, after in changes
            ],
            "verdict": leaks.verdict(last),
            "leak": [{"name": g.name, "bytes_per_step": g.per_step} for g in growth],
            "caveats": caveats,
        }
        console.deliver(
            args,
            "\n".join(lines),
            content,
            f"pyalloc top {console.quoted(args.file[-1])} --over-time",
        )
        return 1 if growth else 0


def _analyse(args: argparse.Namespace, path: Path) -> Analysis:
    progress = console.Progress(f"reading {path.name}", quiet=args.quiet)
    found = trace.analyse(path, device=args.device, progress=progress)
    progress.close()
    trace.check_device(found, args.device)
    return found


def _verdict_of(found: list[Analysis]) -> str:
    """It is of the steps of one file, whatever the table above compares."""
    return f"verdict on {found[-1].path.name} by itself" if len(found) > 1 else "verdict"


def _caveats(found: list[Analysis]) -> list[str]:
    """Of two files each told with its name."""
    names = [f"{each.path.name}: " if len(found) > 1 else "" for each in found]
    return [
        name + caveat for name, each in zip(names, found, strict=True) for caveat in each.caveats
    ]


def _steps(found: Analysis, args: argparse.Namespace) -> tuple[list[Moment], tuple[str, str]]:
    """The moments at the beginning of two steps; without a wish, of the third and the last looked at."""
    wanted: list[int] | None = args.steps
    known = {step[0]: step[1] for step in found.steps}
    if wanted is None:
        usable = [number for number, event in known.items() if event in found.moments]
        if len(usable) < 2:
            raise UsageError(
                "one file without steps has nothing to compare: give two files, or call pyalloc.step()"
            )
        wanted = [usable[min(2, len(usable) - 2)], usable[-1]]
    missing = [number for number in wanted if number not in known]
    if missing:
        raise UsageError(f"there is no step {missing[0]}; {_numbers(found)}")
    events = [known[number] for number in wanted]
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


def _end_mark(found: Analysis) -> tuple[int, int] | None:
    """The last step and what begins after it, where that is no step of the program's: nothing was asked for in it.

    A recording's own steps end with the optimizer's, after the last one too.
    """
    if len(found.steps) < 2:
        return None
    (last, *_), (number, _, _, at_begin, peak) = found.steps[-2:]
    return (last, number) if peak == at_begin else None


def _numbers(found: Analysis) -> str:
    numbers = [step[0] for step in found.steps]
    if not numbers:
        return "no steps are in the file"
    end = _end_mark(found)
    if end is None:
        return f"steps go from {min(numbers)} to {max(numbers)}"
    return f"steps go from {min(numbers)} to {end[0]}, and {end[1]} stands for the end of the last"


def _changes(
    before: tuple[Analysis, Moment], after: tuple[Analysis, Moment]
) -> list[tuple[str, int, int]]:
    tables = [_table(found.by_line(moment.blocks)) for found, moment in (before, after)]
    names = {*tables[0], *tables[1]}
    rows = [(name, tables[0].get(name, 0), tables[1].get(name, 0)) for name in names]
    return sorted(rows, key=lambda row: (-abs(row[2] - row[1]), row[0]))


def _table(rows: list[Row]) -> dict[str, int]:
    return {row.name: row.bytes for row in rows}


def _signed(value: int) -> str:
    return ("+" if value >= 0 else "-") + size(abs(value))
