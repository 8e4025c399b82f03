"""Calls before the program ends itself in a way that skips atexit functions.

With os._exit(), as multiprocessing's children do; or with a signal to itself, as servers do that were asked to end by
one and have cleaned up (uvicorn).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

_LIMIT_S = 5.0  # a watchdog may call os._exit() because one of our calls hangs
# Other signals tell of a crash, or kill at once.
_REQUESTS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_calls: list[Callable[[], object]] = []
_has_begun = False


def has_begun() -> bool:
    """Is the process about to end itself?"""
    return _has_begun


def before(call: Callable[[], object]) -> None:
    """Has it called once before the end, in this process and in any forked from it; ignores its exceptions."""
    if not _calls:
        _wrap()
    if call not in _calls:
        _calls.append(call)


def _wrap() -> None:
    leave, send, raise_here = os._exit, os.kill, signal.raise_signal

    def _exit(status: int) -> NoReturn:
        try:
            _call_in_time()
        finally:
            leave(status)

    def kill(pid: int, number: int, /) -> None:
        try:
            if pid == os.getpid():
                _before_signal(number)
        finally:
            send(pid, number)

    def raise_signal(number: int, /) -> None:
        try:
            _before_signal(number)
        finally:
            raise_here(number)

    os._exit, os.kill, signal.raise_signal = _exit, kill, raise_signal


def _before_signal(number: int) -> None:
    """The calls, if this signal ends the process."""
    if (
        number in _REQUESTS
        and signal.getsignal(number) == signal.SIG_DFL
        and number not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    ):
        _call_in_time()


def _call_in_time() -> None:
    # No lock: a signal handler may call os._exit() during os._exit().
    global _has_begun
    _has_begun = True
    last = threading.Thread(target=_call_all, daemon=True, name="pyalloc-leaving")
    last.start()
    last.join(_LIMIT_S)


def _call_all() -> None:
    for call in _calls:
        try:
            call()
        except Exception:  # the process ends: there is nobody left to tell
            continue
