"""Runs pytest on files of this folder under one allocator: run.py native|pyalloc FILE [pytest options]."""

from __future__ import annotations

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
    command = [sys.executable, *OPTIONS, *sys.argv[2:]]
    os.execve(sys.executable, command, environment(sys.argv[1]))
