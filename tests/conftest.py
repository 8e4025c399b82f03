"""Fixtures shared by all tests: fresh interpreters, and real PyTorch on the host-memory runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pyalloc import _bootstrap, hostcuda

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the CUDA build of PyTorch the tests that need it are skipped; .ci/test says so."""
    if dry_torch() is not None:
        return
    skip = pytest.mark.skip(reason="needs the CUDA build of PyTorch: make torch")
    for item in items:
        if "torch" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def dry_python() -> RunPython:
    """Runs source text in a fresh interpreter with torch on the host-memory runtime."""

    def run(
        source: str,
        *,
        install: bool = False,
        memory: str = "8GB",
        devices: int = 1,
        **options: object,
    ) -> subprocess.CompletedProcess[str]:
        env = dry_environment(install=install, memory=memory, devices=devices)
        env.update(options.pop("env", None) or {})  # type: ignore[call-overload]
        command = [sys.executable, "-W", "ignore:nvml", "-c", textwrap.dedent(source)]
        return run_checked(command, env=env, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def run_python() -> RunPython:
    """Runs source text in a fresh interpreter; expect=None accepts any exit code."""

    def run(source: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_checked([sys.executable, "-c", textwrap.dedent(source)], **options)  # type: ignore[arg-type]

    return run
