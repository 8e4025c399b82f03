"""pyalloc live."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from typing import Any

from pyalloc import live
from pyalloc.common import console, keyboard
from pyalloc.errors import UsageError
from pyalloc.report.live import NO_TERMINAL, ORDERS, View, screen, watched

_N_LINES = 8  # shown by the key l
_ALL_LINES = 10_000  # enough to sort by change here


class Command:
    """Watch the memory of a running process.

    `pyalloc run` must have started the process, or `pyalloc attach` must be recording it, or the program must have
    run `import pyalloc.live; pyalloc.live.serve()`.

    pyalloc live PID [--interval 1] [--count N] [--lines 8]

    On a terminal these keys work, and the last line lists them: q or Ctrl-C quits (the process goes on), space
    pauses, l shows the lines of the program that hold most, s sorts them by bytes, blocks or change, c counts changes
    from now on.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Which process, how often."""
        parser.add_argument("pid", type=console.count, metavar="PID", help="the process's number")
        parser.add_argument(
            "--interval",
            type=_seconds,
            default=1.0,
            metavar="S",
            help="seconds between two updates (default: 1)",
        )
        parser.add_argument(
            "--count",
            type=console.index,
            default=0,
            metavar="N",
            help="stop after N updates; 0 goes on until the process ends (default: 0)",
        )
        parser.add_argument(
            "--lines",
            type=console.index,
            default=0,
            metavar="N",
            help="also show the N lines of the program that hold most, if stacks are recorded (default: 0)",
        )
        parser.add_argument("--json", action="store_true", help="print one line of JSON per update")

    def run(self, args: argparse.Namespace) -> int:
        """Prints updates; ends with 0 when the process ends."""
        if not args.json and not args.count and console.is_screen() and sys.stdin.isatty():
            return _Watch(args).run()
        history: list[int] = []
        shown = 0
        while args.count == 0 or shown < args.count:
            if shown:
                time.sleep(args.interval)
            try:
                figures = live.ask(args.pid, args.lines)
            except UsageError as error:
                if shown == 0:
                    raise
                if isinstance(error, live.BusyError):
                    continue
                print(f"process {args.pid} has ended", file=sys.stderr if args.json else sys.stdout)
                return 0
            shown += 1
            if args.json:
                print(json.dumps(figures), flush=True)
                continue
            history.append(_allocated(figures))
            if console.is_screen() and shown > 1:
                sys.stdout.write("\x1b[H\x1b[J")
            print(console.printable(screen(figures, history, _columns())), flush=True)
        if not args.json:
            print(f"next: pyalloc stats {args.pid}", file=sys.stderr)
        return 0


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else NO_TERMINAL


def _allocated(figures: dict[str, Any]) -> int:
    return sum(device["allocated_bytes.all.current"] for device in figures["devices"].values())


class _Watch:
    """The view on a terminal, with keys."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.view = View(args.lines)
        self.history: list[int] = []
        self.figures: dict[str, Any] = {}

    def run(self) -> int:
        """Runs until a key ends it or the process ends; the last figures stay on the screen."""
        self._look()
        try:
            with keyboard.screen():
                has_ended = self._go_on()
        except KeyboardInterrupt:  # the usual way out
            has_ended = False
        print(console.printable(screen(self._last(), self.history, _columns())))
        if has_ended:
            print(f"process {self.args.pid} has ended")
        console.tell(argparse.Namespace(quiet=False), f"next: pyalloc stats {self.args.pid}")
        return 0

    def _go_on(self) -> bool:
        """Updates the screen; returns whether the process has ended."""
        until = time.monotonic() + self.args.interval
        while True:
            height = shutil.get_terminal_size().lines
            text = watched(self.figures, self.history, self.view, height, _columns())
            keyboard.show(console.printable(text))
            key = keyboard.key(math.inf if self.view.is_paused else until)
            if key in ("q", None):
                return False
            if key and not self._press(key):
                continue
            try:
                self._look()
            except live.BusyError:  # the last figures stay
                continue
            except UsageError:
                return True
            until = time.monotonic() + self.args.interval

    def _look(self) -> None:
        self.figures = live.ask(self.args.pid, _ALL_LINES if self.view.n_lines else 0)
        self.history.append(_allocated(self.figures))

    def _press(self, key: str) -> bool:
        """Handles a key; returns whether to ask the process at once."""
        view = self.view
        if key == " ":
            view.is_paused = not view.is_paused
            return not view.is_paused
        if key == "l":
            view.n_lines = 0 if view.n_lines else self.args.lines or _N_LINES
            return view.n_lines > 0
        if key == "s":
            view.order = ORDERS[(ORDERS.index(view.order) + 1) % len(ORDERS)]
        elif key == "c":
            view.before = view.held
        elif key in "+-" and view.n_lines:
            view.n_lines = max(1, view.n_lines + (1 if key == "+" else -1))
        return False

    def _last(self) -> dict[str, Any]:
        """The last figures, with as many lines as were shown."""
        lines, n = self.figures.get("lines"), self.view.n_lines
        if not lines or not n:
            return {key: value for key, value in self.figures.items() if key != "lines"}
        return {**self.figures, "lines": live.shortened(lines, n)}


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return value
