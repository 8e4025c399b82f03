"""A quick form of every benchmark, for ``pytest benchmarks`` with pytest-benchmark.

What runs in real torch on the host-memory runtime is timed in child processes; the table shows the times that they
report, without those of starting them.  Answers are checked first, as in the long forms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    architectures,
    costs,
    faults,
    hostcuda,
    invented,
    lasting,
    limits,
    memory,
    perturbed,
    policies,
    recording,
    repeated,
    settling,
    speed,
    streaming,
    training,
)
from benchmarks.peers import building
from benchmarks.suite import suite
from benchmarks.torch_replay import ALLOCATORS, THROUGH_WRAPPER, TorchReplay
from benchmarks.workloads import record
from pyalloc import _core

pytest.importorskip("pytest_benchmark")

MISSING = hostcuda.why_not()
in_torch = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
Answer = dict[str, Any]


class Told:
    """A clock that advances by the times that child processes report."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def run(self, benchmark: Any, ask: Callable[[], float], rounds: int = 3) -> None:
        """Runs rounds of ask(), which returns seconds."""

        def go() -> None:
            self.seconds += ask()

        benchmark.pedantic(go, rounds=rounds)


@pytest.fixture(autouse=True)
def grouped(benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Gives each benchmark a table."""
    benchmark.group = request.function.__name__.removeprefix("test_")


told = Told()
told_by_child = pytest.mark.benchmark(timer=told)


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
@pytest.mark.parametrize("name", ["seq2seq", "moe", "streams3"])
def test_replay(benchmark: Any, tmp_path: Path, name: str, policy: str) -> None:
    """One replay on the simulated device."""
    program = _core.Program(suite([name])[0].write(tmp_path))
    assert program.replay(policy, check=True)["n_violations"] == 0
    result = benchmark.pedantic(program.replay, (policy,), rounds=3)
    assert result["completed"]


def test_read_trace(benchmark: Any, tmp_path: Path) -> None:
    """Events of a trace read in columns."""
    path = suite(["decode"])[0].write(tmp_path)

    def read() -> int:
        reader, n = _core.TraceReader(path), 0
        while kinds := reader.read()[0]:
            n += len(kinds)
        return n

    assert benchmark.pedantic(read, rounds=3) == _core.Program(path).info()["n_events"]


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_memory(benchmark: Any, tmp_path: Path, allocator: str) -> None:
    """benchmarks.memory: peak and least memory of one loop, by the models."""
    trace = suite(["gan"])[0]
    path = trace.write(tmp_path)
    row = benchmark.pedantic(memory.model_row, (trace, path, allocator, ""), rounds=1)
    benchmark.extra_info.update(peak_live=row.peak_live, min_live=row.min_live)
    assert row.peak_live >= row.min_live * 0.99 >= 0.98


def test_limits(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.memory --limits."""
    path = suite(["gan"])[0].write(tmp_path)
    row = benchmark.pedantic(limits.measure, (path, "gan", "pyalloc", 1.1, ""), rounds=3)
    assert row.completed and not row.violations


def test_settling(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.memory --passes."""
    path = suite(["gan"])[0].write(tmp_path)
    row = benchmark.pedantic(settling.measure, (path, "gan", "pyalloc", "", 12), rounds=3)
    assert row.last_calls == 0


def test_policies(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.policies."""
    names = ["two_phases", "two_devices"]
    points = benchmark.pedantic(policies.measure, (names, tmp_path), rounds=1)
    settings = [setting for setting, _, _ in policies.SETTINGS]
    assert [point.setting for point in points] == settings * len(names)
    assert all(point.min_live >= 1 for point in points)  # each card holds what lives on it


def test_invented(benchmark: Any) -> None:
    """benchmarks.invented."""
    rows = benchmark.pedantic(lambda: invented.measure_one(7), rounds=1)
    assert [row.allocator for row in rows] == list(ALLOCATORS)
    assert all(row.min_live <= row.peak_live for row in rows)


@in_torch
def test_architectures(benchmark: Any) -> None:
    """benchmarks.architectures."""
    rows = benchmark.pedantic(lambda: architectures.measure_one("squeezenet1_0", 1), rounds=1)
    assert [row.allocator for row in rows] == list(ALLOCATORS)
    assert all(1 <= row.min_live <= row.peak_live for row in rows)


def test_perturbed(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.perturbed."""
    rows = benchmark.pedantic(
        lambda: list(perturbed.measure(["two_phases"], 1, tmp_path)), rounds=1
    )
    assert [row.allocator for row in rows] == list(ALLOCATORS)


@in_torch
def test_lasting(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.lasting."""
    record.build_recorder()
    rows = benchmark.pedantic(lambda: list(lasting.measure("unet", 3, tmp_path)), rounds=1)
    assert [row.allocator for row in rows] == list(ALLOCATORS)
    assert all(row.n_steps == 3 * row.n_first for row in rows)
    assert all(row.first_ms > row.last_ms >= 0 for row in rows)


@pytest.fixture(scope="module", params=[*ALLOCATORS, speed.WRAPPED])
def server(request: pytest.FixtureRequest) -> Iterator[TorchReplay]:
    """Real torch in a process of its own."""
    wrapped = request.param == speed.WRAPPED
    with TorchReplay(
        "pyalloc" if wrapped else request.param, environment=THROUGH_WRAPPER if wrapped else {}
    ) as started:
        yield started


@in_torch
@told_by_child
@pytest.mark.parametrize("pattern", speed.patterns(scaling=False)[:8], ids=lambda one: one.name)
def test_speed(benchmark: Any, server: TorchReplay, pattern: speed.Pattern) -> None:
    """benchmarks.speed: one allocate and one free together."""
    told.run(benchmark, lambda: server.speed(pattern.ask)["median_ns"] / 1e9)


@in_torch
@told_by_child
@pytest.mark.skipif(building.why_not() is not None, reason=str(building.why_not()))
def test_peers(benchmark: Any, tmp_path: Path) -> None:
    """benchmarks.peers: one operation of a warm pass on RMM's pool."""
    peer = building.rmm()
    path = suite(["gan"])[0].write(tmp_path)
    with TorchReplay(str(peer.library), environment=peer.environment) as server:
        told.run(benchmark, lambda: server.replay(path, turns=1)["warm_ns_per_op"] / 1e9, rounds=1)


@in_torch
@told_by_child
def test_loop(benchmark: Any, server: TorchReplay, tmp_path: Path) -> None:
    """benchmarks.speed --loops, benchmarks.memory through torch: one operation of a warm pass."""
    path = suite(["gan"])[0].write(tmp_path)

    def ask() -> float:
        answer = server.replay(path, turns=1)
        assert answer["completed"]
        return float(answer["warm_ns_per_op"]) / 1e9

    told.run(benchmark, ask, rounds=1)


@in_torch
@told_by_child
def test_start(benchmark: Any) -> None:
    """benchmarks.speed: processor time of install()."""
    told.run(benchmark, lambda: costs.start(1).install_cpu_ms / 1e3, rounds=1)


@in_torch
def test_host_memory(benchmark: Any) -> None:
    """benchmarks.speed: pyalloc's own tables take no more than they should."""
    for row in benchmark.pedantic(costs.host_memory, (60_000,), rounds=1):
        benchmark.extra_info[row.what] = row.host_bytes
        assert 0 < row.host_bytes <= row.target_bytes, row


@in_torch
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_faults(benchmark: Any, allocator: str) -> None:
    """benchmarks.faults: one call that fails, in a process of its own."""
    fault = next(fault for fault in faults.FAULTS if fault.what.endswith("illegal address"))
    answer: Answer = benchmark.pedantic(faults.run_fault, (fault, allocator), rounds=1)
    assert answer["raised"] and answer["good"] and answer["works"], answer


@in_torch
@told_by_child
@pytest.mark.parametrize("row", recording.ROWS[3:5], ids=lambda row: row[0])
def test_recording(benchmark: Any, tmp_path: Path, row: tuple[Any, ...]) -> None:
    """benchmarks.recording: one event with 16 frames, file included."""
    told.run(benchmark, lambda: recording.run(row, 2000, tmp_path)["total_ns"] / 1e9, rounds=1)


@in_torch
@told_by_child
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_repeated(benchmark: Any, allocator: str) -> None:
    """benchmarks.repeated: four steps of one program."""

    def ask() -> float:
        row = repeated.train(repeated.PROGRAMS[0], allocator, 4)
        assert len(row["calls"]) == 4 and row["peak_live"] > 1
        return float(row["seconds"])

    told.run(benchmark, ask, rounds=1)


@in_torch
@told_by_child
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_training(benchmark: Any, allocator: str) -> None:
    """benchmarks.training: two steps of one loop."""

    def ask() -> float:
        row = training.train("late_state", allocator, most_steps=2)
        assert not row["failed"] and len(row["step_ms"]) == 2
        return float(row["seconds"])

    told.run(benchmark, ask, rounds=1)


@pytest.mark.parametrize("command", ["stats", "top", "report"])
def test_streaming(benchmark: Any, tmp_path: Path, command: str) -> None:
    """benchmarks.streaming: a command on a trace of 200,000 events."""
    path = tmp_path / "long.pya"
    streaming.write(path, 200_000)
    words = [word.format(path) for word in streaming.COMMANDS[command]]
    _, _, resident = benchmark.pedantic(streaming.measure, (words,), rounds=1)
    assert resident < streaming.LIMIT


OpCall = Callable[..., Any]


def op_cases() -> list[tuple[str, str]]:
    """Pairs of an op and whose: ours or torch's."""
    names = ("log_prob", "mixture", "additive", "attention")
    return [(name, whose) for name in names for whose in ("ours", "torch")]


@pytest.mark.parametrize(("name", "whose"), op_cases())
def test_ops(benchmark: Any, name: str, whose: str) -> None:
    """benchmarks.ops: forward and backward, small, against float64 first."""
    torch = pytest.importorskip("torch")
    from benchmarks.ops import additive, attention, measure, spherical
    from pyalloc import ops

    torch.manual_seed(0)
    n_l, n_m, n_t, dim = 32, 32, 64, 64
    ball = spherical.spherical_inputs(n_l, n_m, n_t, dim, "cpu")
    attended = [torch.randn(1, 4, 200, dim) for _ in "qkv"]
    sizes = ((8, 64), (8, 20, 64), (8, 20, 128), (64,))
    summed = [torch.randn(size) for size in sizes]
    cases: dict[str, tuple[OpCall, OpCall, list[Any], tuple[int, ...]]] = {
        "log_prob": (spherical.our_log_prob, spherical.by_einsum, ball[:3], (n_l, n_m, n_t)),
        "mixture": (spherical.our_mixture, spherical.mixture_einsum, ball, (n_l, n_t)),
        "additive": (ops.additive_attention, additive.eager_additive, summed, (8, 128)),
        "attention": (attention.our_attention, attention.sdpa, attended, (1, 4, 200, dim)),
    }
    ours, theirs, inputs, shape = cases[name]
    benchmark.group = f"ops, {name}"
    measure.check(name, *measure.checked(ours, theirs, inputs, shape))
    run = measure.both(ours if whose == "ours" else theirs, inputs, torch.randn(shape))
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)


def test_dispatch(benchmark: Any) -> None:
    """benchmarks.ops.dispatch: one random shape on both kernels."""
    torch = pytest.importorskip("torch")
    from benchmarks.ops import dispatch

    torch.manual_seed(0)
    shape = benchmark.pedantic(dispatch.measure, (random.Random(1),), rounds=1)
    assert shape.from_c > 0 and shape.from_python > 0
