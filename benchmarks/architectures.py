"""Models that nobody tuned for: those of torchvision and transformers, on native, expandable segments and pyalloc.

``python -m benchmarks.architectures [--only NAME ...] [--autocast] [--steps N] [--json] [-q]``

Each of 69 architectures is trained for a few steps with AdamW in a dry run, with batches and lengths that differ
from step to step and an evaluation halfway (benchmarks/workloads/architectures.py; needs torchvision and
transformers).  The recording is replayed on policy models and the simulated device, as for ``python -m
benchmarks.invented``, and not kept.  Some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from benchmarks.compared import Row, rows_of, table
from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.torch_replay import ROOT
from benchmarks.workloads.architectures import ARCHITECTURES
from pyalloc import _core

SEVERAL = 2  # at a time: each has a torch in memory


class RecordingError(RuntimeError):
    """A dry run failed; the text is its last lines."""


def measure_one(name: str, n_steps: int = 8, is_half: bool = False) -> list[Row]:
    """A row for each allocator.

    Raises:
        RecordingError: the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.pya"
        program = [sys.executable, "-m", "benchmarks.workloads.architectures", name]
        options = ["--steps", str(n_steps), *["--autocast"] * is_half]
        recorded = ["--stacks", "none", "--record", str(path)]
        dryrun = [sys.executable, "-m", "pyalloc", "dryrun", *recorded]
        done = subprocess.run(
            [*dryrun, *program, *options], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RecordingError(f"{name}: {done.stderr[-2000:]}")
        return rows_of(_core.Program(path), name)


def measure(names: Sequence[str], n_steps: int, is_half: bool) -> Iterator[list[Row]]:
    """The rows of each architecture as they come."""
    with ThreadPoolExecutor(SEVERAL) as pool:
        waiting: list[Future[list[Row]]] = [
            pool.submit(measure_one, name, n_steps, is_half) for name in names
        ]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ARCHITECTURES, default=())
    parser.add_argument("--autocast", action="store_true", help="train in bfloat16")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="training steps (8)")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each model and allocator instead"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error("--steps must be at least 1")
    names = asked.only or list(ARCHITECTURES)
    rows: list[Row] = []
    try:
        for found in measure(names, asked.steps, asked.autocast):
            rows += found
            if not asked.quiet:
                figures = ", ".join(f"{row.allocator} {row.peak_live:.3f}" for row in found)
                n = f"[{len({row.program for row in rows})}/{len(names)}]"
                print(f"{n} {found[0].program}: peak/live {figures}", file=sys.stderr, flush=True)
    except RecordingError as error:
        print(error, file=sys.stderr)
        return 1
    rows.sort(key=lambda row: names.index(str(row.program)))
    if asked.json:
        print("\n".join(json.dumps(asdict(row)) for row in rows))
        return 0
    print(table(rows))
    kind = "bfloat16 by autocast" if asked.autocast else "float32"
    print(f"simulated device, typical costs; {kind}, {asked.steps} steps; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
