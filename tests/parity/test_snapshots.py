"""memory_snapshot and _snapshot: segments, blocks and their frames, and the files made of them."""

from __future__ import annotations

import pickle
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from parity.tensors import MIB, empty, of
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
    with torch.cuda.stream(torch.cuda.Stream()):  # a segment of pyalloc's is what one stream has
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
    """A block that another stream goes on using after its free shows where it lies."""
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
    """Until the memory may be reused; what completes the free is recorded wherever any free is."""
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
    """A flame graph begins at its root."""

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


def test_dump_loads_everywhere(tmp_path) -> None:
    _record_memory_history(stacks="python")
    tensors = [empty(i * MIB) for i in range(1, 9)]
    del tensors[::2]
    path = tmp_path / "snapshot.pickle"
    _dump_snapshot(str(path))
    raw = path.read_bytes()
    # The viewer does not read protocol 5.  torch dumps with Python's default, which is 5 from 3.14 on.
    assert raw[0] == 0x80 and 2 <= raw[1] <= max(4, pickle.DEFAULT_PROTOCOL)
    snapshot = pickle.loads(raw)
    assert "segments" in _memory_viz.segsum(snapshot)
    assert "free completed" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "<html>" in _memory_viz.segment_plot(snapshot)
