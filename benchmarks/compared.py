"""Programs on native, expandable segments and pyalloc: their rows and the table of them, for several benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.torch_replay import ALLOCATORS
from pyalloc import _core

#: peaks that differ by at most the larger of these count as equal
SAME_SHARE, SAME_BYTES = 0.005, 4 << 20
#: no program's peak/live should be above
BAR = 1.07


@dataclass(frozen=True)
class Row:
    """One program on one allocator."""

    program: int | str
    allocator: str
    live_bytes: int
    peak_live: float
    min_live: float
    device_ms: float


def rows_of(program: _core.Program, name: int | str) -> list[Row]:
    """A row for each allocator, from policy models and the simulated device."""
    live = program.info()["peak_live_bytes"]
    rows = []
    for allocator in ALLOCATORS:
        ample = program.replay(allocator, check=True)
        least = program.find_min(allocator)
        assert ample["completed"] and not ample["n_violations"] and least is not None, (
            f"{name} on {allocator}"
        )
        rows.append(
            Row(
                program=name,
                allocator=allocator,
                live_bytes=live,
                peak_live=ample["peak_bytes"] / live,
                min_live=least["bytes"] / live,
                device_ms=ample["device_ns"] / 1e6,
            )
        )
    return rows


def by_allocator(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each allocator, in the same order of programs."""
    return {name: [row for row in rows if row.allocator == name] for name in ALLOCATORS}


def n_above_best(found: dict[str, list[Row]], mine: list[Row], figure: str) -> int:
    """How many programs have a lower figure, by more than the tolerance, on another allocator."""
    n = 0
    for row, *rows in zip(mine, *found.values(), strict=True):
        tolerance = max(SAME_SHARE, SAME_BYTES / row.live_bytes)
        n += getattr(row, figure) > min(getattr(each, figure) for each in rows) + tolerance
    return n


def table(rows: list[Row]) -> str:
    """The summary as text, with a column per allocator."""
    found = by_allocator(rows)
    native_ms = [row.device_ms for row in found["native"]]
    n = len(native_ms)

    def times(mine: list[Row]) -> list[float]:
        return [row.device_ms / ms for row, ms in zip(mine, native_ms, strict=True)]

    def share(count: int) -> str:
        return f"{count / n:.1%}"

    lines: list[tuple[str, Callable[[list[Row]], str]]] = [
        (
            "peak/live, geometric mean",
            lambda mine: f"{geometric_mean([r.peak_live for r in mine]):.3f}",
        ),
        (
            "  nine in ten at most",
            lambda mine: f"{sorted(r.peak_live for r in mine)[9 * n // 10]:.3f}",
        ),
        ("  largest", lambda mine: f"{max(r.peak_live for r in mine):.3f}"),
        (f"  above {BAR}", lambda mine: share(sum(r.peak_live > BAR for r in mine))),
        (
            "  above the best of the three",
            lambda mine: share(n_above_best(found, mine, "peak_live")),
        ),
        (
            "min/live, geometric mean",
            lambda mine: f"{geometric_mean([r.min_live for r in mine]):.3f}",
        ),
        ("  largest", lambda mine: f"{max(r.min_live for r in mine):.3f}"),
        (
            "  above the best of the three",
            lambda mine: share(n_above_best(found, mine, "min_live")),
        ),
        ("device time, geometric mean", lambda mine: f"{geometric_mean(times(mine)):.2f}x"),
        (
            "  above native's by over 5 %",
            lambda mine: share(sum(t > 1.05 for t in times(mine))),
        ),
        ("  most", lambda mine: f"{max(times(mine)):.2f}x"),
    ]
    head = f"{f'{n} programs':32}" + "".join(f"{name:>12}" for name in ALLOCATORS)
    body = [
        f"{title:32}" + "".join(f"{text(found[name]):>12}" for name in ALLOCATORS)
        for title, text in lines
    ]
    return "\n".join([head, *body])
