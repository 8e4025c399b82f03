"""The program's main thread: calls in it between two bytecodes, and its Ctrl-C, which may have to wait."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LOOK_S = 0.05
_OFTEN = 10  # looks
_asked: list[Any] = []  # what Python may still call


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delays Ctrl-C until the end of a recording is written; a second Ctrl-C takes effect at once."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):
        yield
        return
    caught: list[int] = []

    def wait(number: int, _frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)
        print("pyalloc: finishing the recording; press Ctrl-C again to abandon it", file=sys.stderr)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            signal.raise_signal(signal.SIGINT)


def run(
    call: Callable[[], object], within_s: float, is_idle: Callable[[], bool] = lambda: False
) -> bool:
    """Runs a call in the main thread, between two bytecodes, from whatever thread.

    The main thread may be anywhere: the call must not wait, nor take a lock that may be held there.

    is_idle: does the main thread seem to wait for something outside?  Then this gives up sooner.

    Returns:
        Was it called?  If not, the main thread ran no Python code during this time, and the call will not be made.

    Raises:
        Exception: what the call raised.
    """
    if threading.current_thread() is threading.main_thread():
        call()
        return True
    once = threading.Lock()
    done = threading.Event()
    raised: list[BaseException] = []
    todo = [call]  # what Python may still call stays for ever: with nothing of the caller's

    def call_once(_: object) -> int:
        if once.acquire(blocking=False):
            try:
                todo.pop()()
            except BaseException as error:
                raised.append(error)
            done.set()
        return 0

    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call_once)
    _asked.append(function)
    if ctypes.pythonapi.Py_AddPendingCall(function, None) != 0:  # too many wait already
        return False
    end, n_idle = time.monotonic() + within_s, 0
    while not done.wait(_LOOK_S) and time.monotonic() < end and n_idle < _OFTEN:
        n_idle = n_idle + 1 if is_idle() else 0
    if once.acquire(blocking=False):
        todo.clear()
        return False
    done.wait()
    while raised:
        _raise_where_it_belongs(raised.pop())
    return True


def _raise_where_it_belongs(error: BaseException) -> None:
    """Raises in the main thread what a signal handler of the program raised in the middle of the call."""
    if isinstance(error, Exception):
        raise error
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(_class_of(error)))
    raise InterruptedError("the program was interrupted at that moment; try again")


def _class_of(error: BaseException) -> type[BaseException]:
    """One whose instance, made of nothing, is like it: Python makes it in the other thread."""
    kind, given = type(error), error.args
    return type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *given)})
