"""What pages are made of: one file each, without network, with all data and code in it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyalloc import source
from pyalloc.analysis import Analysis

MOST_STACKS = 1500
_MAX_FRAMES = 40  # of a stack: the innermost, and the program's own
_FOLDER = Path(__file__).parent


def filled(template: str, title: str, content: dict[str, Any]) -> str:
    """The text of a page: a template with the scripts and styles that it names, and its data."""
    data = json.dumps(content, separators=(",", ":"), default=str)
    # "</" ends a script element wherever it stands, and "<!--" with "<script" keeps one from ending.
    told = {"TITLE": html.escape(title), "DATA": data.replace("<", "\\u003c")}

    def part(found: re.Match[str]) -> str:
        """Whole, each once: what is in it may look like another's name."""
        name = found[1]
        return told[name] if name in told else (_FOLDER / name.lower()).read_text("utf-8")

    return re.sub(r"__([A-Z]+(?:\.[A-Z]+)?)__", part, (_FOLDER / template).read_text("utf-8"))


class Stacks:
    """Stacks and frames, each once in the page: a stack is a list of frames, a frame [text, whose it is].

    0: the program's, 1: a library's in Python, 2: C++.
    """

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.frames: dict[tuple[str, int], int] = {}
        self.stacks: list[list[int]] = []
        self.numbers: dict[tuple[int, str], int] = {}

    def number(self, stack: int, label: str) -> int:
        """Of a stack, outermost frame first; of a label where there is none."""
        key = (stack, "" if stack else label)
        if key not in self.numbers:
            if len(self.stacks) == MOST_STACKS:
                return -1
            self.numbers[key] = self.keep(self.frames_of(stack, label))
        return self.numbers[key]

    def keep(self, frames: Iterable[tuple[str, int]]) -> int:
        """The number of one more stack."""
        self.stacks.append([self.frames.setdefault(frame, len(self.frames)) for frame in frames])
        return len(self.stacks) - 1

    def frames_of(self, stack: int, label: str) -> list[tuple[str, int]]:
        """Of a stack, or the label where there is none, outermost first."""
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
