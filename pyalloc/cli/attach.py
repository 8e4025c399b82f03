"""pyalloc attach."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

from pyalloc import live
from pyalloc.common import console, processes, recorded
from pyalloc.common.units import size
from pyalloc.errors import UsageError
from pyalloc.inside import autorecord
from pyalloc.outside import attach

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S = 7 * 86400.0
_LOOK_S = 0.5
_PATIENCE_S = 60.0  # with a process that does not answer


class Command:
    """Start recording a process that is already running.

    It may use torch's own allocator or pyalloc, and need not have been started with pyalloc.  Once attached, `pyalloc
    live` can watch it too.

    pyalloc attach PID [-o out.pya] [--duration 60s]
    pyalloc attach PID --stop

    A process started by `pyalloc run` is asked over its socket.  Any other is entered with gdb, which halts it for a
    fraction of a second; it must run Python 3.10 or newer with torch, but needs no pyalloc.  Without --duration the
    recording ends with --stop or with the process.  Ctrl-C here does not end the recording.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Which process, where to, how long."""
        parser.add_argument("pid", type=console.count, metavar="PID", help="the process's number")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="OUT.pya",
            help="file to record to (default: out.PID.pya in this folder)",
        )
        parser.add_argument(
            "--duration",
            type=_duration,
            metavar="60s",
            help="how long to record, e.g. 60s, 5m or 2h (default: until --stop)",
        )
        parser.add_argument("--stop", action="store_true", help="end the recording")
        autorecord.prepare_choices(parser)
        parser.add_argument(
            "--wait", type=_duration, default=30.0, metavar="30s",
            help="how long to wait for the process to respond before giving up (default: 30s)",
        )  # fmt: skip
        parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")

    def run(self, args: argparse.Namespace) -> int:
        """Begins or ends a recording; prints which, and the next command."""
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
        with contextlib.suppress(UsageError):  # the process may be writing that very file
            found = live.ask(args.pid).get("recording")
            if found is not None:
                return  # the process will say so
        raise


class _Line:
    """A line on the terminal that says what is waited for; cleared at the end."""

    def __init__(self, is_quiet: bool) -> None:
        self.is_shown = not is_quiet and sys.stderr.isatty()
        self.last = ""

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self.is_shown and text != self.last:
            console.show_in_place(text)
            self.last = text

    def waiting(self, doing: str) -> None:
        """Shows what the process does instead of answering."""
        self.show(f"waiting, {doing}")


def _begun(pid: int, path: Path, told: dict[str, Any]) -> str:
    lines = [
        f"recording process {pid}: {processes.command(pid)}",
        f"  to {path} ({path.name}.part until the recording ends)",
    ]
    if told["waits"]:
        lines.append("  It has not used CUDA yet; the recording begins when it does.")
        others = processes.below(pid)
        lines += [f"  Or did you mean one of the processes it started?{others}"] if others else []
        return "\n".join(lines)
    whose = "pyalloc" if told["allocator"] == "pyalloc" else "torch's own allocator"
    lines.append(f"  {whose}; {size(told['bytes'])} were already in use, by unknown lines")
    if not told["in_main"]:
        lines += [
            "  The main thread was not running Python code, so the recording began from",
            "  another thread: requests made at that moment may be missing.",
        ]
    return "\n".join(lines)


def _stop(args: argparse.Namespace) -> int:
    if args.output is not None or args.duration is not None or autorecord.says_how(args):
        raise UsageError(
            "--stop only ends a recording; leave out -o, --duration, --stacks, --no-source and --no-marks"
        )
    with _Line(args.quiet) as line:
        told = attach.end(args.pid, wait_s=args.wait, tell=line.waiting)
    if told["waits"]:
        console.tell(
            args, f"stopped recording process {args.pid}; it never used CUDA, so there is no file"
        )
        return 0
    return _tell_end(args, Path(told["path"]))


def _until_end(args: argparse.Namespace, path: Path) -> int:
    """Shows the progress; the process itself keeps the time."""
    begin = time.monotonic()
    try:
        with _Line(args.quiet) as line:
            while _is_recorded(args.pid, path, begin + args.duration):
                took = min(time.monotonic() - begin, args.duration)
                line.show(f"recording: {took:.0f} of {args.duration:.0f} s")
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        console.tell(args, f"still recording; to end it: pyalloc attach {args.pid} --stop")
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
        told = "ended its recording early and printed the reason on its standard error"
        why = told if processes.is_there(args.pid) else "was killed"
        raise UsageError(
            f"process {args.pid} {why}; to see what was recorded: pyalloc report {console.quoted(part)}"
        )
    raise UsageError(f"nothing was recorded: process {args.pid} did not use CUDA in that time")


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; write for example 60s, 5m or 2h, at most a week"
        )
    return seconds
