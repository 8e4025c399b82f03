"""Programs that nobody tuned for: trainings generated from seeds, on native, expandable segments and pyalloc.

``python -m benchmarks.invented [--programs N] [--first SEED] [--json]``

The suite has 38 programs.  This generates as many as you like, and none of them influenced the choice of a constant
(benchmarks/workloads/invented.py).  Policy models and the simulated device, as for ``python -m benchmarks.policies``.
peak/live: peak device memory over peak live bytes; min/live: the smallest device on which the program completes, over
peak live bytes; device time: modelled, over native's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.suite import write_operations
from benchmarks.torch_replay import ALLOCATORS
from benchmarks.workloads.invented import invent
from pyalloc import _core

#: peaks that differ by at most the larger of these count as equal
SAME_SHARE, SAME_BYTES = 0.005, 4 << 20
#: no program's peak/live should be above
BAR = 1.07


@dataclass(frozen=True)
class Row:
    """One program on one allocator."""

    seed: int
    allocator: str
    live_bytes: int
    peak_live: float
    min_live: float
    device_ms: float


def measure_one(seed: int) -> list[Row]:
    """A row for each allocator; none for a seed without a program."""
    training = invent(seed)
    if training is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "invented.pya"
        write_operations(training.operations, path)
        program = _core.Program(path)
    live = program.info()["peak_live_bytes"]
    assert live == training.peak_bytes, f"seed {seed}: {live} bytes live, not {training.peak_bytes}"
    rows = []
    for allocator in ALLOCATORS:
        ample = program.replay(allocator, check=True)
        least = program.find_min(allocator)
        assert ample["completed"] and not ample["n_violations"] and least is not None, (
            f"seed {seed} on {allocator}"
        )
        rows.append(
            Row(
                seed=seed,
                allocator=allocator,
                live_bytes=live,
                peak_live=ample["peak_bytes"] / live,
                min_live=least["bytes"] / live,
                device_ms=ample["device_ns"] / 1e6,
            )
        )
    return rows


def measure(first: int, n_programs: int) -> Iterator[Row]:
    """The rows of the first n programs from seed ``first`` on, by seed."""
    n_found = 0
    # Not a Pool: it kills its workers at any point, and may then wait for ever for a lock that one of them held.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for rows in pool.map(measure_one, range(first, first + 10 * n_programs)):
                n_found += bool(rows)
                yield from rows
                if rows and n_found % 50 == 0:
                    print(f"[{n_found}/{n_programs}]", file=sys.stderr, flush=True)
                if n_found == n_programs:
                    return
        finally:
            pool.shutdown(cancel_futures=True)


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


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="first seed (1)")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each program and allocator instead"
    )
    arguments = parser.parse_args()
    if arguments.programs < 1:
        parser.error("--programs must be at least 1")
    rows = list(measure(arguments.first, arguments.programs))
    if arguments.json:
        print("\n".join(json.dumps(asdict(row)) for row in rows))
        return 0
    print(table(rows))
    seeds = [row.seed for row in rows]
    print(f"simulated device, typical costs; seeds {seeds[0]}..{seeds[-1]}; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
