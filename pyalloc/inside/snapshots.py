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

from pyalloc.inside import sharing

_lock = threading.RLock()  # reentrant: `pyalloc attach` may interrupt, in the same thread
_replaced: list[tuple[Any, Any]] = []  # torch, and its __getattr__ before
_without_collector: set[int] = set()  # the threads that switched the garbage collector off


def _forget_in_child() -> None:
    """Undoes, in a forked child, what threads that it does not have were doing."""
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
    """Segments, history and settings, as torch gives them; while a recording runs, its history, not the program's."""
    import torch

    with _without_compiler(torch), sharing.ours():
        try:
            whole: dict[str, Any] = torch.cuda.memory._snapshot()
        except RuntimeError as error:
            if "Unable to cast Python instance" not in str(error):
                raise
            raise RuntimeError(
                "torch's own allocator cannot tell the stacks of a program of which a file's name is not UTF-8; "
                "rename the file, or leave the stacks out (--stacks none)"
            ) from error
    return whole


@contextlib.contextmanager
def uncollected(is_wanted: bool = True) -> Iterator[None]:
    """Switches Python's collector off: a snapshot's many objects would start it, and its frees would go unrecorded."""
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


def segments() -> list[dict[str, Any]]:
    """Only the segments of take(), with the stacks of live blocks if history is on; much faster in newer torch."""
    import torch

    ask: Any = torch.cuda.memory.memory_snapshot
    is_newer = "include_traces" in inspect.signature(ask).parameters
    with _without_compiler(torch), sharing.ours():
        if is_newer:
            _hold(0, 0, False)
        found: list[dict[str, Any]] = ask(**({"include_traces": False} if is_newer else {}))
    return found


def _hold(*told: Any) -> None:
    """Adds a reference to each: torch 2.14 drops one to each argument of its snapshot without owning it.

    Before Python 3.12, which no longer counts references to it, the process ends when `False` has none left.
    """
    for each in told:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@contextlib.contextmanager
def _without_compiler(torch: Any) -> Iterator[None]:
    """Keeps a snapshot from importing torch._inductor, which takes seconds in the middle of the program.

    torch asks its compiler for the names of generated code; before anything was compiled, there are none.
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
