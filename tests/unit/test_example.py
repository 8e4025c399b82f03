"""The example as a dry run: it reserves no more than native, and fits where its live peak nearly does."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from dry_support import python_for

pytestmark = [pytest.mark.torch, pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent
PROGRAM = "examples/seq2seq.py"
MIB = 2**20


def dryrun(allocator: str, memory: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pyalloc",
        "dryrun",
        "--allocator",
        allocator,
        "--memory",
        memory,
    ]
    python = python_for((ROOT / PROGRAM).read_text(), dryrun=True)
    program = [python, PROGRAM, "--steps", "3", *arguments]
    return subprocess.run(
        [*command, *program], cwd=ROOT, capture_output=True, text=True, check=False
    )


@cache
def figures(allocator: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        done = dryrun(allocator, "80GB", "--json", str(path))
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def test_pyalloc_reserves_no_more_than_native() -> None:
    assert figures("pyalloc")["peak_reserved_bytes"] <= figures("native")["peak_reserved_bytes"]
    assert figures("pyalloc")["peak_allocated_bytes"] <= figures("native")["peak_allocated_bytes"]


def test_fits_in_a_tenth_more_than_its_live_peak() -> None:
    memory = figures("pyalloc")["peak_allocated_bytes"] * 11 // 10
    done = dryrun("pyalloc", f"{memory // MIB}MiB")
    assert done.returncode == 0, done.stderr


def test_below_its_live_peak_it_runs_out_of_memory() -> None:
    memory = figures("pyalloc")["peak_allocated_bytes"] * 9 // 10
    done = dryrun("pyalloc", f"{memory // MIB}MiB")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in done.stderr


def test_starts_with_the_thread_s_281_mib() -> None:
    first = figures("pyalloc")["rows"][0]
    assert first["phase"] == "start"
    assert round(first["allocated_bytes"] / MIB) == 281
