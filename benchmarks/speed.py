"""What a request costs: torch's native allocator, expandable segments and pyalloc, as torch sees them.

``python -m benchmarks.speed [--json] [--rounds N] [--only PATTERN ...] [--loops] [--scaling [--plot FILE]]``

Through c10's own interface on the host-memory CUDA runtime: raw_alloc + raw_delete ("raw"), or allocate + the DataPtr's
deleter ("DataPtr").  A number is nanoseconds for one allocation and one free together, the median of batches of
200 pairs; p99 is of those batches.  In every round each pattern runs in a fresh process for each allocator, and these
take turns of 1 to 100 ms, so that what disturbs a shared machine disturbs all of them.  The table shows the median
turn, and the median of native's turns over the adjacent ones of pyalloc, with its quartiles.  After it comes what
pyalloc takes through torch's wrapper for foreign allocators, as if torch's own methods were not found
(PYALLOC_FAST_PATH=0).  Then the other costs of a process: its start, and host memory (benchmarks/costs.py).  The
tests (tests/benchmarks) check the answers on the traces; here the blocks of each pattern are only counted.

--loops: also the recorded loops: nanoseconds per operation in the allocator itself, once everything is cached (after a
first pass; a turn has as many passes as make 50,000 operations).  The time inside device calls, which are system calls
on the host-memory runtime, is shown separately for all three, with the number of calls per pass.
--scaling: 10^2 to 10^6 live blocks, with the 99.999th percentile of single pairs in processor time, and that of as many
equally long steps without an allocator: what interrupts and other processes add to any of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import costs, hostcuda, plots
from benchmarks.helping import HelpFormatter
from benchmarks.memory import ample_bytes, commit
from benchmarks.suite import Trace, suite
from benchmarks.torch_replay import (
    ALLOCATORS,
    THROUGH_WRAPPER,
    ReplayRequest,
    SpeedRequest,
    TorchReplay,
    in_turns,
)
from pyalloc import _core

KIB, MIB = 1 << 10, 1 << 20
#: turns per round
TURNS = 10
#: pyalloc as a pluggable allocator, without taking over methods of torch
WRAPPED = "pyalloc, wrapped"


@dataclass(frozen=True)
class Pattern:
    """One row: the request to :meth:`TorchReplay.speed`, and the ratio to native that it should reach."""

    name: str
    ask: SpeedRequest
    target: float | None = None
    wrapped: bool = True  # through torch's wrapper as well


def patterns(scaling: bool) -> list[Pattern]:
    """The rows of the table."""
    base = [
        ("one size, 512 B", SpeedRequest(1, 512, equal=True), 4.0),
        (
            "64 live, one size, last first",
            SpeedRequest(64, 4 * KIB, equal=True, lifo=True),
            None,
        ),
        ("1000 live, random to 1 MiB", SpeedRequest(1000, MIB), 7.0),
        ("300 live, random to 32 MiB", SpeedRequest(300, 32 * MIB), 6.0),
    ]
    rows = [
        Pattern(
            f"{name}, {'DataPtr' if data_ptr else 'raw'}", replace(ask, data_ptr=data_ptr), target
        )
        for name, ask, target in base
        for data_ptr in (False, True)
    ]
    for threads in (2, 16):
        ask = SpeedRequest(100, MIB, threads=threads)
        rows.append(Pattern(f"{threads} threads, 100 live each", ask, 1.0))
    for power in range(2, 7) if scaling else ():
        ask = SpeedRequest(10**power, 4 * KIB, n=max(200_000, 2 * 10**power), tail=True)
        rows.append(Pattern(f"10^{power} live, random to 4 KiB", ask, wrapped=False))
    return rows


def in_rounds(
    servers: dict[str, TorchReplay], requests: list[SpeedRequest] | list[ReplayRequest]
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each allocator, a round for each request."""
    rounds = [in_turns(servers, request) for request in requests]
    return {name: [answers[name] for answers in rounds] for name in servers}


def figures(ns: Sequence[float], native_ns: Sequence[float]) -> dict[str, Any]:
    """The median, fastest and slowest turn, and the ratios of native's turns to them, turn by turn."""
    ratios = [theirs / own for theirs, own in zip(native_ns, ns, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ns": statistics.median(ns),
        "fastest_ns": min(ns),
        "slowest_ns": max(ns),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def measure(
    rows: list[Pattern], servers: dict[str, TorchReplay], rounds: int, quiet: bool
) -> list[dict[str, Any]]:
    """One result for each pattern and allocator."""
    results = []
    for pattern in rows:
        asked = {name: one for name, one in servers.items() if pattern.wrapped or name != WRAPPED}
        requests = [replace(pattern.ask, turns=TURNS, seed=n + 1) for n in range(rounds)]
        answers = in_rounds(asked, requests)
        turns = {
            name: [ns for answer in mine for ns in answer["turn_ns"]]
            for name, mine in answers.items()
        }
        for name, all_rounds in answers.items():

            def middle(key: str, of: list[dict[str, Any]] = all_rounds) -> float:
                return float(statistics.median(answer[key] for answer in of))

            results.append(
                {
                    "pattern": pattern.name,
                    "allocator": name,
                    **figures(turns[name], turns["native"]),
                    "p99_ns": middle("p99_ns"),
                    "p99999_ns": middle("worst_ns") or None,
                    "machine_p99999_ns": middle("machine_ns") or None,
                    "least_share": middle("least_share") or None,
                    "n": all_rounds[0]["n"],
                    "rounds": rounds,
                    "target": pattern.target,
                }
            )
        if not quiet:
            print(f"{pattern.name}: done", file=sys.stderr, flush=True)
    return results


def measure_loops(
    traces: list[Trace], servers: dict[str, TorchReplay], rounds: int, folder: Path, quiet: bool
) -> list[dict[str, Any]]:
    """Nanoseconds per operation of the recorded loops once everything is cached, and the remaining device calls."""
    results = []
    asked = {name: servers[name] for name in ALLOCATORS}
    for trace in traces:
        path = trace.write(folder)
        capacity = ample_bytes(_core.Program(path).info()["peak_live_bytes"])
        answers = in_rounds(asked, [ReplayRequest(str(path), capacity, TURNS)] * rounds)
        # each turn: nanoseconds outside of device calls, inside, calls of a pass
        turns = {
            name: [t for answer in mine for t in answer["turns"]] for name, mine in answers.items()
        }
        for name, mine in turns.items():
            outside, inside, calls = zip(*mine, strict=True)
            results.append(
                {
                    "pattern": _loop(trace),
                    "allocator": name,
                    **figures(outside, [ns for ns, _, _ in turns["native"]]),
                    "device_calls": int(statistics.median(calls)),
                    "device_ns": statistics.median(inside),
                    "n": answers[name][0]["ops"],
                    "rounds": rounds,
                    "target": 3.0,
                }
            )
        if not quiet:
            print(f"{_loop(trace)}: done", file=sys.stderr, flush=True)
    return results


def _loop(trace: Trace) -> str:
    return f"loop {trace.name}"


def table(results: list[dict[str, Any]]) -> str:
    """The results as text."""
    head = f"{'native':>8}{'expand.':>8}{'pyalloc':>8}{'p99':>6}{'ratio':>7}{'quartiles':>12}"
    lines = [f"{'ns for one allocate + free':36}{head}"]
    ratios = []
    for name in dict.fromkeys(result["pattern"] for result in results):
        part = {result["allocator"]: result for result in results if result["pattern"] == name}
        ours = part["pyalloc"]
        ratio = ours["ratio"]
        ratios.append(ratio)
        low, high = ours["ratio_quartiles"]
        p99 = f"{ours['p99_ns']:.0f}" if ours.get("p99_ns") else "-"
        line = (
            f"{name:36}"
            + "".join(f"{part[a]['ns']:8.0f}" for a in ALLOCATORS)
            + f"{p99:>6}{ratio:6.1f}x{f'{low:.1f}..{high:.1f}':>12}"
        )
        if ours["target"] is not None:
            line += f" (want {ours['target']:.0f})" if ratio < ours["target"] else ""
        if WRAPPED in part:
            line += f"  wrapped {part[WRAPPED]['ns']:.0f}"
        if ours.get("least_share"):
            line += f"  slowest thread did {ours['least_share']:.0%} of the mean"
        if ours.get("p99999_ns"):
            slowest = [ours["p99999_ns"], part["native"]["p99999_ns"], ours["machine_p99999_ns"]]
            us, native_us, machine_us = (f"{ns / 1000:.1f}" for ns in slowest)
            line += f"  99.999%: {us} us (native {native_us}, no allocator {machine_us})"
        if any(part[a].get("device_calls") for a in ALLOCATORS):
            inside = ", ".join(f"{part[a]['device_ns']:.0f}" for a in ALLOCATORS)
            calls = ", ".join(str(part[a]["device_calls"]) for a in ALLOCATORS)
            line += f"  device calls: {calls}; ns in them: {inside}"
        lines.append(line)
    lines.append(f"{'geometric mean of the ratios':36}{geometric_mean(ratios):42.1f}x")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Nanoseconds and the 99.999th percentile against the number of live blocks."""
    scaling = [result for result in results if result["pattern"].startswith("10^")]
    figure, panels = plots.subplots(2)
    for panel, key, title in (
        (panels[0], "ns", "median, ns for one allocate + free"),
        (panels[1], "p99999_ns", "99.999th percentile, ns of processor time"),
    ):
        for allocator in ALLOCATORS:
            mine = [result for result in scaling if result["allocator"] == allocator]
            live = [10 ** int(result["pattern"][len("10^") :].split()[0]) for result in mine]
            panel.plot(live, [result[key] for result in mine], "o-", label=allocator)
        panel.set(xscale="log", yscale="log", xlabel="live blocks, random to 4 KiB")
        panel.set_title(title, fontsize=10)
    panels[0].legend()
    plots.save(figure, path)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="patterns, and loops, whose name contains one of these",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scaling", action="store_true")
    plots.option(parser, "with --scaling: an SVG")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    parser.add_argument("-q", "--quiet", action="store_true")
    arguments = parser.parse_args()
    why = hostcuda.why_not()
    if why:
        print(f"benchmarks.speed compares inside real torch: {why}", file=sys.stderr)
        return 1

    def is_wanted(name: str) -> bool:
        return not arguments.only or any(text in name for text in arguments.only)

    rows = [row for row in patterns(arguments.scaling) if is_wanted(row.name)]
    loops = [
        trace
        for trace in (suite() if arguments.loops else [])
        if trace.kind != "generated" and is_wanted(_loop(trace))
    ]
    if not rows and not loops:
        names = " or ".join(repr(text) for text in arguments.only)
        parser.error(f"no pattern has {names} in its name; the loops are --loops")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: stack.enter_context(TorchReplay(name)) for name in ALLOCATORS}
        servers[WRAPPED] = stack.enter_context(TorchReplay("pyalloc", environment=THROUGH_WRAPPER))
        results = measure(rows, servers, arguments.rounds, arguments.quiet)
        results += measure_loops(loops, servers, min(3, arguments.rounds), folder, arguments.quiet)
        begun = costs.start(arguments.rounds) if not arguments.only else None
        memory = costs.host_memory() if not arguments.only else []
        about = {"torch": servers["native"].torch, "commit": commit()}
    if arguments.json:
        besides = [{"pattern": "start", **asdict(begun)}] if begun is not None else []
        besides += [{"pattern": "host memory", **asdict(row)} for row in memory]
        for result in (*results, *besides):
            print(json.dumps({**result, **about}))
    else:
        print(table(results))
        if begun is not None:
            print("\n".join(costs.lines(begun, memory)))
        n = sorted({result["n"] for result in results if "threads" not in result["pattern"]})
        pairs = f"n {n[0]}..{n[-1]}, " if n else ""
        print(
            f"torch {about['torch']} on the host-memory runtime; {pairs}{arguments.rounds} rounds with "
            f"seeds 1..{arguments.rounds}, {TURNS} turns in each; commit {about['commit']}"
        )
    if arguments.plot is not None:
        plot(results, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
