"""The asking side of `pyalloc attach`: over the process's live socket, else through a debugger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyalloc import live
from pyalloc.common import processes
from pyalloc.errors import UsageError
from pyalloc.outside import debugger


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
    """Starts a recording of the process; returns what the process says about it (attached.py).

    Raises:
        UsageError: it cannot be recorded.
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
    """Ends the recording that begin() started.  It may be empty, if the process never used CUDA.

    Raises:
        UsageError: there is no such recording.
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
