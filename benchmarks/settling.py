"""What a long run settles to: every trace many times over in one process.

``python -m benchmarks.memory --passes 12 [TRACE ...] [--only NAME ...] [--conf SETTINGS] [--json]``

Every trace is replayed that often on the simulated device, one pass after the other on the same allocator; blocks that
a pass leaves alive are freed before the next.  Allocators are the policy models of native and expandable segments, and
pyalloc itself.  Shows device calls and modelled milliseconds (csrc/device/sim_cost.h) of the first and the last pass,
and peak over peak live bytes of one pass and of all.  Replays are deterministic; seed 1 for generated traces.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pyalloc import _core


@dataclass(frozen=True)
class Row:
    """One trace on one allocator."""

    trace: str
    allocator: str
    passes: int
    first_calls: int
    last_calls: int
    first_ms: float
    last_ms: float
    first_peak_live: float
    peak_live: float


def measure(path: Path, name: str, allocator: str, conf: str, passes: int) -> Row:
    """Two replays: one pass, and all of them."""
    program = _core.Program(path)
    live = program.info()["peak_live_bytes"]
    options = conf if allocator == "pyalloc" else ""
    first = program.replay(allocator, options=options)
    every = program.replay(allocator, options=options, passes=passes)
    assert every["completed"] and not every["n_violations"], f"{name} failed under {allocator}"
    return Row(
        trace=name,
        allocator=allocator,
        passes=passes,
        first_calls=first["n_calls"],
        last_calls=every["n_calls_last_pass"],
        first_ms=first["device_ns"] / 1e6,
        last_ms=every["device_ns_last_pass"] / 1e6,
        first_peak_live=first["peak_bytes"] / live,
        peak_live=every["peak_bytes"] / live,
    )


def table(rows: list[Row]) -> str:
    """One line per row."""
    head = f"{'peak/live':>10}{'of all':>8}{'calls':>8}{'last pass':>10}{'ms':>8}{'last':>7}"
    lines = [f"{'':34}{head}"]
    shown = ""
    for row in rows:
        name = "" if row.trace == shown else row.trace
        shown = row.trace
        lines.append(
            f"{name:22}{row.allocator:12}{row.first_peak_live:10.3f}{row.peak_live:8.3f}"
            f"{row.first_calls:8}{row.last_calls:10}{row.first_ms:8.1f}{row.last_ms:7.1f}"
        )
    return "\n".join(lines)


def run(
    traces: list[tuple[str, Path]],
    allocators: list[str],
    conf: str,
    passes: int,
    *,
    as_json: bool,
    quiet: bool,
    commit: str,
) -> int:
    """Measures and prints."""
    rows = []
    for number, (name, path) in enumerate(traces):
        rows += [measure(path, name, allocator, conf, passes) for allocator in allocators]
        if not quiet:
            print(f"[{number + 1}/{len(traces)}] {name}", file=sys.stderr, flush=True)
    if as_json:
        for row in rows:
            print(json.dumps({**asdict(row), "commit": commit}))
        return 0
    print(table(rows))
    quiet_ones = sum(row.last_calls == 0 for row in rows if row.allocator == "pyalloc")
    print(f"pyalloc makes no device call in the last pass of {quiet_ones} of {len(traces)} traces")
    print(f"simulated device, typical costs; {passes} passes; seed 1; commit {commit}")
    return 0
