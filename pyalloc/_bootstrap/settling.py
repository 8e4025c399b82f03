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
_AUTOGRAD = "pt_autograd"  # torch names its threads pt_autograd_0, ...


def wait_at_exit() -> None:
    """Python's last exit function, when it is registered first."""
    atexit.register(_wait)


def _wait() -> None:
    end = time.monotonic() + _LIMIT_S
    before = _look()
    while before and time.monotonic() < end:
        time.sleep(_INTERVAL_S)
        now = _look()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


def _look() -> dict[str, tuple[str, str]]:
    """Of every autograd thread whether it runs, and how often it was given and taken a processor."""
    found = {}
    try:
        for tid in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{tid}/comm") as comm:
                if not comm.read().startswith(_AUTOGRAD):
                    continue
            with open(f"/proc/self/task/{tid}/status") as status:
                lines = [line.split() for line in status]
            state = next((words[1] for words in lines if words[0] == "State:"), "")
            switches = " ".join(words[1] for words in lines if words[0].endswith("ctxt_switches:"))
            found[tid] = (state, switches)
    except OSError:  # no /proc here, or a thread has ended meanwhile
        return {}
    return found
