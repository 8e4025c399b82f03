"""The parity tests on a card: what fails on pyalloc and not on torch's own allocator; one JSON line for each file.

Left out are those that need two devices, a small one, or the host-memory runtime's own functions.  A failure on both
says something about the card, or the test: counts of free memory, for example, cover the whole card.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from parity.run import OPTIONS  # noqa: E402

from pyalloc import _bootstrap  # noqa: E402

FILES = (
    *("graphs", "streams", "pools", "special_pools", "statistics", "snapshots", "annotations"),
    "compile",  # last, because compilers take their time
)
LIMIT_S = 100  # of a file on one allocator
NO_END = "(end)"  # stands for what a run that did not finish would have reported


def environment(allocator: str) -> dict[str, str]:
    env = {**_bootstrap.environment(dict(os.environ)), "PYALLOC_PARITY": allocator}
    env |= {"PYALLOC_PARITY_ON": "card", _bootstrap.INSTALL: str(int(allocator == "pyalloc"))}
    return env


def verdicts(output: str) -> set[str]:
    """The tests that failed, from what -vv prints after each, and from the summary, which only a finished run has."""
    each = re.findall(r"^\S+\.py::(\S+).*? (?:FAILED|ERROR)\b", output, re.MULTILINE)
    return {*each, *re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", output, re.MULTILINE)}


def failed(name: str, allocator: str, limit_s: float = LIMIT_S) -> tuple[set[str], str]:
    """The tests of a file that did not pass, NO_END if some did not run, and pytest's last words."""
    if limit_s <= 0:
        return {NO_END}, "not run: no time was left"
    command = [sys.executable, *OPTIONS, "-vv", f"tests/parity/test_{name}.py"]
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env=environment(allocator),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as late:
        text = bytes(late.stdout or b"").decode(errors="replace")
        return {*verdicts(text), NO_END}, f"no end in {limit_s:.0f} s: {text[-400:]}"
    tests = verdicts(done.stdout)
    if done.returncode != 0:
        print(f"-- {name} on {allocator}\n{done.stdout[-6000:]}", flush=True)
    if done.returncode not in (0, 1):  # the process died, or nothing could be collected
        tests.add(NO_END)
    return tests, done.stdout.rstrip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=FILES, help=" ".join(FILES))
    parser.add_argument("--seconds", type=float, default=1600, help="for all of them (1600)")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    n_ours = 0
    for name in asked.files:
        found = {}
        for allocator in ("pyalloc", "native"):
            left_s = end - time.monotonic()
            found[allocator] = failed(name, allocator, min(LIMIT_S, left_s))
        # What did not run on pyalloc has not passed, whatever native did.
        ours = found["pyalloc"][0] - (found["native"][0] - {NO_END})
        n_ours += len(ours)
        row = {"file": name, "on_pyalloc_alone": sorted(ours), "native": found["native"][1]}
        print(json.dumps({**row, "pyalloc": found["pyalloc"][1]}), flush=True)
    return 1 if n_ours else 0


if __name__ == "__main__":
    sys.exit(main())
