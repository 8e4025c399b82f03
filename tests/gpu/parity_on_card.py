"""The parity tests on a card: what fails on pyalloc and not on torch's own allocator; one JSON line for each file.

Left out are those that need two devices, a small one, or the host-memory runtime's own questions.  What fails on both
tells of the card, or of the test: counts of free memory, for one, are the whole card's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from parity.run import OPTIONS  # noqa: E402

from pyalloc import _bootstrap  # noqa: E402

FILES = (
    *("graphs", "streams", "pools", "special_pools", "statistics", "snapshots", "annotations"),
    "compile",  # last: compilers take their time
)
LIMIT_S = 120


def environment(allocator: str) -> dict[str, str]:
    env = {**_bootstrap.environment(dict(os.environ)), "PYALLOC_PARITY": allocator}
    env |= {"PYALLOC_PARITY_ON": "card", _bootstrap.INSTALL: str(int(allocator == "pyalloc"))}
    return env


def failed(name: str, allocator: str) -> tuple[set[str], str]:
    """The tests of a file that did not pass, and pytest's last words; its end alone where there was none."""
    command = [sys.executable, *OPTIONS, "-v", f"tests/parity/test_{name}.py"]
    try:
        done = subprocess.run(
            command,
            cwd=TESTS.parent,
            env=environment(allocator),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        text = bytes(late.stdout or b"").decode(errors="replace")
        return {"(end)"}, f"no end in {LIMIT_S} s: {text[-400:]}"
    tests = set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE))
    if done.returncode != 0:
        print(f"-- {name} on {allocator}\n{done.stdout[-6000:]}", flush=True)
    if done.returncode not in (0, 1):  # the process died, or nothing could be collected
        tests.add("(end)")
    return tests, done.stdout.rstrip().rpartition("\n")[2]


def main() -> int:
    n_ours = 0
    for name in sys.argv[1:] or FILES:
        found = {allocator: failed(name, allocator) for allocator in ("native", "pyalloc")}
        ours = found["pyalloc"][0] - found["native"][0]
        n_ours += len(ours)
        row = {"file": name, "on_pyalloc_alone": sorted(ours), "native": found["native"][1]}
        print(json.dumps({**row, "pyalloc": found["pyalloc"][1]}), flush=True)
    return 1 if n_ours else 0


if __name__ == "__main__":
    sys.exit(main())
