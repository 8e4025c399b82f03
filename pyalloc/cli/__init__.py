"""The command line: `pyalloc <subcommand>`, one file of this folder each.

A subcommand is a class `Command` with `prepare_parser(parser)` and `run(args) -> exit code`; its docstring is its help.
Only the chosen one is imported, so that `pyalloc run` starts fast.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import difflib
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from pyalloc import __version__
from pyalloc.common import console, starting
from pyalloc.errors import PyallocError

# The levels of timelines, and the mark for what was left out, in a terminal without Unicode.
_ASCII = dict(zip("▁▂▃▄▅▆▇█…", ".:-=+*#@~", strict=True))


class Subcommand(Protocol):
    """What the class `Command` of each module of this folder looks like."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work; returns the exit code."""


def names() -> list[str]:
    """The subcommands, as typed."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Subcommand:
    """The subcommand of that name."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    command: Subcommand = module.Command()
    return command


def _description(command: Subcommand) -> str:
    """The docstring, formatted for a terminal: prose is wrapped, examples stay as they are."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith("pyalloc ") else textwrap.fill(" ".join(text.split()), _width())
        for text in paragraphs
    )


def _width() -> int:
    """Of help: lines longer than 79 columns are hard to read, also where there is room."""
    return min(max(shutil.get_terminal_size().columns, 30), 80) - 1


def _summary(command: Subcommand) -> str:
    return (command.__doc__ or "").strip().partition("\n")[0]  # none under python -OO


def _overview() -> str:
    lines = ["usage: pyalloc <subcommand> [arguments]", "", "subcommands:"]
    lines += [f"  {name:<12}{_summary(load(name))}" for name in names()]
    lines += [
        "",
        "pyalloc <subcommand> --help explains it; pyalloc --version prints the version",
        "start with: pyalloc doctor",
    ]
    folded = (textwrap.fill(line, _width(), subsequent_indent=" " * 14) for line in lines)
    return "\n".join(folded)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code, or that of the error it raised."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("pyalloc", _plain)
        sys.stdout.reconfigure(errors="pyalloc")
    try:
        starting.raise_at_interrupts()
        with _ended_in_order():
            code = _dispatch(words)
            sys.stdout.flush()
    except KeyboardInterrupt:
        console.clear()
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader of our output is gone
        return 141
    except OSError as error:
        _drop_output()
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        console.complain(f"{' '.join(['pyalloc', *words[:1]])}: {why}")
        return 2
    return code


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Error handler of a codec: what a terminal shows for characters that it does not have."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_ASCII.get(each, "?") for each in lacking), error.end


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind like Ctrl-C; otherwise temporary files and child processes would remain."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    ]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _open_streams() -> None:
    """Replaces streams that were closed before Python started, as daemons do; Python sets them to None."""
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _drop_output() -> None:
    """Redirects standard output to nowhere: Python would try to write its buffer at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if len(words) > 1 and words[0] == "help" and words[1][0:1] != "-":
        return _run(words[1], ["--help"])
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    return _run(words[0], words[1:])


def _unknown(words: list[str], options: list[str]) -> str:
    """What is wrong with words that no option takes."""
    typed = [word.partition("=")[0] for word in words if word.startswith("--")]
    near = [difflib.get_close_matches(word, options, 1) for word in typed]
    meant = " ".join(found[0] for found in near if found)
    return f"unrecognized arguments: {' '.join(words)}" + (
        f"; did you mean {meant}?" if meant else ""
    )


def _run(name: str, rest: list[str]) -> int:
    if name not in names():
        known = f"the subcommands are {', '.join(names())}"
        near = difflib.get_close_matches(name, names(), 1)
        if name == "record":
            program = console.joined(rest) if rest and rest[0][0:1] != "-" else "python train.py"
            hint = f"to record a program, type: pyalloc run --record out.pya {program}"
        elif near:
            hint = f"did you mean {near[0]!r}?"
        elif name.endswith(".py") or shutil.which(name) is not None:
            program = (
                f"to run a program on pyalloc, type: pyalloc run {console.joined([name, *rest])}"
            )
            hint = program if name.endswith(".py") else f"{known}; {program}"
        elif os.path.isfile(name):
            hint = f"to see what a recording holds, type: pyalloc report {console.quoted(name)}"
        else:
            hint = known
        console.complain(f"pyalloc: there is no subcommand {name!r}; {hint}")
        return 2
    command = load(name)
    parser = argparse.ArgumentParser(
        prog=f"pyalloc {name}",
        description=_description(command),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=_width()),
    )
    # A value like -1GB is the option's to refuse, and no option itself; from Python 3.14 on this is the default.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    command.prepare_parser(parser)
    try:
        args, unknown = parser.parse_known_args(rest)
        if unknown:
            parser.error(_unknown(unknown, [*parser._option_string_actions]))
        console.keep_inputs(args)
        return command.run(args)
    except PyallocError as error:
        console.complain(f"pyalloc {name}: {error}")
        return error.exit_code
