"""Replaces a library's function by ours, while torch.jit.script() still compiles the library's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def standing_for(original: Any, replacement: Callable[..., Any]) -> Any:
    """A function that calls the replacement, but looks like the original to a compiler.

    functools.wraps() leads a compiler to the original's source.  The compiler looks its names up in the function's
    globals, which therefore have to be the original's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    code, cells = call.__code__, call.__closure__
    return functools.wraps(original)(
        FunctionType(code, original.__globals__, original.__name__, None, cells)
    )
