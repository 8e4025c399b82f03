"""Quick forms of the memory and speed benchmarks, for ``pytest benchmarks`` with pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.suite import suite
from pyalloc import _core

pytest.importorskip("pytest_benchmark")


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
@pytest.mark.parametrize("name", ["seq2seq", "moe", "streams3"])
def test_replay(
    benchmark: Callable[..., dict[str, object]], tmp_path: Path, name: str, policy: str
) -> None:
    """One replay on the simulated device; the answer is checked first."""
    program = _core.Program(suite([name])[0].write(tmp_path))
    assert program.replay(policy, check=True)["n_violations"] == 0
    result = benchmark(program.replay, policy)
    assert result["completed"]


def test_read_trace(benchmark: Callable[..., int], tmp_path: Path) -> None:
    """Events of a trace read in columns."""
    path = suite(["decode"])[0].write(tmp_path)

    def read() -> int:
        reader, n = _core.TraceReader(path), 0
        while kinds := reader.read()[0]:
            n += len(kinds)
        return n

    assert benchmark(read) == _core.Program(path).info()["n_events"]
