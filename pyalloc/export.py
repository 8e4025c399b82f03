"""Traces in the formats of other programs: torch's snapshot, Perfetto, TensorBoard, CSV, JSON, speedscope.

Each converter writes while it reads: memory is bounded by what is alive, not by the length of the trace.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pyalloc import _core, reading
from pyalloc.analysis.meaning import Analysis
from pyalloc.traces.convert import (
    ALLOCATED,
    GIVES_BACK,
    KINDS,
    NAMES,
    NO_POOL,
    PENDING,
    TAKES_MEMORY,
    Pool,
    Range,
    cut,
)
from pyalloc.traces.moments import SMALL_SEGMENT, Block, moments_of
from pyalloc.traces.pickles import SnapshotWriter

# Those of our events that torch's history has, too.
_TORCH = {
    "alloc",
    "free_requested",
    "free_completed",
    *TAKES_MEMORY,
    *GIVES_BACK,
    "snapshot",
    "oom",
}
_EMPTYING_FIRST = ("free_completed", *GIVES_BACK)  # empty_cache() waits for other streams' work
_ROUTES = re.compile(b"[%s]" % re.escape(bytes((KINDS["pool_begin"], KINDS["pool_end"]))))
_MAX_TORCH_ENTRIES = 2_000_000  # viewers do not open larger pickles
_CSV_FRAMES = 8
_EMPTYING = -1  # a stack for what empty_cache() gave back: snapshots mark it by this alone
_EMPTY_CACHE = {"name": "empty_cache", "filename": "/torch/cuda/memory.py", "line": 0}
Progress = Callable[[int, int], object]
Convert = Callable[[Path, Analysis, BinaryIO, Progress | None], None]


def _frames(reader: _core.TraceReader, stack: int) -> list[dict[str, Any]]:
    """A stack's frames as torch writes them, innermost first."""
    return [
        {"name": name, "filename": file, "line": line}
        for name, file, line in reading.frames(reader, stack)
    ]


def to_torch(
    file: Path, analysis: Analysis, out: BinaryIO, progress: Progress | None = None
) -> None:
    """A snapshot pickle (protocol 4) for pytorch.org/memory_viz and torch.cuda._memory_viz."""
    n_devices = max((*analysis.totals["device_peak"], 0)) + 1
    skip = max(0, analysis.totals["n_events"] - _MAX_TORCH_ENTRIES)
    # On pyalloc, device memory moves from pool to pool.
    states = _states_at(file, skip, has_owners=analysis.notes.get("allocator") != "pyalloc")
    writer = SnapshotWriter(out)
    writer.begin()
    for device in range(n_devices):
        writer.trace(_torch_entries(file, skip, device, states[device], writer, progress))
    rest = {"segments": _segments(analysis), "allocator_settings": {}}
    writer.end({**rest, "external_annotations": _ranges(analysis)})


def _ranges(analysis: Analysis) -> list[dict[str, Any]]:
    """Phases, and steps named as by torch.profiler, as ranges of torch.profiler.record_function."""
    begins = [(f"ProfilerStep#{step[0]}", step[2]) for step in analysis.steps]
    ends = [time_ns for _, time_ns in begins[1:]] + [analysis.totals["last_ns"]]
    found = [(name, begin, end) for (name, begin), end in zip(begins, ends, strict=False)]
    found += [
        (phase.name, phase.begin_ns, phase.end_ns)
        for phase in analysis.phases
        if phase.begin_ns < phase.end_ns
    ]
    edges = [(begin, 1, name, "START") for name, begin, _ in found]
    # At the same time ends come first, except the end of a step that takes no time.
    edges += [(end, 0 if begin < end else 2, name, "END") for name, begin, end in found]
    return [
        {"stage": stage, "name": name, "device": 0, "time_us": time_ns // 1000}
        for time_ns, _, name, stage in sorted(edges, key=lambda edge: edge[:2])
    ]


@dataclass
class _State:
    """What is where on one device, as far as the trace has been read.  Blocks by address."""

    has_owners: bool  # each segment belongs to one pool
    sizes: dict[int, int] = field(default_factory=dict)  # torch's frees tell them
    pools: dict[int, Pool] = field(default_factory=dict)  # only of blocks in private pools
    owned: list[Range] = field(default_factory=list)  # segments of private pools
    routed: Pool = NO_POOL  # where requests go now

    def follow(self, action: str, addr: int, size: int) -> tuple[int, Pool]:
        """Applies one event; returns its size and pool."""
        if action == "alloc":
            self.sizes[addr] = size
            if self.routed != NO_POOL:
                self.pools[addr] = self.routed
            else:
                self.pools.pop(addr, None)
            return size, self.routed
        if action == "free_requested":
            return self.sizes.get(addr, size), self.pools.get(addr, NO_POOL)
        if action == "free_completed":
            return self.sizes.pop(addr, size), self.pools.pop(addr, NO_POOL)
        if action.startswith("segment_"):
            owner = self._cut(addr, size)
            return size, NO_POOL if action in TAKES_MEMORY else owner
        return size, NO_POOL

    def _cut(self, addr: int, size: int) -> Pool:
        """Removes device memory from owned; returns the pool that it belonged to."""
        at = bisect_right(self.owned, addr, key=lambda piece: piece[0]) - 1
        is_owned = at >= 0 and addr < self.owned[at][1]
        pool = self.owned[at][4] if is_owned else NO_POOL
        cut(self.owned, addr, addr + size)
        return pool

    def own(self, addr: int, size: int, pool: Pool) -> None:
        """Device memory belongs to this pool from now on."""
        if pool != NO_POOL and self.has_owners:
            cut(self.owned, addr, addr + size)
            insort(self.owned, (addr, addr + size, 0, False, pool))


def _states_at(file: Path, event: int, *, has_owners: bool) -> dict[int, _State]:
    """The state of each device before that event."""
    states: dict[int, _State] = defaultdict(lambda: _State(has_owners))
    if event == 0:
        return states
    scan = _core.Scan(file, n_bins=2, moments=[event])
    pools = [NO_POOL, *scan.pools()]
    for block in map(Block._make, scan.blocks(0, True)):
        states[block.device].sizes[block.address] = block.bytes
        if block.pool:
            states[block.device].pools[block.address] = pools[block.pool]
    [moment] = moments_of(scan)
    for address, size, _, device, _ in moment.segments:
        states[device].own(address, size, pools[moment.pools.get((device, address), 0)])
    for at, columns, _ in reading.pieces(file, None):
        if at >= event:
            break
        kinds = columns[0][: event - at]
        for i in (each.start() for each in _ROUTES.finditer(kinds)):
            begins = kinds[i] == KINDS["pool_begin"]
            addr, arg = (columns[place][8 * i : 8 * i + 8] for place in (5, 7))
            pool = int.from_bytes(addr, "little"), int.from_bytes(arg, "little")
            states[columns[1][i]].routed = pool if begins else NO_POOL
    return states


def _torch_entries(
    file: Path,
    skip: int,
    device: int,
    state: _State,
    writer: SnapshotWriter,
    progress: Progress | None,
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields a device's entries, each with the number of its stack, without the first `skip` events.

    Only the next request tells which pool device memory was taken for, so entries wait for it.
    """
    waiting: list[tuple[dict[str, Any], int]] = []
    emptying: tuple[str, ...] = ()  # actions that still belong to an empty_cache()
    for _, piece, reader in reading.rows(file, skip, progress):
        for kind, own, time_ns, _, stream, addr, size, arg, number, _ in piece:
            action = NAMES.get(kind, "")
            if own != device:
                continue
            if action in ("pool_begin", "pool_end"):
                state.routed = (addr, arg) if action == "pool_begin" else NO_POOL
            if waiting and action in ("alloc", "segment_pool"):
                yield from _with_pools(waiting, state)
                waiting.clear()
            if action not in _TORCH:
                emptying = _EMPTYING_FIRST if action == "empty_cache" else emptying
                continue
            is_emptying = action in emptying and action in GIVES_BACK
            if is_emptying or action not in emptying:
                emptying = GIVES_BACK if is_emptying else ()
            stack = _EMPTYING if is_emptying else number
            told, pool = state.follow(action, addr, size)
            if not writer.knows(stack):
                writer.define(stack, [_EMPTY_CACHE] if is_emptying else _frames(reader, stack))
            entry = {
                "action": action,
                "size": told,
                "stream": stream,
                "time_us": time_ns // 1000,
                "pool_id": pool,
            }
            if action == "oom":
                entry["device_free"] = arg
            else:
                entry["addr"] = addr
            if waiting or (state.has_owners and action in TAKES_MEMORY):
                waiting.append((entry, stack))
            else:
                yield entry, stack
    yield from waiting


def _with_pools(
    entries: list[tuple[dict[str, Any], int]], state: _State
) -> list[tuple[dict[str, Any], int]]:
    """These entries, now that it is known which pool device memory was taken for."""
    for entry, _ in entries:
        if entry["action"] in TAKES_MEMORY:
            entry["pool_id"] = state.routed
            state.own(entry["addr"], entry["size"], state.routed)
    return entries


def _segments(analysis: Analysis) -> list[dict[str, Any]]:
    """Segments and blocks at the end.  In a trace without segments, each block gets its own."""
    end = analysis.moments[max(analysis.moments)]
    waiting = set(end.pending)
    blocks = sorted((*end.blocks, *waiting), key=lambda b: (b.device, b.address))
    ranges = sorted(end.segments, key=lambda s: (s[3], s[0])) or [
        (b.address, b.bytes, b.stream, b.device, False) for b in blocks
    ]
    keys = [(b.device, b.address) for b in blocks]
    result = []
    for address, length, stream, device, mapped in ranges:
        inside = blocks[
            bisect_left(keys, (device, address)) : bisect_left(keys, (device, address + length))
        ]
        pieces: list[dict[str, Any]] = []
        at = address
        for block in inside:
            if block.address > at:
                pieces.append(_piece(at, block.address - at, "inactive", []))
            frames = [
                {"name": name, "filename": file, "line": line}
                for name, file, line in analysis.frames(block.stack)
            ]
            state = PENDING if block in waiting else ALLOCATED
            pieces.append(_piece(block.address, block.bytes, state, frames))
            at = block.address + block.bytes
        if at < address + length:
            pieces.append(_piece(at, address + length - at, "inactive", []))
        active = sum(block.bytes for block in inside)
        live = sum(block.bytes for block in inside if block not in waiting)
        result.append(
            {
                "device": device,
                "address": address,
                "total_size": length,
                "allocated_size": live,
                "active_size": active,
                "requested_size": live,
                "stream": stream,
                "segment_type": "large" if length > SMALL_SEGMENT else "small",
                "segment_pool_id": analysis.pool_id(end.pools.get((device, address), 0)),
                "is_expandable": mapped,
                "frames": [],
                "blocks": pieces,
            }
        )
    return result


def _piece(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frames,
    }


def to_csv(file: Path, out: BinaryIO, progress: Progress | None = None) -> None:
    """One line for each event; kinds and texts in words, the frames of a stack joined."""
    stacks: dict[int, bytes] = {0: b""}
    texts: dict[int, bytes] = {0: b""}
    out.write(f"{','.join(('event', *reading.FIELDS))}\r\n".encode())
    for first, columns, reader in reading.pieces(file, progress):
        for number in _numbers(columns[-2]) - stacks.keys():
            stacks[number] = _quoted(
                " < ".join(
                    f"{file_name}:{line} {name}"
                    for name, file_name, line in reading.frames(reader, number)[:_CSV_FRAMES]
                )
            )
        for number in _numbers(columns[-1]) - texts.keys():
            texts[number] = _quoted(reader.text(number) or "")
        out.write(_core.csv_lines(first, columns, stacks, texts))


def _numbers(column: bytes) -> set[int]:
    return set(memoryview(column).cast("I"))


def _quoted(text: str) -> bytes:
    """A cell of a CSV file."""
    if any(mark in text for mark in ',"\r\n'):
        text = '"' + text.replace('"', '""') + '"'
    return text.encode()


def _dump(value: Any, out: BinaryIO, **keywords: Any) -> None:
    """Writes JSON piece by piece."""
    for part in json.JSONEncoder(default=str, **keywords).iterencode(value):
        out.write(part.encode("utf-8"))


def to_json(
    file: Path, analysis: Analysis, out: BinaryIO, progress: Progress | None = None
) -> None:
    """The report as data."""
    from pyalloc.report import data

    _dump(data.summary(analysis), out, indent=1)


def to_perfetto(
    file: Path, analysis: Analysis, out: BinaryIO, progress: Progress | None = None
) -> None:
    """Phases, out-of-memory errors, and counters with the most of each bin, in the format of ui.perfetto.dev."""
    origin = analysis.totals["first_ns"]
    found: list[dict[str, Any]] = [
        {
            "ph": "C",
            "pid": 1,
            "name": "GPU memory",
            "ts": (b[1] - origin) / 1000,
            "args": {"allocated": b[2], "idle": max(b[5] - b[2], 0)},
        }
        for b in analysis.bins
    ]
    found += [
        {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "name": p.name,
            "ts": (p.begin_ns - origin) / 1000,
            "dur": max(p.end_ns - p.begin_ns, 0) / 1000,
            "args": {"step": p.step, "peak_bytes": p.peak_bytes},
        }
        for p in analysis.phases
    ]
    found += [
        {
            "ph": "i",
            "s": "g",
            "pid": 1,
            "tid": 1,
            "name": "out of memory",
            "ts": (time_ns - origin) / 1000,
            "args": {"device": oom[-1], "requested_bytes": oom[1], "free_bytes": oom[2]},
        }
        for oom, time_ns in _timed(file, analysis.ooms, progress)
    ]
    _dump({"traceEvents": found, "displayTimeUnit": "ms"}, out)


def _timed(
    file: Path, ooms: list[tuple[int, ...]], progress: Progress | None
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Out-of-memory errors, which are in order, with their times."""
    waiting = deque(ooms)
    for at, columns, _ in reading.pieces(file, progress if ooms else None):
        times = memoryview(columns[2]).cast("Q")
        while waiting and waiting[0][0] < at + len(times):
            oom = waiting.popleft()
            yield oom, times[oom[0] - at]
        if not waiting:
            return


def to_speedscope(
    file: Path, analysis: Analysis, out: BinaryIO, progress: Progress | None = None
) -> None:
    """The stacks that hold the peak, weighted by bytes, for speedscope.app."""
    index: dict[tuple[str, str, int], int] = {}
    frames: list[dict[str, Any]] = []

    def number(frame: tuple[str, str, int]) -> int:
        if frame not in index:
            index[frame] = len(frames)
            frames.append({"name": frame[0], "file": frame[1], "line": frame[2]})
        return index[frame]

    held: dict[int, int] = {}
    for block in analysis.peak.blocks:
        held[block.stack] = held.get(block.stack, 0) + block.bytes
    samples = [
        [number(f) for f in reversed(analysis.frames(stack) or (("(no stack)", "", 0),))]
        for stack in held
    ]
    total = sum(held.values())
    _dump(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": frames},
            "profiles": [
                {
                    "type": "sampled",
                    "name": f"{analysis.path.name} at its peak",
                    "unit": "bytes",
                    "startValue": 0,
                    "endValue": total,
                    "samples": samples,
                    "weights": list(held.values()),
                }
            ],
            "activeProfileIndex": 0,
            "exporter": "pyalloc",
        },
        out,
    )


def to_tensorboard(
    file: Path, analysis: Analysis, out: BinaryIO, progress: Progress | None = None
) -> None:
    """An event file of scalars, one for each bin of the timeline; the step is the event."""
    from pyalloc.figures import event_file

    origin = analysis.totals["first_ns"] / 1e9
    scalars = [
        (
            b[0],
            b[1] / 1e9 if origin else 0.0,
            {"memory/allocated_bytes.all.peak": b[2], "memory/reserved_bytes.all.current": b[5]},
        )
        for b in analysis.bins
    ]
    out.write(event_file(scalars))


# Suffix, and what converts an analysis; None: the events themselves are converted, without one.
FORMATS: dict[str, tuple[str, Convert | None]] = {
    "torch": (".pickle", to_torch),
    "perfetto": (".perfetto.json", to_perfetto),
    "tensorboard": (".tfevents", to_tensorboard),
    "csv": (".csv", None),
    "json": (".json", to_json),
    "speedscope": (".speedscope.json", to_speedscope),
}
