"""_record_memory_history: the entries of a history, its levels, lengths, labels, and how it ends."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from parity.tensors import GIB, MIB, empty, of, trace
from torch.cuda.memory import _record_memory_history, _snapshot


def actions(device: int = 0) -> list[str]:
    return [entry["action"] for entry in trace(device)]


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
    """In a long history they take gigabytes."""
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
    """Then no more stacks are captured, and capturing one frees the earlier ones."""
    for _ in range(3):  # it was requested again
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
        for _ in range(100):  # steps of the main thread
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


def test_no_actions_but_torchs_are_told() -> None:
    """torch's viewer and other programs know no others."""
    _record_memory_history("all", stacks="python")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = empty(MIB)
        tensor.record_stream(torch.cuda.Stream())
        del tensor
    del pool
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    known = {
        *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
        *("segment_map", "segment_unmap", "snapshot", "oom"),
    }
    assert "free_completed" in actions() and set(actions()) <= known
    # Nor do others replace these.
    kept = [empty(1000)]
    _record_memory_history(None)
    _record_memory_history("all", stacks="python", max_entries=3)
    kept += [empty(1000) for _ in range(3)]
    for _ in range(3):
        kept[0].record_stream(torch.cuda.Stream())
    assert actions() == ["alloc"] * 3


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
    if torch.cuda.get_allocator_backend() == "pluggable":  # torch's own history has begun by then
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
    assert getattr(memory, "_memory_metadata_supported", lambda: True)()  # 2.11 lacks it
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
    _record_memory_history(None)
    assert memory._allocation_traceback(tensor.data_ptr()) == frames
    _record_memory_history(context=None)
    assert memory._allocation_traceback(tensor.data_ptr()) == frames
    assert memory._allocation_traceback(empty(1000).data_ptr()) is None


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
