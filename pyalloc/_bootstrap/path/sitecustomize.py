"""Runs in every Python process that `pyalloc run` or `pyalloc dryrun` starts, before the program.

It first runs the sitecustomize that it hides, if there is one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_OTHERS = os.path.dirname(_HERE)


def _run_shadowed() -> None:
    rest = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


class _Package:
    """Finds pyalloc only: its neighbours may belong to another environment, and the program must not see them."""

    @staticmethod
    def find_spec(
        fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "pyalloc":
            return None
        folder = os.path.dirname(_OTHERS)
        file = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(
            fullname, file, submodule_search_locations=[folder]
        )


def _make_importable() -> None:
    """If the program's environment has no pyalloc, appends a finder for it, after all finders of the program."""
    if importlib.util.find_spec("pyalloc") is None:
        sys.meta_path.append(_Package)


def _wait_at_exit() -> None:
    spec = importlib.util.spec_from_file_location(
        "_pyalloc_settling", os.path.join(_OTHERS, "settling.py")
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.wait_at_exit()


def _start() -> None:
    # The same names as in pyalloc._bootstrap, live and autorecord; most processes need none of these modules.
    ours = ("PYALLOC_INSTALL", "PYALLOC_DRYRUN_REPORT", "PYALLOC_RECORD", "PYALLOC_LIVE")
    if any(name in os.environ for name in ours):
        _make_importable()
    if os.environ.get("PYALLOC_INSTALL") == "1":
        from pyalloc.install import install_when_torch_is_imported

        install_when_torch_is_imported()
    if os.environ.get("PYALLOC_LIVE") == "1":
        from pyalloc.live import serve_when_torch_is_imported

        serve_when_torch_is_imported()
    if os.environ.get("PYALLOC_RECORD"):
        from pyalloc.inside.autorecord import record_when_cuda_starts

        record_when_cuda_starts()
    folder = os.environ.get("PYALLOC_DRYRUN_REPORT")
    if folder:
        from pyalloc._bootstrap.report import watch

        watch(folder)


_wait_at_exit()
try:
    _run_shadowed()
finally:  # even after an error in the program's own file, which Python reports
    _start()
