"""The suite of traces, and the commands that run it: what they print, not how fast they are."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults, lasting, perturbed, plots, repeated
from benchmarks.speed import figures
from benchmarks.suite import HELD_OUT, TRACES, suite
from benchmarks.torch_replay import SpeedRequest, TorchReplay, in_turns
from pyalloc import _core

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_suite_has_enough_of_each_kind() -> None:
    kinds = [trace.kind for trace in suite()]
    assert kinds.count("recorded") >= 14
    assert kinds.count("held-out") == len(HELD_OUT) >= 6
    assert kinds.count("generated") >= 5
    assert sum(path.stat().st_size for path in TRACES.iterdir()) < 30e6
    with pytest.raises(ValueError, match="nothing"):
        suite(["nothing"])


@pytest.mark.parametrize("trace", suite(), ids=lambda trace: trace.name)
def test_each_trace_is_whole_and_the_same_each_time(trace, tmp_path: Path) -> None:
    """Complete, every free of something alive, streams and sizes in range; generated ones the same each time."""
    path = trace.write(tmp_path)
    info = _core.Program(path).info()
    assert info["is_complete"]
    assert info["n_ops"] > 1000
    assert info["n_ignored_frees"] == info["n_missing_frees"] == 0
    if trace.kind == "generated":
        data = path.read_bytes()
        path.unlink()
        assert trace.write(tmp_path).read_bytes() == data
    if trace.name == "mixture":
        assert info["n_ops"] > 1_000_000


def test_memory_with_models_only() -> None:
    done = run("benchmarks.memory", "--only", "gan", "--no-torch", "--json", "-q")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["allocator"] for row in rows] == ["native", "expandable", "pyalloc"]
    for row in rows:
        assert row["source"] == "model"
        assert row["peak_live"] >= row["min_live"] * 0.99 >= 0.98
        assert row["device_ns"]["low"] <= row["device_ns"]["high"]
        assert row["calls"] >= row["calls_second_half"]


def test_memory_tells_what_passes_settle_to() -> None:
    done = run("benchmarks.memory", "--only", "gan", "--passes", "12", "--json", "-q")
    assert done.returncode == 0, done.stderr
    rows = {row["allocator"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == {"native", "expandable", "pyalloc"}
    for row in rows.values():
        assert row["last_calls"] == 0 < row["first_calls"]
        assert row["first_peak_live"] <= row["peak_live"]
    assert rows["pyalloc"]["peak_live"] < rows["expandable"]["peak_live"]


def test_perturbed_is_the_same_program_beside_blocks_that_stay(tmp_path: Path) -> None:
    done = run("benchmarks.perturbed", "graph_pools", "two_devices", "--seeds", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    plain = {
        name: _core.Program(suite([name])[0].write(tmp_path))
        for name in ("graph_pools", "two_devices")
    }
    for row in rows:
        program = plain[row["trace"]]
        live, peak = (
            program.info()["peak_live_bytes"],
            program.replay(row["allocator"])["peak_bytes"],
        )
        assert row["plain"] == peak / live
        assert row["plain"] * 0.97 < row["mean"] <= row["worst"] < row["plain"] * 1.05
    perturbed.with_guests(tmp_path / "graph_pools.pya", tmp_path / "more.pya", 1)
    more, less = _core.Program(tmp_path / "more.pya").info(), plain["graph_pools"].info()
    assert more["n_ops"] == less["n_ops"] + perturbed.N_GUESTS
    assert (
        0
        < more["peak_live_bytes"] - less["peak_live_bytes"]
        <= perturbed.N_GUESTS * perturbed.MOST_GUEST
    )


def test_memory_of_a_snapshot_begins_with_what_was_alive(tmp_path: Path) -> None:
    """8 MiB are alive only before the history, 16 all the time, 4 come last: 24 at most."""
    mib, base = 1 << 20, 1 << 40
    common = {"stream": 0, "frames": []}
    sizes = {0: 16 * mib, 16 * mib: 4 * mib}
    blocks = [
        {"address": base + at, "size": n, "requested_size": n, "state": "active_allocated"}
        for at, n in sizes.items()
    ]
    segment = {
        **common,
        **{"device": 0, "address": base, "total_size": 20 * mib, "segment_type": "large"},
        "blocks": [{**block, "frames": []} for block in blocks],
    }
    old = {**common, "addr": base + (1 << 30), "size": 8 * mib}
    history = [
        {**old, "action": "free_requested"},
        {**old, "action": "free_completed"},
        {**old, "action": "segment_free"},
        {**common, "action": "alloc", "addr": base + 16 * mib, "size": 4 * mib},
    ]
    path = tmp_path / "theirs.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}, protocol=4))
    done = run("benchmarks.memory", str(path), "--no-torch", "--json", "-q")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["trace"] == "theirs" and row["kind"] == "file"
        assert row["live_bytes"] == 24 * mib
        assert row["min_bytes"] >= 24 * mib
        assert row["recorded_bytes"] == 28 * mib
    told = run("benchmarks.memory", str(path), "--no-torch", "-q").stdout
    assert f"as recorded{28 / 24:11.3f}" in told
    native = next(row for row in rows if row["allocator"] == "native")["peak_bytes"]
    assert f"geometric mean {native / (28 * mib):.4f}" in told
    snapshot = pickle.loads(path.read_bytes())
    snapshot["allocator_settings"] = {"expandable_segments": True}
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    assert "as recorded" not in run("benchmarks.memory", str(path), "--no-torch", "-q").stdout


def test_memory_refuses() -> None:
    done = run("benchmarks.memory", "--only", "nothing")
    assert done.returncode == 2
    assert "no trace named nothing" in done.stderr
    done = run("benchmarks.memory", str(ROOT / "README.md"), "-q", "--no-torch")
    assert done.returncode == 1
    assert "neither a recording" in done.stderr


@pytest.mark.torch
def test_memory_through_torch() -> None:
    done = run("benchmarks.memory", "--only", "two_phases", "-q")
    assert done.returncode == 0, done.stderr
    assert "real torch" in done.stdout
    assert "geometric mean" in done.stdout
    assert re.search(r"pyalloc .* x native ms +\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", done.stdout)


@pytest.mark.torch
def test_calls_are_those_that_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain allocations too, whatever the caller's environment requests of torch."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    path = suite(["gan"])[0].write(tmp_path)
    with TorchReplay("pyalloc", "vmm:False") as server:
        row = server.replay(path)
    named = row["calls_by_name"]
    assert 0 < named["cuMemAlloc_v2"] <= row["calls"] == sum(named.values())
    assert "cuMemCreate" not in named and row["calls"] < row["ops"] / 10


@pytest.mark.torch
def test_faults_meet_the_allocator_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller's environment requests of torch: native frees what it caches, and tries again."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    answer = faults.run_fault(faults.FAULTS[0], "native")
    assert answer == {"raised": None, "text": "", "good": True, "works": True, "lost": 0}


@pytest.mark.torch
@pytest.mark.parametrize("besides", [[], ["--loops"]])
def test_speed_of_a_pattern_that_is_none_is_refused(besides: list[str]) -> None:
    done = run("benchmarks.speed", "--only", "nothing", "--rounds", "1", *besides)
    assert done.returncode == 2 and "no pattern has 'nothing' in its name" in done.stderr


@pytest.mark.torch
def test_speed_prints_a_row_of_json_for_each_figure() -> None:
    done = run(
        "benchmarks.speed", "--rounds", "1", "--only", "one size, 512", "threads", "--json", "-q"
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4 * 4  # native, expandable, pyalloc, and pyalloc through torch's wrapper
    for row in rows:
        assert 0 < row["fastest_ns"] <= row["ns"] <= row["slowest_ns"]
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["ratio"] == 1 or row["allocator"] != "native"
        assert row["n"] > 0


@pytest.mark.torch
def test_speed_of_threads_alone_is_a_table() -> None:
    done = run("benchmarks.speed", "--rounds", "1", "--only", "2 threads", "-q")
    assert done.returncode == 0, done.stderr
    assert "2 threads, 100 live each" in done.stdout and "1 rounds" in done.stdout


@pytest.mark.torch
def test_fixed_shapes_end_without_device_calls() -> None:
    program = repeated.PROGRAMS[0]
    native, ours = (repeated.train(program, name, 10) for name in ("native", "pyalloc"))
    assert native["quiet_from"] <= 4
    assert ours["quiet_from"] <= 8  # without places found again: never
    assert ours["peak_live"] < native["peak_live"]


class Counted:
    """In place of a process with torch: says when it was called."""

    def __init__(self, name: str, n_turns: int, log: list[str]) -> None:
        self.name, self.left, self.log = name, n_turns, log

    def begin(self, _: SpeedRequest) -> dict[str, Any]:
        self.log.append(f"{self.name} begins")
        return {"turn": True} if self.left else {"of": self.name}

    def turn(self) -> dict[str, Any]:
        self.log.append(self.name)
        self.left -= 1
        return {"turn": True} if self.left else {"of": self.name}


def test_allocators_take_turns() -> None:
    log: list[str] = []
    servers: Any = {name: Counted(name, n, log) for name, n in (("a", 2), ("b", 3), ("c", 0))}
    assert in_turns(servers, SpeedRequest(1, 512)) == {name: {"of": name} for name in "abc"}
    assert log == ["a begins", "b begins", "c begins", "a", "b", "a", "b", "b"]


@pytest.mark.parametrize("moment", range(4))
def test_a_slow_moment_does_not_change_the_ratio(moment: int) -> None:
    slow = [5.0 if turn == moment else 1.0 for turn in range(4)]
    row = figures([10 * factor for factor in slow], [40 * factor for factor in slow])
    assert (row["ratio"], row["ratio_quartiles"]) == (4, [4, 4])
    assert (row["fastest_ns"], row["ns"], row["slowest_ns"]) == (10, 10, 50)


def commands() -> set[str]:
    """The benchmarks: modules with a command line, or one that memory's command opens."""
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "ops").glob("*.py")]
    found = {path.stem for path in files if "``python -m benchmarks." in path.read_text()}
    return found - {"suite", "torch_replay", "__init__", "__main__"} | {"ops"}


def test_each_benchmark_has_a_quick_form() -> None:
    tree = ast.parse((ROOT / "benchmarks" / "test_quick.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert commands() >= {"memory", "speed", "policies", "faults", "dispatch"}
    assert commands() - {"ops"} <= {each.name for node in imports for each in node.names}
    assert "benchmarks.ops" in {node.module for node in imports}


@pytest.mark.torch
def test_quick_forms_run() -> None:
    pytest.importorskip("pytest_benchmark")
    done = run(
        *("pytest", "benchmarks", "-q", "--benchmark-disable", "-p", "no:cacheprovider"),
        *("-k", "not native and not expandable and not wrapped and not history and not peers"),
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    parser = argparse.ArgumentParser()
    plots.option(parser, "write a plot too")
    with pytest.raises(SystemExit):
        parser.parse_args(["--plot", str(tmp_path / "plot.svg")])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_first_steps_of_a_trace(tmp_path: Path) -> None:
    whole = suite(["unet"])[0].write(tmp_path)
    n_all = lasting.first_steps(whole, tmp_path / "all.pya", None)
    assert lasting.first_steps(whole, tmp_path / "two.pya", 2) == 2
    assert lasting.first_steps(whole, tmp_path / "more.pya", n_all + 1) == n_all > 2
    counts = [
        _core.Program(tmp_path / f"{name}.pya").info()["n_allocs"]
        for name in ("two", "all", "more")
    ]
    assert 0 < counts[0] < counts[1] == counts[2] == _core.Program(whole).info()["n_allocs"]
