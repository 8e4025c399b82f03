"""Measures times in turns, checks answers against float64, prints rows."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.card import smi
from benchmarks.memory import commit
from pyalloc import ops

# fp32 operations per clock of a multiprocessor: by multiply-adds, or a third of dense TF32 if that is more
FLOP_PER_CLOCK = {
    (7, 5): 128,
    (8, 0): 1024 / 3,
    (8, 6): 256,
    (8, 9): 256,
    (9, 0): 2048 / 3,
    (10, 0): 4096 / 3,
    (12, 0): 256,
}
Run = Callable[[], Any]


@dataclass
class Bench:
    """Settings of one run, and what it printed."""

    device: str
    rounds: int
    compile: bool
    seed: int
    path: Path | None = None  # a file that gets all rows so far after each
    rows: list[dict[str, Any]] = field(default_factory=list)
    copied_bytes_per_ms: float | None = None

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Run) -> float:
        self.sync()
        begin = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - begin

    def times(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Milliseconds of each, in turns, so that a busy machine slows down all alike."""
        if self.device == "cuda":
            return self.device_times(runs)
        for run in runs.values():
            for _ in range(2):
                run()
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                taken[name].append(1e3 * self.seconds(run))
        return taken

    def device_times(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Milliseconds on the device alone: many replays of a graph of one call between two events."""
        steps = {name: captured(run) for name, run in runs.items()}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")

        def replayed(step: Run, count: int) -> float:
            begin.record()
            for _ in range(count):
                step()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / count

        counts = {k: max(1, int(5 / max(replayed(step, 3), 1e-3))) for k, step in steps.items()}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, step in steps.items():
                taken[name].append(replayed(step, counts[name]))
        return taken

    def floor_ms(self, n_bytes: float, n_flop: float) -> float | None:
        """The time to move so many bytes or to do so much fp32 arithmetic, whichever is larger.

        Bytes: at the rate of a large copy, measured here, by the driver or a kernel, whichever is faster.  Arithmetic:
        at the card's clock, by fp32 multiply-adds or three TF32 products, whichever is faster.  None if the card is not
        in the table.
        """
        per_clock = FLOP_PER_CLOCK.get(torch.cuda.get_device_capability())
        clock = smi("clocks.max.sm")
        if per_clock is None or clock is None:
            return None
        if self.copied_bytes_per_ms is None:
            source = torch.empty(1 << 28, device="cuda")
            target = torch.empty_like(source)
            copies = {
                "driver": lambda: target.copy_(source),
                "kernel": lambda: torch.neg(source, out=target),
            }
            taken = self.device_times(copies).values()
            self.copied_bytes_per_ms = 2 * source.nbytes / min(map(statistics.median, taken))
        n_units = torch.cuda.get_device_properties().multi_processor_count
        flop_per_ms = n_units * per_clock * float(clock.split()[0]) * 1e3
        least: float = max(n_bytes / self.copied_bytes_per_ms, n_flop / flop_per_ms)
        return least

    def compare(
        self,
        name: str,
        ours: Run,
        peers: dict[str, Run],
        *,
        target: float | None,
        floor_ms: float | None = None,
        **extra: Any,
    ) -> float | None:
        failed = {key: why for key, run in peers.items() if (why := failure(run)) is not None}
        if failed:
            extra["failed_peers"] = failed
            peers = {key: run for key, run in peers.items() if key not in failed}
        taken = self.times({"ours": ours, **peers})
        medians = {key: statistics.median(values) for key, values in taken.items()}
        best = min(peers, key=lambda key: medians[key], default=None)
        ratio = None if best is None else medians[best] / medians["ours"]
        self.row(
            name,
            ratio=None if ratio is None else round(ratio, 3),
            target=target,
            met=None if target is None or ratio is None else ratio >= target,
            ours_ms=summary(taken["ours"]),
            peers_ms={key: summary(taken[key]) for key in peers},
            fastest_peer=best,
            **({} if self.device == "cuda" else self.one_thread(ours, peers)),
            **over_floor(medians["ours"], floor_ms),
            **extra,
        )
        return ratio

    def one_thread(self, ours: Run, peers: dict[str, Run]) -> dict[str, Any]:
        """Like compare(), by processor time of one thread, which other work on the machine hardly changes."""
        least = least_seconds({"ours": ours, **peers}, rounds=5, seconds=0.5)
        fastest = min((least[key] for key in peers), default=None)
        return {
            "one_thread_ratio": None if fastest is None else round(fastest / least["ours"], 3),
            "one_thread_ms": {key: round(1e3 * value, 3) for key, value in least.items()},
        }

    def row(self, name: str, **values: Any) -> None:
        row = {
            "benchmark": name,
            **values,
            "n": self.rounds,
            "seed": self.seed,
            "commit": commit(),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else processor(),
            **({"driver": smi("driver_version")} if self.device == "cuda" else {}),
            "threads": torch.get_num_threads(),
            "isa": ops.cpu_isa(),
            "torch": torch.__version__,
            "load": round(os.getloadavg()[0], 2),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def compiled(self, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The functions and, unless switched off, each of them through torch.compile."""
        if not self.compile:
            return functions
        return {**functions, **{f"compile({k})": torch.compile(f) for k, f in functions.items()}}


def captured(run: Run) -> Run:
    """The replay of a graph of one call, without the time of Python and launches; the call itself if not possible."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"timed with its launches: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()
        return run
    replay: Run = graph.replay
    return replay


def failure(run: Run) -> str | None:
    """Why a peer cannot run: torch's compiler is missing, or does not support this card."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def over_floor(ours_ms: float, floor_ms: float | None) -> dict[str, Any]:
    """Our time over the floor; the project's bar is 1.5."""
    if floor_ms is None:
        return {}
    ratio = ours_ms / floor_ms
    return {
        "floor_ms": round(floor_ms, 4),
        "over_floor": round(ratio, 2),
        "floor_target": 1.5,
        "floor_met": ratio <= 1.5,
    }


def least_ratio(ours: Run, peer: Run) -> float:
    """The peer's least processor time over ours."""
    least = least_seconds({"ours": ours, "peer": peer}, rounds=15, seconds=0.05)
    return least["peer"] / least["ours"]


def least_seconds(runs: dict[str, Run], *, rounds: int, seconds: float) -> dict[str, float]:
    """The least processor time of each: one thread, in turns, so that a busy machine does not matter.

    Calls of microseconds are timed many at once, because reading the clock would hide the difference.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in runs.values():
            run()
        shortest = min(processor_seconds(run, 1) for run in runs.values())
        calls = max(1, int(2e-4 / max(shortest, 1e-6)))
        least = dict.fromkeys(runs, math.inf)
        begin = time.perf_counter()
        while rounds > 0 or time.perf_counter() - begin < seconds:
            for name, run in runs.items():
                least[name] = min(least[name], processor_seconds(run, calls) / calls)
            rounds -= 1
    finally:
        torch.set_num_threads(threads)
    return least


def processor_seconds(run: Run, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        run()
    return time.process_time() - begin


def summary(taken: Sequence[float]) -> dict[str, float]:
    ordered = sorted(taken)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(p99, 3),
        "least": round(ordered[0], 3),
    }


def processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def relative(a: Tensor, b: Tensor) -> float:
    b = b.double()
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30))


def check(
    name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> float:
    """The largest error against float64; SystemExit if it exceeds both twice torch's and 1e-6."""
    worst = 0.0
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        error, bar = relative(mine, right), max(2 * relative(other, right), 1e-6)
        if not error <= bar:
            raise SystemExit(
                f"{name}: wrong answer, relative error {error:.2e} where {bar:.2e} is allowed"
            )
        worst = max(worst, error)
    return worst


def results(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def both(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Run:
    """One forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def run() -> None:
        torch.autograd.grad(function(*leaves), leaves, grad)

    return run


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return run


def checked(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shape: tuple[int, ...],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Output and gradients of ours, of the peer, and of the peer in float64."""
    grad = torch.randn(shape, dtype=torch.float64, device=inputs[0].device)
    exact = results(theirs, [x.double() for x in inputs], grad)
    return results(ours, inputs, grad), results(theirs, inputs, grad), exact
