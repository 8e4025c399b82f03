"""`pyalloc live` on a terminal: keys, and what they show."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from termios import ECHO, ICANON, TIOCSWINSZ, tcgetattr
from typing import Any

import pytest
from dry_support import SOON_S

from instrument.tools import MIB, ROOT
from pyalloc import live
from pyalloc.cli.live import Command, _Watch
from pyalloc.common import console
from pyalloc.errors import UsageError
from pyalloc.report.live import View, watched

SERVER = """
import sys, time
from pyalloc import live
n = 0
def figures(n_lines=0):
    global n
    n += 1
    names = [f"train/model_of_a_long_name.py:{i} EncoderLayer.forward" for i in range(1, 13)]
    rows = [{"name": name, "bytes": (i + 1) * 8 << 20, "blocks": 40 - i} for i, name in enumerate(names)]
    rows[2]["bytes"] += n << 20
    told = {"allocated_bytes.all.current": n << 20, "reserved_bytes.all.current": 1 << 30,
            "allocated_bytes.all.peak": 1 << 30, "device_total_bytes": 8 << 30}
    found = {"pid": 1, "argv": ["train.py"], "devices": {"0": told}}
    if n_lines:
        found["lines"] = sorted(rows, key=lambda row: -row["bytes"])
    return found
live.figures = figures
live.serve()
print("ready", flush=True)
sys.stdin.read()
"""


class Terminal:
    """`pyalloc live` for a process, on a terminal of its own."""

    def __init__(self, pid: int, **environment: str) -> None:
        self.child, self.number = pty.fork()
        if self.child == 0:
            ioctl(1, TIOCSWINSZ, struct.pack("4H", 30, 80, 0, 0))
            os.environ.update(TERM="xterm", PYTHONPATH=str(ROOT))
            os.environ.pop("NO_COLOR", None)
            os.environ.update(environment)
            for name in ("LINES", "COLUMNS"):  # readline may have set them, unknown to os.environ
                os.unsetenv(name)
            words = [sys.executable, "-m", "pyalloc", "live", str(pid), "--interval", "0.01"]
            os.execv(sys.executable, words)
        self.seen = ""

    def wait(self, pattern: str) -> str:
        """The last screen, once it matches; one of the next thousand screens must."""
        n_before = self.seen.count("\x1b[H")
        while True:
            *before, last = self.seen.split("\x1b[H")
            shown = re.sub(r"\x1b\[[KJ]", "", last)
            if last.endswith("\x1b[J") and re.search(pattern, shown, re.DOTALL):
                return shown
            assert len(before) < n_before + 1000 and self.read(), (pattern, shown)

    def read(self) -> bool:
        """False: the program has ended."""
        assert select.select([self.number], [], [], SOON_S)[0], self.seen[-3000:]
        try:
            part = os.read(self.number, 1 << 16)
        except OSError:
            part = b""
        self.seen += part.decode()
        return bool(part)

    def press(self, key: str) -> None:
        os.write(self.number, key.encode())

    def end(self) -> tuple[str, int]:
        """What stays on the terminal, and the exit code."""
        while self.read():
            pass
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        return self.seen.rsplit("\x1b[?1049l", maxsplit=1)[-1].replace("\r", ""), code


@contextmanager
def serving() -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        assert server.stdout.readline() == "ready\n"
        try:
            yield server
        finally:
            server.stdin.close()


def test_keys() -> None:
    with serving() as server:
        terminal = Terminal(server.pid)
        first = terminal.wait("l show lines")
        assert "model_of_a" not in first
        assert not tcgetattr(terminal.number)[3] & (ECHO | ICANON)
        terminal.press("l")
        shown = terminal.wait("s by bytes")
        assert shown.count("EncoderLayer.forward") == 8 and "  and 4 more" in shown
        assert all(len(line) <= 80 for line in shown.replace("\r", "").split("\n"))
        terminal.press("+")
        terminal.wait("and 3 more")
        terminal.press("-")
        terminal.wait("and 4 more")
        terminal.press("s")
        by_blocks = terminal.wait("s by blocks")
        assert [int(n) for n in re.findall(r" % +(\d+) ", by_blocks)] == list(range(40, 32, -1))
        terminal.press("s")
        changed = terminal.wait(r"\+\d+\.0 MiB.*s by change")
        assert re.findall(r"\+\d+\.0 MiB +train/model_of_a_long_name\.py:(\d+)", changed) == ["3"]
        terminal.press(" ")
        held = terminal.wait("space resume")
        terminal.press("c")
        anew = terminal.wait("line\r\n +96")
        assert "+" not in anew.split("line\r")[1].split("q quit")[0] and "MiB" in held
        terminal.press("q")
        left, code = terminal.end()
    assert code == 0 and "held now, by line" in left and "next: pyalloc stats" in left
    assert "4 more" in left and "\x1b" not in left
    assert terminal.seen.count("\x1b[?1049h") == terminal.seen.count("\x1b[?25h") == 1


@pytest.mark.parametrize("how", ["the process", "Ctrl-C"])
def test_how_else_it_ends(how: str) -> None:
    with serving() as server:
        terminal = Terminal(server.pid)
        terminal.wait("l show lines")
        if how == "Ctrl-C":
            terminal.press("\x03")
        else:
            server.send_signal(signal.SIGKILL)
        left, code = terminal.end()
    assert code == 0 and ("has ended" in left) is (how == "the process")
    assert "process 1: train.py" in left and "\x1b" not in left and "Traceback" not in left


def test_keys_on_a_terminal_that_shall_show_no_colours() -> None:
    with serving() as server:
        terminal = Terminal(server.pid, NO_COLOR="1")
        terminal.wait("l show lines")
        terminal.press("q")
        _, code = terminal.end()
    assert code == 0


def test_a_dumb_terminal_gets_no_control_sequences() -> None:
    """Such as a shell in Emacs, which would show them."""
    with serving() as server:
        terminal = Terminal(server.pid, TERM="dumb")
        while terminal.seen.count("process 1: train.py") < 2:
            assert terminal.read()
        terminal.press("\x03")
        left, code = terminal.end()
    assert code == 130 and "\x1b" not in left and "Traceback" not in left


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)],
)
def test_where_text_is_bold(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert console.has_color() is expected


def figures(lines: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {"pid": 1, "argv": ["train.py"], "devices": {}, "lines": lines}


@pytest.mark.parametrize("columns", [8, 40, 60, 80, 81, 200])
def test_a_screen_is_as_wide_and_high_as_the_terminal(columns: int) -> None:
    names = [f"train/a_file_of_a_long_name_{i}.py:1 DecoderLayer.forward" for i in range(30)]
    lines = [{"name": name, "bytes": (900 - i) * MIB, "blocks": 1} for i, name in enumerate(names)]
    stats = {f"allocated_bytes.all.{each}": 900 * MIB for each in ("current", "peak")}
    stats |= {"reserved_bytes.all.current": 1000 * MIB, "device_total_bytes": 80 << 30}
    told = {**figures(lines), "argv": ["train.py", "--a" * 50], "devices": {"0": stats}}
    for shown in (told, {**told, "lines": None}):
        text = watched(shown, [i * MIB for i in range(500)], View(n_lines=30), 30, columns)
        assert max(map(len, text.split("\n"))) < max(columns, 20)
        if columns >= 40:
            assert len(text.split("\n")) <= 30 and "q quit" in text.split("\n\n")[-1]
            flat = " ".join(text.split())
            assert "900.0 MiB (peak 900.0 MiB), idle 100.0 MiB, retries 0, OOMs 0" in flat


def test_changes_count_from_the_first_look_on() -> None:
    def row(name: str, n: int) -> dict[str, Any]:
        return {"name": name, "bytes": n * MIB, "blocks": 1}

    view = View(n_lines=5, order="change")
    watched(figures([row("a.py:1 f", 10), row("b.py:2 g", 5)]), [], view, 40)
    shown = watched(figures([row("c.py:3 h", 7), row("a.py:1 f", 6)]), [], view, 40)
    table = [line.split() for line in shown.split("\n") if ".py:" in line and "train" not in line]
    assert [words[-2:] for words in table] == [["c.py:3", "h"], ["b.py:2", "g"], ["a.py:1", "f"]]
    assert [words[-4] for words in table] == ["+7.0", "-5.0", "-4.0"]
    assert table[1][:2] == ["0", "bytes"]  # what is gone is reported, too
    assert (
        len(watched(figures([row("a.py:1 f", 10)] * 30), [], View(n_lines=30), 24).split("\n"))
        <= 24
    )
    assert "unknown which lines" in watched(figures(None), [], view, 40)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    Command().prepare_parser(parser)
    return parser.parse_args(["1", "--interval", "0", *words])


def answer(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | UsageError) -> list[object]:
    """Has a process answer this; returns what is left."""
    left: list[object] = list(answers)

    def ask(_pid: int, _n: int) -> object:
        found = left.pop(0)
        if isinstance(found, UsageError):
            raise found
        return found

    monkeypatch.setattr("pyalloc.live.ask", ask)
    return left


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("words", [[], ["--count", "2"]], ids=str)
def test_without_keys_each_look_is_a_screen_or_lines(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    words: list[str],
) -> None:
    monkeypatch.setattr("pyalloc.common.console.is_screen", lambda: is_terminal)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: bool(words))
    left = answer(monkeypatch, figures([]), figures([]), UsageError("it has ended"))
    assert Command().run(arguments(*words)) == 0
    out = capsys.readouterr().out
    assert out.count("process 1: train.py") == 2 and len(left) == len(words) / 2
    assert out.count("\x1b[H\x1b[J") == is_terminal


def test_a_process_that_is_busy_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = figures([]), live.BusyError("it is stopped"), figures([]), UsageError("it has ended")
    left = answer(monkeypatch, *answers)
    monkeypatch.setattr("pyalloc.common.keyboard.key", lambda _until: "")
    monkeypatch.setattr("pyalloc.common.keyboard.show", lambda _text: None)
    watch = _Watch(arguments())
    watch._look()
    assert watch._go_on() and not left and len(watch.history) == 2
