"""Runs pytest on files of this folder under one allocator."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from dry_support import dry_environment

OPTIONS = (
    *("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
    *("-o", "filterwarnings=default", "-W", "ignore"),
)


def environment(allocator: str) -> dict[str, str]:
    env = dry_environment(install=allocator == "pyalloc", memory="8GB", devices=2)
    env["PYALLOC_PARITY"] = allocator
    return env


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("allocator", choices=("native", "pyalloc"))
    parser.add_argument(
        "tests", nargs=argparse.REMAINDER, help="tests/parity/test_x.py, and pytest's options"
    )
    asked = parser.parse_args()
    if not asked.tests:
        parser.error("which tests?")  # not those of other folders
    command = [sys.executable, *OPTIONS, *asked.tests]
    os.execve(sys.executable, command, environment(asked.allocator))
