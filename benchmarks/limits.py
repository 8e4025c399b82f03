"""What short memory costs: device calls and modelled time at capacities close to what the program needs.

``python -m benchmarks.memory --limits [TRACE ...] [--only NAME ...] [--conf SETTINGS] [--json]``

Every trace is replayed on the simulated device by the policy models of native and expandable segments and by pyalloc
itself (``--conf`` for its settings), at 1.0, 1.02, 1.05, 1.1 and 1.3 times the peak live bytes of the device that needs
most, rounded up to a page.  A replay that runs out of memory shows "-".  The others show device calls in the whole run
and in its second half (where an allocator that thrashes goes on making them), and modelled milliseconds
(csrc/device/sim_cost.h).  Replays are deterministic; seed 1 for generated traces.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pyalloc import _core
from pyalloc.traces.moments import PAGE

LIMITS = (1.0, 1.02, 1.05, 1.1, 1.3)


@dataclass(frozen=True)
class Row:
    """One trace on one allocator at one limit (None: ample memory)."""

    trace: str
    allocator: str
    limit: float | None
    capacity_bytes: int
    completed: bool
    done: float
    calls: int
    calls_second_half: int
    device_ns: int
    violations: int

    @property
    def ms(self) -> float:
        """Modelled device time."""
        return self.device_ns / 1e6


def measure(path: Path, name: str, allocator: str, limit: float | None, conf: str) -> Row:
    """One replay."""
    program = _core.Program(path)
    info = program.info()
    wanted = 0 if limit is None else math.ceil(limit * info["device_live_bytes"] / PAGE) * PAGE
    options = conf if allocator == "pyalloc" else ""
    result = program.replay(allocator, capacity=wanted, options=options)
    return Row(
        trace=name,
        allocator=allocator,
        limit=limit,
        capacity_bytes=wanted,
        completed=bool(result["completed"]),
        done=1.0 if result["completed"] else result["failed_op"] / info["n_ops"],
        calls=result["n_calls"],
        calls_second_half=result["n_calls_second_half"],
        device_ns=result["device_ns"],
        violations=result["n_violations"],
    )


def measure_all(
    traces: list[tuple[str, Path]],
    allocators: list[str],
    conf: str,
    jobs: int,
    say: Callable[[str], object],
) -> list[Row]:
    """Rows of all traces."""
    wanted = [
        (path, name, allocator, limit, conf)
        for name, path in traces
        for limit in (None, *LIMITS)
        for allocator in allocators
    ]

    def one(job: tuple[Path, str, str, float | None, str]) -> Row:
        row = measure(*job)
        assert row.violations == 0, f"{row.trace} misused the device under {row.allocator}"
        say(f"{row.trace}, {row.allocator} at {row.limit or 'ample'}")
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, wanted))


def _cells(rows: list[Row], text: Callable[[Row], str]) -> str:
    return " ".join(f"{text(row) if row.completed else '-':>9}" for row in rows)


def summary(rows: list[Row], allocators: list[str]) -> list[str]:
    """At each limit, how many traces complete, and their time over that with ample memory."""
    ample = {(row.trace, row.allocator): row for row in rows if row.limit is None}
    traces = {row.trace for row in rows}
    lines = [
        f"{'':8}{'':12}{'completed':>12}{'time, x ample':>16}{'worst':>8}{'calls, x ample':>16}"
    ]
    for limit in LIMITS:
        for allocator in allocators:
            mine = [
                row
                for row in rows
                if row.allocator == allocator and row.limit == limit and row.completed
            ]
            times = [row.ms / max(ample[row.trace, allocator].ms, 1e-6) for row in mine]
            calls = [row.calls / max(ample[row.trace, allocator].calls, 1) for row in mine]
            figures = (
                f"{geometric_mean(times):16.2f}{max(times):8.2f}{geometric_mean(calls):16.2f}"
                if mine
                else f"{'-':>16}{'-':>8}{'-':>16}"
            )
            lines.append(f"{limit:<8}{allocator:12}{len(mine):6} of {len(traces):2}{figures}")
    return lines


def against(rows: list[Row], other: str) -> list[str]:
    """Time on pyalloc over time on another allocator, for traces that both complete at the limit."""
    mine = {(row.trace, row.limit): row for row in rows if row.allocator == "pyalloc"}
    lines = []
    for limit in LIMITS:
        ratios = [
            mine[row.trace, limit].ms / row.ms
            for row in rows
            if row.allocator == other
            and row.limit == limit
            and row.completed
            and mine[row.trace, limit].completed
        ]
        if ratios:
            lines.append(
                f"{limit:<8}pyalloc / {other}: {geometric_mean(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} traces)"
            )
    return lines


def table(rows: list[Row], allocators: list[str]) -> str:
    """Every trace at every limit, then the sums."""
    groups = ("calls", "calls, 2nd half", "ms")
    width = 10 * len(allocators)
    lines = [
        f"{'':24}" + "".join(f"{group:^{width}}" for group in groups),
        f"{'trace':18}{'limit':6}" + (" ".join(f"{name:>9}" for name in allocators) + " ") * 3,
    ]
    for trace in dict.fromkeys(row.trace for row in rows):
        for limit in (None, *LIMITS):
            mine = [row for row in rows if row.trace == trace and row.limit == limit]
            lines.append(
                f"{trace if limit is None else '':18}{limit or 'ample':<6}"
                f"{_cells(mine, lambda row: str(row.calls))} "
                f"{_cells(mine, lambda row: str(row.calls_second_half))} "
                f"{_cells(mine, lambda row: f'{row.ms:.1f}')}"
            )
    lines += ["", *summary(rows, allocators), ""]
    if "pyalloc" in allocators:
        for other in allocators:
            if other != "pyalloc":
                lines += against(rows, other)
    return "\n".join(lines)


def run(
    traces: list[tuple[str, Path]],
    allocators: list[str],
    arguments: Any,
    about: dict[str, Any],
) -> int:
    """The part of benchmarks.memory behind --limits."""
    total = len(traces) * len(allocators) * (len(LIMITS) + 1)
    done = 0

    def say(text: str) -> None:
        nonlocal done
        done += 1
        if not arguments.quiet:
            print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

    rows = measure_all(traces, allocators, arguments.conf, arguments.jobs, say)
    if arguments.json:
        for row in rows:
            print(json.dumps({**asdict(row), **about}))
        return 0
    print(table(rows, allocators))
    conf = f", settings {arguments.conf}" if arguments.conf else ""
    print(f"policy models and pyalloc on the simulated device{conf}; commit {about['commit']}")
    return 0
