"""What calls leave behind: unreachable Python objects, and host memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Sequence

from pyalloc import _core, errors

N_CALLS, N_TRIES = 100, 20
# From here on the reference count marks an immortal object (from Python 3.12 on) instead of counting: Python leaves it
# alone, while an extension built with other headers goes on counting, as the stable ABI allows.
_IMMORTAL = 1 << 30
_LEAST_BYTES = 16  # malloc returns nothing smaller


class _Malloc(ctypes.Structure):
    """struct mallinfo2"""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


# Immortal objects: what calls leave of them are references.
_LASTING = [None, True, False, 0, 1, _core, errors, *vars(_core).values(), *vars(errors).values()]


def _in_use(given: Sequence[object]) -> tuple[int, int, int]:
    """(objects, references, bytes that malloc handed out)"""
    gc.collect()
    counts = map(sys.getrefcount, [*_LASTING, *given])
    references = sum(n for n in counts if n < _IMMORTAL)
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # glibc before 2.33
        return sys.getallocatedblocks(), references, 0
    ask.restype = _Malloc
    told = ask()
    return sys.getallocatedblocks(), references, told.uordblks + told.hblkhd


def left_by(call: Callable[[], object], given: Sequence[object] = ()) -> str | None:
    """What each of many calls leaves, in words; None: nothing.  Exceptions are part of a call.

    given: the call's arguments, which it must leave alone.
    """

    def repeat(n: int) -> None:
        for _ in range(n):
            with contextlib.suppress(Exception):
                call()

    repeat(N_CALLS)
    for _ in range(
        N_TRIES
    ):  # what is kept for some hundred calls, as Python's caches do, is no leak
        before = _in_use(given)
        repeat(N_CALLS)
        after = _in_use(given)
        objects, references, n_bytes = (
            (b - a) / N_CALLS for a, b in zip(before, after, strict=True)
        )
        if max(objects, abs(references), n_bytes / _LEAST_BYTES) < 0.5:
            return None
    return f"{objects} objects, {references} references and {n_bytes} bytes for each call"
