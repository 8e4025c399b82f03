"""Python may end only when torch's autograd threads rest.

backward() returns while the device's thread still drops what it held for it, Python objects among them.  Python that is
finalizing ends a thread that wants the interpreter, and unwinding torch's C++ frames ends the process: "terminate
called without an active exception", exit code 134.  On host memory kernels take no time, so programs that end right
after backward() meet it often.
"""

from __future__ import annotations

import atexit
import os
import time

_LIMIT_S = 5.0  # somebody else's backward() may never end
_INTERVAL_S = 0.002
_N_ALIKE = 5  # looks: a thread sleeps too while another has the interpreter, 5 ms at a time
_AUTOGRAD = "pt_autograd"  # torch names its threads pt_autograd_0, ...


def wait_at_exit() -> None:
    """Python's last exit function, when it is registered first."""
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
    """Of every autograd thread whether it runs, and how often it was given and taken a processor."""
    found = {}
    try:
        tids = os.listdir("/proc/self/task")
    except OSError:  # no /proc here
        return {}
    for tid in tids:
        try:
            if _read(tid, "comm").startswith(_AUTOGRAD):
                found[tid] = _state(_read(tid, "status"))
        except OSError:  # it has ended meanwhile
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
