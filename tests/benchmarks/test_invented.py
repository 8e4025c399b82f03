"""Generated trainings are valid programs, and what is said of them is true."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compared import BAR, Row, table
from benchmarks.torch_replay import ALLOCATORS
from benchmarks.workloads.invented import Training, invent
from pyalloc.traces.moments import STEP

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(1, 20)


def program(seed: int) -> Training:
    found = invent(seed)
    assert found is not None
    return found


def test_what_is_freed_was_there_once_and_the_peak_is_the_sum() -> None:
    found = [training for seed in SEEDS if (training := invent(seed)) is not None]
    assert len(found) > len(SEEDS) / 2
    for training in found:
        live: dict[int, int] = {}
        total = peak = 0
        for what, block, *rest in training.operations:
            if what == "alloc":
                assert block not in live and rest[0] > 0
                live[block] = -(-rest[0] // STEP) * STEP
                total += live[block]
                peak = max(peak, total)
            elif what == "free":
                total -= live.pop(block)
            else:
                assert block in live
        assert live == training.live and peak == training.peak_bytes


def test_steps_leave_what_the_program_holds_on_to() -> None:
    """Without queue, held blocks and gradients that stay: weights, their copy and the optimizer's state."""
    tried = 0
    for seed in range(1, 400):
        training = invent(seed)
        if training is None:
            continue
        habits = training.habits
        if habits.holds_every or habits.n_queued or habits.keeps_gradients:
            continue
        n_states = {"momentum": 1, "adam": 2}.get(habits.optimizer, 0)
        n_weights = sum(len(layer.weights) for layer in training.layers)
        assert len(training.live) == n_weights * (1 + habits.has_second_copy + n_states)
        tried += 1
        if tried == 4:
            return
    pytest.fail("hardly any such program")


def test_a_seed_is_one_program_and_seeds_differ() -> None:
    assert program(7).operations == program(7).operations
    kinds = Counter(len(t.operations) for seed in SEEDS if (t := invent(seed)) is not None)
    assert len(kinds) > len(SEEDS) / 2


def test_the_table_counts_what_rows_say() -> None:
    native = Row(1, "native", 1 << 30, 1.5, 1.25, 10.0)
    expandable = replace(native, allocator="expandable", peak_live=1.01, device_ms=20.0)
    mine = replace(native, allocator="pyalloc", peak_live=1.02, device_ms=10.4)
    other = [replace(row, program=2, peak_live=BAR + 0.01) for row in (native, expandable, mine)]
    other[2] = replace(other[2], min_live=1.2551)
    lines = table([native, expandable, mine, *other]).splitlines()
    assert lines[0].split() == ["2", "programs", *ALLOCATORS]
    assert [line[32:].split() for line in lines if "above the best" in line] == [
        ["50.0%", "0.0%", "50.0%"],
        ["0.0%", "0.0%", "50.0%"],
    ]
    cells = {line[:32].strip(): line[32:].split() for line in lines[1:]}
    assert cells["above 1.07"] == ["100.0%", "50.0%", "50.0%"]
    assert cells["above native's by over 5 %"] == ["0.0%", "100.0%", "0.0%"]
    assert cells["most"] == ["1.00x", "2.00x", "1.04x"]


def test_the_command_prints_a_line_for_each_program_and_allocator() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.invented", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = run("--programs", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["allocator"] for row in rows] == [*ALLOCATORS, *ALLOCATORS]
    for row in rows:
        assert row["live_bytes"] == program(row["program"]).peak_bytes
        assert 1 <= row["min_live"] <= row["peak_live"]
    wrong = run("--programs", "0")
    assert wrong.returncode == 2 and "--programs must be at least 1" in wrong.stderr
