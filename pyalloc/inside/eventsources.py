"""Where a recording's events come from: pyalloc's history, or torch's own, read through its snapshots."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from pyalloc import _core
from pyalloc.inside import sharing, snapshots
from pyalloc.traces.convert import EventWriter, Row

_MAX_ENTRIES = 10_000_000
_TORCH_EVENTS = 200_000  # torch's own history is moved to the file when this many events wait,
_TORCH_LEAST_S = 0.5  # or at the first mark after this time,
_TORCH_BLOCK_S = 1e-4  # plus this per block in the snapshot, which each cost 6 us every time,
_TORCH_S = 5.0  # but at most this time;
_TORCH_BACK_S = 10.0  # without marks, from the background after this time,
_TORCH_LONG_S = 60.0  # or at the latest after this one, whatever the program does,
_TORCH_REST = 20  # if so many times the last move's duration is longer


class Source(Protocol):
    """Where events come from: pyalloc's history or torch's."""

    has_record_stream: bool  # calls of Tensor.record_stream are among the events

    def clock(self) -> int:
        """Nanoseconds, comparable with the times of the events."""

    def begin(self, before: dict[str, Any]) -> None:
        """Events are kept from now on, and none from before, of which the snapshot tells."""

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        """Moves to the file what happened, with the marks up to then, which it takes from the list.

        at_mark: in the thread that makes one, so that the program itself waits meanwhile.
        """

    def is_due(self) -> bool:
        """At a mark, in the thread that makes it: is it time to drain?"""

    def in_background(self) -> bool:
        """Every half second, in a thread of its own: is it time to drain?"""


def thread_name(number: int) -> str:
    """What a thread of this process is called: by Python, or by those that the system numbers so; "": it has ended."""
    if number == os.getpid():
        return threading.main_thread().name
    for thread in threading.enumerate():
        # Python makes names up for threads of C that call it: theirs are the system's.
        if thread.native_id == number and not thread.name.startswith("Dummy-"):
            return thread.name
    try:
        return Path(f"/proc/self/task/{number}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


class Ours:
    """pyalloc's history, moved from C to the file: nothing is lost whatever other threads do, and it costs little."""

    has_record_stream = True

    def __init__(self, writer: EventWriter, stacks: str) -> None:
        self.writer = writer
        self.stacks = stacks
        self.history = _core.HistoryWriter(writer.writer, writer.used, thread_name)
        self.offset_ns = time.time_ns() - time.monotonic_ns()  # events have the monotonic clock
        self.n_lost = 0

    def clock(self) -> int:
        return time.monotonic_ns() + self.offset_ns

    def begin(self, before: dict[str, Any]) -> None:
        _torch_history(self.stacks, clear=True)  # torch's functions should know that it is on
        level = 0 if self.stacks == "none" else 2
        _core.history_start(level, True, _MAX_ENTRIES, 0, self.stacks == "all")

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        first = self.writer.n_events
        written, lost = self.history.drain(self.offset_ns, pending)
        self.writer.n_events += written
        if lost:
            self.n_lost += lost
            self.writer.gap(first, self.n_lost, self.clock())

    def is_due(self) -> bool:
        return False

    def in_background(self) -> bool:
        return True


class Torchs:
    """torch's history, read through its snapshots.

    Events between a snapshot and the clearing after it are lost, and torch lets other threads run during a snapshot.
    (Python's collector has to wait, because its frees would be lost, too.)  So the history is cleared when the program
    itself makes a mark.  Without marks, if the program rests or has made none for long, the new events are moved in the
    background and the history is kept, unless it is large.  Lost events are counted and reported.
    """

    has_record_stream = False

    def __init__(self, writer: EventWriter, stacks: str) -> None:
        self.writer = writer
        self.stacks = stacks
        self.n_seen = 0  # allocations
        # Entries that were moved and are still in the history, for each device and others: number and last one.
        self.kept: list[tuple[int, Any] | None] = []
        self.n_before = 0
        self.n_made = 0  # at the last move
        self.n_told = 0  # lost allocations that were reported
        self.n_moved = 0  # allocations and frees at the last move
        self.n_looked = 0  # and at the last look from the background
        self.last = self.last_mark = self.last_clear = time.monotonic()
        self.cost = 0.0  # seconds that the last move took
        self.period = _TORCH_LEAST_S  # between moves at marks

    def clock(self) -> int:
        return time.time_ns()

    def begin(self, before: dict[str, Any]) -> None:
        self.n_made, self.n_moved = made()
        self.n_before = self.n_made
        sharing.keep(before["device_traces"], *_others(before))
        _torch_history(self.stacks, clear=True)

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        begin = time.monotonic()
        n_made, self.n_moved = made()
        is_long = begin - self.last_clear > _TORCH_LONG_S - self._interval()
        with snapshots.uncollected(at_mark or is_long):
            taken = snapshots.take()
            n_blocks = sum(len(segment["blocks"]) for segment in taken["segments"])
            self.period = min(max(n_blocks * _TORCH_BLOCK_S, _TORCH_LEAST_S), _TORCH_S)
            whole = [*taken["device_traces"], *_others(taken)]
            kept = self.kept or [None] * len(whole)
            parts = [_new(*each) for each in zip(whole, kept, strict=True)]
            # C++ code may have switched it off, or cleared it, without passing through sharing.py.
            is_off = not sharing.is_on()
            is_cut = is_off or any(each is None for each in parts)
            new = [each if part is None else part for each, part in zip(whole, parts, strict=True)]
            self.kept = [(len(each), each[-1]) if each else None for each in whole]
            if at_mark or is_off or (is_long and sum(map(len, whole)) > _TORCH_EVENTS):
                _torch_history(self.stacks, clear=True)
                self.kept = []
                self.last_clear = begin
        self.last = time.monotonic()
        self.cost = self.last - begin
        marks = sorted(pending)
        del pending[: len(marks)]
        traces = [[entry for entry in trace if entry["action"] != "snapshot"] for trace in new[:-2]]
        sharing.keep(traces, *new[-2:])
        first = self.writer.n_events
        self.writer.merged(traces, marks)
        self.n_seen += sum(entry["action"] == "alloc" for trace in traces for entry in trace)
        if n_made < self.n_made:  # the program reset the counters
            self.n_before = n_made - self.n_seen - self.n_told
        self.n_made = n_made
        lost = max(n_made - self.n_before - self.n_seen, self.n_told)
        if is_cut or lost > self.n_told:
            self.n_told = lost
            self.writer.gap(first, lost, self.clock())

    def switch(self) -> None:
        """Switches torch's history on as the program wants it now; keeps its entries."""
        _torch_history(self.stacks)

    def n_lost(self) -> int:
        """Number of allocations that no snapshot had.  Call it after the last drain."""
        return max(made()[0] - self.n_before - self.n_seen, 0)

    def is_due(self) -> bool:
        self.last_mark = time.monotonic()
        if self.last_mark - self.last > self.period:
            return True
        return made()[1] - self.n_moved > _TORCH_EVENTS

    def in_background(self) -> bool:
        idle = time.monotonic() - max(self.last_mark, self.last)
        if idle <= _TORCH_S:
            return False
        before, self.n_looked = self.n_looked, made()[1]
        rests = self.n_looked == before
        return self.n_looked > self.n_moved and (rests or idle > self._interval())

    def _interval(self) -> float:
        """Seconds between background moves while the program works; longer if moves take long."""
        return min(max(_TORCH_BACK_S, _TORCH_REST * self.cost), _TORCH_LONG_S)


def made() -> tuple[int, int]:
    """Allocations of this process so far, and allocations plus frees."""
    import torch

    stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    allocs = sum(s.get("allocation.all.allocated", 0) for s in stats)
    return allocs, allocs + sum(s.get("allocation.all.freed", 0) for s in stats)


def _others(snapshot: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The history's other entries: pinned memory, and the program's annotations."""
    return snapshot.get("host_traces", []), snapshot.get("external_annotations", [])


def _new(history: list[Any], kept: tuple[int, Any] | None) -> list[Any] | None:
    """The entries after the kept ones; None if the last kept one is no longer there."""
    if kept is None:
        return history
    n, last = kept
    return history[n:] if len(history) >= n and history[n - 1] == last else None


def _torch_history(stacks: str, *, clear: bool = False) -> None:
    """Switches torch's history on, with what the recording and the program need."""
    import torch

    keywords = {"enabled": "all", "max_entries": _MAX_ENTRIES, **sharing.wanted(stacks)}
    sharing.switch_on(torch, keywords, clear=clear)
