"""What pages are made of.  A page is one file that needs no network: all data and code are in it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyalloc.analysis.meaning import Analysis
from pyalloc.traces import source

MOST_STACKS = 1500
_MAX_FRAMES = 40  # of a stack: the innermost, and the program's own
_FOLDER = Path(__file__).parent


def filled(template: str, title: str, content: dict[str, Any]) -> str:
    """The HTML of a page: a template, filled with the scripts and styles that it names, the title and the data."""
    data = json.dumps(content, separators=(",", ":"), default=str)
    # "</script" in the data would end the script element, and "<!--" with "<script" would prevent its end.
    told = {"TITLE": html.escape(title), "DATA": data.replace("<", "\\u003c")}

    def part(found: re.Match[str]) -> str:
        """The part itself.  It is not searched again: its text may contain what looks like another name."""
        name = found[1]
        return told[name] if name in told else (_FOLDER / name.lower()).read_text("utf-8")

    return re.sub(r"__([A-Z]+(?:\.[A-Z]+)?)__", part, (_FOLDER / template).read_text("utf-8"))


class Stacks:
    """Stacks and frames, each once in the page: a stack is a list of frames, a frame [text, kind].

    kind: 0: the program's, 1: a library's in Python, 2: C++.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.frames: dict[tuple[str, int], int] = {}
        self.stacks: list[list[int]] = []
        self.numbers: dict[tuple[int, str], int] = {}

    def number(self, stack: int, label: str) -> int:
        """The number of a stack, outermost frame first, or else of a label; -1 if the page is full."""
        key = (stack, "" if stack else label)
        if key not in self.numbers:
            if len(self.stacks) == MOST_STACKS:
                return -1
            self.numbers[key] = self.keep(self.frames_of(stack, label))
        return self.numbers[key]

    def keep(self, frames: Iterable[tuple[str, int]]) -> int:
        """Adds a stack; returns its number."""
        self.stacks.append([self.frames.setdefault(frame, len(self.frames)) for frame in frames])
        return len(self.stacks) - 1

    def frames_of(self, stack: int, label: str) -> list[tuple[str, int]]:
        """A stack's frames, outermost first, or the label if there is no stack."""
        frames = self.analysis.frames(stack)
        python = tuple(frame for frame in frames if not source.is_cpp(frame[1]))
        kept = frames if len(frames) <= _MAX_FRAMES else python or frames
        if len(kept) > _MAX_FRAMES:
            near, far = kept[: _MAX_FRAMES // 2], kept[_MAX_FRAMES // 2 :]
            own = tuple(frame for frame in far if not source.is_foreign(frame[1]))
            kept = (*near, *(own or far)[: _MAX_FRAMES // 2])
        shown = [
            (
                f"{source.short_file(file)}:{line} {name}",
                2 if source.is_cpp(file) else int(source.is_foreign(file)),
            )
            for name, file, line in reversed(kept)
        ]
        if python:
            return shown
        return [(self.analysis.nameless(stack) if stack else label, 0), *shown]
