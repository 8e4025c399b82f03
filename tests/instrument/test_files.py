"""Files: ours and torch's are read, damaged and hostile ones are refused, round trips keep what matters."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from instrument.tools import ROOT, Plan, pyalloc
from pyalloc import _core, cli, errors, export, pickles, source, trace
from pyalloc.advice import advise
from pyalloc.config import Config
from pyalloc.report import html
from pyalloc.report.text import explain_oom, sparkline

MIB = 2**20


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, protocol: int) -> None:
    touched, path = tmp_path / "touched", tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "x": Bomb(touched)}, protocol=protocol))
    with pytest.raises(errors.TraceError, match=r"nothing was executed|neither a trace"):
        trace.analyse(path)
    out = pyalloc("report", path, expect=2)
    assert "refused" in out or "neither a trace" in out
    assert "Traceback" not in out and not touched.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x04cos\nsystem\n(S'touch x'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02Ppersistent\n.",
        b"\x80\x04\x82\x01.",
    ],
)
def test_opcodes_that_reach_outside_are_refused(code: bytes) -> None:
    with pytest.raises(errors.TraceError):
        pickles.loads(code)


@pytest.mark.parametrize(
    "value",
    [
        5,
        {"segments": 3},
        {"segments": [{"address": 0}]},
        {"segments": [{"address": -1, "total_size": 3, "blocks": []}]},
        {"segments": [{"address": "a", "total_size": 3, "blocks": []}]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 80, "size": 4}]]},
        {"segments": [], "device_traces": [[{"action": 4, "addr": 1, "size": 4}]]},
        {"segments": [], "device_traces": [[{"addr": 1, "size": 4}]]},
        {"segments": [], "device_traces": 7},
    ],
)
def test_malformed_snapshots_are_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(pickle.dumps(value, protocol=4))
    with pytest.raises(errors.TraceError):
        trace.analyse(path)


def small_trace(plan: Plan) -> Path:
    line = plan.stack(3)
    plan.event("segment_alloc", addr=1 << 30, bytes=20 * MIB, stack=line)
    for step in range(6):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=4 * MIB, stack=line)
        plan.event("alloc", addr=(1 << 30) + 4 * MIB, bytes=3 * MIB, stack=plan.stack(4))
        plan.event("phase_end", "forward")
        plan.event("free_requested", addr=1 << 30)
        plan.event("free_completed", addr=1 << 30)
        plan.event("free_requested", addr=(1 << 30) + 4 * MIB)
        plan.event("free_completed", addr=(1 << 30) + 4 * MIB)
    plan.event("alloc", addr=(1 << 30) + 8 * MIB, bytes=MIB, stack=line)
    return plan.done()


def test_scalars_are_of_the_smallest_size_class(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 24, bytes=512, stack=plan.stack(1))
    plan.event("alloc", addr=1 << 25, bytes=1536, stack=plan.stack(1))
    found = trace.analyse(plan.done())
    names = [row.name for row in found.by_size(found.peak.blocks)]
    assert names == ["up to 2 KiB", "up to 1 KiB"]


def test_every_cut_of_a_trace_is_read_or_refused(plan: Plan, tmp_path: Path) -> None:
    whole = small_trace(plan).read_bytes()
    cut = tmp_path / "cut.pya"
    for n in range(0, len(whole), 7):
        cut.write_bytes(whole[:n])
        try:
            found = trace.analyse(cut)
        except errors.TraceError:
            continue
        assert not found.totals["is_complete"]


def test_every_damaged_byte_is_noticed_or_harmless(plan: Plan, tmp_path: Path) -> None:
    whole = bytearray(small_trace(plan).read_bytes())
    damaged = tmp_path / "damaged.pya"
    refused = 0
    for at in range(len(whole)):
        copy = bytearray(whole)
        copy[at] ^= 0x41
        damaged.write_bytes(copy)
        try:
            trace.analyse(damaged)
        except errors.TraceError:
            refused += 1
    assert refused > len(whole) * 0.9  # the padding of the header is nobody's


def test_a_huge_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.pya"
    path.write_bytes(
        b"PYATRACE" + struct.pack("<II", 1, 0) + struct.pack("<4s7I", b"PYAC", *[0xFFFFFFF0] * 7)
    )
    with pytest.raises(errors.TraceError):
        trace.analyse(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80", b"PYATRACE", b"\xfd7zXZ\x00nonsense"])
def test_other_files_are_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    out = pyalloc("report", path, expect=2)
    assert "other" in out and "Traceback" not in out
    assert "No such file" in pyalloc("report", tmp_path / "absent", expect=2)


def test_to_torch_and_back(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    before = trace.analyse(path)
    target = tmp_path / "snapshot.pickle"
    with target.open("wb") as out:
        export.to_torch(path, before, out)
    after = trace.analyse(target)
    for key in ("peak_bytes", "peak_reserved_bytes", "end_bytes", "n_allocs", "n_frees"):
        assert after.totals[key] == before.totals[key], key
    assert after.by_line(after.peak.blocks) == before.by_line(before.peak.blocks)


@pytest.mark.parametrize("device", [0, 1])
def test_frees_of_what_the_exported_part_does_not_show_have_a_size(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    """torch's viewer takes what is freed and was never asked for as there from the beginning, by the free's size."""
    plan.event("segment_alloc", addr=1 << 30, bytes=1 << 40, device=device)
    for i in range(40):
        plan.event("alloc", addr=(i + 1) << 30, bytes=(i + 1) * MIB, device=device)
    for i in range(40):
        plan.event("free_requested", addr=(i + 1) << 30, device=device)
        plan.event("free_completed", addr=(i + 1) << 30, device=device)
    path, target = plan.done(), tmp_path / "late.pickle"
    monkeypatch.setattr(export, "_MAX_TORCH_ENTRIES", 90)
    with target.open("wb") as out:
        export.to_torch(path, trace.analyse(path), out)
    entries = pickle.loads(target.read_bytes())["device_traces"][device]
    frees = [entry["size"] // MIB for entry in entries if entry["action"] == "free_requested"]
    assert len(entries) == 90 and frees == list(range(1, 41))
    assert trace.analyse(target).totals["peak_bytes"] == sum(range(1, 41)) * MIB


def test_perfettos_counter_reaches_the_peak(tmp_path: Path) -> None:
    """Also where its bin ends below it."""
    own = Plan(tmp_path / "peaks.pya")
    own.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    own.event("user", "note=bins end behind a free")
    for i in range(50_000):
        own.writer.event(1, addr=1 << 30, bytes=(i % 30_000) * 512 + 512, time_ns=3 * i)
        own.writer.event(2, addr=1 << 30, time_ns=3 * i)
    path, target = own.done(), tmp_path / "out.json"
    pyalloc("export", path, "--to", "perfetto", "-o", target)
    counters = [event["args"] for event in json.loads(target.read_text())["traceEvents"]]
    assert max(each["allocated"] for each in counters) == trace.analyse(path).totals["peak_bytes"]
    assert {each["allocated"] + each["idle"] for each in counters} == {64 * MIB}


def test_a_copy_without_source_of_a_cut_file_is_cut(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    path.write_bytes(path.read_bytes()[:-1])
    target = tmp_path / "out.json"
    pyalloc("export", path, "--to", "json", "--no-source", "-o", target)
    assert json.loads(target.read_text())["caveats"] == [
        "The file was cut off; what is there is shown."
    ]


def pool_entry(action: str, addr: int, pool: tuple[int, int]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": 64 * MIB, "stream": 0, "pool_id": pool}


@pytest.mark.parametrize("began", ["before", "within"])
@pytest.mark.parametrize("goes", [False, True])
def test_private_pools_of_a_snapshot_are_replayed_as_such(
    tmp_path: Path, began: str, goes: bool
) -> None:
    """What a pool left free is nobody else's as long as it has a user: until torch gives memory of it back."""
    pool, other, none = (0, 1), (0, 2), (0, 0)
    entries = [
        pool_entry("alloc", 1, pool),
        pool_entry("free_requested", 1, pool),
        pool_entry("alloc", 2, none),
        pool_entry("alloc", 3, pool),
        pool_entry("free_requested", 3, pool),
        pool_entry("free_requested", 2, none),
    ][began == "before" :]
    if goes:
        entries += [pool_entry("segment_free", 1, pool), pool_entry("alloc", 4, other)]
    path = tmp_path / "pools.pickle"
    segment = {"address": 1, "total_size": 64 * MIB, "stream": 0, "device": 0, "blocks": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    with trace.as_trace_file(path) as file:
        kinds = [event["kind"] for event, _ in export.events(file)]
    # of the second begin, and at the end
    assert kinds.count(export.KINDS["pool_release"]) == 1 + goes
    with trace.program(path) as program:
        assert program.info()["n_pools"] == 1 + goes
        assert program.replay("native", capacity=130 * MIB)["completed"]
        assert not program.replay("native", capacity=126 * MIB)["completed"]


def test_pools_of_live_blocks_are_known_without_history(tmp_path: Path) -> None:
    block = {"size": MIB, "requested_size": MIB, "state": "active_allocated"}
    segment = {
        "address": 1 << 30,
        "total_size": 2 * MIB,
        "stream": 0,
        "device": 1,
        "blocks": [block],
    }
    path = tmp_path / "pools.pickle"
    path.write_bytes(pickle.dumps({"segments": [{**segment, "segment_pool_id": (3, 0)}]}))
    with trace.program(path) as program:
        assert program.info()["n_pools"] == 1


def test_state_before_a_trace_that_begins_late(tmp_path: Path) -> None:
    """The ring lost the beginning: two blocks were there before, one of them is freed in the trace."""
    block = {"size": MIB, "requested_size": MIB, "frames": []}
    snapshot = {
        "segments": [
            {
                "address": 1 << 30, "total_size": 20 * MIB, "stream": 0, "device": 0,
                "blocks": [
                    {**block, "address": 1 << 30, "state": "active_allocated"},
                    {**block, "address": (1 << 30) + MIB, "size": 2 * MIB, "state": "inactive"},
                    {**block, "address": (1 << 30) + 3 * MIB, "state": "active_allocated"},
                    {**block, "address": (1 << 30) + 4 * MIB, "size": 16 * MIB, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": "free_requested", "addr": (1 << 30) + MIB, "size": 2 * MIB, "stream": 0},
                {"action": "free_completed", "addr": (1 << 30) + MIB, "size": 2 * MIB, "stream": 0},
                {"action": "alloc", "addr": (1 << 30) + 3 * MIB, "size": MIB, "stream": 0},
            ]
        ],
    }  # fmt: skip
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    totals = trace.analyse(path).totals
    assert totals["peak_bytes"] == 3 * MIB and totals["end_bytes"] == 2 * MIB
    assert totals["peak_reserved_bytes"] == 20 * MIB and totals["n_unknown_frees"] == 0


@pytest.mark.parametrize("undone", ["segment_map", "segment_unmap"])
def test_an_expandable_segment_stays_one(tmp_path: Path, undone: str) -> None:
    """Its parts are mapped and unmapped one by one; all are of the segment's stream."""
    start, part = 1 << 30, 20 * MIB
    segment = {
        "address": start,
        "total_size": 2 * part,
        "stream": 7,
        "is_expandable": True,
        "blocks": [],
    }
    entry = {"action": "segment_map", "addr": start + part, "size": part, "stream": 7}
    entries = [{**entry, "action": "segment_unmap"}, entry][undone == "segment_map" :]
    path = tmp_path / "expandable.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    found = trace.analyse(path)
    assert found.moments[max(found.moments)].segments == ((start, 2 * part, 7, 0, True),)


@pytest.mark.parametrize("before", [False, True])
def test_frees_of_a_snapshot_that_skipped_those_requested(tmp_path: Path, before: bool) -> None:
    """torch's own example, skip_actions=["free_requested"], leaves free_completed alone to tell of a free."""
    entry = {"size": MIB, "stream": 0}
    entries = [
        {**entry, "action": action, "addr": (1 << 30) + i * MIB}
        for i in range(3)
        for action in ("alloc", "free_completed")
    ][before:]
    segment = {"address": 1 << 30, "total_size": 20 * MIB, "stream": 0, "blocks": []}
    path = tmp_path / "skipped.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    totals = trace.analyse(path).totals
    assert totals["peak_bytes"] == MIB and totals["end_bytes"] == 0
    assert totals["n_frees"] == 3 and totals["n_unknown_frees"] == 0


@pytest.mark.parametrize("skipped", [("alloc",), ("free_requested", "free_completed")])
def test_a_history_that_leaves_out_what_is_needed_is_not_used(
    tmp_path: Path, skipped: tuple[str, ...]
) -> None:
    """16 blocks, of 1 MiB each and never two at once: without their requests they would all be alive at first."""
    start = 1 << 30
    entries = [
        {"action": action, "addr": start + i % 4 * MIB // 2, "size": MIB, "stream": 0}
        for i in range(16)
        for action in ("alloc", "free_requested", "free_completed")
        if action not in skipped
    ]
    live = {"size": MIB, "requested_size": MIB, "state": "active_allocated", "address": start}
    segment = {"address": start, "total_size": 20 * MIB, "stream": 0, "blocks": [live]}
    path = tmp_path / "skipped.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    found = trace.analyse(path)
    assert found.totals["peak_bytes"] == found.totals["end_bytes"] == MIB
    assert "leaves out allocations or frees (skip_actions" in found.caveats[0]
    found.replays = {"native": {"peak_bytes": 2 * MIB, "completed": True}}
    assert not [item for item in advise(found) if item.kind == "policy"]


def stitched(pool: tuple[int, int], start: int) -> list[dict[str, Any]]:
    """pyalloc joins two free stretches for a request, and parts them after it."""
    parts = [(start, 64 * MIB), (start + 128 * MIB, 64 * MIB)]
    whole = [(start + (1 << 40), 128 * MIB)]
    done = []
    for action, ranges in (
        ("segment_unmap", parts), ("segment_alloc", whole), ("alloc", whole), ("free_requested", whole),
        ("segment_free", whole), ("segment_map", parts),
    ):  # fmt: skip
        done += [
            {"action": action, "addr": at, "size": n, "stream": 0, "pool_id": pool}
            for at, n in ranges
        ]
    return done


@pytest.mark.parametrize("goes", [False, True])
def test_a_pool_whose_pages_are_joined_keeps_its_user(tmp_path: Path, goes: bool) -> None:
    pool, start = (0, 1), 1 << 30
    first = {"action": "segment_map", "addr": start, "size": 192 * MIB, "stream": 0}
    kept = {"action": "alloc", "addr": start + 64 * MIB, "size": 64 * MIB, "stream": 0}
    entries = [{**first, "pool_id": pool}, {**kept, "pool_id": pool}, *stitched(pool, start)]
    if goes:
        entries += [
            {**kept, "action": "free_requested", "pool_id": pool},
            {**first, "action": "segment_unmap", "pool_id": pool},
            {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "pool_id": (0, 0)},
        ]
    snapshot = {
        "segments": [],
        "device_traces": [entries],
        "allocator_settings": {"pyalloc": {"vmm": "True"}},
    }
    path = tmp_path / "joined.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with trace.as_trace_file(path) as file:
        kinds = [event["kind"] for event, _ in export.events(file)]
    assert kinds.count(export.KINDS["pool_begin"]) == 1
    assert kinds.count(export.KINDS["pool_release"]) == goes


def frames_of(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": 7} for name, file in frames]


# What torch's history has by default, stacks="all": frames of C++ around and between those of Python.
CPP = [
    ("torch::unwind::unwind()", "??"),
    ("c10::cuda::malloc()", ""),
    ("??", "/env/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"),
    ("at::_ops::mm::call()", "RegisterCUDA_0.cpp"),
]
PYTHON = [
    ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py"),
    ("_PyEval_EvalFrameDefault", "/opt/lib/libpython3.11.so.1.0"),
    ("_start", "/opt/bin/python3.11"),
    *[("_call_impl", "/env/lib/python3.11/site-packages/torch/nn/modules/module.py")] * 90,
    ("train", "/home/me/train"),
]
AUTOGRAD = [("torch::autograd::Engine::thread_main()", "??"), ("clone3", "x86_64/clone3.S")]


def test_the_line_of_a_program_given_as_text() -> None:
    made_by_a_library = ("__init__", "<string>", 3)
    internal = ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 9)
    found = source.place((internal, made_by_a_library, ("<module>", "<string>", 1)))
    assert found is not None and (found.file, found.line) == ("<string>", 1)
    found = source.place((made_by_a_library, internal, ("main", "<stdin>", 2)))
    assert found is not None and (found.file, found.line) == ("<stdin>", 2)


def test_the_line_of_a_compiled_program_is_not_that_of_its_generated_code() -> None:
    name = "c4kuvi32oiqvhad5gq3lwv2pmgil6dfrl33lnanu7xi7ygjokyrm.py"
    written = [f"{cache}/{name}" for cache in ("/tmp/torchinductor_me/4k", "/my/cache/4k")]
    for file in (*written, "/tmp/torch_geometric.nn.conv.gcn_conv_GCNConv_propagate_t9o0_hqh.py"):
        found = source.place((("call", file, 807), ("forward", "/home/me/train.py", 33)))
        assert found is not None and str(found) == "me/train.py:33 forward"


def test_figures_of_one_device_are_not_beside_replays_of_all(plan: Plan) -> None:
    for device in (0, 1):
        plan.event("alloc", addr=(device + 1) << 30, bytes=8 * MIB, device=device)
    path = plan.done()
    assert json.loads(pyalloc("report", path, "--json", "-q"))["replay"]
    assert not json.loads(pyalloc("report", path, "--json", "-q", "--device", "1"))["replay"]
    assert " --devices 2 " in pyalloc("replay", path, "--find-min")


def test_the_next_command_can_be_typed(plan: Plan) -> None:
    found = trace.analyse(small_trace(plan))
    told = explain_oom(found, 0, MIB, Path("/runs/one run/out.pya"))
    assert told.endswith("next: pyalloc report '/runs/one run/out.pya'")


def test_the_line_of_memory_shows_all_of_a_short_trace(plan: Plan) -> None:
    for i in range(9):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    cells = sparkline(trace.analyse(plan.done()))
    assert cells == "".join(sorted(cells)) and cells[-1] == "\N{FULL BLOCK}"


def test_of_ranks_those_without_memory_are_left_out(plan: Plan, tmp_path: Path) -> None:
    """A worker of torch.compile starts CUDA and allocates nothing."""
    path, worker = small_trace(plan), Plan(tmp_path / "out.123.pya").done()
    shown = pyalloc("report", worker, path)
    assert "left out, without any allocation: out.123.pya" in shown
    assert (
        "plan.pya: " in shown and "at the peak, by contributor" in shown and "odd one" not in shown
    )


def snapshot_of(*blocks: tuple[str, list[tuple[str, str]]]) -> dict[str, Any]:
    """Blocks of 1, 2, ... MiB, by state and stack, in one segment of 20 MiB."""
    return {
        "segments": [
            {
                "address": 1 << 30, "total_size": 20 * MIB, "stream": 0, "device": 0,
                "blocks": [
                    {"address": (1 << 30) + 4 * i * MIB, "size": 4 * MIB,
                     "requested_size": (i + 1) * MIB, "state": state, "frames": frames_of(*stack)}
                    for i, (state, stack) in enumerate(blocks)
                ],
            }
        ],
        "device_traces": [],
    }  # fmt: skip


def test_the_programs_line_is_found_between_frames_of_cpp(tmp_path: Path) -> None:
    path = tmp_path / "all.pickle"
    live = "active_allocated"
    snapshot = snapshot_of((live, CPP + PYTHON), (live, CPP + AUTOGRAD), ("inactive", []))
    for value in (snapshot, snapshot["segments"]):  # torch.cuda.memory_snapshot() is the bare list
        path.write_bytes(pickle.dumps(value, protocol=4))
        found = trace.analyse(path)
        names = [row.name for row in found.by_line(found.peak.blocks)]
        assert sorted(names) == ["backward (no Python stack)", "me/train:7 train"], names
        assert sorted(row.name for row in found.by_category(found.peak.blocks)) == [
            "activations",
            "gradients",
        ]
        page = html.page(found, [found])
        frames = dict(json.loads(re.search(r'"frames": ?(\[\[.*?\]\])', page)[1]))  # type: ignore[index]
        assert frames["me/train:7 train"] == frames["backward (no Python stack)"] == 0
        assert (
            frames["modules/linear.py:7 forward"] == 1 and frames["x86_64/clone3.S:7 clone3"] == 2
        )


def test_what_a_snapshots_history_does_not_have_is_said(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    snapshot = snapshot_of(("active_allocated", PYTHON), ("active_allocated", PYTHON))
    seen: dict[str, list[str]] = {}
    entry = {"action": "alloc", "size": MIB, "stream": 0, "frames": []}
    entries = [{**entry, "addr": (1 << 30) + 4 * i * MIB} for i in range(2)]
    freed = [{**entry, "addr": 3 << 30}, {**entry, "addr": 3 << 30, "action": "free_completed"}]
    for name, history in (
        ("none", []),
        ("state", entries[1:]),
        ("late", freed),
        ("whole", entries),
    ):
        snapshot["device_traces"] = [history]
        path.write_bytes(pickle.dumps(snapshot, protocol=4))
        found = trace.analyse(path)
        seen[name] = found.caveats
        found.replays = {"native": {"peak_bytes": 2 * MIB, "completed": True}}
        # 20 MiB were reserved before: no merit of a replay that never saw what needed them
        assert ("policy" in {each.kind for each in advise(found)}) == (name == "whole"), name
    assert "no history" in seen["none"][0] and "no history" in seen["state"][0]
    assert "begins when memory was in use already" in seen["late"][0]
    assert seen["whole"] == []


def test_the_smallest_memory_is_rounded_up_and_an_error_while_recording_is_told(plan: Plan) -> None:
    for i in range(1500):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    plan.event("oom", bytes=64 * MIB, arg=0)
    shown = pyalloc("replay", plan.done(), "--find-min", "--policy", "pyalloc")
    assert re.search(r"pyalloc +1,500 MiB +1,500 MiB", shown), shown  # 1.46 GiB would not be enough
    assert "ran out of memory while it was recorded" in shown


def test_no_output_replaces_the_trace_it_is_made_from(plan: Plan, tmp_path: Path) -> None:
    path, link = small_trace(plan), tmp_path / "link.html"
    link.symlink_to(path)
    content = path.read_bytes()
    for words in (
        ["stats", path, "-o", path],
        ["report", path, path, "-o", path],
        ["export", path, "--to", "csv", "-o", link],
    ):
        assert "write to another file" in pyalloc(*words, "--force", expect=2)
    assert path.read_bytes() == content
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"segments": []}, protocol=4))
    for words in (["--force"], []):
        told = pyalloc("export", snapshot, "--to", "torch", *words, expect=2)
        assert "write to another file" in told
    pyalloc("export", snapshot, "--to", "json")
    assert json.loads((tmp_path / "snapshot.json").read_text())["file"] == str(snapshot)


@pytest.mark.parametrize("to", sorted(export.FORMATS))
def test_exports_are_written_once(plan: Plan, tmp_path: Path, to: str) -> None:
    path, target = small_trace(plan), tmp_path / "out"
    pyalloc("export", path, "--to", to, "-o", target)
    content = target.read_bytes()
    assert content
    assert "--force overwrites it" in pyalloc("export", path, "--to", to, "-o", target, expect=2)
    if to in ("perfetto", "json", "speedscope"):
        json.loads(content)
    if to == "csv":
        assert content.count(b"\n") == 1 + trace.analyse(path).totals["n_events"]


def test_csv_has_every_field_of_every_event(tmp_path: Path) -> None:
    own = Plan(tmp_path / "odd.pya")
    name, file = own.writer.string('a,"b"\n'), own.writer.string("größe.py")
    most = 2**64 - 1
    stacks = [0]
    for line in range(12):
        stacks.append(own.writer.stack(stacks[-1], name, file, line))
    for kind in export.KINDS.values():
        own.writer.event(
            kind, addr=most, bytes=most, stream=most, arg=most, thread=most, device=63,
            text=name, stack=stacks[kind % 13], time_ns=kind,
        )  # fmt: skip
    path, target = own.done(), tmp_path / "odd.csv"
    pyalloc("export", path, "--to", "csv", "-o", target)
    with target.open(newline="", encoding="utf-8") as lines:
        header, *found = csv.reader(lines)
    assert header[0] == "event" and len(found) == len(export.KINDS)
    names = {number: text for text, number in export.KINDS.items()}
    for i, (row, (event, reader)) in enumerate(zip(found, export.events(path), strict=True)):
        frames = []
        at = event["stack"]
        while at and len(frames) < 8:
            parent, *_, line = reader.frame(at) or (0, 0)
            frames.append(f'größe.py:{line} a,"b"\n')
            at = parent
        cells = {**event, "kind": names[event["kind"]], "stack": " < ".join(frames)}
        cells["text"] = reader.text(event["text"]) or ""
        assert row == [str(i), *(str(cells[field]) for field in header[1:])]


def test_lines_are_made_of_columns_and_cells_that_fit() -> None:
    columns = (b"\1", b"\0", *[b"\0" * 8] * 6, *[b"\0" * 4] * 2)
    assert _core.csv_lines(7, columns, {}, {}) == b"7,alloc,0,0,0,0,0,0,0,,\r\n"
    assert _core.csv_lines(7, (b"\xff", *columns[1:]), {}, {}).startswith(b"7,255,0,")
    for wrong in (columns[:9], (*columns[:9], b"\0"), (*columns[:9], b"\1\0\0\0"), (None,) * 10):
        with pytest.raises((ValueError, KeyError, IndexError, TypeError)):
            _core.csv_lines(0, wrong, {}, {})


@pytest.mark.torch
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_snapshots_of_torch_are_read_and_ours_by_its_viewer(tmp_path: Path, allocator: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch\n"
        "torch.cuda.memory._record_memory_history()\n"
        "kept = [torch.empty(3 << 20, dtype=torch.uint8, device='cuda') for _ in range(5)]\n"
        "del kept[1]\n"
        "torch.cuda.memory._dump_snapshot(sys.argv[1])\n"
    )
    theirs, ours = tmp_path / "theirs.pickle", tmp_path / "ours.pickle"
    pyalloc("dryrun", "--allocator", allocator, sys.executable, "-W", "ignore", script, theirs)
    found = trace.analyse(theirs)
    assert found.totals["peak_bytes"] == 15 * MIB and found.totals["end_bytes"] == 12 * MIB
    assert found.by_line(found.peak.blocks)[0].name.endswith("program.py:3 <module>") or (
        "<listcomp>" in found.by_line(found.peak.blocks)[0].name
    )
    pyalloc("export", theirs, "--to", "torch", "-o", ours)
    from torch.cuda import _memory_viz

    for path in (theirs, ours):
        with path.open("rb") as file:
            snapshot = pickle.load(file)
        assert "12.0MiB" in _memory_viz.segsum(snapshot).replace(" ", "")
        assert _memory_viz.trace(snapshot) and _memory_viz.trace_plot(snapshot)


def test_replay_says_when_nothing_fits(plan: Plan) -> None:
    path = small_trace(plan)
    out = pyalloc("replay", path, "--limit", "4MB", "-q", expect=1)
    assert "out of memory at operation" in out
    data = json.loads(pyalloc("replay", path, "--find-min", "--json", "-q"))
    assert {name for name, _ in _core.replay_policies()} == set(data["find_min"])
    assert "last pass" in pyalloc("replay", path, "--passes", "2", "-q")
    assert "passes from 1 to 1000" in pyalloc("replay", path, "--passes", "0", "-q", expect=2)
    for name, least in data["find_min"].items():
        again = json.loads(
            pyalloc(
                "replay", path, "--policy", name, "--limit", str(least["bytes"]), "--json", "-q"
            )
        )
        assert again["policies"][name]["completed"]


def test_examples_in_the_help_are_right() -> None:
    """Each `--conf key:value` that a help text shows is a setting."""
    shown = [
        conf
        for name in cli.names()
        for conf in re.findall(r"--conf (\w+:\w+)", pyalloc(name, "--help"))
    ]
    assert "memory:tight" in shown
    for conf in shown:
        if conf.lower() != "key:value":
            Config(conf)


def test_what_a_trace_does_not_tell_is_said(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_trace(plan)
    empty = Plan(tmp_path / "it's empty.pya").done()
    nothing = tmp_path / "nothing"
    nothing.touch()
    for words, code, text in (
        (["report", path, "--device", "7"], 2, "no memory of device 7, only of 0"),
        (["top", empty, "--device", "0"], 2, "nor of another"),
        (["report", empty], 0, "No allocation is in it"),
        (["report", empty], 0, "next: pyalloc run --record out.pya python train.py"),
        (["top", empty], 0, "No allocation is in it"),
        (["top", empty], 0, "next: pyalloc run --record out.pya python train.py"),
        (["stats", empty], 0, "it'\"'\"'s empty.pya'"),  # typed as it is, the next command works
        (["replay", empty, "--find-min"], 2, "nothing to replay"),
        (["stats", nothing], 2, "the file is empty"),
        (["report", "."], 2, ".: Is a directory"),
        (["report", path, "-o", tmp_path / "no" / "where.html"], 2, "there is no folder"),
        (["report", path, "-o", tmp_path], 2, "no plain file"),
        (["report", empty], 0, "no steps began"),
    ):
        assert cli.main([str(word) for word in words]) == code, words
        shown = "".join(capsys.readouterr())
        assert text in " ".join(shown.split()), shown
    for words in (["top", path, "-n", "-3"], ["sweep", path, "--workers", "-4"]):
        with pytest.raises(SystemExit):
            cli.main([str(word) for word in words])
        assert "is not a number from 1 on" in capsys.readouterr().err


def test_output_that_cannot_be_written_or_spelled(plan: Plan) -> None:
    path = small_trace(plan)
    command = [sys.executable, "-m", "pyalloc"]
    plain = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([*command, "report", path], env=plain, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.isascii() and b"at the peak" in done.stdout
    for words in (["report", path], ["--help"], ["doctor"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*command, *words], env=plain, stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 2, words
        assert b": No space left" in done.stderr and done.stderr.count(b"\n") == 1, done.stderr
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [*command, *words], env=plain, stdout=writing, stderr=subprocess.PIPE, check=False
        )
        os.close(writing)
        assert done.returncode == 141, words
        assert b"rror" not in done.stderr, done.stderr


def test_names_of_files_need_not_be_text(plan: Plan, tmp_path: Path) -> None:
    path, page = tmp_path / "a\udcff.pya", tmp_path / "page.html"
    small_trace(plan).rename(path)
    pyalloc("report", path, "-o", page)
    assert "<title>a\\udcff.pya" in page.read_text()


@pytest.mark.parametrize("closed", [1, 2])
def test_streams_that_are_closed(plan: Plan, closed: int) -> None:
    path = small_trace(plan)
    for words in (["report", path], ["--help"], ["run", "python", "-c", ""]):
        done = subprocess.run(
            [sys.executable, "-m", "pyalloc", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: os.close(closed),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr


def test_of_two_ranks_the_larger_is_the_odd_one(tmp_path: Path) -> None:
    paths = []
    for name, size in (("a.pya", 1 << 20), ("b.pya", 3 << 20)):
        own = Plan(tmp_path / name)
        own.event("alloc", addr=1 << 20, bytes=size, stack=own.stack(1))
        paths.append(own.done())
    out = pyalloc("report", *paths, "-q")
    assert "the odd one is b.pya; against a.pya" in out


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ((), *((name, "--help") for name in cli.names())):
        for line in pyalloc(*words).splitlines():
            assert len(line) <= 80, line


def test_output_fits_80_columns(plan: Plan) -> None:
    path = small_trace(plan)
    for words in (["report"], ["replay", "--find-min"], ["top"], ["top", "--over-time"], ["diff"]):
        for line in pyalloc(words[0], path, *words[1:], "-q").splitlines():
            assert len(line) <= 80, line
    assert (ROOT / "pyalloc").is_dir()


def test_exports_need_memory_for_what_lives_not_for_how_long(tmp_path: Path) -> None:
    """Events are taken in portions: twice as many need hardly more memory."""
    code = """
import sys
sys.path.append("tests")
from peak_memory import peak_kib
from pyalloc import cli
assert cli.main(["export", sys.argv[1], "--to", sys.argv[2], "-q", "--force", "-o", sys.argv[3]]) == 0
print(peak_kib())
"""
    paths = []
    for n in (200_000, 400_000):
        own = Plan(tmp_path / f"{n}.pya")
        for i in range(n // 2):
            own.writer.event(1, addr=(i % 64 + 1) << 20, bytes=512, stack=0, time_ns=i)
            own.writer.event(2, addr=(i % 64 + 1) << 20, time_ns=i)
        paths.append(own.done())
    for to in ("csv", "torch"):
        resident = []
        for path in paths:
            done = subprocess.run(
                [sys.executable, "-c", code, path, to, tmp_path / "out"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            resident.append(int(done.stdout))
        assert resident[1] - resident[0] < 16 * 1024, (to, resident)  # KiB
