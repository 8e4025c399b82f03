"""Fixtures shared by all tests: fresh interpreters, and real PyTorch on the host-memory runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RunPython = Callable[..., subprocess.CompletedProcess[str]]


def run_checked(
    command: list[str],
    *,
    expect: int | None = 0,
    env: dict[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if expect is not None and done.returncode != expect:
        pytest.fail(
            f"exit code {done.returncode}, not {expect}\n--- stdout\n{done.stdout[-4000:]}"
            f"\n--- stderr\n{done.stderr[-6000:]}"
        )
    return done


@pytest.fixture
def run_python() -> RunPython:
    """Runs source text in a fresh interpreter; expect=None accepts any exit code."""

    def run(source: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_checked([sys.executable, "-c", textwrap.dedent(source)], **options)  # type: ignore[arg-type]

    return run
