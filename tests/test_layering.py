"""Floors and rooms: a C file includes only files of its own floor and lower ones, and rooms keep to themselves."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyalloc

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "pyalloc"

# room -> the other rooms that it may include from
ROOMS = {
    "core": {"device"},
    "device": {"core"},
    "ipc": {"core"},
    "replay": {"core", "device"},
    "ops": set(),
    "hostcuda": set(),
    "gdb": set(),
    "module": {"core", "device", "ops", "replay", "torch", "thread"},
    "torch": {"core", "device", "ipc", "thread"},
    "thread": set(),
}
# The device room stands on floor 0 of the core: it knows types, but no policy.
ONLY_FROM_CORE = {"device": {"base.h"}}
ONLY_FROM_DEVICE = {"core": {"device.h"}}
FOREIGN = re.compile(r"^(Python\.h|torch/|c10/|ATen/|cuda|cublas|cudnn|nvml|nvrtc)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
FLOOR = re.compile(r"\bFloor (\d+)\b")

C_FILES = sorted(
    path
    for path in CSRC.rglob("*")
    if path.suffix in {".c", ".h", ".cpp"} and "build" not in path.parts
)


def name(path: Path) -> str:
    return str(path.relative_to(CSRC))


def room(path: Path) -> str:
    parts = path.relative_to(CSRC).parts
    return parts[0] if len(parts) > 1 else re.split(r"[_.]", parts[0])[0]


def includes(path: Path) -> list[tuple[bool, str]]:
    """For each include: (is it one of ours, its name)."""
    return [(mark == '"', what) for mark, what in INCLUDE.findall(path.read_text())]


def own_includes(path: Path) -> list[Path]:
    found = []
    for ours, what in includes(path):
        if not ours:
            continue
        target = (path.parent / what).resolve()
        assert target.is_relative_to(CSRC), f"{name(path)} reaches out of csrc: {what}"
        # The compiler complains about a generated or missing header.
        if target.exists():
            found.append(target)
    return found


def floor(path: Path) -> int | None:
    """The floor that the first comment states; a .c file without one has its header's floor."""
    for each in (path, path.with_suffix(".h")):
        stated = FLOOR.search(each.read_text()[:2000]) if each.exists() else None
        if stated:
            return int(stated.group(1))
    return None


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_rooms_keep_to_themselves(path: Path) -> None:
    here = room(path)
    assert here in ROOMS, f"{name(path)}: no such room in ROOMS"
    for target in own_includes(path):
        there = room(target)
        assert there == here or there in ROOMS[here], f"{name(path)} may not include {name(target)}"
        if there == "core" and here in ONLY_FROM_CORE:
            assert target.name in ONLY_FROM_CORE[here], f"{name(path)} includes {name(target)}"
        if there == "device" and here in ONLY_FROM_DEVICE:
            assert target.name in ONLY_FROM_DEVICE[here], f"{name(path)} includes {name(target)}"


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_no_foreign_headers(path: Path) -> None:
    for ours, what in includes(path):
        if not ours and FOREIGN.match(what):
            assert room(path) == "module", f"{name(path)} may not include <{what}>"
            assert what == "Python.h", f"{name(path)} may not include <{what}>"


HEADERS = [path for path in C_FILES if path.suffix == ".h"]


@pytest.mark.parametrize("path", HEADERS, ids=name)
def test_headers_state_their_floor(path: Path) -> None:
    assert "#pragma once" in path.read_text()
    assert floor(path) is not None, f"{name(path)}: the first comment must say 'Floor N'"


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_includes_only_lower_floors(path: Path) -> None:
    here = floor(path)
    if here is None:  # without a header of its own, it takes the highest floor it includes
        return
    for target in own_includes(path):
        there = floor(target)
        if room(target) != room(path) and room(path) != "core":
            continue  # each room counts its own floors; the core and its device share theirs
        assert there is not None and there <= here, (
            f"{name(path)} (floor {here}) includes {name(target)} (floor {there})"
        )


def test_no_include_cycles() -> None:
    graph = {path: own_includes(path) for path in C_FILES}
    done: set[Path] = set()

    def visit(path: Path, above: tuple[Path, ...]) -> None:
        assert path not in above, "cycle: " + " -> ".join(name(step) for step in (*above, path))
        if path in done:
            return
        for target in graph.get(path, []):
            visit(target, (*above, path))
        done.add(path)

    for path in graph:
        visit(path, ())


def test_package_init_only_re_exports() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    allowed = (ast.Import, ast.ImportFrom)
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        told = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else None
        is_fact = told in ("__all__", "__version__")  # which pyproject.toml reads without importing
        assert isinstance(node, allowed) or is_docstring or is_fact, ast.unparse(node)


def test_all_errors_are_caught_by_names_of_the_package() -> None:
    """Docstrings name them: `except pyalloc.UsageError`."""
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    errors = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert errors <= set(pyalloc.__all__)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


# Rooms of the Python package, and what they may import while they are imported, besides the extension and `errors`:
# other rooms, or modules outside of rooms, which are the public ones.
PYTHON_ROOMS = {
    "_bootstrap": set(),
    "common": {"_bootstrap"},
    "traces": {"common"},
    "analysis": {"common", "traces"},
    "inside": {"_bootstrap", "common", "traces", "live", "marks"},
    "outside": {"_bootstrap", "common", "live", "install"},
    "report": {"common", "traces", "analysis", "outside"},
    "ops": {"common"},
    "distributions": {"ops"},
}
# What they may import in a function, too.
LATE = {"_bootstrap": {"inside", "install", "live"}, "inside": {"report", "trace"}}
FOR_ALL = {"_core", "errors", "__version__"}
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
ROOM_FILES = [path for path in PYTHON_FILES if path.relative_to(PACKAGE).parts[0] in PYTHON_ROOMS]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def from_package(path: Path, *, late: bool) -> Iterator[str]:
    """What a file imports from pyalloc, without that name: while it is imported, or late, in a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            within = inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            if within == late and isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif within == late and isinstance(child, ast.ImportFrom) and child.module:
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from walk(child, within)

    for name in walk(ast.parse(path.read_text()), False):
        if name.startswith("pyalloc."):
            yield name.removeprefix("pyalloc.")


@pytest.mark.parametrize("path", ROOM_FILES, ids=module_of)
def test_python_rooms_keep_to_themselves(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0]
    allowed = PYTHON_ROOMS[here] | FOR_ALL | {here}
    for late, others in ((False, set()), (True, LATE.get(here, set()))):
        for target in from_package(path, late=late):
            assert target.split(".")[0] in allowed | others, f"{module_of(path)} imports {target}"


def test_every_python_folder_is_a_room() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == PYTHON_ROOMS.keys() | {"cli"}  # which may import everything


def test_no_python_import_cycles() -> None:
    files = {module_of(path): path for path in PYTHON_FILES}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        targets = {f"pyalloc.{name}" for name in from_package(path, late=False)}
        graph[module] = {
            target if target in files else target.rpartition(".")[0] for target in targets
        } - {"pyalloc"}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


PURE = ("common", "traces", "analysis", "report")


@pytest.mark.parametrize(
    "path", [p for p in ROOM_FILES if p.relative_to(PACKAGE).parts[0] in PURE], ids=module_of
)
def test_rooms_that_read_recordings_need_no_torch(path: Path) -> None:
    """Data in, data or text out: neither torch nor the allocator is there when a recording is read."""
    for module in imported(path):
        assert not module.startswith(("torch", "pyalloc.install", "pyalloc.inside")), module


def test_importing_pyalloc_does_not_import_torch(run_python) -> None:  # type: ignore[no-untyped-def]
    run_python(
        "import sys, pyalloc; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    )
