"""The snapshot of this process's CUDA memory that torch.cuda.memory._snapshot() gives, on either allocator."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from pyalloc import sharing

_lock = threading.RLock()  # `pyalloc attach` may come in between, in the same thread
_replaced: list[tuple[Any, Any]] = []  # torch, and what look-ups in it called before
_without_collector: set[int] = set()  # the threads that switched it off


def _forget_in_child() -> None:
    """In a forked child no other thread is at it, nor ends what it had begun."""
    global _lock
    _lock = threading.RLock()
    for torch, loads in reversed(_replaced):
        torch.__getattr__ = loads
    _replaced.clear()
    if _without_collector - {threading.get_ident()}:
        gc.enable()
    _without_collector.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def take() -> dict[str, Any]:
    """Segments, history and settings, as torch gives them: while it is recorded the history is the recording's."""
    import torch

    with _without_compiler(torch), sharing.ours():
        whole: dict[str, Any] = torch.cuda.memory._snapshot()
    return whole


@contextlib.contextmanager
def uncollected(is_wanted: bool = True) -> Iterator[None]:
    """Python's collector waits, which the many objects of a snapshot call: what it frees would be told by none."""
    is_wanted = is_wanted and gc.isenabled()
    me = threading.get_ident()
    if is_wanted:
        _without_collector.add(me)
        gc.disable()
    try:
        yield
    finally:
        if is_wanted:
            gc.enable()
            _without_collector.discard(me)


def have_stacks() -> bool:
    """Is history kept, be it the program's or a recording's?"""
    import torch

    with sharing.ours():
        return bool(torch._C._cuda_isHistoryEnabled())


def segments() -> list[dict[str, Any]]:
    """Of that the segments alone, with the stacks of live blocks where history is on; much faster in newer torch."""
    import torch

    ask: Any = torch.cuda.memory.memory_snapshot
    is_newer = "include_traces" in inspect.signature(ask).parameters
    with _without_compiler(torch), sharing.ours():
        if is_newer:
            _hold(0, 0, False)
        found: list[dict[str, Any]] = ask(**({"include_traces": False} if is_newer else {}))
    return found


def _hold(*told: Any) -> None:
    """One reference more: torch 2.14 drops one to each thing that its own snapshot is told, and owns none.

    Where `False` has none left Python ends (before 3.12, which does not count them).
    """
    for each in told:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@contextlib.contextmanager
def _without_compiler(torch: Any) -> Iterator[None]:
    """Keeps a snapshot from importing torch._inductor, which takes seconds in the middle of the program.

    torch asks its compiler for the names of generated code there; before anything was compiled there are none.
    """
    me = threading.get_ident()

    def look_up(name: str) -> Any:
        if name == "_inductor" and threading.get_ident() == me:
            raise AttributeError(name)
        return loads(name)

    with _lock:
        loads = torch.__getattr__
        _replaced.append((torch, loads))
        if "torch._inductor" not in sys.modules:
            torch.__getattr__ = look_up
        try:
            yield
        finally:
            torch.__getattr__ = loads
            del _replaced[-1:]
