"""Fixtures shared by all tests: fresh interpreters, and real PyTorch on the host-memory runtime."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict

import pytest
from dry_support import COUNTED, RunPython, dry_environment, dry_torch, python_for, run_checked


def pytest_configure() -> None:
    """Restores these signals, so that programs under test start as in a terminal: nohup and `&` leave them ignored."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)  # before `-m "not torch"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that need the CUDA build of PyTorch if there is none; .ci/test says so."""
    for item in items:
        if "dry_python" in getattr(item, "fixturenames", ()):
            item.add_marker("torch")
    if dry_torch() is not None:
        return
    skip = pytest.mark.skip(reason="needs the CUDA build of PyTorch: make torch")
    for item in items:
        if "torch" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports how many tests ran inside others, as tests/parity/conftest.py counted them."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for report in itertools.chain(*terminalreporter.stats.values()):
        for name, value in getattr(report, "user_properties", ()) if _is_call(report) else ():
            if name.startswith(COUNTED):
                number, outcome = value
                counted[name][outcome] += number
    for name, outcomes in sorted(counted.items()):
        text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        terminalreporter.write_line(f"{name}: {text}")


def _is_call(report: object) -> bool:
    return getattr(report, "when", None) == "call"


@pytest.fixture
def dry_python() -> RunPython:
    """Runs source text with torch on the host-memory runtime, in a process of its own.

    cold: in a fresh interpreter, even if it imports torch first.
    """

    def run(
        source: str,
        *,
        install: bool = False,
        memory: str = "8GB",
        devices: int = 1,
        cold: bool = False,
        env: dict[str, str] | None = None,
        **options: object,
    ) -> subprocess.CompletedProcess[str]:
        variables = dry_environment(install=install, memory=memory, devices=devices)
        variables.update(env or {})
        source = textwrap.dedent(source)
        python = sys.executable if cold else python_for(source, env or ())
        command = [python, "-W", "ignore:nvml", "-c", source]
        return run_checked(command, env=variables, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def run_python() -> RunPython:
    """Runs source text in a fresh interpreter; expect=None accepts any exit code."""

    def run(source: str, **options: object) -> subprocess.CompletedProcess[str]:
        return run_checked([sys.executable, "-c", textwrap.dedent(source)], **options)  # type: ignore[arg-type]

    return run
