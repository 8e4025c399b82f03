"""Traces in other programs' formats: torch's snapshot, Perfetto, TensorBoard, CSV, JSON, speedscope."""

from __future__ import annotations

import csv
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pyalloc import _core
from pyalloc.analysis import Analysis
from pyalloc.convert import KINDS

_NAMES = {number: name for name, number in KINDS.items()}
_TORCH = frozenset(
    (
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "snapshot",
        "oom",
    )
)
_MAX_TORCH_ENTRIES = 2_000_000  # a pickle of more no viewer opens
_FIELDS = ("kind", "device", "time_ns", "thread", "stream", "addr", "bytes", "arg", "stack", "text")
_FORMATS = ("B", "B", "Q", "Q", "Q", "Q", "Q", "Q", "I", "I")
Event = dict[str, Any]


def events(file: Path) -> Iterator[tuple[Event, _core.TraceReader]]:
    """All events of a trace file, a piece at a time, with the reader that knows their texts."""
    reader = _core.TraceReader(file)
    while True:
        columns = reader.read()
        n = len(columns[0])
        if n == 0:
            return
        arrays = [
            struct.unpack(f"<{n}{code}", column)
            for code, column in zip(_FORMATS, columns, strict=True)
        ]
        for row in zip(*arrays, strict=True):
            yield dict(zip(_FIELDS, row, strict=True)), reader


def _frames(reader: _core.TraceReader, stack: int, cache: dict[int, Any]) -> list[dict[str, Any]]:
    """Frames as torch has them, innermost first."""
    known = cache.get(stack)
    if known is not None:
        return known  # type: ignore[no-any-return]
    frames: list[dict[str, Any]] = []
    at = stack
    while at:
        frame = reader.frame(at)
        if frame is None or frame[0] >= at:
            if frame is not None:
                frames.append(_frame(reader, frame))
            break
        frames.append(_frame(reader, frame))
        at = frame[0]
    cache[stack] = frames
    return frames


def _frame(reader: _core.TraceReader, frame: tuple[int, int, int, int]) -> dict[str, Any]:
    return {
        "name": reader.text(frame[1]) or "?",
        "filename": reader.text(frame[2]) or "?",
        "line": frame[3],
    }


def to_torch(file: Path, analysis: Analysis) -> bytes:
    """A snapshot pickle (protocol 4) for pytorch.org/memory_viz and torch.cuda._memory_viz."""
    cache: dict[int, Any] = {}
    n_devices = max((*analysis.totals["device_peak"], 0)) + 1
    traces: list[list[dict[str, Any]]] = [[] for _ in range(n_devices)]
    skip = max(0, analysis.totals["n_events"] - _MAX_TORCH_ENTRIES)
    for event, reader in islice(events(file), skip, None):
        action = _NAMES.get(event["kind"], "")
        if action not in _TORCH or event["device"] >= n_devices:
            continue
        entry: dict[str, Any] = {
            "action": action,
            "addr": event["addr"],
            "size": event["bytes"],
            "stream": event["stream"],
            "time_us": event["time_ns"] // 1000,
            "frames": _frames(reader, event["stack"], cache),
        }
        if action == "oom":
            entry["device_free"] = event["arg"]
            del entry["addr"]
        traces[event["device"]].append(entry)
    _fill_sizes(traces)
    snapshot = {
        "segments": _segments(analysis),
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=4)


def _fill_sizes(traces: list[list[dict[str, Any]]]) -> None:
    """Frees of torch carry their size, ours do not need it."""
    for trace in traces:
        sizes: dict[int, int] = {}
        for entry in trace:
            if entry["action"] == "alloc":
                sizes[entry["addr"]] = entry["size"]
            elif entry["action"].startswith("free_"):
                entry["size"] = sizes.get(entry["addr"], entry["size"])


def _segments(analysis: Analysis) -> list[dict[str, Any]]:
    """Segments and blocks at the end.  A trace without device memory gets one segment for each block."""
    end = analysis.moments[max(analysis.moments)]
    blocks = sorted(end.blocks, key=lambda b: (b.device, b.address))
    ranges = sorted(end.segments, key=lambda s: (s[3], s[0])) or [
        (b.address, b.bytes, b.stream, b.device, False) for b in blocks
    ]
    result = []
    for address, length, stream, device, mapped in ranges:
        inside = [
            b for b in blocks if b.device == device and address <= b.address < address + length
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
            pieces.append(_piece(block.address, block.bytes, "active_allocated", frames))
            at = block.address + block.bytes
        if at < address + length:
            pieces.append(_piece(at, address + length - at, "inactive", []))
        live = sum(block.bytes for block in inside)
        result.append(
            {
                "device": device,
                "address": address,
                "total_size": length,
                "allocated_size": live,
                "active_size": live,
                "requested_size": live,
                "stream": stream,
                "segment_type": "large" if length > 2 * 2**20 else "small",
                "segment_pool_id": (0, 0),
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


def to_csv(file: Path, analysis: Analysis) -> bytes:
    """One line for each event; kind and text in words, frames of a stack joined."""
    out = io.StringIO()
    table = csv.writer(out)
    table.writerow(("event", *_FIELDS))
    cache: dict[int, Any] = {}
    for i, (event, reader) in enumerate(events(file)):
        row = {**event, "kind": _NAMES.get(event["kind"], event["kind"])}
        row["text"] = reader.text(event["text"]) if event["text"] else ""
        frames = _frames(reader, event["stack"], cache)[:8]
        row["stack"] = " < ".join(f"{f['filename']}:{f['line']} {f['name']}" for f in frames)
        table.writerow((i, *(row[name] for name in _FIELDS)))
    return out.getvalue().encode("utf-8")


def to_json(file: Path, analysis: Analysis) -> bytes:
    """The report as data."""
    from pyalloc.report import data

    return json.dumps(data.summary(analysis), indent=1, default=str).encode("utf-8")


def to_perfetto(file: Path, analysis: Analysis) -> bytes:
    """Counters and phases in the trace event format that ui.perfetto.dev opens."""
    origin = analysis.totals["first_ns"]
    rows: list[dict[str, Any]] = [
        {
            "ph": "C",
            "pid": 1,
            "name": "GPU memory",
            "ts": (b[1] - origin) / 1000,
            "args": {"allocated": b[4], "idle": max(b[5] - b[4], 0)},
        }
        for b in analysis.bins
    ]
    rows += [
        {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "name": p.name,
            "ts": (p.begin_ns - origin) / 1000,
            "dur": max(p.end_ns - p.begin_ns, 0) / 1000,
            "args": {"step": p.step - 1, "peak_bytes": p.peak_bytes},
        }
        for p in analysis.phases
    ]
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}).encode("utf-8")


def to_speedscope(file: Path, analysis: Analysis) -> bytes:
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
    return json.dumps(
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
        }
    ).encode("utf-8")


def to_tensorboard(file: Path, analysis: Analysis) -> bytes:
    """An event file of scalars, one for each bin of the timeline; the step is the event."""
    from pyalloc.figures import event_file

    origin = analysis.totals["first_ns"] / 1e9
    rows = [
        (
            b[0],
            b[1] / 1e9 if origin else 0.0,
            {"memory/allocated_bytes.all.peak": b[2], "memory/reserved_bytes.all.current": b[5]},
        )
        for b in analysis.bins
    ]
    return event_file(rows)


FORMATS: dict[str, tuple[str, Callable[[Path, Analysis], bytes]]] = {
    "torch": (".pickle", to_torch),
    "perfetto": (".perfetto.json", to_perfetto),
    "tensorboard": (".tfevents", to_tensorboard),
    "csv": (".csv", to_csv),
    "json": (".json", to_json),
    "speedscope": (".speedscope.json", to_speedscope),
}
