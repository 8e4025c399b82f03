"""The loops of the suite, trained: what benchmarks.training prints, not how fast it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dry_support import dry_environment

from benchmarks import training
from benchmarks.workloads.record import names

ROOT = Path(__file__).resolve().parents[2]
in_vision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="needs torchvision: pip install torchvision",
)
COMMAND = [sys.executable, "-m", "benchmarks.training", "-q"]


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


def row(allocator: str, **other: Any) -> dict[str, Any]:
    figures = {"live_bytes": 1 << 30, "peak_bytes": 3 << 29, "median_ms": 2.0, "retries": 0}
    requests = {"n_allocations": 100, "requested_bytes": 1000}
    return {"program": "gan", "allocator": allocator, "failed": "", **figures, **requests, **other}


@pytest.mark.torch
@pytest.mark.slow
@in_vision
def test_a_loop_is_trained_on_each_allocator_with_the_same_requests() -> None:
    done = run("--only", "gan", "--steps", "6", "--json", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "asked for" not in done.stderr
    rows = {row["allocator"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == set(training.ALLOCATORS)
    for each in rows.values():
        assert each["peak_bytes"] >= each["live_bytes"] > 0
        assert len(each["step_ms"]) == 6 and each["median_ms"] > 0
        assert (each["jobs"], each["failed"], each["out_of_memory"]) == (2, "", False)
    assert [rows[name]["backend"] for name in training.ALLOCATORS] == [
        *("native", "native", "cudaMallocAsync", "pluggable")
    ]
    assert rows["expandable"]["peak_bytes"] != rows["native"]["peak_bytes"]
    assert rows["async"]["calls"] is rows["async"]["n_allocations"] is None
    assert rows["pyalloc"]["n_allocations"] == rows["native"]["n_allocations"] > 1000
    assert rows["pyalloc"]["peak_bytes"] < rows["native"]["peak_bytes"]


@pytest.mark.torch
@pytest.mark.slow
@in_vision
def test_a_training_of_more_steps() -> None:
    once, twice = (training.train("unet", "pyalloc", times=times) for times in (1, 2))
    assert not once["failed"] and not twice["failed"]
    assert len(twice["step_ms"]) == 2 * len(once["step_ms"]) > 0
    assert twice["median_ms"] == training.typical_ms(twice["step_ms"], 2)


@pytest.mark.parametrize(
    ("step_ms", "times", "expected"),
    [([9, 1, 2, 3], 1, 2), ([9, 8, 2, 3], 2, 2.5), ([9], 1, 9), ([9], 2, 9), ([], 1, None)],
)
def test_a_typical_step_is_one_after_growth(
    step_ms: list[float], times: int, expected: float | None
) -> None:
    assert training.typical_ms(step_ms, times) == expected


@pytest.mark.torch
@pytest.mark.slow
@in_vision
def test_a_card_that_is_too_small_is_a_row_that_says_so() -> None:
    words = ("--device", "cuda", "--only", "gan", "unet", "--steps", "2")
    words += ("--allocators", "pyalloc", "--json")
    done = run(*words, env=dry_environment(memory="500MB"))
    assert done.returncode == 1
    gan, unet = (json.loads(line) for line in done.stdout.splitlines())
    assert gan["out_of_memory"] and "CUDA out of memory" in gan["failed"]
    assert gan["peak_bytes"] > 0 and gan["step_ms"] == []
    assert unet["failed"] == "" and len(unet["step_ms"]) == 2
    assert "gan, pyalloc: OutOfMemoryError" in done.stderr


@pytest.mark.torch
def test_a_late_loop_and_a_broken_one_are_rows_too() -> None:
    late = training.train("gan", "native", limit_s=0.05)
    assert late["failed"] == "took longer than 0.05 s"
    broken = training.train("none", "native")
    assert broken["failed"] == "KeyError: 'none'" and "Traceback" in broken["said"]


def test_other_requests_are_told() -> None:
    same = [row("native"), row("async", n_allocations=None, requested_bytes=None), row("pyalloc")]
    assert training.remarks(same) == []
    other = [row("native"), row("pyalloc", n_allocations=101, retries=3)]
    assert training.remarks(other) == [
        "gan, pyalloc: the card was full 3 times",
        "gan, pyalloc: asked for 101 blocks, native for 100",
    ]
    failed = {**row("async"), "failed": "took longer than 1 s"}
    assert training.remarks([failed]) == ["gan, async: took longer than 1 s"]


def test_means_are_of_what_all_came_through() -> None:
    rows = [row("native"), row("pyalloc", peak_bytes=1 << 30)]
    rows += [{**each, "program": "vit"} for each in (row("native", median_ms=8.0), row("pyalloc"))]
    lines = training.table(rows, ["native", "pyalloc"]).splitlines()
    assert lines[-1].split() == ["mean", "of", "2", "1.500", "1.225", "4.0", "2.0"]
    rows[-1]["failed"] = "CUDA error"
    lines = training.table(rows, ["native", "pyalloc"]).splitlines()
    assert lines[-2].split() == ["vit", "1024", "1.500", "-", "8.0", "-"]
    assert lines[-1].split() == ["mean", "of", "1", "1.500", "1.000", "2.0", "2.0"]


def test_what_is_no_loop_is_refused() -> None:
    done = run("--only", "gan", "nothing")
    assert done.returncode == 2 and "--only nothing: none of gpt_fixed" in done.stderr
    assert "--jobs 0: at least one" in run("--jobs", "0").stderr
    assert set(training.STEPS_ON_CARD) <= set(names())
