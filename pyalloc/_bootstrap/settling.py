"""Delays the end of Python until torch's autograd threads are idle.

backward() returns while the device's thread still releases objects that it held, Python objects among them.  A
finalizing Python ends any thread that wants the interpreter, and unwinding torch's C++ frames then aborts the process:
"terminate called without an active exception", exit code 134.  In a dry run kernels take no time, so programs that end
right after backward() would often hit this.
"""

from __future__ import annotations

import atexit
import os
import time

_LIMIT_S = 5.0  # a backward() of another thread may never end
_INTERVAL_S = 0.002
_N_ALIKE = 5  # equal looks in a row: waiting for the interpreter is sleep, too, up to 5 ms
_AUTOGRAD = "pt_autograd"  # torch names its threads pt_autograd_0, ...


def wait_at_exit() -> None:
    """Waits at exit.  Call it first: the exit function that is registered first runs last."""
    atexit.register(_wait)


def _wait() -> None:
    end = time.monotonic() + _LIMIT_S
    before, n_alike = _look(), 0
    while before and n_alike < _N_ALIKE and time.monotonic() < end:
        time.sleep(_INTERVAL_S)
        now = _look()
        rests = now == before and all(state == "S" for state, _ in now.values())
        before, n_alike = now, n_alike + 1 if rests else 0


def _look() -> dict[str, tuple[str, str]]:
    """For every autograd thread: its state, and its counts of context switches."""
    found = {}
    try:
        tids = os.listdir("/proc/self/task")
    except OSError:  # no /proc here
        return {}
    for tid in tids:
        try:
            if _read(tid, "comm").startswith(_AUTOGRAD):
                found[tid] = _state(_read(tid, "status"))
        except OSError:  # the thread has ended
            continue
    return found


def _read(tid: str, name: str) -> str:
    with open(f"/proc/self/task/{tid}/{name}", errors="replace") as file:
        return file.read()


def _state(status: str) -> tuple[str, str]:
    lines = [line.split() for line in status.splitlines()]
    state = next((words[1] for words in lines if words[0] == "State:"), "")
    switches = " ".join(words[1] for words in lines if words[0].endswith("ctxt_switches:"))
    return state, switches
