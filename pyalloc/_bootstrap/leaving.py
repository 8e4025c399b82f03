"""A last word before os._exit(), which asks no atexit function: children of multiprocessing end with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn

_LIMIT_S = 5.0  # a watchdog calls os._exit() because something hangs, maybe what is called here
_calls: list[Callable[[], object]] = []
_begun: list[
    int
] = []  # exit codes; no lock, for a signal's handler may leave while a program is leaving


def has_begun() -> bool:
    """Is the process about to end by os._exit()?"""
    return bool(_begun)


def before(call: Callable[[], object]) -> None:
    """Calls it, once, before os._exit() of this process and of those forked from it; what it raises is dropped."""
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
