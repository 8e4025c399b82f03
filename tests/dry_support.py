"""Running programs on the host-memory runtime, for the fixtures and for tests that start programs themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pyalloc import _bootstrap, hostcuda

ROOT = Path(__file__).parent.parent
PATIENCE_S = 900  # what takes longer hangs; a loaded machine needs a tenth of it


def run_checked(
    command: list[str],
    *,
    expect: int | None = 0,
    env: dict[str, str] | None = None,
    timeout: float = PATIENCE_S,
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


@cache
def dry_torch() -> hostcuda.Torch | None:
    """The PyTorch beside these tests, or None where it cannot be dry-run."""
    try:
        found = hostcuda.find_torch(sys.executable)
        hostcuda.preloads(found.cuda_major)
    except hostcuda.HostCudaError:
        return None
    return found


def dry_environment(
    *, install: bool = False, memory: str = "8GB", devices: int = 1
) -> dict[str, str]:
    """An environment in which torch runs on the host-memory runtime; install: on pyalloc, as `pyalloc run` does."""
    torch = dry_torch()
    assert torch is not None
    env = hostcuda.environment(_bootstrap.environment(dict(os.environ)), torch)
    env["PYALLOC_HOSTCUDA_MEMORY"] = memory
    env["PYALLOC_HOSTCUDA_DEVICES"] = str(devices)
    env.pop(_bootstrap.INSTALL, None)
    if install:
        env[_bootstrap.INSTALL] = "1"
    return env
