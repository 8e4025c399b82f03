"""The recorded loops of the suite, trained: most memory and milliseconds of a step under each allocator.

``python -m benchmarks.training [--device cuda] [--only NAME ...] [--allocators NAME ...] [--times N] [--json]``

benchmarks.memory replays recordings of these loops; here they run themselves (benchmarks/workloads), each under each
allocator in a process of its own, with the same seed: on a card with --device cuda, else on the host-memory runtime, in
which kernels compute nothing.  async is torch's backend on the driver's pools (cudaMallocAsync).

Columns: live: most MiB allocated, on the first allocator; peak/live: most memory reserved over most allocated, for each
allocator; ms: the median of the steps after the first (with --times N: of the last half), between events on the card's
own clock (nothing waits for them).
Means are over the loops that completed on every allocator.  Below the table: what failed or took longer than --limit-s
(the exit code is then 1), where an allocator got requests for other bytes or another number of blocks than the first
one (async does not tell), and where a card was full, so that cached memory was released.

--jobs N trains N at once; if all of them fit, memory is as if each ran alone, but times are not.  --turns: they start
at once, but train one after the other, so that with enough processors times are as if each ran alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import pyalloc
from benchmarks import hostcuda, trained
from benchmarks.card import smi
from benchmarks.helping import HelpFormatter
from benchmarks.memory import Progress, commit
from benchmarks.workloads.record import names
from pyalloc.common.folding import clip

ALLOCATORS = ("native", "expandable", "async", "pyalloc")
#: fewer steps on a card for loops that would take long there: mixture's 900 are about a million small kernels and take
#: as long as ten other loops; in a third of them, models have already been replaced twice (steps 149 and 299)
STEPS_ON_CARD = {"mixture": 320}
#: names the file whose lock a child holds during its turn
TURNS = "PYALLOC_TRAINING_TURNS"
Row = dict[str, Any]


class Clock:
    """When each step began and the last one ended; on a card by events, so that no step waits for another."""

    def __init__(self, device: str) -> None:
        self.is_card = device == "cuda"
        self.marks: list[Any] = []
        self.began: float | None = None

    def mark(self, number: int = 0) -> None:
        """Marks the beginning of a step, or the end of the last."""
        if self.began is None:
            self.began = time.perf_counter()
        if self.is_card:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Milliseconds of each step; waits for the card."""
        if not self.is_card:
            return [round(1e3 * (end - start), 2) for start, end in pairwise(self.marks)]
        import torch

        torch.cuda.synchronize()
        return [round(start.elapsed_time(end), 2) for start, end in pairwise(self.marks)]

    def seconds(self) -> float:
        """Seconds from the first step to now."""
        return round(time.perf_counter() - (self.began or time.perf_counter()), 3)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """In a child: with --turns, waits until no other child trains."""
    with contextlib.ExitStack() as stack:
        if path := os.environ.get(TURNS):
            fcntl.flock(stack.enter_context(open(path)), fcntl.LOCK_EX)  # held until it is closed
        yield


def typical_ms(step_ms: list[float], times: int) -> float | None:
    """The median of the steps after the first; of the last half in longer runs, where memory has had time to grow."""
    later = step_ms[len(step_ms) // 2 :] if times > 1 else step_ms[1:]
    return round(statistics.median(later or step_ms), 2) if step_ms else None


def _train_here(name: str, allocator: str, device: str, most_steps: int | None, times: int) -> Row:
    """In a child: trains and counts."""
    counter = trained.counter_of(device)
    if allocator == "pyalloc":
        pyalloc.install()
    import torch

    importlib.import_module(f"benchmarks.workloads.{names()[name]}")
    from benchmarks.workloads.common import WORKLOADS, Run

    clock = Clock(device)
    torch.manual_seed(1)
    failed = ""
    try:
        with _turn():
            WORKLOADS[name].body(Run(random.Random(1), clock.mark, most_steps, times))
            clock.mark()
            step_ms = clock.step_ms()
    except torch.cuda.OutOfMemoryError as error:  # what was reserved until then still makes a row
        failed, step_ms = f"OutOfMemoryError: {str(error).splitlines()[0]}", []
    seconds = clock.seconds()
    stats = torch.cuda.memory_stats()
    tells = bool(stats.get("allocation.all.allocated"))  # false for cudaMallocAsync
    return {
        "live_bytes": torch.cuda.max_memory_allocated(),
        "peak_bytes": counter.peak_bytes(),
        "requested_bytes": stats["requested_bytes.all.peak"] if tells else None,
        "n_allocations": stats["allocation.all.allocated"] if tells else None,
        "calls": counter.n_calls() if tells else None,
        "retries": stats.get("num_alloc_retries", 0),
        "step_ms": step_ms,
        "median_ms": typical_ms(step_ms, times),
        "seconds": seconds,
        "failed": failed,
        "out_of_memory": bool(failed),
        "backend": torch.cuda.get_allocator_backend(),
        "torch": torch.__version__,
        "device": trained.device_name(device),
    }


def train(
    name: str,
    allocator: str,
    device: str = "host",
    *,
    most_steps: int | None = None,
    times: int = 1,
    limit_s: float = 120,
    turns: str | None = None,
) -> Row:
    """Trains one loop under one allocator in a process of its own; ``failed`` says why it did not complete."""
    words = ["--here", name, allocator, "--device", device]
    words += ["--steps", str(most_steps)] if most_steps is not None else []
    words += ["--times", str(times)]
    env = trained.environment(device, allocator) | ({TURNS: turns} if turns else {})
    began = time.perf_counter()
    row: Row = {"program": name, "allocator": allocator, "most_steps": most_steps, "times": times}
    try:
        return row | trained.in_child("benchmarks.training", words, env, limit_s)
    except trained.ChildError as error:
        took = round(time.perf_counter() - began, 2)
        row |= {"failed": error.reason, "out_of_memory": "OutOfMemoryError" in error.reason}
        return row | {"process_s": took, "said": error.said}


def remarks(rows: list[Row]) -> list[str]:
    """What failed, where requests differ from those under the first allocator, and where a card was full."""
    found = []
    first: dict[str, Row] = {}
    for row in rows:
        about = f"{row['program']}, {row['allocator']}"
        if row["failed"]:
            found.append(f"{about}: {clip(row['failed'], 150)}")
            continue
        if row["retries"]:
            found.append(f"{about}: the card was full {row['retries']} times")
        if row["n_allocations"] is None:
            continue
        other = first.setdefault(row["program"], row)
        for what, words in (("n_allocations", "blocks"), ("requested_bytes", "bytes at the most")):
            if row[what] != other[what]:
                asked = f"asked for {row[what]} {words}"
                found.append(f"{about}: {asked}, {other['allocator']} for {other[what]}")
    return found


def _cells(texts: list[str], width: int) -> str:
    return "".join(f"{text:>{width}}" for text in texts)


def table(rows: list[Row], allocators: list[str]) -> str:
    """The rows as text."""
    head = _cells(allocators, 11)
    lines = [
        f"{'':18}{'live MiB':>9}{'peak/live, then ms of a step: ':>33}",
        f"{'':27}{head}{head}",
    ]
    good: list[dict[str, Row]] = []
    for name in dict.fromkeys(row["program"] for row in rows):
        mine = {r["allocator"]: r for r in rows if r["program"] == name and not r["failed"]}
        live = next((f"{row['live_bytes'] / 2**20:.0f}" for row in mine.values()), "-")
        ratios = [f"{peak_live(mine[a]):.3f}" if a in mine else "-" for a in allocators]
        times = [f"{mine[a]['median_ms']:.1f}" if a in mine else "-" for a in allocators]
        lines.append(f"{name:18}{live:>9}{_cells(ratios, 11)}{_cells(times, 11)}")
        good += [mine] if len(mine) == len(allocators) else []
    if good:
        ratios = [f"{geometric_mean([peak_live(m[a]) for m in good]):.3f}" for a in allocators]
        times = [f"{geometric_mean([m[a]['median_ms'] for m in good]):.1f}" for a in allocators]
        lines.append(f"{f'mean of {len(good)}':27}{_cells(ratios, 11)}{_cells(times, 11)}")
    return "\n".join(lines)


def peak_live(row: Row) -> float:
    """Most memory reserved over most allocated."""
    return float(row["peak_bytes"] / row["live_bytes"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these loops")
    parser.add_argument(
        "--allocators",
        nargs="+",
        choices=ALLOCATORS,
        default=list(ALLOCATORS),
        metavar="NAME",
        help=f"of {', '.join(ALLOCATORS)} (all)",
    )
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    steps = "of each loop at the most (all; on a card %s)"
    fewer = ", ".join(f"{n} of {name}" for name, n in STEPS_ON_CARD.items())
    parser.add_argument("--steps", type=int, metavar="N", help=steps % fewer)
    parser.add_argument("--times", type=int, default=1, help="as many steps as the suite's (1)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--turns", action="store_true", help="they train one after the other")
    parser.add_argument("--limit-s", type=float, default=120, help="for each (default 120)")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    return parser


def _train_all(chosen: list[str], arguments: argparse.Namespace) -> list[Row]:
    device, limit_s = arguments.device, arguments.limit_s
    about = {"jobs": arguments.jobs, "turns": arguments.turns, "commit": commit()}
    about |= {"driver": smi("driver_version") or ""} if device == "cuda" else {}
    progress = Progress(len(chosen) * len(arguments.allocators), arguments.quiet)

    def one(job: tuple[str, str], turns: str | None) -> Row:
        name, allocator = job
        fewer = STEPS_ON_CARD.get(name) if device == "cuda" else None
        asked = {"most_steps": arguments.steps or fewer, "times": arguments.times}
        row = train(name, allocator, device, **asked, limit_s=limit_s, turns=turns) | about
        if arguments.json:  # in one write, because others print too
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        progress.step(f"{name}, {allocator}: {row['failed'] or f'{peak_live(row):.3f}'}")
        return row

    jobs = [(name, a) for name in chosen for a in arguments.allocators]
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(arguments.jobs) as pool:
        return list(pool.map(partial(one, turns=lock.name if arguments.turns else None), jobs))


def main() -> int:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    for option in ("steps", "times", "jobs"):
        n = getattr(arguments, option)
        if n is not None and n < 1:
            parser.error(f"--{option} {n}: at least one")
    if arguments.here:
        name, allocator = arguments.here
        steps, times = arguments.steps, arguments.times
        print(json.dumps(_train_here(name, allocator, arguments.device, steps, times)))
        sys.stdout.flush()
        os._exit(0)  # nothing is measured after this
    unknown = sorted(set(arguments.only or []) - set(names()))
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: none of {', '.join(names())}")
    why = hostcuda.why_not() if arguments.device == "host" else None
    if why:
        print(f"benchmarks.training trains with real torch: {why}", file=sys.stderr)
        return 1
    rows = _train_all(arguments.only or list(names()), arguments)
    told = remarks(rows)
    if arguments.json:
        print(*told, sep="\n", end="\n" if told else "", file=sys.stderr)
    else:
        print(table(rows, arguments.allocators), *told, sep="\n")
        ran = next((row for row in rows if "torch" in row), {})
        where = f"real torch {ran.get('torch', '?')} on {ran.get('device', arguments.device)}"
        print(f"{where}; {arguments.jobs} at once; commit {commit()}")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
