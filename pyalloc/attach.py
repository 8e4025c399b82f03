"""`pyalloc attach` from the side of who asks: over the process's live socket, or else by a debugger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyalloc import debugger, live, processes
from pyalloc.errors import UsageError


def begin(
    pid: int,
    path: Path,
    *,
    stacks: str,
    marks: bool,
    duration_s: float | None,
    force: bool,
    wait_s: float,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """The process is recorded from now on; how, it tells (attached.py).

    Raises:
        UsageError: it cannot be.
    """
    request = {
        "attach": "begin",
        "path": str(path.absolute()),
        "stacks": stacks,
        "marks": marks,
        "duration_s": duration_s,
        "force": force,
    }
    return _ask(processes.find(pid), request, wait_s, tell)


def end(pid: int, *, wait_s: float, tell: Callable[[str], object]) -> dict[str, Any]:
    """The recording that begin() began is whole, or was never begun because the process did not use CUDA.

    Raises:
        UsageError: there is none.
    """
    process = processes.find(pid)
    if not process.has_pyalloc:
        raise UsageError(f"process {pid} is not being recorded: pyalloc is not loaded in it")
    return _ask(process, {"attach": "end"}, wait_s, tell)


def _ask(
    process: processes.Process,
    request: dict[str, Any],
    wait_s: float,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    found = live.request(process.pid, request, wait_s)
    if found is None:
        processes.check_python(process)
        found = debugger.ask(process, request, wait_s, tell)
    if "error" in found:
        raise UsageError(f"process {process.pid}: {found['error']}")
    return found
