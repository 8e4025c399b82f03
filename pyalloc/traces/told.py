"""Events of a trace one by one: which ones to show, and what each is in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyalloc.traces.convert import NAMES

_WORDS = {
    "alloc": "allocated",
    "free_requested": "freed",
    "free_completed": "available again",
    "record_stream": "used on another stream",
    "segment_alloc": "segment allocated",
    "segment_free": "segment freed",
    "segment_map": "segment mapped",
    "segment_unmap": "segment unmapped",
    "oom": "out of memory",
    "snapshot": "snapshot taken",
    "empty_cache": "cache emptied",
    "pool_begin": "private pool in use",
    "pool_end": "private pool left",
    "pool_release": "private pool released by a user",
    "step": "step {arg} begins",
    "phase_begin": "{text} begins",
    "phase_end": "{text} ends",
    "category": "holds {text}",
    "label": 'called "{text}"',
    "thread": "thread {arg} is {text}",
}
# Notes, and what only explains other events.
_NOT_SHOWN = ("user", "stream", "device", "sync", "segment_pool")


class Told(NamedTuple):
    """An event (csrc/replay/scan.h).  bytes: of its block or segment, or requested; stack: its own, else its block's.

    pool: a private pool, 0: none; alloc_event: when its block was allocated, None if it has no known block.
    """

    event: int
    time_ns: int
    kind: int
    device: int
    bytes: int
    address: int
    stream: int
    pool: int
    arg: int
    alloc_event: int | None
    stack: int
    text: str

    @property
    def name(self) -> str:
        """The name of its kind in trace files."""
        return NAMES.get(self.kind, "")

    @property
    def what(self) -> str:
        """What happened, in words."""
        return _WORDS.get(self.name, self.name).format(arg=self.arg, text=self.text)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of ranges of events: ascending, without overlaps."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def around(at: int, n: int, n_events: int) -> tuple[int, int]:
    """The range of n events with `at` in the middle, shifted to lie within the trace."""
    begin = max(0, min(at - n // 2, n_events - n))
    return begin, min(begin + n, n_events)


def shown(rows: Iterable[Told]) -> Iterator[Told]:
    """Leaves out what says nothing by itself: notes, and free_completed right after its free or of an unknown block."""
    before: Told | None = None
    for row in rows:
        says_nothing = row.alloc_event is None or _follows(before, row)
        if row.name not in _NOT_SHOWN and not (row.name == "free_completed" and says_nothing):
            yield row
        before = row


def _follows(before: Told | None, row: Told) -> bool:
    if before is None or before.name != "free_requested":
        return False
    return (before.address, before.device) == (row.address, row.device)
