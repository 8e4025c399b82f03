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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from pyalloc.common import files, pythons
from pyalloc.common.folding import folded
from pyalloc.errors import UsageError

RECORD = "pyalloc run --record out.pya python train.py"  # the next step if nothing was recorded
ON_ONE_MACHINE = (
    16  # devices or ranks: with no more of them, one machine is assumed, as torchrun does
)
_TEXTS = ("", ".txt", ".md", ".log")  # suffixes of -o for text
_JSON = ".json"
_PAGES = (".html", ".htm")
_MOST = 2**31 - 1  # largest number as an argument
_AFTER_S = 1.0  # before that no progress is shown
_EVERY_S = 0.2
# Control characters except newline, and those that change the writing direction.
_OBEYED = re.compile("(\x1b\\[[01]m)|[\0-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLUMNS = 80  # if the terminal does not tell


def quoted(path: Path | str) -> str:
    """A file's name or another word, quoted for the shell, in one line and without what a terminal obeys."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def joined(words: Iterable[Path | str]) -> str:
    """Words as one command, each quoted()."""
    return " ".join(map(quoted, words))


def _escaped(char: str) -> str:
    """The same between $' and ': bytes that are no UTF-8, and control characters, as numbers."""
    if char.isprintable():
        return f"\\{char}" if char in "\\'" else char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def program(notes: dict[str, str]) -> str:
    """The recorded program's command, to be typed again.  Only for scripts, as a trace may come from somebody else."""
    try:
        words = shlex.split(printable(notes.get("command", "")))
    except ValueError:
        words = []
    rest = iter(words[1:])
    first = ""
    for word in rest:
        if re.fullmatch(r"-[^\WcmWX]*[WX]", word):  # the option takes the next word
            next(rest, None)
        elif not word.startswith("-") or word in ("-c", "-m"):
            first = word
            break
    is_script = first.endswith(".py") and re.fullmatch(pythons.PROGRAM, Path(words[0]).name)
    n_ranks = ranks(notes)
    if n_ranks > 1:
        script = shlex.join(words[words.index(first) :]) if is_script else "your_script.py"
        processes = f"--nproc-per-node {n_ranks} " if n_ranks <= ON_ONE_MACHINE else ""
        return f"torchrun {processes}{script}"
    return shlex.join(words) if is_script else "python your_script.py"


def ranks(notes: dict[str, str]) -> int:
    """Number of processes of the recorded program, according to its launcher."""
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
    """Checks -o with check_output().  Its suffix says what is written: .json means --json."""
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
    """Does the file's suffix ask for an HTML page?"""
    return path is not None and path.suffix.lower() in _PAGES


def check_output(path: Path | None, force: bool) -> None:
    """Raises UsageError if a file would be overwritten or cannot be written, before any work is done."""
    if path is None:
        return
    if str(path) == "-":
        raise UsageError("-o does not take '-'; leave -o out, or name a file")
    if files.is_special(path):
        raise UsageError(f"{path} is not a regular file; choose another name")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists; --force overwrites it")
    check_folder(path)


def keep_inputs(args: argparse.Namespace) -> None:
    """Raises UsageError if the output would replace an input, even with --force."""
    output, given = getattr(args, "output", None), getattr(args, "file", [])
    for path in map(Path, given if isinstance(given, list) else [given]):
        if output is not None and output.exists() and path.exists() and output.samefile(path):
            raise UsageError(f"{output} is also an input; write to another file")


def check_folder(path: Path) -> None:
    """Raises UsageError if no file can be created beside `path`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        is_fixed = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "read-only file system" if is_fixed else "permission denied"
        raise UsageError(f"cannot create a file in {folder}: {why}")


@contextlib.contextmanager
def writing(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Opens a temporary file and renames it at the end, so that a file of the final name is always complete."""
    check_output(path, force)
    try:
        with files.writing(path) as file:
            yield file
            check_output(path, force)  # somebody else may have made it meanwhile
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def printable(text: str) -> str:
    """Removes control sequences, as names may come from other people's files; keeps bold."""
    return _OBEYED.sub(lambda found: found[1] or "?", text)


def write(path: Path, text: str | bytes, force: bool) -> None:
    """Writes a file as writing() does."""
    with writing(path, force) as file:
        file.write(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)


def deliver(args: argparse.Namespace, text: str, data: Any, then: str) -> None:
    """Writes text, or data as JSON, to where the arguments say; then suggests the next command."""
    content = json.dumps(data, indent=2, default=str) if args.json else printable(text)
    if args.output is not None:
        write(args.output, content + "\n", args.force)
        tell(args, f"wrote {args.output}")
    else:
        print(content)
    tell(args, f"next: {then}")


def tell(args: argparse.Namespace, text: str) -> None:
    """Tells the user something beside the output.  Flushes the output first: if that fails there is no next step."""
    sys.stdout.flush()
    if not args.quiet:
        print(text, file=sys.stderr)


def complain(text: str) -> None:
    """Prints what is wrong: folded on a terminal, on one line otherwise, so that programs can search it."""
    clear()
    lines = printable(text).split("\n")
    print(*(map(folded, lines) if sys.stderr.isatty() else lines), sep="\n", file=sys.stderr)


def is_screen() -> bool:
    """Is the output a terminal that obeys control sequences?"""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def has_color() -> bool:
    """Is the output a terminal with colours?"""
    return is_screen() and not os.environ.get("NO_COLOR")


class Progress:
    """Shows rate and remaining time on the terminal for work of more than a second."""

    def __init__(
        self, what: str, unit: str = "MB", scale: float = 1e6, *, quiet: bool = False
    ) -> None:
        self.what, self.unit, self.scale = what, unit, scale
        self.begin = self.last = time.monotonic()
        self.since: tuple[float, int] | None = None  # when the measured part began, and `done` then
        self.done = 0
        self.enabled = not quiet and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> bool:
        """Notes that so much is done; returns True: go on."""
        now = time.monotonic()
        if self.since is None or done < self.done:
            self.since = now, done  # first call, or the next of several replays
        self.done = done
        if self.enabled and now - self.begin > _AFTER_S and now - self.last > _EVERY_S and done:
            self.last = now
            show_in_place(
                f"{self.what}: {100 * done / max(total, 1):3.0f} %{self._pace(now, total)}"
            )
        return True

    def _pace(self, now: float, total: int) -> str:
        """Rate and remaining time, as soon as they are known."""
        begin, before = self.since or (now, 0)
        rate = (self.done - before) / max(now - begin, 1e-3)
        if not rate:
            return ""
        eta = (total - self.done) / rate
        return f", {rate / self.scale:,.1f} {self.unit}/s, {eta:.0f} s left"

    def close(self) -> None:
        """Clears the line."""
        clear()


def columns(stream: TextIO) -> int:
    """Of the terminal that a stream goes to; 80 if it goes elsewhere, or the terminal does not tell."""
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return found or _COLUMNS


_shown = ""  # the line on the terminal that is replaced in place


def show_in_place(text: str) -> None:
    """Replaces the line shown on the terminal.  Cuts it to the width: a wrapped line could not be replaced."""
    global _shown
    _shown = text
    width = columns(sys.stderr) - 1
    print(f"\r{text[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Clears the line shown in place, also after an error or Ctrl-C ended its owner."""
    if _shown:
        show_in_place("")
