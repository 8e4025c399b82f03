"""pyalloc._core without torch and without a device: calls refuse clearly before install()."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dry_support import run_checked

import pyalloc
from pyalloc import AllocatorError, _core
from pyalloc.errors import TraceError
from pyalloc.traces.convert import KINDS

CALLS: list[Callable[[], object]] = [
    lambda: _core.alloc(0, 512, 0),
    lambda: _core.free(0),
    lambda: _core.record_stream(0, 0),
    lambda: _core.block_info(0),
    lambda: _core.empty_cache(),
    lambda: _core.trim(0, 0),
    lambda: _core.get_fraction(0),
    lambda: _core.reserve(0, 512, 0),
    lambda: _core.set_limit(0, False, 512),
    lambda: _core.get_limit(0, False),
    lambda: _core.pool_set_limit(0, (0, 1), 512),
    lambda: _core.stats(0),
    lambda: _core.nested_stats(0, ()),
    lambda: _core.reset_peak(0),
    lambda: _core.reset_accumulated(0),
    lambda: _core.check(0),
    lambda: _core.torch_attach(),
]


@pytest.mark.parametrize("call", CALLS)
def test_without_a_heap_calls_say_what_to_do(call: Callable[[], object]) -> None:
    assert not _core.is_created()
    with pytest.raises(AllocatorError, match=r"pyalloc\.install\(\)"):
        call()


def test_a_heap_may_be_made_and_destroyed_without_a_device() -> None:
    _core.create("memory:tight")
    try:
        assert _core.is_created()
        with pytest.raises(AllocatorError, match="already"):
            _core.create("")
    finally:
        _core.destroy()
    assert not _core.is_created()


def test_allocating_without_a_driver_is_an_error_not_a_crash(
    run_python: Callable[..., object],
) -> None:
    """In a process of its own: other tests here load the host-memory driver."""
    run_python("""
        from pyalloc import _core
        from pyalloc.errors import AllocatorError

        def refused(function, *arguments):
            try:
                function(*arguments)
            except AllocatorError:
                return True
            return False

        _core.create("")
        assert refused(_core.alloc, 0, 1 << 20, 0)
        assert refused(_core.alloc, -1, 1 << 20, 0)
        assert refused(_core.alloc, 1000, 1 << 20, 0)
        assert refused(_core.free, 512)
        _core.free(0)
        _core.destroy()
    """)


@pytest.mark.parametrize("opens", [_core.TraceReader, _core.TraceWriter, _core.Scan, _core.Program])
def test_errors_about_files_give_the_reason(opens: Callable[[object], object]) -> None:
    """Whatever bytes the name has, and however long it is."""
    for name in (b"/nowhere/\xff/x", "/nowhere" + 15 * ("/" + 250 * "x")):
        with pytest.raises(TraceError, match=r"/nowhere.*x: No such file or directory"):
            opens(name)


class Closing:
    """A number that closes a trace when it is read."""

    def __init__(self, writer: _core.TraceWriter) -> None:
        self.writer = writer
        self.said = ""

    def __index__(self) -> int:
        try:
            self.writer.close()
        except RuntimeError as error:
            self.said = str(error)
        return 0


def test_a_mark_that_cannot_be_is_told_as_such(tmp_path: Path) -> None:
    """And not as a full disk."""
    _core.create("")
    try:
        history = _core.HistoryWriter(_core.TraceWriter(tmp_path / "out.pya"), set(), str)
        with pytest.raises(ValueError, match="a string or stack not defined yet"):
            history.drain(0, [(1, KINDS["user"], 99, 0, 0, 0, 0)])
    finally:
        _core.destroy()


def test_a_trace_is_not_closed_while_it_is_written(tmp_path: Path) -> None:
    _core.create("")
    try:
        path = tmp_path / "out.pya"
        writer = _core.TraceWriter(path)
        number = Closing(writer)
        mark = (1, KINDS["user"], number, 0, 0, 0, 0)
        assert _core.HistoryWriter(writer, set(), str).drain(0, [mark]) == (1, 0)
        assert "is writing to this trace" in number.said
        assert not path.exists()
        with pytest.raises(ValueError, match="the trace is closed"):
            writer.event(Closing(writer))  # type: ignore[arg-type]
        assert path.exists()
    finally:
        _core.destroy()


def test_figures_without_torch_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for ask in (pyalloc.stats, pyalloc.trim, lambda: pyalloc.set_limit("1GiB")):
        with pytest.raises(
            AllocatorError, match="not installed, because this Python has no PyTorch"
        ):
            ask()


def test_features_are_reported_without_torch() -> None:
    # Another test may have loaded torch here.
    code = "from pyalloc import _core; print(_core.torch_features())"
    features = ast.literal_eval(run_checked([sys.executable, "-c", code]).stdout)
    assert features
    for name, works, detail in features:
        assert name and detail
        assert works is False


def test_nested_statistics_are_torchs() -> None:
    """All except ours and those left out; the parity suite checks their order."""

    def flat(inner: dict[str, Any], before: str = "") -> Iterator[tuple[str, int]]:
        for key, value in inner.items():
            if isinstance(value, dict):
                yield from flat(value, f"{before}{key}.")
            else:
                yield before + key, value

    _core.create("max_split_size:32MiB")
    try:
        all_of_them = _core.stats(0)
        found = list(flat(_core.nested_stats(0, {"num_ooms"})))
        with pytest.raises(TypeError):
            _core.nested_stats(0, 1)  # type: ignore[arg-type]
    finally:
        _core.destroy()
    assert sorted(found) == sorted(
        (key, value)
        for key, value in all_of_them.items()
        if not key.startswith("pyalloc_") and key != "num_ooms"
    )
    assert ("max_split_size", 32 << 20) in found


def test_every_counter_of_ours_is_explained() -> None:
    root = Path(__file__).parents[2]
    counters = re.findall(r"X\((pyalloc_\w+)\)", (root / "csrc/core/stats.h").read_text())
    told = set(re.findall(r"`(pyalloc_\w+)`", (root / "docs/limits.md").read_text()))
    assert len(counters) > 20 and set(counters) == told


def names(body: list[ast.stmt]) -> set[str]:
    told = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    told |= {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return {name for name in told if not name.startswith("__")}


def test_the_stub_tells_of_all_there_is_and_of_nothing_else() -> None:
    stub = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text()).body
    assert names(stub) == {name for name in dir(_core) if not name.startswith("__")}
    for kind in (node for node in stub if isinstance(node, ast.ClassDef)):
        methods = {name for name in vars(getattr(_core, kind.name)) if not name.startswith("__")}
        assert names(kind.body) == methods, kind.name
