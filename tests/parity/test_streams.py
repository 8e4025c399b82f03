"""Streams: memory is reused in stream order, and after record_stream only once the recorded work is done."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.programs import run
from parity.tensors import GIB, MIB, asked_of_destroyed_streams, destroy, empty, own_stream

import pyalloc

TESTS = Path(__file__).parent.parent


def busy(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.zeros(1, device="cuda")


def released(address: int, size: int, stream: torch.cuda.Stream) -> bool:
    """Does the allocator reuse the address on the stream?"""
    kept, found = [], False
    with torch.cuda.stream(stream):
        for _ in range(20):
            kept.append(empty(size))
            found = found or kept[-1].data_ptr() == address
    return found


@pytest.mark.parametrize("size", [1000, MIB, 3 * MIB, 30 * MIB])
def test_same_stream_reuses_at_once(size: int) -> None:
    tensor = empty(size)
    address = tensor.data_ptr()
    del tensor
    assert empty(size).data_ptr() == address


@pytest.mark.parametrize("size", [1000, MIB, 3 * MIB, 30 * MIB])
def test_other_streams_do_not_reuse_live_stream_memory(size: int, runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    side = torch.cuda.Stream()
    tensor = empty(size)
    address = tensor.data_ptr()
    busy(torch.cuda.current_stream())
    del tensor
    with torch.cuda.stream(side):
        other = empty(size)
    assert other.data_ptr() != address


@pytest.mark.parametrize("size", [1000, 3 * MIB, 30 * MIB])
def test_recorded_block_waits(size: int, runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    side = torch.cuda.Stream()
    tensor = empty(size)
    address = tensor.data_ptr()
    busy(side)
    tensor.record_stream(side)
    del tensor
    assert empty(size).data_ptr() != address


@pytest.mark.parametrize("size", [1000, 3 * MIB, 30 * MIB])
def test_recorded_block_returns_after_the_work(size: int, runtime) -> None:
    side = torch.cuda.Stream()
    tensor = empty(size)
    address = tensor.data_ptr()
    busy(side)
    tensor.record_stream(side)
    del tensor
    torch.cuda.synchronize()
    empty(512)  # looks at finished events
    assert released(address, size, torch.cuda.current_stream())


def test_own_stream_changes_nothing(runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    tensor = empty(3 * MIB)
    address = tensor.data_ptr()
    tensor.record_stream(torch.cuda.current_stream())
    del tensor
    assert empty(3 * MIB).data_ptr() == address


def test_view_protects_the_whole_block(runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    side = torch.cuda.Stream()
    tensor = empty(4 * MIB)
    address = tensor.data_ptr()
    busy(side)
    tensor[MIB : 2 * MIB].record_stream(side)
    del tensor
    assert empty(4 * MIB).data_ptr() != address


def test_empty_tensor_and_cpu_memory_are_ignored() -> None:
    side = torch.cuda.Stream()
    before = torch.cuda.memory_stats()
    empty(0).record_stream(side)
    with pytest.raises(RuntimeError, match="record_stream"):
        torch.empty(MIB).record_stream(side)
    assert torch.cuda.memory_stats() == before


def test_two_recordings_of_one_stream(runtime) -> None:
    side = torch.cuda.Stream()
    tensor = empty(MIB)
    for _ in range(5):
        tensor.record_stream(side)
    address = tensor.data_ptr()
    del tensor
    torch.cuda.synchronize()
    empty(512)
    assert released(address, MIB, torch.cuda.current_stream())


def test_two_streams_must_both_finish(runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    tensor = empty(3 * MIB)
    address = tensor.data_ptr()
    for stream in (first, second):
        busy(stream)
        tensor.record_stream(stream)
    del tensor
    assert empty(3 * MIB).data_ptr() != address
    assert (
        torch.cuda.memory_stats()["active.all.current"]
        > torch.cuda.memory_stats()["allocation.all.current"]
    )


def test_active_bytes_fall_when_events_complete(runtime) -> None:
    side = torch.cuda.Stream()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    tensor = empty(3 * MIB)
    busy(side)
    tensor.record_stream(side)
    del tensor
    assert torch.cuda.memory_stats()["active_bytes.all.current"] >= before + 3 * MIB
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < before + 3 * MIB


def test_empty_cache_reclaims_pending_blocks(runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    side = torch.cuda.Stream()
    free = torch.cuda.mem_get_info()[0]
    tensor = empty(100 * MIB)
    busy(side)
    tensor.record_stream(side)
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - 4 * MIB


def test_memory_of_one_stream_serves_another_after_synchronisation() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = [empty(1024 * MIB) for _ in range(6)]
    del tensors
    torch.cuda.synchronize()
    assert empty(6 * 1024 * MIB).numel() == 6 * 1024 * MIB


def test_prefetch_loop_keeps_data_apart(runtime) -> None:
    side = torch.cuda.Stream()
    runtime.pya_hostcuda_set_event_delay(8)
    for step in range(40):
        host = torch.full((300_000,), step % 200, dtype=torch.uint8)
        with torch.cuda.stream(side):
            batch = host.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        assert torch.equal(batch.cpu(), host)
        busy(torch.cuda.current_stream())
        del batch


def test_external_stream() -> None:
    side = torch.cuda.Stream()
    external = torch.cuda.ExternalStream(side.cuda_stream)
    with torch.cuda.stream(external):
        tensor = empty(3 * MIB)
    address = tensor.data_ptr()
    tensor.record_stream(torch.cuda.default_stream())
    del tensor
    torch.cuda.synchronize()
    empty(512)  # looks at finished events
    assert released(address, 3 * MIB, side)


def test_snapshot_names_the_stream() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = empty(3 * MIB)
    segments = torch.cuda.memory_snapshot()
    owners = {
        segment["stream"]
        for segment in segments
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    }
    assert owners == {side.cuda_stream}


def test_memory_of_a_destroyed_stream_is_usable() -> None:
    cudart = torch.cuda.cudart()
    handle = ctypes.c_void_p()
    assert int(cudart.cudaStreamCreate(ctypes.addressof(handle))) == 0
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        tensors = [empty(30 * MIB) for _ in range(4)]
    torch.cuda.synchronize()
    assert int(cudart.cudaStreamDestroy(handle.value)) == 0
    del tensors
    for _ in range(3):
        kept = [empty(20 * MIB + i) for i in range(8)]
        busy(torch.cuda.current_stream())
        assert len({tensor.data_ptr() for tensor in kept}) == 8
        del kept
    assert torch.cuda.memory_allocated() == before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 30 * MIB


def test_block_waits_for_a_stream_destroyed_meanwhile(runtime) -> None:
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    side = own_stream()
    tensor = empty(3 * MIB)
    address = tensor.data_ptr()
    busy(side)
    tensor.record_stream(side)
    del tensor
    destroy(side)  # its work goes on
    assert empty(3 * MIB).data_ptr() != address
    assert torch.cuda.memory_stats()["active_bytes.all.current"] >= before + 3 * MIB
    runtime.pya_hostcuda_set_event_delay(0)
    empty(512)  # looks at finished events
    assert released(address, 3 * MIB, torch.cuda.current_stream())


@pytest.mark.parametrize("how", ["allocated", "recorded", "by number", "refused", "reserved"])
def test_nothing_is_asked_of_a_destroyed_stream(runtime: Any, how: str) -> None:
    """A card's driver may crash at that.  Torch's own streams live as long as the process, others do not."""
    if how == "reserved" and os.environ["PYALLOC_PARITY"] != "pyalloc":
        pytest.skip("of pyalloc")
    use_and_destroy(runtime, how)


@pytest.mark.parametrize("how", ["allocated", "refused"])
def test_nothing_is_asked_of_the_first_stream(how: str) -> None:
    """The process's first request goes torch's own way, to see how torch fills its pointers."""
    program = f"""
import ctypes
from parity import test_streams
test_streams.use_and_destroy(ctypes.CDLL("libcuda.so.1"), {how!r})
"""
    run("-c", program, folder=TESTS)


def use_and_destroy(runtime: Any, how: str) -> None:
    def use() -> None:
        stream = own_stream()
        if how == "allocated":
            with torch.cuda.stream(stream):
                empty(64 * MIB)
        elif how == "refused":
            with torch.cuda.stream(stream), pytest.raises(torch.OutOfMemoryError):
                empty(64 * GIB)
        elif how == "reserved":
            with torch.cuda.stream(stream):
                pyalloc.reserve(torch.cuda.memory_reserved() + 64 * MIB)
            pyalloc.reserve(0)
        elif how == "by number":
            address = torch.cuda.caching_allocator_alloc(64 * MIB, stream=stream.cuda_stream)
            torch.cuda.caching_allocator_delete(address)
        else:
            empty(64 * MIB).record_stream(stream)
        torch.cuda.synchronize()
        destroy(stream)

    assert asked_of_destroyed_streams(runtime, use) == 0


def test_a_capture_on_the_device_of_a_recorded_stream_is_not_spoilt() -> None:
    """Another library's stream there is waited for through its device, but not while that captures."""
    with torch.cuda.device(1):
        other = own_stream()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side = torch.cuda.Stream()
    empty(30 * MIB).record_stream(other)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        kept = empty(MIB)
        with torch.cuda.device(0):
            for step in range(1, 13):  # each larger than any free block
                empty((64 + 20 * step) * MIB)
                with torch.cuda.stream(side):
                    empty((70 + 20 * step) * MIB)
            torch.cuda.empty_cache()
        kept.zero_()
        graph.capture_end()
    graph.replay()
    destroy(other)


@pytest.mark.parametrize("whose", ["torch's", "own"])
@pytest.mark.parametrize("begins", ["after its first request", "before"])
def test_a_capture_begun_by_hand_is_not_spoilt(whose: str, begins: str) -> None:
    """Not by torch.cuda.graph, which tells the allocator: a wait for the device would end the capture with an error."""
    cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    stream = torch.cuda.Stream() if whose == "torch's" else own_stream()
    other = torch.cuda.Stream()
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    held = [empty(30 * MIB) for _ in range(6)]
    with torch.cuda.stream(other):
        held += [empty(30 * MIB) for _ in range(6)]
    if begins != "before":
        with torch.cuda.stream(stream):
            empty(30 * MIB)
    torch.cuda.synchronize()
    assert cudart.cudaStreamBeginCapture(handle, 2) == 0
    held.clear()
    for each in (stream, other):
        with torch.cuda.stream(each):
            for step in range(1, 20):
                empty(step * 15 * MIB)
    torch.cuda.empty_cache()
    assert cudart.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
    with torch.cuda.stream(stream):  # the capture is over
        empty(512)
    if whose == "own":
        destroy(stream)


@pytest.mark.parametrize("whose", ["torch's", "own"])
@pytest.mark.skipif(
    os.environ.get("PYALLOC_PARITY") != "pyalloc", reason="native's next request raises"
)
def test_freed_while_a_recorded_stream_is_captured_by_hand(whose: str) -> None:
    """An event would become part of the graph, never complete, and end the capture when it is queried.  The memory
    comes back all the same."""
    cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    stream = torch.cuda.Stream() if whose == "torch's" else own_stream()
    handle, graph = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tensor = empty(30 * MIB)
    tensor.record_stream(stream)
    assert cudart.cudaStreamBeginCapture(handle, 2) == 0
    del tensor
    held = [empty(30 * MIB) for _ in range(5)]
    del held
    assert cudart.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
    with torch.cuda.stream(stream):  # the capture is over
        empty(512)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def free_after_a_recorded_stream_is_destroyed() -> None:
    side = own_stream()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    tensor = empty(30 * MIB)
    kept = empty(30 * MIB)
    busy(side)
    tensor.record_stream(side)
    torch.cuda.synchronize()
    destroy(side)
    del tensor
    for _ in range(3):
        again = [empty(30 * MIB) for _ in range(3)]
        assert len({tensor.data_ptr() for tensor in (kept, *again)}) == 4
        del again
    torch.cuda.synchronize()
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before
    assert torch.cuda.memory_reserved() < 30 * MIB


def test_stream_destroyed_before_the_block_is_freed() -> None:
    """Torch records an event on the stream when it frees the block, where no exception can pass: the process ends."""
    if os.environ["PYALLOC_PARITY"] == "pyalloc":
        free_after_a_recorded_stream_is_destroyed()
        return
    call = (
        "from parity import test_streams; test_streams.free_after_a_recorded_stream_is_destroyed()"
    )
    run("-c", call, expect=-signal.SIGABRT, folder=TESTS)
