"""pyalloc plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyalloc import _core, planning, replaying, trace
from pyalloc.analysis.allocators import PLANNED
from pyalloc.common import console, ranked, recorded
from pyalloc.common.units import size
from pyalloc.errors import PlanError, UsageError
from pyalloc.report import text
from pyalloc.traces.caveats import gap_of, notes_of
from pyalloc.traces.moments import PAGE

_FEW = 0.01  # of all bytes: less is not mentioned
_LEAST_PLACED = 1 / 2  # of live bytes: a program that died early repeats itself within a step


class Command:
    """Plan where each tensor will lie in memory, from recorded steps.

    pyalloc plan out.pya          then: pyalloc run --plan out.plan python train.py
    pyalloc plan out.rank*.pya    then: pyalloc run --plan out.plan torchrun ...

    This is for programs whose steps make the same requests each time.  Record the program from its start; four steps
    are enough: `pyalloc run --record out.pya python train.py`, or without a GPU `pyalloc dryrun --record`.  Requests
    that later differ from the plan are served as if there were none.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The recording and the plan's file."""
        parser.add_argument(
            "file",
            type=Path,
            nargs="+",
            help="a recording, or a snapshot written by torch, that began with the program",
        )
        parser.add_argument(
            "--device",
            type=console.index,
            metavar="N",
            help="plan for this device only (default: each with at least 1 %% of the requested bytes)",
        )
        parser.add_argument("--json", action="store_true", help="print the figures as JSON")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="file to write the plan to (default: out.plan for out.pya)",
        )
        console.add_quiet(parser)
        parser.add_argument("--force", action="store_true", help="overwrite existing files")

    def run(self, args: argparse.Namespace) -> int:
        """Writes the plans, and prints what they achieve."""
        if len(args.file) > 1 and args.output is not None:
            raise UsageError(
                "-o works with one file only; leave it out, and each plan is named after its file"
            )
        targets = [args.output or recorded.plan(file) for file in args.file]
        for i, target in enumerate(targets):
            console.keep_inputs(argparse.Namespace(file=args.file, output=target))
            console.check_output(target, args.force)
            if target in targets[:i]:
                first = args.file[targets.index(target)]
                raise UsageError(f"the plans of {first} and {args.file[i]} would both be {target}")
        made = []
        for file, target in zip(args.file, targets, strict=True):
            try:
                made.append(_made(args, file, target))
            except PlanError as error:  # a rank's second process that used no memory, for example
                left_out = error
                if len(args.file) > 1:
                    console.complain(f"pyalloc plan: left out: {error}")
        if not made:
            raise left_out
        if args.json:
            rows = [each.row() for each in made]
            print(json.dumps(rows if len(args.file) > 1 else rows[0], indent=2))
        for given, ranks in _given(made, len(args.file)).items():
            console.tell(args, f"next: {_next(given, ranks)}")
        return 0


@dataclass(frozen=True)
class _Made:
    """A plan that was written, its replays, and the recording's figures and notes."""

    file: Path
    target: Path
    plan: planning.Plan
    figures: dict[str, Any]
    info: dict[str, Any]  # of the recording
    notes: dict[str, str]

    def row(self) -> dict[str, Any]:
        return {
            "plan": str(self.target),
            "devices": [
                part.figures() | {"requests": len(part.places)} for part in self.plan.parts
            ],
            "replayed": self.figures,
        }


def _given(made: list[_Made], n_files: int) -> dict[Path, list[_Made]]:
    """The names to pass as --plan, each with its plans: all ranks share one name, other files have one each.

    A rank's second process follows the plan of its first one, so its own is not named.
    """
    found: dict[Path, list[_Made]] = {}
    firsts = [each for each in made if not ranked.is_second(each.target)]
    for each in firsts or made:
        given = ranked.common(each.target) if n_files > 1 else each.target
        found.setdefault(given, []).append(each)
    return found


def _made(args: argparse.Namespace, file: Path, target: Path) -> _Made:
    reading = console.Progress(f"reading {file.name}", quiet=args.quiet)
    searching = console.Progress("looking for steps", "M comparisons", quiet=args.quiet)
    placing = console.Progress("placing", "M comparisons", quiet=args.quiet)
    with trace.read_once(file, reading):
        plan = planning.make(
            file, device=args.device, progress=reading, searching=searching, placing=placing
        )
        progress = console.Progress("replaying", "M operations", quiet=args.quiet)
        with trace.program(file, progress) as program:
            figures = _replayed(program, plan, progress)
            made = _Made(file, target, plan, figures, program.info(), notes_of(program.notes()))
        progress.close()
    if gap_of(made.notes):
        console.complain(f"pyalloc plan: {file}: {gap_of(made.notes)}")
    console.write(target, plan.to_json() + "\n", args.force)
    if not args.json:
        print(console.printable(_table(made)))
    console.tell(args, f"wrote {target}")
    return made


def _next(given: Path, ranks: list[_Made]) -> str:
    program = console.program(ranks[0].notes)
    if not all(map(_why_not, ranks)):
        return f"pyalloc run --plan {console.quoted(given)} {program}"
    short = [console.quoted(each.file) for each in ranks if each.info["n_ooms"]]
    return f"pyalloc report {' '.join(short)}" if short else f"pyalloc run {program}"


def _why_not(made: _Made) -> str:
    """Why the plan should not be used; empty if it should."""
    planned, unplanned = (made.figures[name]["peak_bytes"] for name in (PLANNED, "pyalloc"))
    # For example, private pools use memory that is idle otherwise, and a plan does not cover them.
    if planned > unplanned + PAGE:
        return "The program needs less memory without the plan: do not use it, or record again."
    placed, held = _placed(made)
    if made.info["n_ooms"] and placed < _LEAST_PLACED * held:
        return (
            f"The program ran out of memory while it was recorded, and the plan covers only {size(placed)} of the "
            f"{size(held)} that it held: do not use the plan; record again with more memory."
        )
    return ""


def _placed(made: _Made) -> tuple[int, int]:
    """The most bytes that the plan has places for at once, and that the program held."""
    peaks = made.info["device_peak"]
    held = sum(peaks.get(part.device, sum(peaks.values())) for part in made.plan.parts)
    return sum(part.live_bytes for part in made.plan.parts), held


def _replayed(
    program: _core.Program, plan: planning.Plan, progress: console.Progress
) -> dict[str, Any]:
    """Replays the recording on each allocator, and on pyalloc with the plan."""
    figures = replaying.compare(program, replaying.policies(), progress=progress)
    planned = replaying.compare(program, ["pyalloc"], progress=progress, plan=plan.packed())
    return {**figures, PLANNED: planned["pyalloc"]}


def _table(made: _Made) -> str:
    lines = []
    for part in made.plan.parts:
        lines += _part_lines(made.file, part)
    lines += text.compare(list(made.figures.items()), 1)
    why_not = _why_not(made)
    if why_not:
        lines.append(text.wrapped(why_not, ""))
    elif made.info["n_ooms"]:
        lines.append(
            text.wrapped(
                "The program ran out of memory while it was recorded: the plan covers only what it had allocated "
                "until then.",
                "",
            )
        )
    elif all(part.elsewhere <= _FEW for part in made.plan.parts):
        placed, held = _placed(made)
        if placed < _LEAST_PLACED * held:
            lines.append(
                text.wrapped(
                    f"The plan has places for {size(placed)} of the {size(held)} that the program held: what outlives "
                    "its step (kept in a list, for example) has none, and is served as without a plan.",
                    "",
                )
            )
    return "\n".join(lines)


def _part_lines(file: Path, part: planning.Part) -> list[str]:
    n = len(part.places)
    steps = "one step" if part.turns == 1 else f"{part.turns} steps"
    kinds = (
        f"{n:,} requests: the program's beginning and {steps} ({part.period:,} requests)"
        if part.period
        else f"all {n:,} requests"
    )
    where = "" if part.device is None else f", device {part.device}"
    lines = [
        text.wrapped(f"{file.name}{where}: planned {kinds}", ""),
        f"peak allocated   {size(part.live_bytes)}",
        f"planned          {size(part.extent_bytes)}, {part.extent_bytes / max(part.live_bytes, 1):.4f} times that",
    ]
    if not part.period:
        lines.append(
            text.wrapped(
                "No two consecutive steps make the same requests: the plan covers this one run, and helps only if the "
                "next run makes the same requests in the same order.",
                "",
            )
        )
    if part.elsewhere > _FEW:
        lines.append(
            text.wrapped(
                f"{100 * part.elsewhere:.0f} % of all bytes were requested on other streams or in private pools "
                "(CUDA graphs, MemPool), which a plan does not cover.",
                "",
            )
        )
    return lines
