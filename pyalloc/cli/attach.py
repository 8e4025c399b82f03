"""pyalloc attach."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

from pyalloc import attach, autorecord, console, live, processes, recorded
from pyalloc.errors import UsageError
from pyalloc.units import size

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 7 * 86400.0
_LOOK_S = 0.5
_PATIENCE_S = 60.0  # with a process that does not answer


class Command:
    """Record a process that is running, from now on.

    On torch's own allocator or on pyalloc, started with pyalloc or not.  Then `pyalloc live` answers of it, too.

    pyalloc attach PID [-o out.pya] [--duration 60s]
    pyalloc attach PID --stop

    A process of `pyalloc run` is asked over its socket.  Into others gdb goes, which halts them for a fraction of a
    second; Python 3.10 or newer, and torch in it, are needed there, pyalloc is not.  Without --duration the recording
    ends with --stop or with the process; Ctrl-C here ends nothing there.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Which process, where to, how long."""
        parser.add_argument("pid", type=console.count, metavar="PID", help="number of the process")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="OUT.pya", help="the recording (out.PID.pya here)"
        )
        parser.add_argument(
            "--duration", type=_duration, metavar="60s", help="so long: 60s, 5m, 2h (until --stop)"
        )
        parser.add_argument("--stop", action="store_true", help="end the recording")
        autorecord.prepare_choices(parser)
        parser.add_argument(
            "--wait", type=_duration, default=30.0, metavar="30s",
            help="for the process to come to it; then nothing is begun (30s)",
        )  # fmt: skip
        parser.add_argument("-q", "--quiet", action="store_true", help="errors only")

    def run(self, args: argparse.Namespace) -> int:
        """Says what was begun or ended, and what comes next."""
        if args.stop:
            return _stop(args)
        path = args.output or Path(f"out.{args.pid}.pya")
        stacks = autorecord.stacks_of(args)
        _check_output(args, path)
        with _Line(args.quiet) as line:
            told = attach.begin(
                args.pid,
                path,
                stacks=stacks,
                marks=not args.no_marks,
                duration_s=args.duration,
                force=args.force,
                wait_s=args.wait,
                tell=line.waiting,
            )
        console.tell(args, _begun(args.pid, path, told))
        if args.duration is not None:
            return _until_end(args, path)
        console.tell(args, f"next: pyalloc live {args.pid}, or pyalloc attach {args.pid} --stop")
        return 0


def _check_output(args: argparse.Namespace, path: Path) -> None:
    try:
        autorecord.prepare(path, stacks=args.stacks, automatic=True, force=args.force)
    except UsageError:
        with contextlib.suppress(UsageError):  # what is there may be what the process writes now
            found = live.ask(args.pid).get("recording")
            if found is not None:
                return  # the process will say so
        raise


class _Line:
    """A line of the terminal, while something is waited for."""

    def __init__(self, is_quiet: bool) -> None:
        self.is_shown = not is_quiet and sys.stderr.isatty()
        self.last = ""

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """In place of what was there."""
        if self.is_shown and text != self.last:
            console.show_in_place(text)
            self.last = text

    def waiting(self, doing: str) -> None:
        """The process does not come to what it is asked."""
        self.show(f"waiting, {doing}")


def _begun(pid: int, path: Path, told: dict[str, Any]) -> str:
    lines = [
        f"recording process {pid}: {processes.command(pid)}",
        f"  to {path} ({path.name}.part until it ends)",
    ]
    if told["waits"]:
        lines.append("  It has not used CUDA yet; the recording begins when it does.")
        others = processes.below(pid)
        lines += [f"  Or was one of those meant that it started?{others}"] if others else []
        return "\n".join(lines)
    whose = "pyalloc" if told["allocator"] == "pyalloc" else "torch's own allocator"
    lines.append(f"  {whose}: {size(told['bytes'])} in use before, of which no lines are known")
    if not told["in_main"]:
        lines += [
            "  Its main thread ran no Python code, so it was begun beside that: of what was",
            "  asked for in that moment something may be missing.",
        ]
    return "\n".join(lines)


def _stop(args: argparse.Namespace) -> int:
    if args.output is not None or args.duration is not None or autorecord.says_how(args):
        raise UsageError(
            "--stop ends what was begun: without -o and --duration, and without --stacks, --no-source and --no-marks"
        )
    with _Line(args.quiet) as line:
        told = attach.end(args.pid, wait_s=args.wait, tell=line.waiting)
    if told["waits"]:
        console.tell(args, f"process {args.pid} is recorded no more; it has used no CUDA meanwhile")
        return 0
    return _tell_end(args, Path(told["path"]))


def _until_end(args: argparse.Namespace, path: Path) -> int:
    """Watches; the process itself counts the time."""
    begin = time.monotonic()
    try:
        with _Line(args.quiet) as line:
            while _is_recorded(args.pid, path, begin + args.duration):
                took = min(time.monotonic() - begin, args.duration)
                line.show(f"recording: {took:.0f} of {args.duration:.0f} s")
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        console.tell(args, f"the recording goes on; pyalloc attach {args.pid} --stop ends it")
        raise
    return _tell_end(args, path)


def _is_recorded(pid: int, path: Path, end_s: float) -> bool:
    if not processes.is_there(pid):
        return False
    try:
        found = live.ask(pid).get("recording")
    except UsageError:  # it is busy
        return time.monotonic() < end_s + _PATIENCE_S
    return found is not None and bool(found["path"] == str(path.absolute()))


def _tell_end(args: argparse.Namespace, path: Path) -> int:
    part = recorded.part(path)
    if path.exists():
        console.tell(args, f"recorded: {path}\nnext: pyalloc report {console.quoted(path)}")
        return 0
    if part.exists():
        told = "ended its recording by itself, and told why on its standard error"
        why = told if processes.is_there(args.pid) else "was killed"
        raise UsageError(
            f"process {args.pid} {why}; what was recorded before: pyalloc report {console.quoted(part)}"
        )
    raise UsageError(f"nothing was recorded: process {args.pid} has used no CUDA meanwhile")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 60s, 5m or 2h, up to a week")
    return seconds
