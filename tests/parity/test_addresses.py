"""Memory at an address that the program names: UntypedStorage._resize_with_addr_(), which torch has since 2.14."""

from __future__ import annotations

import pytest
import torch
from parity.tensors import MIB, empty

pytestmark = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_resize_with_addr_"), reason="this torch cannot be asked"
)


def freed(size: int) -> int:
    """The address of a block that was just freed."""
    return empty(size).data_ptr()


def at(address: int, size: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0, device="cuda")
    return storage._resize_with_addr_(size, address)


def is_refused(address: int, size: int) -> bool:
    with pytest.raises(RuntimeError) as caught:
        at(address, size)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    return f"{address:#x}" in str(caught.value)


@pytest.mark.parametrize("size", [1, 600, MIB // 2, MIB, 3 * MIB, 30 * MIB + 777])
def test_a_freed_block_comes_back(size: int) -> None:
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    address = freed(size)
    storage = at(address, size)
    assert storage.data_ptr() == address
    assert storage.nbytes() == size
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before + size
    assert empty(size).data_ptr() != address
    del storage
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == before


def test_it_may_be_the_middle_of_a_free_block() -> None:
    address = freed(30 * MIB)
    storage = at(address + 4 * MIB, 20 * MIB)
    assert storage.data_ptr() == address + 4 * MIB
    in_front, behind = at(address, 4 * MIB), at(address + 24 * MIB, 6 * MIB)
    assert in_front.data_ptr() == address
    del in_front, behind, storage
    assert at(address, 30 * MIB).data_ptr() == address


def test_bytes_arrive_there() -> None:
    address = freed(MIB)
    tensor = torch.empty(0, dtype=torch.uint8, device="cuda")
    tensor.set_(at(address, MIB), 0, (MIB,))
    tensor.copy_(torch.arange(MIB).remainder(251).to(torch.uint8))
    assert tensor.data_ptr() == address
    assert tensor.cpu().tolist()[:300] == [i % 251 for i in range(300)]


def test_what_is_not_free_is_refused() -> None:
    kept = empty(30 * MIB)
    assert is_refused(kept.data_ptr(), 30 * MIB)
    assert is_refused(kept.data_ptr() + MIB, MIB)
    assert is_refused(kept.data_ptr() + 30 * MIB - 512, 30 * MIB)
    assert is_refused(1 << 20, 30 * MIB)


def test_an_address_within_512_bytes_is_refused() -> None:
    address = freed(3 * MIB)
    assert is_refused(address + 8, MIB)
    assert at(address, 3 * MIB).data_ptr() == address


def test_memory_of_another_stream_is_refused() -> None:
    address = freed(3 * MIB)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert is_refused(address, 3 * MIB)
    assert at(address, 3 * MIB).data_ptr() == address


def test_memory_of_another_device_is_refused() -> None:
    address = freed(3 * MIB)
    with torch.cuda.device(1):
        assert is_refused(address, 3 * MIB)


def test_a_pools_memory_is_for_requests_that_go_there() -> None:
    pool = torch.cuda.MemPool()
    outside = freed(3 * MIB)
    with torch.cuda.use_mem_pool(pool):
        inside = freed(3 * MIB)
        assert is_refused(outside, 3 * MIB)
        storage = at(inside, 3 * MIB)
    assert storage.data_ptr() == inside
    del storage
    assert is_refused(inside, 3 * MIB)


def test_results_of_a_graph_are_made_again() -> None:
    """As an optimizer does whose gradients another graph has at fixed addresses."""
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.graph(graph, pool=pool.id, stream=stream):
        result = torch.ones(3 * MIB, dtype=torch.uint8, device="cuda")
    address = result.data_ptr()
    storage = result.untyped_storage()
    storage.resize_(0)
    graph.replay()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        storage._resize_with_addr_(3 * MIB, address)
    assert result.data_ptr() == address
    assert any(
        block["address"] == address and block["state"] == "active_allocated"
        for segment in pool.snapshot()
        for block in segment["blocks"]
    )


def test_histories_and_traces_have_it() -> None:
    address = freed(3 * MIB)
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    try:
        storage = at(address, 3 * MIB)
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        del storage
    finally:
        torch.cuda.memory._record_memory_history(None)
    entry = [each for each in entries if each["action"] == "alloc"][-1]
    assert (entry["addr"], entry["size"]) == (address, 3 * MIB)
    assert any(frame["name"] == "at" for frame in entry["frames"])
