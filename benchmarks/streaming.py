"""Long traces: how fast and in how much memory the instrument reads them.

``python -m benchmarks.streaming [--events N] [--file PATH] [--only COMMAND ...] [--json]``

First writes a trace of N events (default 10^8) of a training loop as the recorder sees it: 40 layers, each allocating
and freeing activations, gradients and temporaries of a few hundred sizes, with stacks, phases and steps.  Then each
command reads it in a process of its own.  Shows seconds, millions of events per second and the largest resident memory,
which should stay below 1 GiB.  Compares the peak that each command finds with the writer's own count.

--file keeps the trace there; it is reused if it exists.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.torch_replay import ROOT
from pyalloc import _core
from pyalloc.traces.convert import KINDS

MIB = 2**20
COMMANDS = {
    "stats": ["stats", "{}", "--json", "-q"],
    "top": ["top", "{}", "--json", "-q"],
    "report": ["report", "{}", "--json", "-q", "--no-replay"],
    "html": ["report", "{}", "-q", "--no-replay", "--force", "-o", "{out}.html"],
    "replay": ["replay", "{}", "--policy", "native", "--json", "-q"],
    "csv": ["export", "{}", "--to", "csv", "-q", "--force", "-o", "{out}.csv"],
    "torch": ["export", "{}", "--to", "torch", "-q", "--force", "-o", "{out}.pickle"],
    "perfetto": ["export", "{}", "--to", "perfetto", "-q", "--force", "-o", "{out}.json"],
}
LIMIT = 2**30


class Loop:
    """Writes the trace: a training loop's requests."""

    def __init__(self, path: Path) -> None:
        self.writer = _core.TraceWriter(path, overwrite=True)
        rng = random.Random(1)
        text = self.writer.string
        self.stacks = [
            self.writer.stack(
                self.writer.stack(0, text("train"), text("/home/me/train.py"), 7),
                text(f"layer{i}"),
                text("/home/me/model.py"),
                10 + i,
            )
            for i in range(200)
        ]
        self.sizes = [[rng.randrange(1, 4000) * 4096 for _ in range(5)] for _ in range(40)]
        self.at = 1 << 40
        self.live = self.peak = 0
        self.n = 0

    def mark(self, kind: str, name: str, arg: int = 0) -> None:
        """Marks a phase or a step."""
        self.n += 1
        self.writer.event(KINDS[kind], text=self.writer.string(name), arg=arg, time_ns=self.n * 100)

    def take(self, address: int, size: int, stack: int) -> None:
        """Makes one request."""
        self.n += 1
        self.writer.event(1, addr=address, bytes=size, stack=stack, time_ns=self.n * 100)
        self.live += size
        self.peak = max(self.peak, self.live)

    def give(self, address: int, size: int) -> None:
        """Frees one block."""
        self.n += 1
        self.writer.event(2, addr=address, time_ns=self.n * 100)
        self.live -= size

    def step(self, number: int) -> None:
        """One step: forward keeps activations; backward uses temporaries and frees them."""
        self.mark("step", "step", number)
        self.mark("phase_begin", "forward")
        kept = []
        for i, sizes in enumerate(self.sizes):
            for k, size in enumerate(sizes):
                address = self.at + (i * 8 + k) * 64 * MIB
                self.take(address, size, self.stacks[i * 5 + k])
                kept.append((address, size))
        self.mark("phase_end", "forward")
        self.mark("phase_begin", "backward")
        for i in reversed(range(len(self.sizes))):
            for k in range(5):
                address = self.at + (i * 8 + 6) * 64 * MIB
                self.take(address, self.sizes[i][k], self.stacks[i])
                self.give(address, self.sizes[i][k])
                self.give(*kept[i * 5 + k])
        self.mark("phase_end", "backward")


def write(path: Path, n_events: int) -> None:
    """Writes the trace, and a file with what its writer knows."""
    loop = Loop(path)
    number, start = 0, time.monotonic()
    while loop.n < n_events:
        loop.step(number)
        number += 1
    loop.writer.close()
    known = {"events": loop.n, "peak_bytes": loop.peak, "seconds": time.monotonic() - start}
    path.with_name(path.name + ".known").write_text(json.dumps(known))


def measure(words: list[str]) -> tuple[str, float, int]:
    """Runs a command: its output, seconds and largest resident bytes."""
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "pyalloc", *words], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        out = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"pyalloc {' '.join(words)}: exit code {child.returncode}")
    return out, time.monotonic() - start, usage.ru_maxrss * 1024


def peak_of(command: str, out: str) -> int | None:
    """The peak that a command found, if it prints one."""
    if command not in ("stats", "report", "replay"):
        return None
    data: dict[str, Any] = json.loads(out)
    if command == "stats":
        return int(data["peak_bytes"])
    return int(
        data["totals"]["peak_bytes"] if command == "report" else data["program"]["peak_live_bytes"]
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--events", type=float, default=1e8)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(COMMANDS), metavar="COMMAND")
    parser.add_argument("--json", action="store_true", help="one JSON line for each command")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path: Path = args.file or Path(folder) / "long.pya"
        if not path.exists():
            write(path, int(args.events))
        known = json.loads(path.with_name(path.name + ".known").read_text())
        n, size = known["events"], path.stat().st_size
        if not args.json:
            print(f"{n:,} events, {size / 1e9:.2f} GB ({size / n:.1f} B/event); commit {commit()}")
            print(f"{'command':10}{'seconds':>9}{'M events/s':>12}{'resident MiB':>14}")
        for name in args.only or COMMANDS:
            words = [word.format(path, out=Path(folder) / "out") for word in COMMANDS[name]]
            out, seconds, resident = measure(words)
            found = peak_of(name, out)
            if found is not None and found != known["peak_bytes"]:
                raise SystemExit(
                    f"{name}: a peak of {found}, the writer counted {known['peak_bytes']}"
                )
            for left in Path(folder).glob("out.*"):
                left.unlink()
            row = {"command": name, "seconds": seconds, "resident_bytes": resident, "events": n}
            if args.json:
                print(json.dumps({**row, "commit": commit()}), flush=True)
            else:
                late = "" if resident < LIMIT else "  (want less than 1024)"
                print(
                    f"{name:10}{seconds:9.1f}{n / seconds / 1e6:12.2f}{resident / MIB:14.0f}{late}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
