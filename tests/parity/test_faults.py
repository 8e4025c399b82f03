"""Device calls that fail under real PyTorch: what pyalloc promises then.

`python -m benchmarks.faults` shows what native and expandable segments do: sometimes they end the process.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity.tensors import MIB, empty

from pyalloc import _core

OUT_OF_MEMORY, INVALID, ILLEGAL_ADDRESS = 2, 1, 700
pytestmark = pytest.mark.skipif(
    os.environ.get("PYALLOC_PARITY") != "pyalloc", reason="native may not survive this"
)

Fail = Callable[[str, int], None]


@pytest.fixture
def fail(runtime: Any) -> Iterator[Fail]:
    """fail(call, error): the next call of that name returns that error."""

    def arm(name: str, error: int) -> None:
        runtime.pya_hostcuda_fail_nth(ctypes.c_uint64(1), name.encode(), error)

    yield arm
    runtime.pya_hostcuda_fail_nth(ctypes.c_uint64(0), None, 0)


def left_behind(runtime: Any) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(runtime.pya_hostcuda_used_bytes(0))


@pytest.mark.parametrize("error", [INVALID, OUT_OF_MEMORY, ILLEGAL_ADDRESS])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_getting_memory(runtime: Any, fail: Fail, call: str, error: int) -> None:
    """Either the request is served in another way, or the error names the call and the device.  Nothing else
    changes."""
    base = left_behind(runtime)
    data = torch.arange(MIB, dtype=torch.int32)
    kept = data.cuda()
    fail(call, error)
    try:
        empty(64 * MIB)
    except torch.OutOfMemoryError:
        assert error == OUT_OF_MEMORY
    except RuntimeError as caught:
        assert error != OUT_OF_MEMORY
        assert call in str(caught) or "failed earlier" in str(caught)
        assert "GPU 0" in str(caught)
    assert _core.check(0) == 0
    assert torch.equal(kept.cpu(), data)
    assert empty(200 * MIB).numel() == 200 * MIB
    del kept
    assert left_behind(runtime) == base


def test_a_peer_that_is_refused(runtime: Any, fail: Fail) -> None:
    """The copy that asks for access fails. torch does not ask again; later copies need no access."""
    x = torch.arange(MIB, dtype=torch.int32).cuda(0)
    y = torch.zeros(MIB, dtype=torch.int32).cuda(1)
    fail("cuMemSetAccess", INVALID)
    with pytest.raises(RuntimeError, match=r"cuMemSetAccess .* GPU 1 with access for GPU 0"):
        y.copy_(x)
    before = runtime.pya_hostcuda_calls(b"cudaMemcpyPeerAsync")
    y.copy_(x)
    assert runtime.pya_hostcuda_calls(b"cudaMemcpyPeerAsync") == before + 1
    assert torch.equal(y.cpu(), x.cpu())


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuCtxSynchronize"])
def test_giving_memory_back(runtime: Any, fail: Fail, call: str) -> None:
    """What could not be given back goes the next time."""
    base = left_behind(runtime)
    tensor = empty(100 * MIB)
    del tensor
    fail(call, INVALID)
    try:
        torch.cuda.empty_cache()
    except RuntimeError as caught:
        assert call in str(caught)
    assert _core.check(0) == 0
    assert left_behind(runtime) == base


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuCtxSynchronize"])
def test_giving_a_pools_memory_back(runtime: Any, fail: Fail, call: str) -> None:
    """The same when a MemPool is dropped, where an exception would end the process."""
    base = left_behind(runtime)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = empty(100 * MIB)
    del tensor
    fail(call, INVALID)
    del pool
    assert _core.check(0) == 0
    assert left_behind(runtime) == base


def test_a_forked_child_drops_its_parents_pool() -> None:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.MemPool(use_on_oom=True)
    x = torch.zeros(MIB, device="cuda")
    with torch.cuda.graph(graph, pool=pool.id):
        y = x + 1
    child = os.fork()
    if child == 0:
        try:
            del y, graph
            count = pool.use_count()  # other than 1, torch 2.9 ends the process
            del pool
            os._exit(count)
        finally:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert pool.use_count() == 2
    graph.replay()
    del y, graph


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuEventQuery"])
def test_blocks_that_wait_for_a_stream(runtime: Any, fail: Fail, call: str) -> None:
    """A block whose event cannot be made or queried is neither reused early nor lost."""
    base = left_behind(runtime)
    side = torch.cuda.Stream()
    shared = empty(40 * MIB)
    address = shared.data_ptr()
    shared.record_stream(side)
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    fail(call, INVALID)
    del shared
    other = empty(40 * MIB)
    runtime.pya_hostcuda_set_event_delay(0)
    assert other.data_ptr() != address
    assert _core.check(0) == 0
    del other
    assert left_behind(runtime) == base
