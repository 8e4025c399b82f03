"""What the allocator's device calls cost in a long run: trainings whose sizes keep changing, ten times as long.

``python -m benchmarks.lasting [NAME ...] [--times N] [--json]``

Runs the loops of the suite whose shapes change from step to step with N times as many steps (real torch on the
host-memory runtime), and replays them on policy models and the simulated device: the suite's number of steps, the first
half, and all steps.  Columns: peak/live of the whole run; modelled milliseconds of device calls in the suite's number
of steps, then per step in the rest of the first half, and per step in the second half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks import hostcuda
from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.torch_replay import ALLOCATORS
from benchmarks.workloads import record
from pyalloc import _core, trace

LOOPS = (
    "seq2seq",
    "gpt_varying",
    "gpt_checkpointed",
    "moe",
    "unet",
    "beam_search",
    "detector",
    "speech",
    "two_tasks",
)


@dataclass(frozen=True)
class Row:
    """One loop on one allocator."""

    loop: str
    allocator: str
    n_first: int
    n_steps: int
    peak_live: float
    first_ms: float
    middle_ms: float
    last_ms: float


def first_steps(source: Path, target: Path, n_steps: int | None) -> int:
    """Copies a trace up to where step n_steps begins; returns the number of steps copied."""
    writer = _core.TraceWriter(target, overwrite=True)
    n_found = trace.copy_without_source(_core.TraceReader(source), writer, n_steps)
    writer.close()
    return n_found


def _recorded(loop: str, times: int, path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.workloads.record", "--child", loop, str(path)]
    subprocess.run(
        [*command, "--times", str(times)],
        check=True,
        env=hostcuda.environment(),
        cwd=record.ROOT,
        stdout=subprocess.DEVNULL,
    )


def measure(loop: str, times: int, folder: Path) -> Iterator[Row]:
    """The rows of one loop, one per allocator."""
    path = folder / f"{loop}.pya"
    _recorded(loop, times, path)
    part = folder / "part.pya"
    n_steps = first_steps(path, part, None)
    counts = [n_steps // times, n_steps // 2, n_steps]
    found: dict[str, list[dict[str, float]]] = {allocator: [] for allocator in ALLOCATORS}
    for n in counts:
        if n < n_steps:
            first_steps(path, part, n)
        program = _core.Program(part if n < n_steps else path)
        for allocator in ALLOCATORS:
            result = program.replay(allocator)
            assert result["completed"] and not result["n_violations"], f"{loop} on {allocator}"
            found[allocator].append(result)
    live = program.info()["peak_live_bytes"]
    for allocator, results in found.items():
        ms = [result["device_ns"] / 1e6 for result in results]
        yield Row(
            loop=loop,
            allocator=allocator,
            n_first=counts[0],
            n_steps=n_steps,
            peak_live=results[-1]["peak_bytes"] / live,
            first_ms=ms[0],
            middle_ms=(ms[1] - ms[0]) / (counts[1] - counts[0]),
            last_ms=(ms[2] - ms[1]) / (counts[2] - counts[1]),
        )


def table(rows: list[Row]) -> str:
    """One line per row, then means."""
    lines = [f"{'':34}{'peak/live':>10}{'first ms':>10}{'then a step':>13}{'in the end':>12}"]
    for row in rows:
        name = f"{row.loop}, {row.n_steps}" if row.allocator == ALLOCATORS[0] else ""
        lines.append(
            f"{name:22}{row.allocator:12}{row.peak_live:10.3f}{row.first_ms:10.1f}"
            f"{row.middle_ms:13.3f}{row.last_ms:12.3f}"
        )
    for allocator in ALLOCATORS:
        mine = [row for row in rows if row.allocator == allocator]
        name = "means" if allocator == ALLOCATORS[0] else ""
        lines.append(
            f"{name:22}{allocator:12}{geometric_mean([row.peak_live for row in mine]):10.3f}"
            f"{sum(row.first_ms for row in mine) / len(mine):10.1f}"
            f"{sum(row.middle_ms for row in mine) / len(mine):13.3f}"
            f"{sum(row.last_ms for row in mine) / len(mine):12.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"loops (default: {', '.join(LOOPS)})"
    )
    parser.add_argument(
        "--times", type=int, default=10, help="as many steps as the suite's (default 10)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    arguments = parser.parse_args()
    if arguments.times < 3:
        parser.error(f"--times {arguments.times}: at least 3 are needed")
    unknown = set(arguments.names) - set(record.names())
    missing = hostcuda.why_not()
    if unknown or missing:
        parser.error(missing or f"no such loop: {', '.join(sorted(unknown))}")
    record.build_recorder()
    rows: list[Row] = []
    loops = arguments.names or LOOPS
    with tempfile.TemporaryDirectory() as folder:
        for number, loop in enumerate(loops, 1):
            rows += measure(loop, arguments.times, Path(folder))
            print(f"[{number}/{len(loops)}] {loop}", file=sys.stderr, flush=True)
    if arguments.json:
        for row in rows:
            print(json.dumps({**asdict(row), "commit": commit()}))
        return 0
    print(table(rows))
    print(f"simulated device, typical costs; {arguments.times} times; seed 1; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
