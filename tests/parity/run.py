"""Runs pytest on files of this folder under one allocator: run.py native|pyalloc FILE [pytest options]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from dry_support import dry_environment

allocator, *rest = sys.argv[1:]
env = dry_environment(install=allocator == "pyalloc", memory="8GB", devices=2)
env["PYALLOC_PARITY"] = allocator
options = [
    "-q",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-o",
    "filterwarnings=default",
    "-W",
    "ignore",
]
os.execve(sys.executable, [sys.executable, "-m", "pytest", *options, *rest], env)
