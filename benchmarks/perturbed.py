"""How much of a result is luck: replays every trace again with a few small blocks in the way from the start.

``python -m benchmarks.perturbed [TRACE ...] [--seeds N] [--json]``

The place of a block decides which later blocks fit beside it, so a few bytes can change a program's peak.  Each seed
allocates six blocks of up to 1.5 MiB before the trace begins and keeps them; they count as live memory.  Uses policy
models and the simulated device, like ``python -m benchmarks.policies``.  Columns: peak/live of the trace as it is, the
geometric mean and the largest over the seeds, modelled device time over native's (geometric mean over the seeds).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.policies import PARTS
from benchmarks.suite import suite
from benchmarks.torch_replay import ALLOCATORS
from pyalloc import _core, trace
from pyalloc.traces.convert import KINDS

N_GUESTS = 6
MOST_GUEST = 3 << 19
FIRST_ADDR = 1 << 62  # beyond what any recorded program had


@dataclass(frozen=True)
class Row:
    """One trace on one allocator."""

    trace: str
    kind: str
    allocator: str
    plain: float
    mean: float
    worst: float
    time: float


def with_guests(source: Path, target: Path, seed: int) -> None:
    """Copies a trace, with blocks in front that are never freed."""
    rng = random.Random(seed)
    writer = _core.TraceWriter(target, overwrite=True)
    for i in range(N_GUESTS):
        writer.event(
            KINDS["alloc"], addr=FIRST_ADDR + i * 2 * MOST_GUEST, bytes=rng.randint(1, MOST_GUEST)
        )
    trace.copy_without_source(_core.TraceReader(source), writer)
    writer.close()


def _replays(path: Path) -> dict[str, tuple[float, float]]:
    """Peak over live and modelled nanoseconds by allocator."""
    program = _core.Program(path)
    live = program.info()["peak_live_bytes"]
    found = {}
    for allocator in ALLOCATORS:
        result = program.replay(allocator)
        assert result["completed"] and not result["n_violations"], f"{path.name} on {allocator}"
        found[allocator] = (result["peak_bytes"] / live, result["device_ns"])
    return found


def measure(names: list[str], n_seeds: int, folder: Path) -> Iterator[Row]:
    """Every trace, as it is and perturbed."""
    traces = suite(names)
    for number, one in enumerate(traces):
        path = one.write(folder)
        plain = _replays(path)
        found = []
        for seed in range(1, n_seeds + 1):
            perturbed = folder / "perturbed.pya"
            with_guests(path, perturbed, seed)
            found.append(_replays(perturbed))
        for allocator in ALLOCATORS:
            peaks = [replay[allocator][0] for replay in found]
            times = [replay[allocator][1] / replay[ALLOCATORS[0]][1] for replay in found]
            yield Row(
                trace=one.name,
                kind=one.kind,
                allocator=allocator,
                plain=plain[allocator][0],
                mean=geometric_mean(peaks),
                worst=max(peaks),
                time=geometric_mean(times),
            )
        print(f"[{number + 1}/{len(traces)}] {one.name}", file=sys.stderr, flush=True)


def _line(title: str, rows: list[Row]) -> str:
    """The geometric means of an allocator's rows."""
    name = title if rows[0].allocator == ALLOCATORS[0] else ""
    plain, mean, worst, time = (
        geometric_mean([getattr(row, column) for row in rows])
        for column in ("plain", "mean", "worst", "time")
    )
    return f"{name:22}{rows[0].allocator:12}{plain:9.3f}{mean:8.3f}{worst:8.3f}{time:13.2f}"


def table(rows: list[Row]) -> str:
    """One line per row, then the geometric means of each part."""
    lines = [f"{'':34}{'as it is':>9}{'mean':>8}{'worst':>8}{'x native ms':>13}"]
    lines += [_line(row.trace, [row]) for row in rows]
    for part, title in PARTS.items():
        for allocator in ALLOCATORS:
            mine = [row for row in rows if row.kind == part and row.allocator == allocator]
            if mine:
                lines.append(_line(title, mine))
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TRACE")
    parser.add_argument("--seeds", type=int, default=8, help="perturbations of each (default 8)")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least one is needed")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(arguments.names, arguments.seeds, Path(folder)))
    if arguments.json:
        for row in rows:
            print(json.dumps({**asdict(row), "seeds": arguments.seeds, "commit": commit()}))
        return 0
    print(table(rows))
    print(f"simulated device, typical costs; seeds 1..{arguments.seeds}; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
