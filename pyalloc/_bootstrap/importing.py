"""Calls that wait until a module is imported, so that a program that does not need torch need not import it."""

from __future__ import annotations

import importlib.util
import sys
from _thread import get_ident
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds a module through the other finders, and adds a call after its import.

    It stays until the module has been executed: libraries call importlib.util.find_spec() to see whether a module
    exists, and import it later.  Not a subclass of importlib.abc's: those imports are a third of pyalloc's import time.
    """

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self.name = name
        self.call = call
        self.asking: set[int] = set()  # threads that are in find_spec()

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        me = get_ident()
        if fullname != self.name or me in self.asking:
            return None
        self.asking.add(me)
        try:
            # Ask all other finders as Python does: one of them may be a _Finder for the same module.
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asking.discard(me)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.call(module)

            spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def after_import(name: str, call: Callable[[Any], object]) -> None:
    """Calls `call` once with the module of that name: now, or right after it was executed for the first time."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))
