"""What recording costs a program, for each event: pyalloc's own recording beside torch's memory history.

``python -m benchmarks.recording [--json] [--rounds N] [--pairs N]``

A Python function, 16 frames deep, allocates and frees a block over and over through torch.cuda.caching_allocator_alloc
and _delete, on the host-memory CUDA runtime: two events per pair.  The cost is the loop's time with recording minus
that without, both in one process, the median of alternating loops.  "with the file" adds the time to end the recording,
since a trace is not paid for before it is written; for torch's history it adds the time to dump a snapshot.

Before anything is timed, each way must give the right answer: all events, and 16 frames if stacks are on.  Each row is
a fresh process; rows take turns; median of the rounds, with the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import hostcuda
from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.torch_replay import ROOT

DEPTH = 16
ROWS = (  # name, allocator, who records, stacks; the most nanoseconds that it should take
    ("pyalloc, no stacks", "pyalloc", "pyalloc", "none", 1000),
    ("torch's history, no stacks", "native", "torch", "none", None),
    ("torch's history, pyalloc's file, no stacks", "native", "pyalloc", "none", None),
    ("pyalloc, 16 frames", "pyalloc", "pyalloc", "python", 5000),
    ("torch's history, 16 frames", "native", "torch", "python", None),
    ("torch's history, pyalloc's file, 16 frames", "native", "pyalloc", "python", None),
)


# ---- in the child ----


def pairs(n: int) -> float:
    """Seconds of n pairs at this depth."""
    import torch

    alloc, free = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    start = time.perf_counter()
    for _ in range(n):
        free(alloc(1 << 20))
    return time.perf_counter() - start


def deep(depth: int, n: int) -> float:
    """pairs(), `depth` calls further down."""
    return pairs(n) if depth == 0 else deep(depth - 1, n)


def depth_now() -> int:
    """The number of Python frames, from here outwards."""
    frame: FrameType | None = sys._getframe()
    n = 0
    while frame is not None:
        frame, n = frame.f_back, n + 1
    return n


class Torchs:
    """torch's own recording, which ends by dumping a snapshot."""

    def __init__(self, stacks: str, path: Path) -> None:
        self.context, self.path = None if stacks == "none" else "alloc", path

    def __enter__(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(
            "all", context=self.context, stacks="python", max_entries=10**8, clear_history=True
        )

    def __exit__(self, *error: object) -> None:
        import torch

        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(None)

    def check(self, n: int) -> int:
        """The number of frames of an allocation; raises if events are missing."""
        with self.path.open("rb") as file:
            entries = pickle.load(file)["device_traces"][0]
        allocs = [entry for entry in entries if entry["action"] == "alloc"]
        frees = [entry for entry in entries if entry["action"] == "free_completed"]
        assert len(allocs) == len(frees) == n, (len(allocs), len(frees), n)
        return len(allocs[-1].get("frames", ()))


class Ours:
    """pyalloc.record(), on whichever allocator is installed."""

    def __init__(self, stacks: str, path: Path) -> None:
        import pyalloc

        self.path = path
        self.recording = pyalloc.record(path, stacks=stacks, automatic=False, force=True)

    def __enter__(self) -> None:
        self.recording.__enter__()

    def __exit__(self, *error: object) -> None:
        self.recording.__exit__(None, None, None)

    def check(self, n: int) -> int:
        """As Torchs.check()."""
        from pyalloc import reading, trace

        totals = trace.analyse(self.path).totals
        assert totals["n_allocs"] == totals["n_frees"] == n, totals
        return max(len(event.stack) for event in reading.events(self.path))


def child(recorder: str, stacks: str, n: int, path: Path) -> dict[str, float]:
    """Nanoseconds per event."""
    import torch

    torch.cuda.init()
    below = DEPTH - depth_now() - 2  # deep() and pairs() are frames too

    make = Torchs if recorder == "torch" else Ours
    first = make(stacks, path)
    with first:
        deep(below, 100)
    frames = first.check(100)
    assert frames == (0 if stacks == "none" else DEPTH), frames
    deep(below, n // 10)
    plain, recorded, ended = [], [], []
    for _ in range(3):
        plain.append(deep(below, n))
        with make(stacks, path):
            recorded.append(deep(below, n))
            start = time.perf_counter()
        ended.append(recorded[-1] + time.perf_counter() - start)
    base = statistics.median(plain)
    scale = 1e9 / (2 * n)
    return {
        "loop_ns": (statistics.median(recorded) - base) * scale,
        "total_ns": (statistics.median(ended) - base) * scale,
        "plain_ns": base * scale,
        "file_bytes": os.path.getsize(path) / (2 * n),
    }


# ---- in the parent ----


def run(row: tuple[Any, ...], n: int, folder: Path) -> dict[str, float]:
    """One process."""
    _, allocator, recorder, stacks, _ = row
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.recording",
        "--child",
        recorder,
        stacks,
    ]
    words += ["--pairs", str(n), "--file", str(folder / "out")]
    env = hostcuda.environment()
    if allocator == "pyalloc":
        words[:1] = [sys.executable, "-m", "pyalloc", "run", sys.executable]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{row[0]}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--json", action="store_true", help="one JSON line for each row")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        recorder, stacks = args.child
        print(json.dumps(child(recorder, stacks, args.pairs, args.file)))
        return 0
    why = hostcuda.why_not()
    if why:
        print(f"benchmarks.recording runs inside real torch: {why}", file=sys.stderr)
        return 1
    found: dict[str, list[dict[str, float]]] = {row[0]: [] for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for row in ROWS:
                found[row[0]].append(run(row, args.pairs, Path(folder)))
    results = []
    for name, _, _, stacks, limit in ROWS:
        totals = [one["total_ns"] for one in found[name]]
        results.append(
            {
                "row": name,
                "stacks": stacks,
                "loop_ns": statistics.median(one["loop_ns"] for one in found[name]),
                "total_ns": statistics.median(totals),
                "least_ns": min(totals),
                "most_ns": max(totals),
                "plain_ns": statistics.median(one["plain_ns"] for one in found[name]),
                "file_bytes": statistics.median(one["file_bytes"] for one in found[name]),
                "limit_ns": limit,
                "n": 2 * args.pairs,
                "rounds": args.rounds,
                "commit": commit(),
            }
        )
    if args.json:
        for result in results:
            print(json.dumps(result))
        return 0
    print(table(results))
    return 0


def table(results: list[dict[str, Any]]) -> str:
    """The rows as text."""
    peers = {
        r["stacks"]: r["total_ns"]
        for r in results
        if r["row"].startswith("torch's history, ") and "file" not in r["row"]
    }
    lines = [
        f"{'ns for each event':44}{'in loop':>9}{'with file':>10}{'spread':>15}{'torch/it':>9}{'B/event':>9}"
    ]
    for r in results:
        spread = f"{r['least_ns']:.0f}-{r['most_ns']:.0f}"
        late = (
            f"  (want {r['limit_ns']})" if r["limit_ns"] and r["total_ns"] > r["limit_ns"] else ""
        )
        lines.append(
            f"{r['row']:44}{r['loop_ns']:9.0f}{r['total_ns']:10.0f}{spread:>15}"
            f"{peers[r['stacks']] / max(r['total_ns'], 1):8.1f}x{r['file_bytes']:9.1f}{late}"
        )
    one = results[0]
    lines.append(
        f"{one['n']} events, {one['rounds']} rounds of 3 loops; nothing random; commit {one['commit']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
