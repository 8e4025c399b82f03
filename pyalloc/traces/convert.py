"""Converts torch's memory snapshots to trace events: the one place that knows both formats."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyalloc import _core
from pyalloc.traces.caveats import BEFORE

Entry = dict[str, Any]
# A mark: time_ns, kind, text, arg, addr, bytes, device.
Row = tuple[int, int, int, int, int, int, int]
KINDS: dict[str, int] = {name: number for name, number, _, _ in _core.trace_kinds()}
NAMES: dict[int, str] = {number: name for name, number in KINDS.items()}
Pool = tuple[int, int]
# start, end, stream, is it part of an expandable segment?, private pool
Range = tuple[int, int, int, bool, Pool]
NO_POOL = (0, 0)
ALLOCATED, PENDING = "active_allocated", "active_pending_free"  # states of blocks
TAKES_MEMORY = ("segment_alloc", "segment_map")
GIVES_BACK = ("segment_free", "segment_unmap")
NEEDS_SIZE = ("alloc", "oom", *TAKES_MEMORY, *GIVES_BACK)
_MOST_LABEL = 500  # characters
_TELL_EVERY = 10_000  # entries
_MOST_GAPS = 10  # listed one by one
_MAX_FRAMES = 256  # many, because C++ frames precede the program's own line


@dataclass(frozen=True)
class Mark:
    """An event from outside the allocator.  kind: a name in KINDS."""

    time_ns: int
    kind: str
    text: str = ""
    arg: int = 0
    addr: int = 0
    bytes: int = 0
    device: int = 0


@dataclass
class EventWriter:
    """Writes torch's entries and our marks to a trace; strings and stacks are written once each."""

    writer: _core.TraceWriter
    strings: dict[str, int] = field(default_factory=dict)
    frames: dict[tuple[int, str, str, int], int] = field(default_factory=dict)
    # Stacks by the ids of their frames in the snapshot that is being written, which keeps the frames alive.
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_events: int = 0
    last_ns: int = 0
    # By device: the private pool that requests go to now; and the pools that have a user.
    routed: dict[int, Pool] = field(default_factory=dict)
    used: set[tuple[int, Pool]] = field(default_factory=set)
    # For snapshots of pyalloc, which joins pages by unmapping them and mapping them again as one: `held` has the bytes
    # of pools that began in the snapshot.
    joins_pages: bool = False
    has_stacks: bool = True  # False: writes none, even if the snapshot has some
    emptying: set[int] = field(default_factory=set)  # devices whose cache is being emptied
    held: dict[tuple[int, Pool], int] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)  # events with lost ones between
    told_gap: tuple[str, str] = ("", "")  # how many are lost, and where

    def string(self, text: str) -> int:
        """The number of a text; 0 for ""."""
        if not text:
            return 0
        number = self.strings.get(text)
        if number is None:
            # File names and arguments need not be UTF-8: Python turns other bytes into surrogates.
            plain = text.encode(errors="backslashreplace").decode()
            number = self.strings[text] = self.writer.string(plain)
        return number

    def stack(self, frames: Sequence[Entry] | None) -> int:
        """The number of a stack, given innermost frame first as in torch; 0 for no stack."""
        if not frames or not self.has_stacks:
            return 0
        kept = frames[:_MAX_FRAMES]
        same = tuple(map(id, kept))  # torch reuses one object per frame
        number = self.seen.get(same)
        if number is None:
            number = self.seen[same] = self._stack(kept)
        return number

    def _stack(self, kept: Sequence[Entry]) -> int:
        number = 0
        for frame in reversed(kept):
            key = (number, str(frame["name"]), str(frame["filename"]), int(frame["line"]))
            known = self.frames.get(key)
            if known is None:
                known = self.frames[key] = self.writer.stack(
                    number, self.string(key[1] or "?"), self.string(key[2] or "?"), max(key[3], 0)
                )
            number = known
        return number

    def entry(self, entry: Entry, device: int) -> None:
        """Writes one entry of torch's device_traces."""
        action = str(entry["action"])
        kind = KINDS["label"] if action == "annotate" else KINDS.get(action)
        if kind is None:  # added by a newer torch
            return
        is_oom = action == "oom"
        time_ns = int(entry.get("time_us", 0)) * 1000
        self._empty_cache(action, entry.get("frames"), device, time_ns)
        pool = _pool(entry.get("pool_id"))
        if self.joins_pages:
            self._hold(action, device, pool, int(entry.get("size", 0)), time_ns)
        elif action in GIVES_BACK:
            self._unused(device, pool, time_ns)
        if action == "alloc" or (action in TAKES_MEMORY and not self.joins_pages):
            self.route(device, pool, time_ns)
        self.event(
            kind,
            addr=0 if is_oom else int(entry.get("addr", 0)),
            bytes=int(entry["size"]) if action in NEEDS_SIZE else 0,
            stream=int(entry.get("stream", 0)),
            device=device,
            arg=int(entry.get("device_free", 0)) if is_oom else 0,
            stack=self.stack(entry.get("frames")),
            text=self.string(_label(entry)) if action == "annotate" else 0,
            time_ns=time_ns,
        )
        label = _label(entry) if action == "alloc" else ""
        if label:
            self.event(
                KINDS["label"],
                addr=int(entry["addr"]),
                device=device,
                text=self.string(label),
                time_ns=time_ns,
            )

    def _empty_cache(
        self, action: str, frames: Sequence[Entry] | None, device: int, time_ns: int
    ) -> None:
        """Adds an event for empty_cache(), which has no entry: without it replays would keep the cache."""
        if action not in GIVES_BACK:
            self.emptying.discard(device)
        elif device not in self.emptying and any(
            frame["name"] == "empty_cache" and "/torch/" in frame["filename"]
            for frame in frames or ()
        ):
            self.emptying.add(device)
            self.event(KINDS["empty_cache"], device=device, time_ns=time_ns)

    def route(self, device: int, pool: Pool, time_ns: int) -> None:
        """Sends the device's requests to that pool from here on; torch's entries only name the pool of each block."""
        before = self.routed.get(device, NO_POOL)
        if pool == before:
            return
        self.routed[device] = pool
        if before != NO_POOL:
            self._pool_event("pool_end", device, before, time_ns)
        if pool != NO_POOL:
            self._pool_event("pool_begin", device, pool, time_ns)
            if (device, pool) in self.used:  # each begin adds a user; keep one
                self._pool_event("pool_release", device, pool, time_ns)
            self.used.add((device, pool))

    def _unused(self, device: int, pool: Pool, time_ns: int) -> None:
        """Ends the pool's use: some of its memory was released, which torch only does when nobody uses the pool."""
        if (device, pool) in self.used:
            if self.routed.get(device) == pool:
                self.route(device, NO_POOL, time_ns)
            self.used.remove((device, pool))
            self._pool_event("pool_release", device, pool, time_ns)

    def _hold(self, action: str, device: int, pool: Pool, size: int, time_ns: int) -> None:
        """Counts the pages of a pool.  If it has none left once a sequence of moves is over, it has no user."""
        if not action.startswith("segment_"):
            for key in [key for key, held in self.held.items() if held == 0 and key[0] == device]:
                del self.held[key]
                self._unused(*key, time_ns)
        elif pool != NO_POOL and ((device, pool) not in self.used or (device, pool) in self.held):
            sign = 1 if action in TAKES_MEMORY else -1
            self.held[device, pool] = self.held.get((device, pool), 0) + sign * size

    def _pool_event(self, kind: str, device: int, pool: Pool, time_ns: int) -> None:
        self.event(KINDS[kind], addr=pool[0], arg=pool[1], device=device, time_ns=time_ns)

    def _route_back(self) -> None:
        for device in list(self.routed):
            self.route(device, NO_POOL, self.last_ns)

    def row(self, mark: Mark) -> Row:
        """A mark as numbers, to be written later."""
        text = self.string(mark.text)
        kind = KINDS[mark.kind]
        return mark.time_ns, kind, text, mark.arg, mark.addr, mark.bytes, mark.device

    def mark(self, mark: Mark) -> None:
        """Writes a mark."""
        self._write_row(self.row(mark))

    def _write_row(self, row: Row) -> None:
        time_ns, kind, text, arg, addr, size, device = row
        self.event(kind, addr=addr, bytes=size, device=device, arg=arg, text=text, time_ns=time_ns)

    def event(self, kind: int, *, time_ns: int, **fields: int) -> None:
        """Writes one event; its time is never before the last one's."""
        self.last_ns = max(self.last_ns, time_ns)
        self.writer.event(kind, time_ns=self.last_ns, **fields)
        self.n_events += 1

    def gap(self, first: int, lost: int, time_ns: int) -> None:
        """Notes that events are missing between event `first` and here; lost: the number known so far."""
        if self.gaps and self.gaps[-1][1] >= first:
            first = self.gaps.pop()[0]
        # The two notes written below belong to the next move, which may lose events, too.
        self.gaps.append((first, self.n_events + 2))
        told = [f"{begin:,} and {end:,}" for begin, end in self.gaps[:_MOST_GAPS]]
        more = len(self.gaps) - len(told)
        self.told_gap = str(lost), ", ".join(told) + f", and {more} more" * bool(more)
        for name, text in zip(("lost_events", "gaps"), self.told_gap, strict=True):
            self.mark(Mark(time_ns, "user", f"{name}={text}"))

    def merged(
        self,
        traces: list[list[Entry]],
        marks: list[Row],
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Writes the entries of all devices and the marks, in order of time.

        torch's times are whole microseconds: a mark is placed in the middle of its microsecond.

        progress: called with entries done and entries in all.
        """
        total = sum(map(len, traces))
        self.seen.clear()
        busy = [(device, trace) for device, trace in enumerate(traces) if trace]
        if len(busy) == 1:
            rows: Iterable[tuple[int, int, Entry]] = _timed(*busy[0])
        else:
            rows = heapq.merge(*(_timed(*one) for one in busy), key=lambda row: row[0])
        at, n = 0, len(marks)
        for i, (time_ns, device, entry) in enumerate(rows):
            if progress is not None and i % _TELL_EVERY == 0:
                progress(i, total)
            while at < n and marks[at][0] < time_ns:
                self._write_row(marks[at])
                at += 1
            self.entry(entry, device)
        for mark in marks[at:]:
            self._write_row(mark)
        self._route_back()
        self.seen.clear()

    def state(self, segments: list[Entry], time_ns: int) -> None:
        """Writes segments and live blocks as if they were allocated now."""
        self.seen.clear()
        has_pools = any(_pool(each.get("segment_pool_id")) != NO_POOL for each in segments)
        for segment in segments:
            mapped = segment.get("is_expandable", False)
            self.event(
                KINDS["segment_map" if mapped else "segment_alloc"],
                addr=int(segment["address"]),
                bytes=int(segment["total_size"]),
                stream=int(segment.get("stream", 0)),
                device=int(segment.get("device", 0)),
                stack=self.stack(segment.get("frames")),
                time_ns=time_ns,
            )
            pool = _pool(segment.get("segment_pool_id"))
            if has_pools:  # it may be empty, and its neighbours in another pool
                self.route(int(segment.get("device", 0)), pool, time_ns)
                self.event(
                    KINDS["segment_pool"],
                    addr=int(segment["address"]),
                    bytes=int(segment["total_size"]),
                    device=int(segment.get("device", 0)),
                    time_ns=time_ns,
                )
        for segment in segments:
            self._blocks(segment, time_ns)
        self._route_back()
        if segments:
            self.mark(Mark(time_ns, "user", f"{BEFORE}={self.n_events + 1}"))

    def _blocks(self, segment: Entry, time_ns: int) -> None:
        at = int(segment["address"])
        for block in segment["blocks"]:
            address = int(block.get("address", at))
            at = address + int(block["size"])
            device = int(segment.get("device", 0))
            if block["state"] in (ALLOCATED, PENDING):
                pool = block.get("pool_id", segment.get("segment_pool_id"))
                self.route(device, _pool(pool), time_ns)
                self.event(
                    KINDS["alloc"],
                    addr=address,
                    bytes=int(block.get("requested_size", block["size"])),
                    stream=int(segment.get("stream", 0)),
                    device=device,
                    stack=self.stack(block.get("frames")),
                    time_ns=time_ns,
                )
            if block["state"] == PENDING:
                # The block's own free_completed will follow; this one, of address 0, says that the trace has them.
                self.event(KINDS["free_completed"], addr=0, device=device, time_ns=time_ns)
                freed = KINDS["free_requested"]
                self.event(freed, addr=address, device=device, time_ns=time_ns)


def _label(entry: Entry) -> str:
    """The program's name for a request: its metadata, else torch.compile's region."""
    region = str(entry.get("compile_context") or "N/A")
    text = str(entry.get("user_metadata") or "") or (region if region != "N/A" else "")
    return text[:_MOST_LABEL]


def _pool(told: Sequence[int] | None) -> Pool:
    """A private pool's id; entries of older torch versions have none."""
    if not told:
        return NO_POOL
    first, second = told
    return int(first), int(second)


def _timed(device: int, trace: list[Entry]) -> Iterator[tuple[int, int, Entry]]:
    for entry in trace:
        yield int(entry.get("time_us", 0)) * 1000 + 500, device, entry


def with_frees(trace: list[Entry]) -> list[Entry]:
    """The trace; if torch was told to skip free_requested, its free_completed entries replace them."""
    actions = {entry["action"] for entry in trace}
    if "free_requested" in actions or "free_completed" not in actions:
        return trace
    return [
        {**entry, "action": "free_requested"} if entry["action"] == "free_completed" else entry
        for entry in trace
    ]


def state_before(segments: list[Entry], traces: list[list[Entry]]) -> tuple[list[Entry], int]:
    """The segments and live blocks at the beginning of the traces, computed back from those at their end.

    Removes blocks that were allocated within a trace, and restores those freed within it, with the size in their free
    and without frames; segments likewise.  A block that is pending at the end was already pending, unless the trace
    frees it.

    Returns:
        Both, and the number of entries that are impossible because others are missing.
    """
    n_wrong = 0
    live: dict[tuple[int, int], Entry] = {}
    ranges: dict[int, list[Range]] = {device: [] for device in range(len(traces))}
    for segment in segments:
        device, stream = int(segment.get("device", 0)), int(segment["stream"])
        start = at = int(segment["address"])
        end, is_expandable = start + int(segment["total_size"]), bool(segment.get("is_expandable"))
        pool = segment.get("segment_pool_id")
        ranges.setdefault(device, []).append((start, end, stream, is_expandable, _pool(pool)))
        for block in segment["blocks"]:
            address = int(block.get("address", at))
            at = address + int(block["size"])
            if block["state"] in (ALLOCATED, PENDING):
                live[device, address] = {**block, "address": address, "pool_id": pool}
    for pieces in ranges.values():
        pieces.sort()
    for device, trace in enumerate(traces):
        n_wrong += _undo(trace, device, live, ranges[device])
    result = []
    keys = sorted(live)
    for (device, address), after in itertools.pairwise(keys):
        n_wrong += after[0] == device and address + int(live[device, address]["size"]) > after[1]
    for device, pieces in ranges.items():
        for start, end, stream, is_expandable, owner in pieces:
            inside = keys[bisect_left(keys, (device, start)) : bisect_left(keys, (device, end))]
            result.append(
                {
                    "device": device,
                    "address": start,
                    "total_size": end - start,
                    "stream": stream,
                    "is_expandable": is_expandable,
                    "segment_pool_id": owner,
                    "blocks": [live[key] for key in inside],
                }
            )
    return result, n_wrong


def _undo(
    trace: list[Entry], device: int, live: dict[tuple[int, int], Entry], ranges: list[Range]
) -> int:
    n_wrong = 0
    for entry in reversed(trace):
        action, size = entry["action"], int(entry.get("size", 0))
        address = int(entry.get("addr", 0))
        if action == "alloc":
            n_wrong += live.pop((device, address), None) is None
        elif action == "free_requested":
            n_wrong += live.get((device, address), {}).get("state") == ALLOCATED
            live[device, address] = {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": ALLOCATED,
                "pool_id": entry.get("pool_id"),
            }
        elif action in GIVES_BACK:
            stream = int(entry.get("stream", 0))
            is_expandable = action == "segment_unmap"
            insort(ranges, (address, address + size, stream, is_expandable, NO_POOL))
        elif action in TAKES_MEMORY:
            cut(ranges, address, address + size)
    return n_wrong


def cut(ranges: list[Range], start: int, end: int) -> None:
    """Cuts [start, end) out of sorted ranges, which stay sorted."""
    first = last = bisect_left(ranges, start, key=lambda piece: piece[0])
    if first > 0 and ranges[first - 1][1] > start:
        first -= 1
    while last < len(ranges) and ranges[last][0] < end:
        last += 1
    rest: list[Range] = []
    for left, right, stream, is_expandable, pool in ranges[first:last]:
        if left < start:
            rest.append((left, start, stream, is_expandable, pool))
        if end < right:
            rest.append((end, right, stream, is_expandable, pool))
    ranges[first:last] = rest
