"""Two recordings, or two moments of one: what changed, and where.  Data in, data out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pyalloc.analysis import moved
from pyalloc.analysis.falling import TRAINING
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.config import CUBLAS_NOTES
from pyalloc.traces import source
from pyalloc.traces.caveats import BEFORE
from pyalloc.traces.facts import Row
from pyalloc.traces.moments import Moment
from pyalloc.traces.source import Frame

_TOLD = 3  # contributors that a sentence names
_LEAST_TOLD = 0.05  # of the largest change: smaller ones explain nothing
_NO_SETTINGS = (  # notes that are shown elsewhere, or that no person changes
    "pid", "about", "clock", "rank", "history", "lost_events", "gaps", "steps_end_with", BEFORE,
    *CUBLAS_NOTES.values(),
)  # fmt: skip
_LONGEST_SETTING = 400  # characters
_MOST_STEPS = 400  # in a table


@dataclass(frozen=True)
class Change:
    """What one name holds before and after."""

    name: str
    before_bytes: int
    after_bytes: int
    before_blocks: int = 0
    after_blocks: int = 0

    @property
    def bytes(self) -> int:
        """Bytes after minus bytes before."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Side:
    """One side of the comparison: a moment of a recording.  name: shown to people."""

    found: Analysis
    moment: Moment
    name: str


class Comparison:
    """What changed from one side to the other.  A line that moved between the recordings has its name from after."""

    def __init__(self, before: Side, after: Side) -> None:
        self.before, self.after = before, after
        self.n_moved = 0
        if not self.is_of_one:
            frames = moved.lines(_frames(before.found), _frames(after.found))
            self.n_moved = sum(not source.is_foreign(file) for _, file, _ in frames)
            before.found.rename(frames)

    @property
    def is_of_one(self) -> bool:
        """Are both moments of one recording?"""
        return self.before.found is self.after.found

    @property
    def bytes(self) -> int:
        """Bytes held after minus bytes held before."""
        return self.after.moment.allocated_bytes - self.before.moment.allocated_bytes

    @cached_property
    def has_one_passes(self) -> bool:
        """Does only one side have forward and backward phases?  Then categories, inferred from them, do not match."""
        has = [
            any(phase.name in TRAINING for phase in side.found.phases)
            for side in (self.before, self.after)
        ]
        return has[0] != has[1]

    @cached_property
    def tables(self) -> dict[str, list[Change]]:
        """Tables by kind of row, without empty ones; largest changes first."""
        kinds = ["line", "size", "label", "stream", "pool"]
        if all(any(b.module for b in side.moment.blocks) for side in (self.before, self.after)):
            kinds.insert(1, "module")
        if not self.has_one_passes:
            kinds = ["contributor", "category", *kinds]
        found = {kind: self._changes(kind) for kind in kinds}
        found |= {"phase": self._phases(), "step": self._steps()}
        least = {"label": 1, "stream": 2, "pool": 1, "phase": 1, "step": 2}
        return {kind: rows for kind, rows in found.items() if len(rows) >= least.get(kind, 0)}

    def _changes(self, kind: str) -> list[Change]:
        tables = [
            {row.name: row for row in _rows(side, kind)} for side in (self.before, self.after)
        ]
        none = Row("", 0, 0)
        pairs = (
            (name, tables[0].get(name, none), tables[1].get(name, none))
            for name in dict.fromkeys([*tables[1], *tables[0]])
        )
        found = [Change(name, a.bytes, b.bytes, a.blocks, b.blocks) for name, a, b in pairs]
        return sorted(found, key=lambda row: (-abs(row.bytes), -row.after_bytes, row.name))

    def _phases(self) -> list[Change]:
        """For each phase name that both have: its highest peak."""
        if self.is_of_one:
            return []
        peaks: list[dict[str, int]] = [{}, {}]
        for known, side in zip(peaks, (self.before, self.after), strict=True):
            for phase in side.found.phases:
                if phase.depth == 0:
                    known[phase.name] = max(known.get(phase.name, 0), phase.peak_bytes)
        return [Change(name, peaks[0][name], n) for name, n in peaks[1].items() if name in peaks[0]]

    def _steps(self) -> list[Change]:
        """The peaks of the steps that both have."""
        if self.is_of_one:
            return []
        before = {step[0]: step[4] for step in self.before.found.steps}
        after = {step[0]: step[4] for step in self.after.found.steps}
        numbers = sorted(before.keys() & after.keys())[:_MOST_STEPS]
        return [Change(f"step {number}", before[number], after[number]) for number in numbers]

    @cached_property
    def contributors(self) -> list[Change]:
        """Contributors, or lines if both sides name contributors differently; without stacks, categories or sizes."""
        if any(b.stack for side in (self.before, self.after) for b in side.moment.blocks):
            return self.tables.get("contributor", self.tables["line"])
        categories = self.tables.get("category", [])
        if any(row.name != "unknown" for row in categories):
            return categories
        return [replace(row, name=f"blocks of {row.name}") for row in self.tables["size"]]

    @property
    def main(self) -> list[Change]:
        """The few changes that explain most of the difference."""
        rows = self.contributors
        least = max(abs(rows[0].bytes) * _LEAST_TOLD, 1) if rows else 1
        return [row for row in rows[:_TOLD] if abs(row.bytes) >= least]

    @property
    def settings(self) -> list[tuple[str, str, str]]:
        """Differences in how the recordings were made: name, before, after; "" if unknown.

        A snapshot knows less about this than a recording.
        """
        first, second = (side.found.notes for side in (self.before, self.after))
        is_told_alike = ("source" in first) == ("source" in second)
        found = []
        for name in dict.fromkeys([*first, *second]):
            pair = first.get(name, ""), second.get(name, "")
            is_told = is_told_alike or all(pair)
            if pair[0] != pair[1] and is_told and name not in _NO_SETTINGS:
                pair = _other_words(*pair) if name == "command" and all(pair) else pair
                found.append((name, pair[0][:_LONGEST_SETTING], pair[1][:_LONGEST_SETTING]))
        return found


def _rows(side: Side, kind: str) -> list[Row]:
    found, moment = side.found, side.moment
    if kind == "pool":
        return found.by_pool(moment)
    groups = {
        "contributor": found.by_maker,
        "category": found.by_category,
        "line": found.by_line,
        "module": found.by_module,
        "size": found.by_size,
        "label": found.by_label,
        "stream": found.by_stream,
    }
    return groups[kind](moment.blocks)


def _frames(found: Analysis) -> Iterator[Frame]:
    """The frames of all its stacks, each once."""
    seen: set[Frame] = set()
    for stack, (n, *_) in enumerate(found.stacks):
        for frame in found.frames(stack) if n else ():
            if frame not in seen:
                seen.add(frame)
                yield frame


def _other_words(before: str, after: str) -> tuple[str, str]:
    """The differing words of two commands, each with the option whose value it is."""
    first, second = before.split(), after.split()
    told: tuple[list[str], list[str]] = ([], [])
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    for what, a, b, c, d in matcher.get_opcodes():
        if what != "equal":
            told[0].extend(_with_option(first, a, b))
            told[1].extend(_with_option(second, c, d))
    return " ".join(told[0]), " ".join(told[1])


def _with_option(words: list[str], first: int, last: int) -> list[str]:
    is_value = 0 < first < last and words[first - 1].startswith("-") and words[first][0] != "-"
    return words[first - is_value : last]


def phase_of(side: Side) -> str:
    """The phase of its moment, such as "backward of step 3"; "" if unknown."""
    totals = side.found.totals
    if side.moment is not side.found.peak:
        return ""
    phase, step = str(totals["peak_phase"]), totals["peak_step"]
    if step is None:
        return phase
    return f"{phase} of step {step}" if phase else f"step {step}"
