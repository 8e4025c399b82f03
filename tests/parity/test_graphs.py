"""CUDA graphs beside pools and threads: who gets which memory during a capture, and how long it stays."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from parity.tensors import MIB, empty, pool_of


def takes(call: object, argument: str) -> bool:
    return argument in inspect.signature(call).parameters  # type: ignore[arg-type]


def pooled() -> set[tuple[int, int]]:
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """On a stream of its own, so that other threads may do anything."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        yield
        graph.capture_end()


def test_a_pool_used_within_a_capture_stays_with_the_graph() -> None:
    if not hasattr(torch.cuda.CUDAGraph, "pools"):
        pytest.skip("this torch's graphs know one pool")
    given, graph, pool = empty(MIB), torch.cuda.CUDAGraph(), torch.cuda.MemPool()
    own = pool.id
    with torch.cuda.graph(graph):
        before = given.clone()
        with torch.cuda.use_mem_pool(pool):
            inside = given.clone()
        after = given.clone()
    assert [pool_of(tensor) for tensor in (before, inside, after)] == [
        graph.pool(),
        own,
        graph.pool(),
    ]
    assert set(graph.pools()) == {graph.pool(), own} and pool.use_count() == 2
    del inside, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert own in pooled()
    graph.replay()
    graph.reset()
    torch.cuda.empty_cache()
    assert own not in pooled()
    del before, after


def test_a_pool_itself_may_be_given() -> None:
    pool, graph = torch.cuda.MemPool(), torch.cuda.CUDAGraph()
    given = pool if hasattr(torch.cuda.CUDAGraph, "pools") else pool.id
    x = empty(MIB)
    with torch.cuda.graph(graph, pool=given):
        y = x.clone()
    assert pool_of(y) == pool.id == graph.pool()
    assert pool.use_count() == 2
    graph.reset()
    assert pool.use_count() == 1


def test_a_graph_is_captured_again_and_again() -> None:
    x, graph = empty(MIB), torch.cuda.CUDAGraph()
    for _ in range(3):
        with torch.cuda.graph(graph):
            y = x.clone()
        assert pool_of(y) == graph.pool()
        graph.replay()
        graph.reset()


def test_a_graph_that_is_kept() -> None:
    if not takes(torch.cuda.CUDAGraph.__new__, "keep_graph"):
        pytest.skip("this torch keeps none")
    x, graph = empty(MIB), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = x.clone()
    assert graph.raw_cuda_graph()
    graph.instantiate()
    graph.replay()
    assert pool_of(y) == graph.pool()


def test_a_result_outlives_its_graph() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = empty(5 * MIB)
    address = y.data_ptr()
    graph.reset()
    torch.cuda.empty_cache()
    assert address not in [empty(5 * MIB).data_ptr() for _ in range(4)]
    del y


def test_other_threads_are_not_captured() -> None:
    graph = torch.cuda.CUDAGraph()
    made: list[torch.Tensor] = []
    with captured(graph):
        inside = empty(5 * MIB)
        thread = threading.Thread(target=lambda: made.append(empty(70 * MIB)))
        thread.start()
        thread.join()
    assert (pool_of(made[0]), pool_of(inside)) == ((0, 0), graph.pool())


def test_two_devices_at_once() -> None:
    barrier = threading.Barrier(2, timeout=600)
    right = {}

    def work(device: int) -> None:
        torch.cuda.set_device(device)
        x, graph = empty(MIB), torch.cuda.CUDAGraph()
        barrier.wait()
        with captured(graph):
            barrier.wait()
            y = x.clone()
            barrier.wait()
        right[device] = pool_of(y) == graph.pool()
        graph.replay()

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == {0: True, 1: True}


def test_one_pool_serves_one_capture_at_a_time() -> None:
    handle = torch.cuda.graph_pool_handle()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        first.capture_begin(pool=handle, capture_error_mode="relaxed")
        kept = empty(MIB)
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="already"):
            second.capture_begin(pool=handle, capture_error_mode="relaxed")
        more = empty(MIB)
        first.capture_end()
    assert pool_of(kept) == pool_of(more) == handle


def test_emptying_the_cache_within_a_capture() -> None:
    x, graph = empty(64 * MIB), torch.cuda.CUDAGraph()
    del x
    with torch.cuda.graph(graph):
        y = empty(MIB)
        torch.cuda.empty_cache()
        z = y.clone()
    graph.replay()
    assert pool_of(y) == pool_of(z) == graph.pool()


def test_pinned_memory_that_a_graph_reads_stays() -> None:
    """During a capture it belongs to a pool of torch's own that lives as long as the graph."""
    if not hasattr(torch.cuda.CUDAGraph, "pools"):
        pytest.skip("this torch's pinned memory knows no captures")
    given, graph = empty(1000), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        unread = torch.zeros(1000, dtype=torch.uint8).pin_memory()
        address = unread.data_ptr()
        del unread
        read = torch.zeros(1000, dtype=torch.uint8).pin_memory()
        assert read.data_ptr() == address
        given.copy_(read, non_blocking=True)
        del read
        other = torch.zeros(1000, dtype=torch.uint8).pin_memory()
    assert other.data_ptr() != address
    graph.replay()


def test_inputs_that_have_gone_are_told_of() -> None:
    if not takes(torch.cuda.CUDAGraph.capture_begin, "check_input_liveness"):
        pytest.skip("this torch does not look")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        of_pool = empty(1000)
    outside, graph = empty(1000), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, check_input_liveness=True):
        result = outside + of_pool
    graph.replay()
    del outside
    with pytest.raises(RuntimeError, match="1 dead tensor"):
        graph.replay()
    del result


# ---- pools without graphs ----


@pytest.mark.skipif(
    not hasattr(torch._C, "_cuda_endAllocateToPool"), reason="this torch has another name for it"
)
def test_pools_of_streams_and_of_everything() -> None:
    """Like use_mem_pool(), for all threads and the current stream."""
    pool = torch.cuda.MemPool()
    torch._C._cuda_beginAllocateToPool(0, pool.id)
    everybody = empty(MIB)
    torch._C._cuda_endAllocateToPool(0, pool.id)
    torch._C._cuda_releasePool(0, pool.id)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch._C._cuda_beginAllocateCurrentStreamToPool(0, pool.id)
        on_it = empty(MIB)
        with torch.cuda.stream(torch.cuda.default_stream()):
            off_it = empty(MIB)
        torch._C._cuda_endAllocateToPool(0, pool.id)
        torch._C._cuda_releasePool(0, pool.id)
    assert [pool_of(tensor) for tensor in (everybody, on_it, off_it)] == [pool.id, pool.id, (0, 0)]
    assert pool.use_count() == 1


def test_a_pool_of_two_devices() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool, device=0), torch.cuda.use_mem_pool(pool, device=1):
        tensors = [torch.empty(MIB, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1)]
    assert [pool_of(tensor) for tensor in tensors] == [pool.id] * 2
    assert {segment["device"] for segment in pool.snapshot()} == {0, 1}
    own = pool.id
    del tensors, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert own not in pooled()


def test_a_pool_that_goes_while_it_is_used() -> None:
    pool = torch.cuda.MemPool()
    own = pool.id
    with pytest.raises(KeyError), torch.cuda.use_mem_pool(pool):
        first = empty(5 * MIB)
        del pool
        gc.collect()
        assert pool_of(empty(5 * MIB)) == own
        raise KeyError
    assert pool_of(empty(MIB)) == (0, 0)
    del first


def test_memory_of_elsewhere_freed_in_a_pools_block() -> None:
    tensor = empty(30 * MIB)
    address = tensor.data_ptr()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        del tensor
        inside = empty(30 * MIB)
    assert inside.data_ptr() != address and pool_of(inside) == pool.id
    assert empty(30 * MIB).data_ptr() == address


def test_backward_within_a_pools_block() -> None:
    """It runs in autograd's threads, which stay outside, unless there is only one thread."""
    for threads, expected in ((True, False), (False, True)):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), torch.autograd.set_multithreading_enabled(threads):
            weight = torch.zeros(MIB, device="cuda", requires_grad=True)
            (weight * 2).sum().backward()
        assert pool_of(weight) == pool.id
        assert (pool_of(weight.grad) == pool.id) is expected
        del weight


def test_pools_are_emptied_when_they_go_only() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        empty(50 * MIB)
        torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    own, held = pool.id, torch.cuda.memory_reserved()
    assert own in pooled()
    del pool
    gc.collect()
    assert own not in pooled() and torch.cuda.memory_reserved() <= held - 50 * MIB


# ---- at the end ----


def test_conditional_nodes() -> None:
    """The last test here, because torch keeps the pool.  It keeps nothing else."""
    nodes = pytest.importorskip("torch._higher_order_ops.cudagraph_conditional_nodes")
    if not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        pytest.skip("this torch's graphs have none")
    which = torch.ones((), dtype=torch.bool, device="cuda")
    x, graph = empty(MIB), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = x + 1
        result = nodes.if_else_node(which, lambda v: v + 2, lambda v: v + 3, (before,))
        after = x + 1
    graph.replay()
    assert {pool_of(tensor) for tensor in (before, result, after)} == {graph.pool()}
    held = torch.cuda.memory_reserved()
    empty(100 * MIB)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held
