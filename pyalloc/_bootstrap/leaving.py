"""Calls before os._exit(), which skips atexit functions: multiprocessing's children end with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

_LIMIT_S = 5.0  # a watchdog may call os._exit() because one of our calls hangs
_calls: list[Callable[[], object]] = []
# Exit codes.  No lock: a signal handler may call os._exit() during os._exit().
_begun: list[int] = []


def has_begun() -> bool:
    """Is the process about to end by os._exit()?"""
    return bool(_begun)


def before(call: Callable[[], object]) -> None:
    """Has it called once before os._exit(), in this process and in any forked from it; ignores its exceptions."""
    if not _calls:
        _wrap()
    if call not in _calls:
        _calls.append(call)


def _wrap() -> None:
    leave = os._exit

    def _exit(status: int) -> NoReturn:
        _begun.append(status)
        try:
            last = threading.Thread(target=_call_all, daemon=True, name="pyalloc-leaving")
            last.start()
            last.join(_LIMIT_S)
        finally:
            leave(status)

    os._exit = _exit


def _call_all() -> None:
    for call in _calls:
        try:
            call()
        except Exception:  # the process ends: there is nobody left to tell
            continue
