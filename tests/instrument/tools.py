"""What the tests of the instrument share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dry_support import PATIENCE_S

from pyalloc import _core
from pyalloc.convert import KINDS

ROOT = Path(__file__).parent.parent.parent


def pyalloc(*words: object, expect: int | None = 0) -> str:
    """Output of `pyalloc ...`, both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "pyalloc", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if expect is not None and done.returncode != expect:
        pytest.fail(f"exit code {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


class Plan:
    """A trace written by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = _core.TraceWriter(path)
        self.time = 0

    def event(self, kind: str, text: str = "", **fields: int) -> None:
        self.time += 1000
        number = self.writer.string(text) if text else 0
        self.writer.event(KINDS[kind], text=number, time_ns=self.time, **fields)

    def stack(self, line: int, name: str = "work", file: str = "/home/me/model.py") -> int:
        return self.writer.stack(0, self.writer.string(name), self.writer.string(file), line)

    def done(self) -> Path:
        self.writer.close()
        return self.path
