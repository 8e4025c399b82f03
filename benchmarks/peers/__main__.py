"""Memory and speed beside other libraries' allocators: RMM's pool, and any that is given as a shared library.

``python -m benchmarks.peers [--library NAME=FILE ...] [--only NAME ...] [--rounds N] [--json]``

Needs the headers that ``pip install librmm-cu12==24.12.1 nvidia-cuda-crt`` installs: RMM is compiled here.  Build other
libraries (such as GMLake) yourself.  They export two functions for torch's pluggable allocator,
``void *foreign_alloc(ssize_t, int, cudaStream_t)`` and ``void foreign_free(void *, ssize_t, int, cudaStream_t)``, and
see the caller's environment.  Each runs behind torch's allocator interface, in real torch on the host-memory CUDA
runtime.  Columns, for the recorded loops:

* peak/live: peak device bytes over peak live bytes with ample memory; RMM's pool grows from 2 MiB by its own rule;
* min/live: the smallest capacity that completes, by bisection in torch (smaller ones that complete by chance are not
  searched for; a process that dies counts as not completing, and is reported); here RMM's pool is the whole card from
  the start, which suits it best;
* ns: one allocation or free once everything is cached, without the time inside device calls (best of three turns).

Then nanoseconds for one allocation and one free in the patterns of benchmarks.speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import hostcuda
from benchmarks.helping import HelpFormatter
from benchmarks.memory import Progress, ample_bytes, commit
from benchmarks.peers import building
from benchmarks.peers.building import Peer
from benchmarks.speed import measure, patterns
from benchmarks.suite import Trace, suite
from benchmarks.torch_replay import ALLOCATORS, Died, TorchReplay
from pyalloc import _core
from pyalloc.traces.moments import PAGE

#: pairs per pattern: some libraries take a millisecond for one
PAIRS = 20_000


@dataclass(frozen=True)
class Row:
    """One loop on one allocator: bytes, and nanoseconds per operation."""

    trace: str
    allocator: str
    live_bytes: int
    peak_bytes: int
    min_bytes: int
    ns_per_op: float
    n_died: int = 0

    @property
    def peak_live(self) -> float:
        """Peak device bytes over peak live bytes."""
        return self.peak_bytes / self.live_bytes

    @property
    def min_live(self) -> float:
        """Smallest sufficient capacity over peak live bytes."""
        return self.min_bytes / self.live_bytes


def least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest capacity in whole pages that fits, by doubling steps from low on, then bisection.

    Args:
        fits: whether it completes with so many bytes.
        low: bytes, in whole pages, that do not suffice.
        high: the most to try.

    Raises:
        ValueError: high does not fit.
    """
    step = max(PAGE, low // 64 // PAGE * PAGE)
    top = min(low + step, high)
    while not fits(top):
        if top == high:
            raise ValueError(f"{high >> 20} MiB do not suffice")
        step *= 2
        low, top = top, min(top + step, high)
    while top - low > PAGE:
        middle = (low + top) // 2 // PAGE * PAGE
        low, top = (low, middle) if fits(middle) else (middle, top)
    return top


def row_of(trace: Trace, path: Path, name: str, ample: TorchReplay, short: TorchReplay) -> Row:
    """Replays with ample memory, then for the smallest capacity."""
    info = _core.Program(path).info()
    live = info["peak_live_bytes"]
    whole = ample.replay(path, ample_bytes(live), turns=3)

    n_died = 0

    def fits(capacity: int) -> bool:
        nonlocal n_died
        try:
            return bool(short.replay(path, capacity)["completed"])
        except Died:
            n_died += 1
            return False

    smallest = least(fits, live // PAGE * PAGE - PAGE, ample_bytes(live))
    ns = whole["warm_ns_per_op"]
    return Row(trace.name, name, live, whole["peak_bytes"], smallest, ns, n_died)


def table(rows: list[Row], names: list[str]) -> str:
    """The loops, one per line, and geometric means."""
    lines = [f"{'':18}" + "".join(f"{name:>22}" for name in names)]
    lines.append(f"{'':18}" + f"{'peak':>9}{'min':>6}{'ns':>7}" * len(names))

    def cell(part: list[Row]) -> str:
        peak, least, ns = (
            geometric_mean([getattr(row, name) for row in part])
            for name in ("peak_live", "min_live", "ns_per_op")
        )
        return f"{peak:9.3f}{least:6.3f}{ns:7.0f}"

    for trace in dict.fromkeys(row.trace for row in rows):
        mine = {row.allocator: row for row in rows if row.trace == trace}
        lines.append(f"{trace:18}" + "".join(cell([mine[name]]) for name in names))
    means = [cell([row for row in rows if row.allocator == name]) for name in names]
    lines.append(f"{'geometric mean':18}" + "".join(means))
    for row in rows:
        if row.n_died:
            lines.append(
                f"{row.trace}, {row.allocator}: {row.n_died} of the smaller capacities ended the process"
            )
    return "\n".join(lines)


def speed_table(results: list[dict[str, Any]], names: list[str]) -> str:
    """The patterns, one per line; the ratio is the fastest other allocator's nanoseconds over pyalloc's."""
    head = "".join(f"{name:>11}" for name in names)
    lines = [f"{'ns for one allocate + free':40}{head}{'spread':>12}{'ratio':>8}"]
    for pattern in dict.fromkeys(result["pattern"] for result in results):
        part = {r["allocator"]: r for r in results if r["pattern"] == pattern}
        ours = part["pyalloc"]
        fastest = min(part[name]["ns"] for name in names if name != "pyalloc")
        spread = f"{ours['fastest_ns']:.0f}..{ours['slowest_ns']:.0f}"
        numbers = "".join(f"{part[name]['ns']:11.0f}" for name in names)
        lines.append(f"{pattern:40}{numbers}{spread:>12}{fastest / ours['ns']:7.1f}x")
    return "\n".join(lines)


def _named(text: str) -> Peer:
    """Argument type: NAME=FILE."""
    name, _, file = text.partition("=")
    if not name or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with a shared library")
    return Peer(name, Path(file).resolve())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--library",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=FILE",
        help="compare with this shared library too (may be given again).  One that maps much needs the kernel's limit "
        "raised first: sysctl vm.max_map_count=1048576",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these loops of the suite")
    parser.add_argument("--rounds", type=int, default=3, help="of each pattern (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def main() -> int:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    why = hostcuda.why_not() or building.why_not()
    if why:
        print(f"benchmarks.peers: {why}", file=sys.stderr)
        return 1
    try:
        chosen = [trace for trace in suite(arguments.only) if trace.kind != "generated"]
    except ValueError as error:
        parser.error(str(error))
    peers = [Peer(name, Path(name)) for name in ALLOCATORS]
    peers.append(building.rmm())
    peers += arguments.library
    names = [peer.name for peer in peers]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def serve(peer: Peer, environment: dict[str, str]) -> TorchReplay:
            server = TorchReplay(str(peer.library), environment=environment)
            return stack.enter_context(server)

        ample = {peer.name: serve(peer, peer.environment) for peer in peers}
        short = {
            peer.name: serve(peer, {**peer.environment, **peer.short_environment})
            for peer in peers
            if peer.short_environment
        }
        asked = [replace(p, ask=replace(p.ask, n=PAIRS)) for p in patterns(scaling=False)]
        results = measure(asked, ample, arguments.rounds, arguments.quiet)
        progress = Progress(len(chosen) * len(names), arguments.quiet)
        rows = []
        for trace in chosen:
            path = trace.write(folder)
            for name in names:
                rows.append(row_of(trace, path, name, ample[name], short.get(name, ample[name])))
                progress.step(f"{trace.name}, {name}")
        about = {"torch": ample["pyalloc"].torch, "rmm": building.RMM_VERSION, "commit": commit()}
    if arguments.json:
        for result in [*map(asdict, rows), *results]:
            print(json.dumps({**result, **about}))
        return 0
    print(table(rows, names))
    print()
    print(speed_table(results, names))
    print(
        f"torch {about['torch']} on the host-memory runtime, RMM {about['rmm']}; "
        f"{arguments.rounds} rounds with seeds 1..{arguments.rounds}; commit {about['commit']}"
    )
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except RuntimeError as error:
        raise SystemExit(f"benchmarks.peers: {error}") from None
