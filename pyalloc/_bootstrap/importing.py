"""Calls that wait for a module: nobody who does not need torch is made to import it."""

from __future__ import annotations

import importlib.util
import sys
from _thread import get_ident
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder:
    """Finds a module as the other finders do, and adds a call after its import.

    It stays until the module was executed: libraries look by importlib.util.find_spec() whether there is one, and
    import it later.  Not derived from importlib.abc's, whose own imports take a third of what importing pyalloc does.
    """

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self.name = name
        self.call = call
        self.asking: set[int] = set()  # threads

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        me = get_ident()
        if fullname != self.name or me in self.asking:
            return None
        self.asking.add(me)
        try:
            # All the other finders, as Python asks them: one of them may wait for the same module.
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
    """Calls once with the module of that name: now, or right after it was executed for the first time."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))
