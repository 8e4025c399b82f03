"""torch's snapshots: read without running anything, rebuilt as far as they say, refused if they are malformed."""

from __future__ import annotations

import json
import pickle
import re
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from instrument.tools import MIB, pyalloc
from pyalloc import errors, reading, trace
from pyalloc.analysis.advice import advise
from pyalloc.report import html
from pyalloc.traces import convert, pickles


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_code_is_refused_and_not_executed(tmp_path: Path, protocol: int) -> None:
    touched, path = tmp_path / "touched", tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "x": Bomb(touched)}, protocol=protocol))
    with pytest.raises(errors.TraceError, match=r"nothing was executed|neither a recording"):
        trace.analyse(path)
    out = pyalloc("report", path, expect=2)
    assert "refused" in out or "neither a recording" in out
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


def test_snapshots_that_are_read_at_once_leave_the_process_its_addresses() -> None:
    """While one is read, there are no more objects than it can need."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    is_in, is_over = threading.Event(), threading.Event()

    def read() -> None:
        with pickles._bounded(1):
            is_in.set()
            is_over.wait()

    beside = threading.Thread(target=read)
    with pickles._bounded(1):
        beside.start()
        is_in.wait(1)
    is_over.set()
    beside.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_frame_is_no_list_of_frames() -> None:
    """Each is checked once, as what it stands for."""
    (frame,) = frames_of(("train", "/home/me/train.py"))
    frames: list[Any] = [frame]
    frames.append(frames)
    for first, second in ((frames, []), ([frame], frame)):
        entries = [{"action": "free", "frames": told} for told in (first, second)]
        data = pickle.dumps({"segments": [], "device_traces": [entries]}, protocol=4)
        with pytest.raises(errors.TraceError, match="malformed"):
            pickles.loads(data)


def pool_entry(action: str, addr: int, pool: tuple[int, int]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": 64 * MIB, "stream": 0, "pool_id": pool}


@pytest.mark.parametrize("began", ["before", "within"])
@pytest.mark.parametrize("goes", [False, True])
def test_private_pools_of_a_snapshot_are_replayed_as_such(
    tmp_path: Path, began: str, goes: bool
) -> None:
    """A pool's free memory is nobody else's as long as the pool has a user: until torch gives memory of it back."""
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
    kinds = [event.kind for event in reading.events(path)]
    # of the second begin, and at the end
    assert kinds.count("pool_release") == 1 + goes
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


@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("expandable", [False, True])
def test_what_private_pools_keep_idle_is_known_from_their_segments(
    tmp_path: Path, has_history: bool, expandable: bool
) -> None:
    """A captured graph that is not running has nothing in use but its memory."""
    live = {"size": 2 * MIB, "requested_size": 2 * MIB, "state": "active_allocated"}
    pools = ((3, 0), (0, 0), (3, 0), (0, 1), (0, 0))
    segments = [
        {
            "address": (i + 1) << 24,
            "total_size": 16 * MIB,  # one after the other
            "stream": 0,
            "is_expandable": expandable,
            "segment_pool_id": pool,
            "blocks": [live] if i == 2 else [],
        }
        for i, pool in enumerate(pools)
    ]
    entries = [pool_entry("alloc", 5 << 24, (0, 0)), pool_entry("free_requested", 5 << 24, (0, 0))]
    path = tmp_path / "pools.pickle"
    told = {"segments": segments, "device_traces": [entries * has_history]}
    path.write_bytes(pickle.dumps(told))
    found = trace.analyse(path)
    end = found.moments[max(found.moments)]
    assert {found.pool_id(n): size for n, size in end.reserved_by_pool().items()} == {
        (3, 0): 32 * MIB,
        (0, 1): 16 * MIB,
    }
    assert [(row.name, row.bytes) for row in found.idle_pools(end)] == [
        ("private pool (3, 0)", 30 * MIB),
        ("private pool (0, 1)", 16 * MIB),
    ]


def test_state_before_a_trace_that_begins_late(tmp_path: Path) -> None:
    """The ring lost the beginning: two blocks existed before, one of them is freed in the trace."""
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
    """Its parts are mapped and unmapped one by one; all belong to the segment's stream."""
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
    """With torch's own example, skip_actions=["free_requested"], only free_completed reports a free."""
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
    """16 blocks of 1 MiB, never two at once: without their requests they would all be alive at first."""
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
    """pyalloc joins two free pieces for a request, and splits them after it."""
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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"expandable_segments": False, "max_split_size": -1}, {}),
        (
            {"max_split_size": 64 * MIB, "garbage_collection_threshold": 0.8},
            {"max_split_size_mb": "64", "garbage_collection_threshold": "0.8"},
        ),
        ({"expandable_segments": True}, {"expandable_segments": "True"}),
        ({"max_split_size": -1, "pyalloc": {"vmm": "True"}}, {"allocator": "pyalloc"}),
    ],
)
def test_settings_are_told_as_one_asks_for_them(
    tmp_path: Path, settings: dict[str, Any], told: dict[str, str]
) -> None:
    path = tmp_path / "settings.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "allocator_settings": settings}))
    notes = trace.analyse(path).notes
    assert {name: notes[name] for name in notes if name not in ("source", "history")} == told


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
    kinds = [event.kind for event in reading.events(path)]
    assert kinds.count("pool_begin") == 1
    assert kinds.count("pool_release") == goes


def frames_of(*frames: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": 7} for name, file in frames]


# The default of torch's history, stacks="all": C++ frames around and between those of Python.
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


AUTOGRAD = [
    ("torch::autograd::Engine::thread_main()", "??"),
    ("execute_native_thread_routine", "thread48.o"),  # of a libstdc++ with symbols
    ("clone3", "x86_64/clone3.S"),
]


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
    assert "begins when memory was already in use" in seen["late"][0]
    assert seen["whole"] == []


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


@pytest.mark.parametrize(
    ("file", "peak"), [("/x/torch/cuda/memory.py", 30), ("/home/me/a.py", 42), ("", 42)]
)
def test_an_emptied_cache_is_emptied_in_replays_too(tmp_path: Path, file: str, peak: int) -> None:
    """No entry says so, but the stacks of what was given back do; an allocator short of memory has others."""
    frames = [
        {"name": "(anonymous)", "filename": "libtorch.so", "line": 0},
        {"name": "empty_cache", "filename": file, "line": 1},
    ]
    entries = [
        {"action": action, "addr": addr, "size": n * MIB, "stream": 0, "frames": frames * bool(file)}
        for action, addr, n in (
            ("segment_alloc", 1 << 30, 12), ("alloc", 1 << 30, 12), ("free_requested", 1 << 30, 12),
            ("free_completed", 1 << 30, 12), ("segment_free", 1 << 30, 12),
            ("segment_alloc", 1 << 31, 30), ("alloc", 1 << 31, 30),
        )
    ]  # fmt: skip
    segment = {
        "address": 1 << 31,
        "total_size": 30 * MIB,
        "stream": 0,
        "blocks": [{"size": 30 * MIB, "state": "active_allocated"}],
    }
    path = tmp_path / "emptied.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    with trace.program(path) as program:
        assert program.replay("native")["peak_bytes"] == peak * MIB


def test_segments_are_as_they_were_before_the_history() -> None:
    def entry(action: str, addr: int, mib: int, stream: int = 0) -> dict[str, object]:
        return {"action": action, "addr": addr << 30, "size": mib * MIB, "stream": stream}

    trace_of_device = [
        entry("segment_free", 2, 2, stream=3),
        entry("segment_unmap", 3, 4, stream=5),
        entry("segment_alloc", 4, 20),
        entry("segment_free", 4, 20),
        {**entry("segment_map", 1, 4), "addr": (1 << 30) + 2 * MIB},  # in the middle of it
    ]
    at_end = {"address": 1 << 30, "total_size": 8 * MIB, "stream": 7, "is_expandable": True}
    before, n_wrong = convert.state_before([{**at_end, "blocks": []}], [trace_of_device])
    assert [
        (each["address"], each["total_size"] // MIB, each["stream"], each["is_expandable"])
        for each in before
    ] == [
        (1 << 30, 2, 7, True),
        ((1 << 30) + 6 * MIB, 2, 7, True),
        (2 << 30, 2, 3, False),
        (3 << 30, 4, 5, True),
    ]
    assert n_wrong == 0


def begun_late(tmp_path: Path) -> Path:
    """Two blocks existed before the history: one is freed in it, the other stays.  4 MiB more come and go."""
    entries = [
        {"action": "alloc", "addr": 12 * MIB, "size": 4 * MIB, "stream": 0, "frames": []},
        {"action": "free_requested", "addr": 12 * MIB, "size": 4 * MIB, "stream": 0},
        {"action": "free_requested", "addr": 4 * MIB, "size": 8 * MIB, "stream": 0},
    ]
    block = {"address": 4 * MIB, "size": 8 * MIB, "state": "inactive"}
    kept = {"address": 2 * MIB, "size": 2 * MIB, "state": "active_allocated", "frames": []}
    segment = {"address": 2 * MIB, "total_size": 18 * MIB, "stream": 0, "blocks": [kept, block]}
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    return path


def test_what_was_there_before_the_history_is_told_apart(tmp_path: Path) -> None:
    path = begun_late(tmp_path)
    found = trace.analyse(path)
    lines = {row.name: row.bytes // MIB for row in found.by_line(found.peak.blocks)}
    assert lines == {
        "in use before the history began, freed later": 8,
        "(no stack)": 4,
        "in use from before the history to its end": 2,
    }
    assert "before=" not in pyalloc("report", path, "-q")  # a note for programs
    snapshot = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps({**snapshot, "device_traces": []}))
    found = trace.analyse(path)  # at a single moment there is no before
    assert [row.name for row in found.by_line(found.peak.blocks)] == ["(no stack)"]


def test_a_line_of_code_that_has_none_is_no_number_of_a_line(tmp_path: Path) -> None:
    """torch writes -1 as an unsigned 64-bit number for functions that it made itself."""
    frames = frames_of(("made", "/home/me/made.py"), ("train", "/home/me/train.py"))
    frames[0]["line"], frames[1]["line"] = 2**64 - 1, -1
    entry = {"action": "alloc", "addr": 2 * MIB, "size": MIB, "stream": 0, "frames": frames}
    segment = {"address": 2 * MIB, "total_size": 2 * MIB, "stream": 0, "blocks": []}
    path = tmp_path / "lines.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[entry]]}))
    (block,) = trace.analyse(path).peak.blocks
    assert trace.analyse(path).frames(block.stack) == (
        ("made", "/home/me/made.py", 0),
        ("train", "/home/me/train.py", 0),
    )
    frames[0]["line"] = "7"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[entry]]}))
    with pytest.raises(errors.TraceError, match="a line that is not a number"):
        trace.analyse(path)


@pytest.mark.parametrize("history", ["none", "late", "whole"])
def test_what_waits_for_other_streams_is_not_idle(tmp_path: Path, history: str) -> None:
    """A state in torch: freed, but not reusable before the other streams are done."""
    blocks = [
        {"address": 2 * MIB, "size": 8 * MIB, "state": "active_pending_free"},
        {"address": 10 * MIB, "size": 4 * MIB, "state": "active_allocated"},
        {"address": 14 * MIB, "size": 6 * MIB, "state": "inactive"},
    ]
    segment = {"address": 2 * MIB, "total_size": 18 * MIB, "stream": 0, "blocks": blocks}
    entries = [
        {"action": "alloc", "addr": 2 * MIB, "size": 8 * MIB, "stream": 0},
        {"action": "free_requested", "addr": 2 * MIB, "size": 8 * MIB, "stream": 0},
        {"action": "alloc", "addr": 14 * MIB, "size": 5 * MIB, "stream": 0},
        {"action": "free_requested", "addr": 14 * MIB, "size": 5 * MIB, "stream": 0},
        {"action": "free_completed", "addr": 14 * MIB, "size": 5 * MIB, "stream": 0},
    ][{"none": 5, "late": 2, "whole": 0}[history] :]
    path = tmp_path / "waiting.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries]}))
    found = trace.analyse(path)
    end = found.moments[max(found.moments)]
    assert (end.allocated_bytes, end.pending_bytes, end.idle_bytes) == (4 * MIB, 8 * MIB, 6 * MIB)
    assert [block.address for block in end.pending] == [2 * MIB]
    target = tmp_path / "again.pickle"
    pyalloc("export", path, "--to", "torch", "-o", target, "-q")
    (written,) = pickle.loads(target.read_bytes())["segments"]
    assert [(b["size"] // MIB, b["state"]) for b in written["blocks"]] == [
        *((8, "active_pending_free"), (4, "active_allocated"), (6, "inactive"))
    ]
    assert (written["allocated_size"], written["active_size"]) == (4 * MIB, 12 * MIB)
    again = trace.analyse(target)
    assert again.moments[max(again.moments)].pending_bytes == 8 * MIB
