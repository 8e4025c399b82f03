"""Programs that nobody tuned for: trainings generated from seeds, on native, expandable segments and pyalloc.

``python -m benchmarks.invented [--programs N] [--first SEED] [--json]``

The suite has 38 programs.  This generates as many as you like, and none of them influenced the choice of a constant
(benchmarks/workloads/invented.py).  Policy models and the simulated device, as for ``python -m benchmarks.policies``.
peak/live: peak device memory over peak live bytes; min/live: the smallest device on which the program completes, over
peak live bytes; device time: modelled, over native's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.compared import Row, rows_of, table
from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.suite import write_operations
from benchmarks.workloads.invented import invent
from pyalloc import _core


def measure_one(seed: int) -> list[Row]:
    """A row for each allocator; none for a seed without a program."""
    training = invent(seed)
    if training is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "invented.pya"
        write_operations(training.operations, path)
        program = _core.Program(path)
    live = program.info()["peak_live_bytes"]
    assert live == training.peak_bytes, f"seed {seed}: {live} bytes live, not {training.peak_bytes}"
    return rows_of(program, seed)


def measure(first: int, n_programs: int) -> Iterator[Row]:
    """The rows of the first n programs from seed ``first`` on, by seed."""
    n_found = 0
    # Not a Pool: it kills its workers at any point, and may then wait for ever for a lock that one of them held.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for rows in pool.map(measure_one, range(first, first + 10 * n_programs)):
                n_found += bool(rows)
                yield from rows
                if rows and n_found % 50 == 0:
                    print(f"[{n_found}/{n_programs}]", file=sys.stderr, flush=True)
                if n_found == n_programs:
                    return
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="first seed (1)")
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each program and allocator instead"
    )
    arguments = parser.parse_args()
    if arguments.programs < 1:
        parser.error("--programs must be at least 1")
    rows = list(measure(arguments.first, arguments.programs))
    if arguments.json:
        print("\n".join(json.dumps(asdict(row)) for row in rows))
        return 0
    print(table(rows))
    seeds = [row.program for row in rows]
    print(f"simulated device, typical costs; seeds {seeds[0]}..{seeds[-1]}; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
