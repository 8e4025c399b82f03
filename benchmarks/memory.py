"""Device memory and device calls of native, expandable segments and pyalloc on the same traces.

``python -m benchmarks.memory [TRACE ...] [--only NAME ...] [--json] [--quick]``

Every trace is replayed through real torch's own c10 interface on the host-memory CUDA runtime, once per allocator with
ample memory and then at the capacities around the smallest that suffices.  Columns:

* peak/live: peak device bytes over peak live bytes (requests rounded to 512) with ample memory;
* min/live: the smallest capacity that completes over peak live bytes.  Found by bisection on the simulated device, then
  tried in torch together with the next smaller sizes until 32 in a row fail; the failing ones above the smallest that
  completes are reported as holes;
* calls: device calls that take, map, free or wait, in the whole run / in its second half, as the runtime counted them
  (the models count one for each 2 MiB page created or mapped);
* ms: device time by the policy models (csrc/device/sim_cost.h), [low, high] at both ends of the costs' ranges; after
  the geometric means, the same over native's;
* ns/op: torch's raw_alloc and raw_delete through the interface, once everything is cached (best of three turns);
  after a plus, the time inside device calls that were still made, which are system calls here.

For a snapshot of torch's own allocator, from a card or not, the table shows the memory that was reserved then, "as
recorded", and below it how close native comes to that here.

Without torch, everything except torch's own speed comes from the policy models, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from statistics import geometric_mean

from benchmarks import hostcuda, limits, settling
from benchmarks.compared import SAME_BYTES, SAME_SHARE
from benchmarks.helping import HelpFormatter
from benchmarks.suite import Trace, suite
from benchmarks.torch_replay import ALLOCATORS, ROOT, TorchReplay
from pyalloc import _core
from pyalloc.common.folding import clip
from pyalloc.errors import PyallocError
from pyalloc.trace import as_trace_file
from pyalloc.traces.caveats import STATE_ONLY, UNMODELLED, is_from_torch, notes_of
from pyalloc.traces.moments import PAGE

NEIGHBOURS = 32
#: what "ample" is in csrc/replay/replay.c
AMPLE_MIN, AMPLE_FACTOR = 80 << 30, 4
#: a row is marked if model and torch differ by more than this
TOLERANCE = 0.01
#: notes of recordings whose allocator was not native with its defaults
UNLIKE = {"expandable_segments", *UNMODELLED}


@dataclass
class Row:
    """One trace on one allocator.  Bytes, nanoseconds; None where it was not measured."""

    trace: str
    kind: str
    allocator: str
    ops: int
    live_bytes: int
    device_live_bytes: int
    peak_bytes: int
    model_peak_bytes: int
    min_bytes: int
    holes: list[int]
    calls: int
    calls_second_half: int
    device_ns: dict[str, int]
    recorded_bytes: int | None = None
    ns_per_op: float | None = None
    device_ns_per_op: float | None = None
    source: str = "torch"
    seed: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def peak_live(self) -> float:
        """Peak device bytes over peak live bytes."""
        return self.peak_bytes / self.live_bytes

    @property
    def min_live(self) -> float:
        """Smallest sufficient capacity over peak live bytes of the device that needs most."""
        return self.min_bytes / self.device_live_bytes


class Progress:
    """Lines on standard error: what is done, and how long the rest will take."""

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.done, self.quiet = total, 0, quiet
        self.began = time.monotonic()

    def step(self, text: str) -> None:
        """Reports that one more is done."""
        self.done += 1
        took = time.monotonic() - self.began
        left = took / self.done * (self.total - self.done)
        if not self.quiet:
            print(
                f"[{self.done}/{self.total}, about {left:.0f} s left] {text}",
                file=sys.stderr,
                flush=True,
            )


class Servers:
    """Replay processes, a few for each allocator, lent out to threads."""

    def __init__(self, allocators: list[str], each: int, stack: ExitStack, conf: str) -> None:
        self.idle: dict[str, Queue[TorchReplay]] = {name: Queue() for name in allocators}
        self.torch = ""
        for name in allocators:
            for _ in range(each):
                server = stack.enter_context(TorchReplay(name, conf))
                self.torch = server.torch
                self.idle[name].put(server)

    @contextmanager
    def lend(self, allocator: str) -> Iterator[TorchReplay]:
        """A server for exclusive use."""
        server = self.idle[allocator].get()
        try:
            yield server
        finally:
            self.idle[allocator].put(server)


def recorded(path: Path) -> int | None:
    """The peak reserved bytes when it was recorded, on torch's allocator with its defaults; None: not known."""
    scan = _core.Scan(path, n_bins=2)
    notes = notes_of(scan.notes())
    if not is_from_torch(notes) or notes.get("history") in STATE_ONLY or UNLIKE & notes.keys():
        return None
    return int(scan.totals()["peak_reserved_bytes"]) or None


def model_row(trace: Trace, path: Path, allocator: str, conf: str) -> Row:
    """The row according to the policy models."""
    program = _core.Program(path)
    options = conf if allocator == "pyalloc" else ""
    runs = {
        cost: program.replay(allocator, cost=cost, options=options)
        for cost in ("typical", "low", "high")
    }
    ample = runs["typical"]
    least = program.find_min(allocator, options=options)
    assert ample["completed"] and least is not None, (
        f"{trace.name} does not complete with ample memory"
    )
    info = program.info()
    return Row(
        trace=trace.name,
        kind=trace.kind,
        allocator=allocator,
        ops=info["n_ops"],
        live_bytes=info["peak_live_bytes"],
        device_live_bytes=info["device_live_bytes"],
        peak_bytes=ample["peak_bytes"],
        model_peak_bytes=ample["peak_bytes"],
        min_bytes=least["bytes"],
        holes=least["holes"],
        calls=ample["n_calls"],
        calls_second_half=ample["n_calls_second_half"],
        device_ns={cost: run["device_ns"] for cost, run in runs.items()},
        source="model",
        recorded_bytes=recorded(path) if trace.kind == "file" else None,
    )


def ample_bytes(live: int) -> int:
    """The capacity that counts as ample."""
    return max(AMPLE_MIN, -(-live // PAGE) * PAGE * AMPLE_FACTOR)


def torch_least(row: Row, path: Path, server: TorchReplay) -> None:
    """Tries the model's smallest capacity and its neighbours in torch; corrects the row."""

    def fits(capacity: int) -> bool:
        return bool(server.replay(path, capacity)["completed"])

    start = row.min_bytes
    while not fits(start):
        start += PAGE
    if start != row.min_bytes:
        row.notes.append(f"torch needs {(start - row.min_bytes) // PAGE} pages more than the model")
    floor = -(-row.device_live_bytes // PAGE) * PAGE
    tried = {start: True}
    row.min_bytes = capacity = start
    while (capacity := capacity - PAGE) >= max(floor, row.min_bytes - NEIGHBOURS * PAGE):
        tried[capacity] = fits(capacity)
        if tried[capacity]:
            row.min_bytes = capacity
    above = [hole for hole in row.holes if hole > start]
    row.holes = sorted(
        {*above, *(c for c, good in tried.items() if not good and c > row.min_bytes)}
    )


def measure(
    trace: Trace, path: Path, allocator: str, servers: Servers | None, quick: bool, conf: str
) -> Row:
    """A row without its time."""
    row = model_row(trace, path, allocator, conf)
    if servers is None:
        return row
    with servers.lend(allocator) as server:
        ample = server.replay(path, ample_bytes(row.live_bytes))
        row.source, row.peak_bytes = "torch", ample["peak_bytes"]
        row.calls, row.calls_second_half = ample["calls"], ample["calls_second_half"]
        if abs(row.model_peak_bytes / row.peak_bytes - 1) > TOLERANCE:
            row.notes.append(f"the model says {row.model_peak_bytes / row.live_bytes:.3f}")
        if not quick:
            torch_least(row, path, server)
    return row


def time_beside(rows: list[Row], allocator: str) -> str:
    """Geometric means of modelled device time over native's: at typical, low and high costs."""
    native = {row.trace: row.device_ns for row in rows if row.allocator == "native"}
    mine = [row for row in rows if row.allocator == allocator and row.trace in native]
    if allocator == "native" or not mine:
        return ""
    typical, low, high = (
        geometric_mean(
            [max(1, row.device_ns[cost]) / max(1, native[row.trace][cost]) for row in mine]
        )
        for cost in ("typical", "low", "high")
    )
    return f"{'x native ms':>17}{typical:7.2f} [{low:.2f}, {high:.2f}]"


def table(rows: list[Row], allocators: list[str]) -> str:
    """The comparison as text, part by part, each with its geometric means."""
    lines: list[str] = []
    for kind in ("recorded", "held-out", "generated", "file"):
        part = [row for row in rows if row.kind == kind]
        if not part:
            continue
        head = f"{kind + ' traces':34}{'peak/live':>10}{'min/live':>9}{'calls':>8}{'2nd half':>9}"
        lines += [*([""] if lines else []), f"{head}{'ms':>7} {'[low, high]':14}{'ns/op':>6}"]
        for name in dict.fromkeys(row.trace for row in part):
            mine = [row for row in part if row.trace == name]
            about = [name, f"  {mine[0].ops} ops", f"  {mine[0].live_bytes / 2**20:.0f} MiB live"]
            for row, text in zip(mine, [*about, *[""] * len(mine)], strict=False):
                low, typical, high = (
                    row.device_ns[cost] / 1e6 for cost in ("low", "typical", "high")
                )
                ns = f"{row.ns_per_op:6.0f}" if row.ns_per_op else "     -"
                ns += f" + {row.device_ns_per_op:.0f}" if row.device_ns_per_op else ""
                lines.append(
                    f"{clip(text, 21):22}{row.allocator:12}{row.peak_live:10.3f}{row.min_live:9.3f}{row.calls:8}"
                    f"{row.calls_second_half:9}{typical:7.0f} {f'[{low:.0f}, {high:.0f}]':14}{ns}"
                )
            if mine[0].recorded_bytes:
                ratio = mine[0].recorded_bytes / mine[0].live_bytes
                lines.append(f"{'':22}{'as recorded':12}{ratio:10.3f}")
        for text, allocator in zip(["geometric mean", "", ""], allocators, strict=False):
            mine = [row for row in part if row.allocator == allocator]
            peak, least = (
                geometric_mean([getattr(row, what) for row in mine])
                for what in ("peak_live", "min_live")
            )
            lines.append(
                f"{text:22}{allocator:12}{peak:10.3f}{least:9.3f}{time_beside(part, allocator)}"
            )
        lines += beside_recorded(part)
    notes = [f"{row.trace}, {row.allocator}: {note}" for row in rows for note in row.notes]
    holes = [
        f"{row.trace}, {row.allocator}: fails at {len(row.holes)} sizes above its smallest, up to "
        f"{row.holes[-1] / row.device_live_bytes:.3f}"
        for row in rows
        if row.holes
    ]
    return "\n".join([*lines, "", *holes, *notes]).strip("\n")


def beside_recorded(rows: list[Row]) -> list[str]:
    """Native's peak here over its peak when the traces were recorded."""
    ratios = [
        row.peak_bytes / row.recorded_bytes
        for row in rows
        if row.allocator == "native" and row.recorded_bytes
    ]
    if not ratios:
        return []
    same = sum(ratio == 1 for ratio in ratios)
    return [
        f"native here over as recorded: geometric mean {geometric_mean(ratios):.4f}, {min(ratios):.4f} to "
        f"{max(ratios):.4f}; the same bytes in {same} of {len(ratios)}"
    ]


def verdicts(rows: list[Row]) -> list[str]:
    """Traces on which pyalloc needs more than another allocator, by more than 0.005 of live and two pages."""
    found = []
    mine = {row.trace: row for row in rows if row.allocator == "pyalloc"}
    for row in rows:
        if row.allocator == "pyalloc" or row.trace not in mine:
            continue
        margin = max(SAME_SHARE, SAME_BYTES / row.live_bytes)
        for what in ("peak_live", "min_live"):
            ours, theirs = getattr(mine[row.trace], what), getattr(row, what)
            if ours > theirs + margin:
                found.append(f"{row.trace}: {what} {ours:.3f}, {row.allocator} {theirs:.3f}")
    return found


def measure_all(
    traces: list[tuple[Trace, Path]],
    allocators: list[str],
    servers: Servers | None,
    arguments: argparse.Namespace,
) -> list[Row]:
    """Rows of all traces: first memory, in parallel; then time, one at a time."""
    progress = Progress(len(traces) * len(allocators), arguments.quiet)

    def one(job: tuple[Trace, Path, str]) -> Row:
        row = measure(*job, servers, arguments.quick, arguments.conf)
        progress.step(f"{row.trace}, {row.allocator}: {row.peak_live:.3f} {row.min_live:.3f}")
        return row

    jobs = [(trace, path, allocator) for trace, path in traces for allocator in allocators]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(one, jobs))
    if servers is not None:
        paths = {trace.name: path for trace, path in traces}
        for row in rows:
            with servers.lend(row.allocator) as server:
                answer = server.replay(paths[row.trace], ample_bytes(row.live_bytes), turns=3)
                row.ns_per_op = answer.get("warm_ns_per_op")
                row.device_ns_per_op = answer.get("warm_device_ns_per_op")
    return rows


def commit() -> str:
    """The commit this ran at, with + if files differ from it; "" outside a repository.

    PYALLOC_COMMIT names it for a copy without .git, as on a borrowed machine.
    """
    if told := os.environ.get("PYALLOC_COMMIT"):
        return told
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="trace files or torch snapshots to compare on",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these traces of the suite")
    parser.add_argument(
        "--allocators",
        nargs="+",
        choices=ALLOCATORS,
        default=list(ALLOCATORS),
        metavar="NAME",
        help=", ".join(ALLOCATORS),
    )
    parser.add_argument(
        "--conf", default="", help="settings of pyalloc, as in PYALLOC_CONF (memory:tight,...)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON line for each row instead of the table"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="do not try the capacities around the smallest in torch",
    )
    parser.add_argument(
        "--limits",
        action="store_true",
        help="calls and time at capacities near what each trace needs (benchmarks/limits.py)",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=1,
        metavar="N",
        help="what N passes in one process settle to (benchmarks/settling.py)",
    )
    parser.add_argument("--no-torch", action="store_true", help="policy models only")
    parser.add_argument("--jobs", type=int, default=2, help="replays at the same time (default 2)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    return parser


def _tell(
    rows: list[Row], arguments: argparse.Namespace, torch: str | None, why: str | None
) -> None:
    """Prints the rows; torch: the version that replayed them; why: the reason if none did."""
    about = {"torch": torch, "commit": commit()}
    if arguments.json:
        for row in rows:
            ratios = {"peak_live": row.peak_live, "min_live": row.min_live}
            print(json.dumps({**asdict(row), **ratios, **about}))
        return
    print(table(rows, arguments.allocators))
    for line in verdicts(rows):
        print(f"above: {line}")
    where = (
        f"real torch {torch} on the host-memory runtime"
        if why is None
        else f"policy models only ({why})"
    )
    print(f"{where}; commit {about['commit']}; {len(rows)} rows")


def main() -> int:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    why = "asked not to" if arguments.no_torch else hostcuda.why_not()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            chosen = [] if arguments.files and not arguments.only else suite(arguments.only)
        except ValueError as error:
            parser.error(str(error))
        traces = [(trace, trace.write(folder)) for trace in chosen]
        for path in arguments.files:
            traces.append(
                (Trace(path.name.split(".")[0], "file"), stack.enter_context(as_trace_file(path)))
            )
        named = [(trace.name, path) for trace, path in traces]
        if arguments.limits:
            return limits.run(named, arguments.allocators, arguments, {"commit": commit()})
        if arguments.passes > 1:
            return settling.run(
                named,
                arguments.allocators,
                arguments.conf,
                arguments.passes,
                as_json=arguments.json,
                quiet=arguments.quiet,
                commit=commit(),
            )
        servers = (
            None if why else Servers(arguments.allocators, arguments.jobs, stack, arguments.conf)
        )
        rows = measure_all(traces, arguments.allocators, servers, arguments)
    _tell(rows, arguments, servers.torch if servers else None, why)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PyallocError as error:
        raise SystemExit(f"benchmarks.memory: {error}") from None
