"""Calls that wait for a module: whatever else looks for it, they run once, when it is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dry_support import RunPython

from pyalloc._bootstrap.importing import after_import


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_who_looks_whether_there_is_a_module_uses_up_no_call(modules: Path) -> None:
    import importlib.util

    (modules / "awaited").mkdir()
    (modules / "awaited" / "__init__.py").write_text("value = 1\n")
    (modules / "awaited" / "inner.py").write_text("value = 2\n")
    finders, seen = list(sys.meta_path), []
    for i, name in enumerate(["awaited", "awaited", "awaited.inner"]):
        after_import(name, lambda module, i=i: seen.append((i, module.value)))
    for _ in range(2):
        looked = importlib.util.find_spec("awaited")
        assert looked is not None and looked.loader is not None
    assert not seen
    assert importlib.util.find_spec("awaited.inner") is not None  # imports its package
    assert sorted(seen) == [(0, 1), (1, 1)]
    importlib.import_module("awaited.inner")
    assert sorted(seen) == [(0, 1), (1, 1), (2, 2)]
    assert sys.meta_path == finders
    importlib.reload(sys.modules["awaited"])
    looked.loader.exec_module(sys.modules["awaited"])  # as lazy loaders do, later
    assert len(seen) == 3


def test_a_module_that_could_not_be_imported_is_waited_for(modules: Path) -> None:
    import importlib

    seen: list[int] = []
    after_import("awaited", lambda module: seen.append(module.value))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited")
    path = modules / "awaited.py"
    path.write_text("raise RuntimeError\n")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError):
        importlib.import_module("awaited")
    path.write_text("value = 3  # of another length\n")
    importlib.invalidate_caches()
    importlib.import_module("awaited")
    assert seen == [3]


@pytest.mark.torch
def test_a_program_that_looks_for_torch_first_runs_on_pyalloc(dry_python: RunPython) -> None:
    """As transformers, accelerate and lightning do before they import it."""
    done = dry_python(
        """
        import importlib.util
        assert importlib.util.find_spec("torch") is not None
        import torch
        torch.empty(5, device="cuda")
        import pyalloc
        print(pyalloc.status().installed, pyalloc.status().allocations)
        """,
        install=True,
        cold=True,
    )
    assert done.stdout == "True 1\n"


def test_finders_of_modules_that_python_passes_over_do_no_harm(run_python) -> None:  # type: ignore[no-untyped-def]
    """Old ones have only find_module()."""
    done = run_python(
        """
        import sys, warnings
        warnings.simplefilter("ignore")
        class Old:
            def find_module(self, name, path=None):
                return None
        sys.meta_path.insert(0, Old())
        from pyalloc._bootstrap.importing import after_import
        for wanted in (print, print):
            after_import("colorsys", lambda module: wanted(module.__name__))
        import colorsys
        after_import("colorsys", lambda module: print("later", module is colorsys))
        """
    )
    assert done.stdout.split() == ["colorsys", "colorsys", "later", "True"]
