"""memory_snapshot, _snapshot, _record_memory_history, and the files made of them."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from parity.tensors import GIB, MIB, empty
from torch.cuda import _memory_viz
from torch.cuda.memory import _dump_snapshot, _record_memory_history, _snapshot

SEGMENT_KEYS = {
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
    "frames",
    "blocks",
}


def trace(device: int = 0) -> list[dict]:
    return _snapshot()["device_traces"][device]


def actions(device: int = 0) -> list[str]:
    return [entry["action"] for entry in trace(device)]


def of(address: int) -> list[dict]:
    return [entry for entry in trace() if entry.get("addr") == address]


def test_a_snapshot_has_torchs_keys() -> None:
    tensor = empty(1000)
    snapshot = _snapshot()
    assert {"segments", "device_traces", "allocator_settings", "external_annotations"} <= set(
        snapshot
    )
    assert len(snapshot["device_traces"]) == 2
    for segment in snapshot["segments"]:
        assert set(segment) >= SEGMENT_KEYS
        assert segment["segment_type"] in ("small", "large")
        for block in segment["blocks"]:
            assert {"address", "size", "requested_size", "state", "frames"} <= set(block)
    del tensor


def test_total_size_adds_up_to_reserved_bytes() -> None:
    tensors = [empty(size) for size in (100, MIB, 3 * MIB, 50 * MIB, 7, 200 * MIB)]
    del tensors[1::2]
    for device in (0, 1):
        segments = [
            segment for segment in torch.cuda.memory_snapshot() if segment["device"] == device
        ]
        assert sum(segment["total_size"] for segment in segments) == torch.cuda.memory_reserved(
            device
        )
        assert sum(
            segment["allocated_size"] for segment in segments
        ) == torch.cuda.memory_allocated(device)


def test_blocks_tile_their_segment() -> None:
    tensors = [empty(size) for size in (100, 5000, MIB, 3 * MIB, 50 * MIB)]
    del tensors[::2]
    for segment in torch.cuda.memory_snapshot():
        place = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == place
            place += block["size"]
        assert place == segment["address"] + segment["total_size"]


def test_every_live_tensor_lies_in_a_block() -> None:
    tensors = [empty(size) for size in (1, 600, MIB, 2 * MIB + 1, 30 * MIB)]
    blocks = {
        block["address"]: block
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
    }
    for tensor in tensors:
        block = blocks[tensor.data_ptr()]
        assert block["state"] == "active_allocated"
        assert block["requested_size"] == tensor.numel()


def test_segments_do_not_overlap() -> None:
    tensors = [empty(i * 3 * MIB + 1) for i in range(8)]
    with torch.cuda.stream(torch.cuda.Stream()):  # pyalloc's segments are what one stream has
        tensors += [empty(i * 3 * MIB + 1) for i in range(8)]
    spans = sorted(
        (s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot()
    )
    assert len(spans) > 1
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start
    del tensors


def test_inactive_blocks() -> None:
    tensor = empty(5 * MIB)
    address = tensor.data_ptr()
    del tensor
    states = [
        block["state"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["address"] <= address < block["address"] + block["size"]
    ]
    assert states == ["inactive"]


def freed_and_used(runtime) -> int:
    """Where a block lies that another stream goes on using after its end."""
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    side = torch.cuda.Stream()
    tensor = empty(5 * MIB)
    address = tensor.data_ptr()
    with torch.cuda.stream(side):
        torch.zeros(1, device="cuda")
    tensor.record_stream(side)
    return address


def test_pending_blocks(runtime) -> None:
    address = freed_and_used(runtime)
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    assert [block["state"] for block in blocks if block["address"] == address] == [
        "active_pending_free"
    ]
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] >= stats["allocated_bytes.all.current"] + 5 * MIB


def names_of(frames: list[dict[str, Any]]) -> set[str]:
    return {frame["name"] for frame in frames}


@pytest.mark.parametrize("context", ["state", "alloc", "all"])
def test_pending_blocks_are_told_by_their_allocation(runtime, context: str) -> None:
    """Until the memory may be handed out again; what frees it then is told where every free is."""
    here = "test_pending_blocks_are_told_by_their_allocation"
    _record_memory_history("all", context=context, stacks="python")
    address = freed_and_used(runtime)
    (block,) = [
        block
        for segment in _snapshot()["segments"]
        for block in segment["blocks"]
        if block["address"] == address
    ]
    assert block["state"] == "active_pending_free"
    assert here in names_of(block["frames"])
    runtime.pya_hostcuda_set_event_delay(0)
    torch.cuda.empty_cache()
    (entry,) = [entry for entry in of(address) if entry["action"] == "free_completed"]
    names = names_of(entry.get("frames", []))
    assert ("empty" in names) is (context == "alloc")
    assert ("empty_cache" in names) is (context == "all")


def test_frames_name_this_file() -> None:
    _record_memory_history(stacks="python")
    tensor = empty(1000)
    blocks = [block for segment in _snapshot()["segments"] for block in segment["blocks"]]
    (frames,) = [block["frames"] for block in blocks if block["address"] == tensor.data_ptr()]
    places = [(frame["filename"], frame["name"]) for frame in frames]
    assert (__file__, "test_frames_name_this_file") in places
    assert (empty.__code__.co_filename, "empty") in places
    assert all(set(frame) >= {"name", "filename", "line"} for frame in frames)


def test_innermost_frame_comes_first() -> None:
    _record_memory_history(stacks="python")
    tensor = empty(1000)
    names = [frame["name"] for frame in of(tensor.data_ptr())[0]["frames"]]
    assert names.index("empty") < names.index("test_innermost_frame_comes_first")


@pytest.mark.parametrize("depth", [1, 126, 127, 128, 200, 700])
def test_all_of_a_deep_stack_is_kept(depth: int) -> None:
    """Its root is where a flame graph begins."""

    def call(n: int) -> torch.Tensor:
        return empty(1000) if n == 0 else call(n - 1)

    _record_memory_history(stacks="python")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        tensor = call(depth)
    finally:
        sys.setrecursionlimit(limit)
    frames = of(tensor.data_ptr())[-1]["frames"]
    names = [frame["name"] for frame in frames]
    assert names.count("call") == depth + 1
    assert names[names.index("test_all_of_a_deep_stack_is_kept") - 1] == "call"
    root = sys._getframe()
    while root.f_back is not None:
        root = root.f_back
    assert (frames[-1]["name"], frames[-1]["line"]) == (root.f_code.co_name, root.f_lineno)


def test_cpp_frames() -> None:
    _record_memory_history(stacks="all")
    tensor = empty(1000)
    names = [frame["name"] for frame in of(tensor.data_ptr())[0]["frames"]]
    assert any("at::" in name or "empty" in name for name in names)
    assert len(names) > 5


def test_alloc_and_free_are_traced_in_order() -> None:
    _record_memory_history(stacks="python")
    tensor = empty(MIB)
    address = tensor.data_ptr()
    del tensor
    assert [entry["action"] for entry in of(address)][-3:] == [
        "alloc",
        "free_requested",
        "free_completed",
    ]


def test_entry_size_is_the_requested_size() -> None:
    _record_memory_history(stacks="python")
    tensor = empty(1001)
    (entry,) = [entry for entry in of(tensor.data_ptr()) if entry["action"] == "alloc"]
    assert entry["size"] == 1001
    assert {"action", "addr", "size", "stream", "time_us"} <= set(entry)


def test_new_memory_is_traced() -> None:
    _record_memory_history(stacks="python")
    tensor = empty(64 * MIB)
    del tensor
    torch.cuda.empty_cache()
    seen = set(actions())
    assert seen & {"segment_alloc", "segment_map"}
    assert seen & {"segment_free", "segment_unmap"}


def test_times_ascend_and_are_now() -> None:
    import time

    before = time.time_ns() // 1000
    _record_memory_history(stacks="python")
    for _ in range(10):
        empty(1000)
    times = [entry["time_us"] for entry in trace()]
    assert times == sorted(times)
    assert before - 2_000_000 < times[0] <= times[-1] < time.time_ns() // 1000 + 2_000_000


def test_oom_entry() -> None:
    _record_memory_history(stacks="python")
    with pytest.raises(torch.OutOfMemoryError):
        empty(100 * GIB + 1)
    (entry,) = [entry for entry in trace() if entry["action"] == "oom"]
    assert entry["size"] == 100 * GIB + 512
    assert 0 < entry["device_free"] <= 8 * GIB
    assert "addr" not in entry


def test_a_trace_has_one_entry_at_least() -> None:
    _record_memory_history(max_entries=0, stacks="python")
    empty(1)
    assert len(trace()) == 1


def test_a_longer_trace_goes_on() -> None:
    empty(1000)
    _record_memory_history(max_entries=6, stacks="python")
    for i in range(10):
        empty(1000 + i)  # three entries each
    _record_memory_history(max_entries=1000, stacks="python")
    empty(5000)
    sizes = sorted(entry["size"] for entry in trace())
    assert sizes == [1008] * 3 + [1009] * 3 + [5000] * 3


def test_snapshot_entry_is_seen_by_the_next() -> None:
    _record_memory_history(stacks="python")
    empty(1)
    assert "snapshot" not in actions()
    assert actions().count("snapshot") == 1
    assert actions().count("snapshot") == 2


@pytest.mark.parametrize("most", [1, 5, 100])
def test_ring_keeps_the_newest(most: int) -> None:
    _record_memory_history(stacks="python", max_entries=most)
    for size in range(1, 60):
        empty(size)
    entries = trace()
    assert len(entries) <= most
    if most >= 5:
        assert [entry["action"] for entry in entries][-1] == "free_completed"
        assert entries[-1]["size"] == 59


def test_off_clears_the_trace() -> None:
    _record_memory_history(stacks="python")
    empty(1)
    assert trace()
    _record_memory_history(None)
    assert trace() == []


@pytest.mark.skipif(
    os.environ.get("PYALLOC_PARITY") != "pyalloc", reason="native keeps them until it records again"
)
def test_a_history_that_was_stopped_keeps_no_stacks() -> None:
    """Of a long history they are gigabytes."""
    _record_memory_history(max_entries=1000)
    scope: dict[str, Any] = {}
    exec("def make():\n    import torch\n    torch.empty(1000, device='cuda')", scope)
    scope["make"]()
    code = weakref.ref(scope.pop("make").__code__)
    gc.collect()
    assert code() is not None
    _record_memory_history(None)
    gc.collect()  # without a GIL only that frees code
    assert code() is None


@pytest.mark.skipif(
    os.environ.get("PYALLOC_PARITY") != "pyalloc", reason="native keeps them until it records again"
)
@pytest.mark.parametrize("is_main", [True, False])
def test_a_block_that_outlives_its_history_keeps_no_stack_when_it_is_freed(is_main: bool) -> None:
    """No more stacks are captured then, which frees those before."""
    for _ in range(3):  # it was asked for again
        _record_memory_history(max_entries=1000)
        scope: dict[str, Any] = {}
        exec("def make():\n    import torch\n    return torch.empty(9, device='cuda')", scope)
        kept = [scope["make"]()]
        code = weakref.ref(scope.pop("make").__code__)
        _record_memory_history(None)
        gc.collect()
        assert code() is not None
        if is_main:
            kept.clear()
        else:
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
        for _ in range(100):  # steps of the main thread's
            pass
        gc.collect()
        assert code() is None


def test_state_records_the_latest_event() -> None:
    _record_memory_history("state", stacks="python")
    tensor = empty(1000)
    assert [entry["addr"] for entry in trace()] == [tensor.data_ptr()]
    blocks = [block for segment in _snapshot()["segments"] for block in segment["blocks"]]
    (frames,) = [block["frames"] for block in blocks if block["address"] == tensor.data_ptr()]
    assert frames


def test_without_context_there_are_no_frames() -> None:
    _record_memory_history("all", context=None)
    tensor = empty(1000)
    (entry,) = [entry for entry in of(tensor.data_ptr()) if entry["action"] == "alloc"]
    assert "frames" not in entry


@pytest.mark.parametrize(
    ("context", "on_alloc", "on_free"),
    [("state", False, False), ("alloc", True, True), ("all", True, True)],
)
def test_levels_of_context(context: str, on_alloc: bool, on_free: bool) -> None:
    _record_memory_history("all", context=context, stacks="python")
    tensor = empty(1000)
    address = tensor.data_ptr()
    del tensor
    entries = {entry["action"]: entry for entry in of(address)}
    assert ("frames" in entries["alloc"]) is on_alloc
    assert ("frames" in entries["free_requested"]) is on_free


@pytest.mark.parametrize(("context", "has_frames"), [("state", False), ("all", True)])
def test_levels_of_context_of_memory_given_back(context: str, has_frames: bool) -> None:
    set_metadata = getattr(torch.cuda.memory, "_set_memory_metadata", None)
    if set_metadata is not None:
        set_metadata("shrinking")
    _record_memory_history("all", context=context, stacks="python")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        empty(MIB)
    del pool
    empty(64 * MIB)
    torch.cuda.empty_cache()
    if set_metadata is not None:
        set_metadata("")
    given_back = [e for e in trace() if e["action"] in ("segment_free", "segment_unmap")]
    assert len(given_back) == 2
    if set_metadata is not None:
        assert {e["user_metadata"] for e in given_back} == {"shrinking"}
    callers = [{frame["name"] for frame in e.get("frames", [])} for e in given_back]
    here = "test_levels_of_context_of_memory_given_back"
    assert [here in names for names in callers] == [has_frames] * 2
    assert ("empty_cache" in callers[1]) is has_frames


@pytest.mark.parametrize(
    ("context", "has_frames"), [("state", False), ("alloc", True), ("all", True)]
)
def test_levels_of_context_of_out_of_memory(context: str, has_frames: bool) -> None:
    _record_memory_history("all", context=context, stacks="python")
    with pytest.raises(torch.OutOfMemoryError):
        empty(1 << 40)
    (entry,) = [entry for entry in _snapshot()["device_traces"][0] if entry["action"] == "oom"]
    assert ("frames" in entry) is has_frames


def test_a_snapshot_entry_tells_active_bytes() -> None:
    _record_memory_history("all", stacks="python")
    kept = [empty(1000), empty(3 * 2**20)]
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    _snapshot()
    del kept
    (entry,) = [each for each in _snapshot()["device_traces"][0] if each["action"] == "snapshot"]
    assert entry["size"] == active


def test_skip_actions() -> None:
    try:
        _record_memory_history("all", stacks="python", skip_actions=["free_requested"])
    except TypeError:
        pytest.skip("this torch has no skip_actions")
    empty(1000)
    seen = actions()
    assert "alloc" in seen
    assert "free_requested" not in seen


@pytest.mark.parametrize("form", [("all",), (True,)], ids=["new", "legacy"])
def test_an_action_told_twice_is_skipped_once(form: tuple) -> None:
    entries = {"trace_alloc_max_entries": 1000} if form == (True,) else {"stacks": "python"}
    try:
        _record_memory_history(*form, skip_actions=["segment_alloc"] * 2, **entries)
    except TypeError:
        pytest.skip("this torch has no skip_actions")
    torch.cuda.empty_cache()
    tensor = empty(100 * MIB)
    del tensor
    seen = set(actions())
    assert "segment_alloc" not in seen and {"alloc", "free_requested", "free_completed"} <= seen


@pytest.mark.parametrize("name", ["aloc", "record_stream", "pool_release"])
def test_skipping_what_is_no_action_begins_nothing(name: str) -> None:
    try:
        with pytest.raises(RuntimeError, match=f"Unknown TraceEntry action: {name}"):
            _record_memory_history("all", stacks="python", skip_actions=[name])
    except TypeError:
        pytest.skip("this torch has no skip_actions")
    if torch.cuda.get_allocator_backend() == "pluggable":  # torch's own has begun by then
        assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.parametrize("wrong", ["alloc", [1], 5])
def test_actions_to_skip_are_a_list_of_names(wrong: object) -> None:
    with pytest.raises(TypeError):
        _record_memory_history("all", stacks="python", skip_actions=wrong)


def test_clear_history() -> None:
    _record_memory_history("all", stacks="python")
    empty(1000)
    _record_memory_history("all", stacks="python", clear_history=True)
    assert trace() == []


def test_live_blocks_keep_their_frames_when_the_history_goes() -> None:
    _record_memory_history("all", stacks="python")
    tensor = empty(1000)
    for change in ({"clear_history": True}, {"enabled": None}):
        try:
            _record_memory_history(stacks="python", **change)
        except TypeError:
            continue  # this torch cannot clear it
        blocks = [block for segment in _snapshot()["segments"] for block in segment["blocks"]]
        (frames,) = [block["frames"] for block in blocks if block["address"] == tensor.data_ptr()]
        assert frames, change


@pytest.mark.parametrize(
    "bad", [{"enabled": "sometimes"}, {"context": "sometimes"}, {"stacks": "sometimes"}]
)
def test_bad_arguments(bad: dict) -> None:
    with pytest.raises(RuntimeError):
        _record_memory_history(**{"enabled": "all", **bad})


def test_legacy_form() -> None:
    _record_memory_history(True, trace_alloc_max_entries=1000, trace_alloc_record_context=True)
    tensor = empty(1000)
    assert [entry["action"] for entry in of(tensor.data_ptr())]
    _record_memory_history(False)
    assert trace() == []


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("_record_memory_history_impl", {"stacks": "python"}),
        (
            "_record_memory_history_legacy",
            {"trace_alloc_max_entries": 1000, "trace_alloc_record_context": True},
        ),
    ],
)
def test_either_form_by_its_own_name(name: str, on: dict[str, object]) -> None:
    switch = getattr(torch.cuda.memory, name)
    switch(True if "legacy" in name else "all", **on)
    tensor = empty(1000)
    entry = of(tensor.data_ptr())[-1]
    assert entry["action"] == "alloc"
    assert any(frame["filename"] == __file__ for frame in entry["frames"])
    switch(False if "legacy" in name else None)
    assert trace() == []


def test_dump_loads_everywhere(tmp_path) -> None:
    _record_memory_history(stacks="python")
    tensors = [empty(i * MIB) for i in range(1, 9)]
    del tensors[::2]
    path = tmp_path / "snapshot.pickle"
    _dump_snapshot(str(path))
    raw = path.read_bytes()
    # The viewer reads no protocol 5, and torch dumps by Python's default, which that is from 3.14 on.
    assert raw[0] == 0x80 and 2 <= raw[1] <= max(4, pickle.DEFAULT_PROTOCOL)
    snapshot = pickle.loads(raw)
    assert "segments" in _memory_viz.segsum(snapshot)
    assert "free completed" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "<html>" in _memory_viz.segment_plot(snapshot)


def test_trace_is_a_gap_free_suffix() -> None:
    _record_memory_history(stacks="python", max_entries=50)
    live: dict[int, int] = {}
    tensors = []
    for size in range(1, 200):
        tensors.append(empty(size * 100))
        if len(tensors) > 5:
            tensors.pop(0)
    for entry in trace():
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)
    assert set(live) <= {tensor.data_ptr() for tensor in tensors}
    assert {tensor.data_ptr() for tensor in tensors} <= set(live)


def test_metadata_is_written_to_entries() -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_set_memory_metadata"):
        pytest.skip("this torch has no memory metadata")
    assert getattr(
        memory, "_memory_metadata_supported", lambda: True
    )()  # 2.11 has no such question
    _record_memory_history(stacks="python")
    memory._set_memory_metadata("phase one")
    tensor = empty(1000)
    assert memory._get_memory_metadata() == "phase one"
    memory._set_memory_metadata("")
    (entry,) = [entry for entry in of(tensor.data_ptr()) if entry["action"] == "alloc"]
    assert entry["user_metadata"] == "phase one"


def test_metadata_is_per_thread() -> None:
    import threading

    memory = torch.cuda.memory
    if not hasattr(memory, "_set_memory_metadata"):
        pytest.skip("this torch has no memory metadata")
    memory._set_memory_metadata("mine")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(memory._get_memory_metadata()))
    thread.start()
    thread.join()
    memory._set_memory_metadata("")
    assert seen == [""]


def test_annotations_of_tensors() -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_annotate_tensor"):
        pytest.skip("this torch has no annotations")
    _record_memory_history(stacks="python")
    tensor = empty(1000)
    memory._annotate_tensor(tensor, "weights")
    notes = [entry for entry in of(tensor.data_ptr()) if entry["action"] == "annotate"]
    assert [note["user_metadata"] for note in notes] == ["weights"]


def test_allocation_traceback() -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_allocation_traceback"):
        pytest.skip("this torch has no allocation traceback")
    _record_memory_history(stacks="python")
    tensor = empty(1000)
    frames = memory._allocation_traceback(tensor.data_ptr())
    assert any(frame["name"] == "test_allocation_traceback" for frame in frames)
    assert memory._allocation_traceback(12345) is None


def test_history_state_is_known() -> None:
    assert not torch._C._cuda_isHistoryEnabled()
    _record_memory_history()
    assert torch._C._cuda_isHistoryEnabled()
    _record_memory_history(None)
    assert not torch._C._cuda_isHistoryEnabled()


def test_history_of_two_devices() -> None:
    _record_memory_history(stacks="python")
    a, b = empty(1000, 0), empty(1000, 1)
    for device, tensor in enumerate((a, b)):
        seen = [
            entry["action"] for entry in trace(device) if entry.get("addr") == tensor.data_ptr()
        ]
        assert seen[-1] == "alloc"
        assert not [entry for entry in trace(1 - device) if entry.get("addr") == tensor.data_ptr()]


def test_history_in_autograd_threads() -> None:
    _record_memory_history(stacks="python")
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    (x * 2).sum().backward()
    torch.cuda.synchronize()
    assert x.grad is not None
    assert actions().count("alloc") >= 3
