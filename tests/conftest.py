"""Fixtures shared by all tests: fresh interpreters, and real PyTorch on the host-memory runtime."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
from dry_support import dry_environment, dry_torch, run_checked

RunPython = Callable[..., subprocess.CompletedProcess[str]]


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
