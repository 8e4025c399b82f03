"""Functions of ours in the place of a library's, where torch.jit.script() compiles the library's all the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def standing_for(original: Any, replacement: Callable[..., Any]) -> Any:
    """Calls the replacement, and is the original to whoever compiles it.

    What functools.wraps() leaves shows its source; the names in there are looked up among the function's globals.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    code, cells = call.__code__, call.__closure__
    return functools.wraps(original)(
        FunctionType(code, original.__globals__, original.__name__, None, cells)
    )
