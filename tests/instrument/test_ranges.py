"""What a program marked in torch's own ways is in the reports: ranges of record_function, metadata of blocks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB, Plan, pyalloc, small_trace
from pyalloc import errors, trace
from pyalloc.analysis import leaks
from pyalloc.analysis.advice import advise
from pyalloc.report import html
from pyalloc.traces.convert import KINDS

SECOND = 1_000_000  # in torch's times


def history(n_steps: int, optimizer: str = "AdamW") -> tuple[list[Any], list[Any]]:
    """Entries and ranges of steps: 4 MiB in forward, 2 in backward, and 1 in the optimizer, which is kept."""
    entries: list[dict[str, Any]] = []
    ranges: list[dict[str, Any]] = []
    for step in range(n_steps):
        now = (step + 1) * SECOND
        parts = (("## forward ##", 4), ("Backward", 2), (f"Optimizer.step#{optimizer}.step", 1))
        for i, (name, size) in enumerate(parts):
            address = (step * 8 + i + 1) << 30
            at = now + i * 1000
            made = {"action": "alloc", "addr": address, "size": size * MIB, "stream": 0}
            ranges.append({"name": name, "stage": "START", "device": 0, "time_us": at})
            entries.append({**made, "time_us": at})  # in the first and the last microsecond
            ranges.append({"name": name, "stage": "END", "device": 0, "time_us": at})
            if size > 1:
                entries.append({**made, "action": "free_requested", "time_us": now + 5000 + i})
    return entries, ranges


def written(path: Path, entries: list[Any], ranges: list[Any]) -> Path:
    """A snapshot; what its entries do not free is alive at its end."""
    entries = sorted(entries, key=lambda entry: int(entry["time_us"]))
    freed = {each["addr"] for each in entries if each["action"] == "free_requested"}
    segments = [
        {
            "address": each["addr"],
            "total_size": MIB,
            "stream": 0,
            "blocks": [{"size": MIB, "state": "active_allocated"}],
        }
        for each in entries
        if each["action"] == "alloc" and each["addr"] not in freed
    ]
    snapshot = {"segments": segments, "device_traces": [entries], "external_annotations": ranges}
    path.write_bytes(pickle.dumps(snapshot))
    return path


def test_ranges_are_phases_and_those_of_optimizers_end_steps(tmp_path: Path) -> None:
    found = trace.analyse(written(tmp_path / "s.pickle", *history(6)))
    names = ["forward", "backward", "optimizer"]
    assert [(phase.name, phase.step) for phase in found.phases] == [
        (name, step) for step in range(6) for name in names
    ]
    assert [phase.n_made for phase in found.phases] == [1] * 18
    assert [step[0] for step in found.steps] == list(range(7))
    assert found.notes["optimizers"] == "AdamW"
    assert (found.totals["peak_phase"], found.totals["peak_step"]) == ("optimizer", 5)
    assert leaks.verdict(found).startswith("leak: 1.00 MiB more at each step")


@pytest.mark.parametrize(
    ("order", "n_steps", "is_sure"),
    [
        ("zzss" * 5, 5, True),
        ("s" + "zzss" * 4 + "zzs", 5, True),  # cut off on both sides
        ("sszz" * 3 + "ss", 4, True),
        ("zs" * 6, 6, False),  # one phase, or two in turns
        ("zss" * 4, 8, False),
        ("s" * 6, 6, False),
        ("zzss" * 2 + "zs" * 2, 6, False),
        ("zzsszz", 2, False),  # once says nothing
        ("z" + "zzss" * 3, 6, False),
    ],
)
def test_optimizers_of_one_class(tmp_path: Path, order: str, n_steps: int, is_sure: bool) -> None:
    entries, ranges = history(1)
    names = {"z": "Optimizer.zero_grad#AdamW.zero_grad", "s": "Optimizer.step#AdamW.step"}
    ranges = [
        {"name": names[each], "stage": stage, "device": 0, "time_us": 2 * SECOND + 10 * i + j}
        for i, each in enumerate(order)
        for j, stage in enumerate(("START", "END"))
    ]
    found = trace.analyse(written(tmp_path / "s.pickle", entries, ranges))
    assert [step[0] for step in found.steps] == list(range(n_steps + 1))
    assert ("Each step() of AdamW" in " ".join(found.caveats)) != is_sure


def test_steps_of_the_profiler_count(tmp_path: Path) -> None:
    entries, ranges = history(3)
    for step in range(3):
        for stage, seconds in (("START", 0.9), ("END", 1.8)):
            at = int((step + seconds) * SECOND)
            ranges.append({"name": f"ProfilerStep#{step + 40}", "stage": stage, "time_us": at})
    found = trace.analyse(written(tmp_path / "s.pickle", entries, ranges))
    assert [step[0] for step in found.steps] == [40, 41, 42]
    assert {phase.name for phase in found.phases} == {"forward", "backward", "optimizer"}


def test_of_what_was_before_the_history_only_what_still_holds_is_told(tmp_path: Path) -> None:
    entries, ranges = history(5)
    whole = {"name": "train", "device": 0}
    ranges += [
        {**whole, "stage": "START", "time_us": 1},
        {**whole, "stage": "END", "time_us": 9 * SECOND},
    ]
    late = [entry for entry in entries if entry["time_us"] > 3 * SECOND]
    found = trace.analyse(written(tmp_path / "s.pickle", late, ranges))
    assert [(p.name, p.depth) for p in found.phases] == [("train", 0)] + [
        (name, 1) for name in ["backward", "optimizer", *["forward", "backward", "optimizer"] * 2]
    ]
    assert [step[0] for step in found.steps] == [0, 1, 2, 3]


def test_the_step_that_began_before_the_history_is_its_first(tmp_path: Path) -> None:
    entries, ranges = history(3)
    for step in range(3):
        at = (step + 1) * SECOND - 1
        ranges.append({"name": f"ProfilerStep#{step + 40}", "stage": "START", "time_us": at})
    late = [entry for entry in entries if entry["time_us"] > 2 * SECOND]
    found = trace.analyse(written(tmp_path / "s.pickle", late, ranges))
    assert [step[0] for step in found.steps] == [41, 42]
    assert found.notes["optimizers"] == "AdamW"  # in which a step before went


def test_a_range_that_ended_before_the_history_took_along_what_was_within(tmp_path: Path) -> None:
    order = (("outer", "START"), ("a", "START"), ("b", "START"), ("a", "END"), ("c", "START"))
    ranges = [
        {"name": name, "stage": stage, "time_us": at} for at, (name, stage) in enumerate(order)
    ]
    found = trace.analyse(written(tmp_path / "s.pickle", history(1)[0], ranges))
    assert [(phase.name, phase.depth) for phase in found.phases] == [("outer", 0), ("c", 1)]


def test_a_range_may_begin_in_the_microsecond_in_which_another_ends(tmp_path: Path) -> None:
    edges = [("a", "START"), ("a", "END"), ("b", "START"), ("b", "END")]
    ranges = [{"name": name, "stage": stage, "time_us": SECOND} for name, stage in edges]
    found = trace.analyse(written(tmp_path / "s.pickle", history(1)[0], ranges))
    assert [(phase.name, phase.depth) for phase in found.phases] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("marks_backward", [False, True])
def test_forward_passes_of_a_snapshot_have_backwards_that_nobody_marked(
    tmp_path: Path, marks_backward: bool
) -> None:
    entries: list[dict[str, Any]] = []
    ranges: list[dict[str, Any]] = []
    for i in range(4):  # accumulated: what each keeps is freed at once
        at = (i + 1) * SECOND
        ranges += [
            {"name": "forward", "stage": s, "time_us": at + n}
            for n, s in enumerate(("START", "END"))
        ]
        made = [
            {
                "action": "alloc",
                "addr": (4 * i + j + 1) << 30,
                "size": MIB,
                "stream": 0,
                "time_us": at,
            }
            for j in range(3)
        ]
        entries += made
        entries += [{**each, "action": "free_requested", "time_us": at + 10} for each in made]
    if marks_backward:  # one, after passes that are an evaluation then
        ranges += [
            {"name": "backward", "stage": s, "time_us": 9 * SECOND} for s in ("START", "END")
        ]
    found = trace.analyse(written(tmp_path / "s.pickle", entries, ranges))
    assert ("no_grad" in {each.kind for each in advise(found)}) == marks_backward


def test_labels_of_blocks(tmp_path: Path) -> None:
    told = [
        {"user_metadata": "batch", "compile_context": "N/A"},
        {"user_metadata": "", "compile_context": "Torch-Compiled Region: 0/0"},
        {"user_metadata": "batch", "compile_context": "Torch-Compiled Region: 0/1"},
        {"user_metadata": "", "compile_context": "N/A"},
    ]
    entries = [
        {"action": "alloc", "addr": (i + 1) << 30, "size": (i + 1) * MIB, "stream": 0, **each}
        for i, each in enumerate(told)
    ]
    entries += [{**entries[2], "action": "annotate", "user_metadata": "kept"}]
    path = written(tmp_path / "s.pickle", [{**each, "time_us": 5} for each in entries], [])
    found = trace.analyse(path)
    labels = [(row.name, row.bytes // MIB) for row in found.by_label(found.peak.blocks)]
    expected = [("(no label)", 4), ("kept", 3), ("Torch-Compiled Region: 0/0", 2), ("batch", 1)]
    assert labels == expected
    assert "by label" in pyalloc("report", path)
    assert "kept" in pyalloc("top", path, "--by", "label")
    data = html.page(found)
    assert '"labels":["","batch","Torch-Compiled Region: 0/0","kept"]' in data
    none = written(tmp_path / "none.pickle", *history(1))
    assert "by label" not in pyalloc("report", none)
    assert "_set_memory_metadata" in pyalloc("top", none, "--by", "label", expect=2)


@pytest.mark.torch
@ALLOCATORS
def test_recordings_have_labels(record: Record, allocator: str) -> None:
    if not hasattr(pytest.importorskip("torch").cuda.memory, "_annotate_tensor"):
        pytest.skip("this torch has no labels")
    path = record(
        """
    import torch
    memory = torch.cuda.memory
    memory._set_memory_metadata("first")
    a = torch.empty(1 << 20, device="cuda")
    memory._set_memory_metadata("")
    b = torch.empty(1 << 21, device="cuda")
    c = torch.empty(1 << 22, device="cuda")
    memory._annotate_tensor(c, "third")
    torch.cuda.synchronize()
    """,
        "--allocator",
        allocator,
    )
    found = trace.analyse(path)
    rows = {(row.name, row.bytes >> 20) for row in found.by_label(found.peak.blocks)}
    assert rows == {("first", 4), ("(no label)", 8), ("third", 16)}


@pytest.mark.parametrize(
    "bad", [7, [3], [{"name": "x", "stage": "START"}], [{"name": 1, "stage": "END", "time_us": 1}]]
)
def test_malformed_ranges_are_refused(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(errors.TraceError, match="malformed"):
        trace.analyse(written(tmp_path / "s.pickle", history(1)[0], bad))


def test_ranges_that_lack_something_are_left_out_and_those_without_a_name_have_one(
    tmp_path: Path,
) -> None:
    entries, _ = history(1)
    whole = [{"name": "", "stage": stage, "time_us": SECOND} for stage in ("START", "END")]
    torn = [
        {key: each[key] for key in each if key != gone}
        for each in whole
        for gone in ("name", "stage")
    ]
    found = trace.analyse(written(tmp_path / "s.pickle", entries, torn + whole))
    assert [phase.name for phase in found.phases] == ["(no name)"]


def test_phases_and_steps_are_exported_as_ranges(tmp_path: Path) -> None:
    path = small_trace(Plan(tmp_path / "out.pya"))
    pyalloc("export", path, "--to", "torch", "-o", tmp_path / "s.pickle")
    before, after = trace.analyse(path), trace.analyse(tmp_path / "s.pickle")
    for each in (before, after):
        assert [(p.name, p.step, p.n_made) for p in each.phases] == [
            ("forward", i, 2) for i in range(6)
        ]
        assert [step[0] for step in each.steps] == list(range(6))


def test_phases_in_no_time_do_not_stay_open_when_exported(tmp_path: Path) -> None:
    plan = Plan(tmp_path / "out.pya")
    plan.event("phase_begin", "work")
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    plan.writer.event(KINDS["phase_begin"], text=plan.writer.string("none"), time_ns=plan.time)
    plan.writer.event(KINDS["phase_end"], text=plan.writer.string("none"), time_ns=plan.time)
    plan.event("phase_end", "work")
    plan.event("alloc", addr=2 << 30, bytes=MIB)
    plan.event("step", "step", arg=3)  # the last step may take none
    pyalloc("export", plan.done(), "--to", "torch", "-o", tmp_path / "s.pickle")
    found = trace.analyse(tmp_path / "s.pickle")
    assert [(phase.name, phase.depth) for phase in found.phases] == [("work", 0)]
    assert [step[0] for step in found.steps] == [3]
