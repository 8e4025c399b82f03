"""What the subcommands share: arguments, output that overwrites nothing, progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyalloc import files
from pyalloc.errors import UsageError
from pyalloc.folding import folded

RECORD = (
    "pyalloc run --record out.pya python train.py"  # what comes next where nothing was recorded
)
ON_ONE_MACHINE = 16  # devices; ranks, where there are no more: torchrun's default is one machine
_TEXTS = ("", ".txt", ".md", ".log")  # what -o may end in, each kind of output its own
_JSON = ".json"
_PAGES = (".html", ".htm")
_MOST = 2**31 - 1  # of an argument that is a number
_AFTER_S = 1.0  # progress is shown from here on
_EVERY_S = 0.2
# Controls but for the end of a line, and what turns the direction of writing.
_OBEYED = re.compile("(\x1b\\[[01]m)|[\0-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLUMNS = 80  # where the terminal does not tell


def quoted(path: Path | str) -> str:
    """A name as it is typed in a command."""
    return shlex.quote(str(path))


def program(notes: dict[str, str]) -> str:
    """The program that a trace was recorded of, to be typed again; only scripts, for traces come from others too."""
    try:
        words = shlex.split(printable(notes.get("command", "")))
    except ValueError:
        words = []
    rest = iter(words[1:])
    first = ""
    for word in rest:
        if re.fullmatch(r"-[^\WcmWX]*[WX]", word):  # what comes next is its own
            next(rest, None)
        elif not word.startswith("-") or word in ("-c", "-m"):
            first = word
            break
    is_script = first.endswith(".py") and re.fullmatch(r"python[\d.]*", Path(words[0]).name)
    n_ranks = ranks(notes)
    if n_ranks > 1:
        script = shlex.join(words[words.index(first) :]) if is_script else "your_script.py"
        processes = f"--nproc-per-node {n_ranks} " if n_ranks <= ON_ONE_MACHINE else ""
        return f"torchrun {processes}{script}"
    return shlex.join(words) if is_script else "python your_script.py"


def ranks(notes: dict[str, str]) -> int:
    """Processes of the program that a trace was recorded of, as its launcher told them."""
    size = notes.get("world_size", "") if "rank" in notes else ""
    return int(size) if re.fullmatch(r"[1-9]\d{0,5}", size) else 1


def count(text: str) -> int:
    """The type of an argument that is a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def index(text: str, most: int = _MOST) -> int:
    """The type of an argument that is a number from 0 on."""
    if not text.isdecimal() or int(text) > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {most}")
    return int(text)


def step(text: str) -> int:
    """The type of an argument that is a step's number, as large as pyalloc.step() takes."""
    return index(text, 2**63 - 1)


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device; -1: all of the trace's."""
    parser.add_argument(
        "--device", type=index, default=-1, metavar="N", help="look at this device only"
    )


def add_output(parser: argparse.ArgumentParser, *, has_page: bool = False) -> None:
    """--json, -o, -q, --force."""
    page = "; a name ending in .html makes it a page" if has_page else ""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"write to FILE instead of stdout{page}"
    )
    add_quiet(parser)
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """-q, for what print only what was asked for beside errors."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, no hints: only results and errors"
    )


def prepare_output(args: argparse.Namespace, *, has_page: bool = False) -> None:
    """check_output() of -o, whose suffix says what is written; .json asks for JSON as --json does."""
    if args.output is None:
        return
    suffix, wants_page = args.output.suffix.lower(), is_page(args.output)
    pages = ", a page (.html)" if has_page else ""
    if suffix not in (*_TEXTS, _JSON) and not (has_page and wants_page):
        raise UsageError(
            f"{args.output}: this command does not write {suffix}, only text ({', '.join(_TEXTS[1:])} or no suffix), "
            f"JSON ({_JSON}){pages}"
        )
    if wants_page and args.json:
        raise UsageError(f"{args.output} asks for a page and --json for JSON; give one of them")
    args.json = args.json or suffix == _JSON
    check_output(args.output, args.force)


def is_page(path: Path | None) -> bool:
    """Does its name ask for an HTML page?"""
    return path is not None and path.suffix.lower() in _PAGES


def check_output(path: Path | None, force: bool) -> None:
    """Raises UsageError where something would be overwritten, or cannot be written: told before the work is done."""
    if path is None:
        return
    if str(path) == "-":
        raise UsageError("-o does not take '-'; leave -o out, or name a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; choose another name")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists; --force overwrites it")
    check_folder(path)


def keep_inputs(args: argparse.Namespace) -> None:
    """Raises UsageError where the output would replace what it is made from, with --force too."""
    output, given = getattr(args, "output", None), getattr(args, "file", [])
    for path in map(Path, given if isinstance(given, list) else [given]):
        if output is not None and output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is also an input; write to another file")


def check_folder(path: Path) -> None:
    """Raises UsageError where no file can be made beside `path`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        is_fixed = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "read-only file system" if is_fixed else "permission denied"
        raise UsageError(f"cannot create a file in {folder}: {why}")


@contextlib.contextmanager
def writing(path: Path, force: bool) -> Iterator[BinaryIO]:
    """A file under a temporary name, renamed at the end: a file under its name is whole."""
    check_output(path, force)
    try:
        with files.writing(path) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def printable(text: str) -> str:
    """Without what a terminal obeys, for names come from files of others; bold stays."""
    return _OBEYED.sub(lambda found: found[1] or "?", text)


def write(path: Path, text: str | bytes, force: bool) -> None:
    """The same at once."""
    with writing(path, force) as file:
        file.write(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)


def deliver(args: argparse.Namespace, text: str, data: Any, then: str) -> None:
    """Text, or data as JSON, to where the arguments say; then the next sensible command."""
    content = json.dumps(data, indent=2, default=str) if args.json else printable(text)
    if args.output is not None:
        write(args.output, content + "\n", args.force)
        tell(args, f"wrote {args.output}")
    else:
        print(content)
    tell(args, f"next: {then}")


def tell(args: argparse.Namespace, text: str) -> None:
    """To the person, beside the output, once that is out: there is no next step where it cannot be written."""
    sys.stdout.flush()
    if not args.quiet:
        print(text, file=sys.stderr)


def complain(text: str) -> None:
    """To the person, what is wrong: in columns on a terminal, in one piece where a program looks for it."""
    clear()
    lines = printable(text).split("\n")
    print(*(map(folded, lines) if sys.stderr.isatty() else lines), sep="\n", file=sys.stderr)


def has_color() -> bool:
    """Is this a terminal that wants colour?"""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Progress:
    """Rate and remaining time on the terminal, for what takes more than a second."""

    def __init__(
        self, what: str, unit: str = "MB", scale: float = 1e6, *, quiet: bool = False
    ) -> None:
        self.what, self.unit, self.scale = what, unit, scale
        self.begin = self.last = time.monotonic()
        self.since: tuple[float, int] | None = None  # where what the rate is of began, and its done
        self.done = 0
        self.enabled = not quiet and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> bool:
        """So much is done; always True: go on."""
        now = time.monotonic()
        if self.since is None or done < self.done:
            self.since = now, done  # or anew: of several replays, each tells of itself
        self.done = done
        if self.enabled and now - self.begin > _AFTER_S and now - self.last > _EVERY_S and done:
            self.last = now
            show_in_place(
                f"{self.what}: {100 * done / max(total, 1):3.0f} %{self._pace(now, total)}"
            )
        return True

    def _pace(self, now: float, total: int) -> str:
        """Rate and remaining time, once there are."""
        begin, before = self.since or (now, 0)
        rate = (self.done - before) / max(now - begin, 1e-3)
        if not rate:
            return ""
        eta = (total - self.done) / rate
        return f", {rate / self.scale:,.1f} {self.unit}/s, {eta:.0f} s left"

    def close(self) -> None:
        """Clears the line."""
        clear()


_shown = ""  # in place, on the terminal


def show_in_place(text: str) -> None:
    """On the terminal, in place of what is shown there; a line too long would begin another, which stays."""
    global _shown
    _shown = text
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    width = (columns or _COLUMNS) - 1
    print(f"\r{text[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """What is shown in place goes; whatever was to do so may have ended by an error, or by Ctrl-C."""
    if _shown:
        show_in_place("")
