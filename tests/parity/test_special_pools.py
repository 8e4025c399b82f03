"""MemPools with an allocator of their own or whole segments, and memory outside the cache."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from parity.programs import run
from parity.tensors import GIB, MIB, empty

import pyalloc

IS_PYALLOC = os.environ["PYALLOC_PARITY"] == "pyalloc"


def cuda_runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    library.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.cudaFree.argtypes = [ctypes.c_void_p]
    return library


ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@dataclass
class OwnAllocator:
    """cudaMalloc and cudaFree, counted; `allocator` is what MemPool takes."""

    sizes: dict[int, int] = field(default_factory=dict)
    is_empty: bool = False
    ready: list[int] = field(
        default_factory=list
    )  # these are handed out first, the last before the others
    on_alloc: Callable[[], object] = lambda: None
    on_free: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        def alloc(size: int, device: int, stream: int | None) -> int | None:
            self.on_alloc()
            address = (
                None if self.is_empty else self.ready.pop() if self.ready else self.reserve(size)
            )
            if address is not None:
                self.sizes[address] = size
            return address

        def free(address: int, size: int, device: int, stream: int | None) -> None:
            self.on_free()
            del self.sizes[address]
            cuda_runtime().cudaFree(address)

        self.functions = ALLOC(alloc), FREE(free)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)

    def reserve(self, size: int) -> int | None:
        address = ctypes.c_void_p()
        return None if cuda_runtime().cudaMalloc(ctypes.byref(address), size) else address.value


@pytest.fixture
def own() -> Iterator[OwnAllocator]:
    made = OwnAllocator()
    yield made
    gc.collect()
    torch.cuda.empty_cache()
    assert made.sizes == {}


def test_segments_come_from_the_own_allocator(own: OwnAllocator) -> None:
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        tensors = [empty(100), empty(5 * MIB), empty(30 * MIB)]
    outside = empty(40 * MIB)
    assert sorted(own.sizes.values()) == [2 * MIB, 20 * MIB, 30 * MIB]
    for tensor in tensors:
        assert any(0 <= tensor.data_ptr() - base < size for base, size in own.sizes.items())
    assert outside.data_ptr() not in own.sizes
    assert not any(segment["is_expandable"] for segment in pool.snapshot())


def test_it_is_counted_like_other_memory(own: OwnAllocator) -> None:
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = empty(30 * MIB)
    assert torch.cuda.memory_allocated() - before[0] == 30 * MIB
    assert torch.cuda.memory_reserved() - before[1] == 30 * MIB
    assert sum(segment["total_size"] for segment in pool.snapshot()) == 30 * MIB
    del tensor


def test_a_pool_with_an_allocator_caches(own: OwnAllocator) -> None:
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        first = empty(3 * MIB)
        address = first.data_ptr()
        del first
        second = empty(3 * MIB)
    assert second.data_ptr() == address
    assert len(own.sizes) == 1
    torch.cuda.empty_cache()
    assert len(own.sizes) == 1


def test_tensors_outlive_their_pool(own: OwnAllocator) -> None:
    data = torch.arange(100_000)
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = data.cuda()
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(tensor.cpu(), data)
    assert len(own.sizes) == 1


def test_managed_memory_comes_by_such_an_allocator(
    own: OwnAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda._use_uvm() makes its allocator from cuda-python, which finds no device here and may not be
    installed."""
    if not hasattr(torch.cuda.memory, "_use_uvm"):
        pytest.skip("of torch 2.13 on")
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=SimpleNamespace()))
    # Anew for each call in 2.13, once in later versions.
    monkeypatch.setattr(torch.cuda.memory, "_UVM_ALLOCATOR", None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *functions: own.allocator)
    with torch.cuda.memory._use_uvm() as pool:
        tensor = empty(30 * MIB)
    assert tensor.data_ptr() in own.sizes
    assert [segment["total_size"] for segment in pool.snapshot()] == [30 * MIB]
    assert empty(30 * MIB).data_ptr() not in own.sizes


def test_it_is_asked_while_a_graph_is_captured(own: OwnAllocator) -> None:
    """What it calls (cudaMalloc) may be forbidden to a capturing thread, unless the thread is exempt meanwhile."""
    given, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.graph(graph, pool=pool.id):
        result = given + 1
    assert result.data_ptr() in own.sizes
    graph.replay()
    torch.cuda.synchronize()
    graph.reset()


def test_the_own_allocator_runs_out(own: OwnAllocator) -> None:
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        own.is_empty = True
        with pytest.raises(RuntimeError):
            empty(5 * MIB)
        own.is_empty = False
        assert empty(5 * MIB).numel() == 5 * MIB


@pytest.mark.skipif(
    not IS_PYALLOC and torch.__version__ < (2, 13), reason="this torch goes by addresses"
)
@pytest.mark.parametrize(("size", "segment", "in_one"), [(MIB, 2 * MIB, 2), (30 * MIB,) * 2 + (1,)])
def test_of_like_segments_the_oldest_is_used_again(
    own: OwnAllocator, size: int, segment: int, in_one: int
) -> None:
    """Wherever they lie: the ranks of a job take the same ones, which symmetric memory relies on."""
    own.ready = sorted(own.reserve(segment) for _ in range(4))
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        tensors = [empty(size) for _ in range(4 * in_one)]
        addresses = [tensor.data_ptr() for tensor in tensors[::in_one]]
        other = empty(1000)
        assert addresses == sorted(addresses, reverse=True)
        for i in (2, 0, 3, 1):
            tensors[i * in_one] = None
        del other  # among those of exactly the size, pyalloc takes what was freed last
        again = [empty(size) for _ in range(4)]
        assert [tensor.data_ptr() for tensor in again] == addresses


@pytest.mark.skipif(
    "use_on_oom" not in inspect.signature(torch.cuda.MemPool.__init__).parameters,
    reason="this torch has no use_on_oom",
)
@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("flag", [False, True])
def test_segments_of_special_pools_are_lent_before_out_of_memory(
    own: OwnAllocator, has_own: bool, flag: bool
) -> None:
    if not has_own and "no_split" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        pytest.skip("this torch has no no_split")
    kind = {"allocator": own.allocator} if has_own else {"no_split": True}
    pool = torch.cuda.MemPool(use_on_oom=flag, **kind)
    with torch.cuda.use_mem_pool(pool):
        inside = empty(5 * GIB)
    address = inside.data_ptr()
    del inside
    if not flag:
        with pytest.raises(torch.OutOfMemoryError):
            empty(4 * GIB)
        return
    lent = empty(4 * GIB)
    assert lent.data_ptr() == address
    assert torch.cuda.memory_allocated() >= 4 * GIB
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(torch.OutOfMemoryError):
        empty(5 * GIB)  # of the stream that made it
    del lent
    with torch.cuda.use_mem_pool(pool):
        assert empty(5 * GIB).data_ptr() == address


@pytest.mark.parametrize("size", [100, 5 * MIB, 30 * MIB])
def test_no_split(size: int) -> None:
    if "no_split" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        pytest.skip("this torch has no no_split")
    pool = torch.cuda.MemPool(no_split=True)
    with torch.cuda.use_mem_pool(pool):
        tensors = [empty(size) for _ in range(3)]
    segments = pool.snapshot()
    assert sorted(segment["address"] for segment in segments) == sorted(
        tensor.data_ptr() for tensor in tensors
    )
    assert all(len(segment["blocks"]) == 1 for segment in segments)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] >= 3 * size


def test_statistics_by_pool_and_kind() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        small, large = empty(1000), empty(50 * MIB)
    nested = torch.cuda.memory_stats_as_nested_dict()
    if "reserved_bytes_by_private_pools" not in nested:
        pytest.skip("this torch has no statistics by pool")
    kinds = {
        kind: counts["current"]
        for kind, counts in nested["reserved_bytes_by_private_pools"][pool.id].items()
    }
    assert kinds["small_pool"] >= 2 * MIB
    assert kinds["large_pool"] >= 30 * MIB
    assert kinds["small_pool"] + kinds["large_pool"] == kinds["all"] >= 52 * MIB
    del small, large


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15),
    reason="older ones end the process where somebody else still uses the pool",
)
def test_graph_outlives_its_mempool() -> None:
    """The graph's kernels hold the addresses of what is free in the pool."""
    pool = torch.cuda.MemPool()
    graph = torch.cuda.CUDAGraph()
    given = empty(30 * MIB)
    with torch.cuda.graph(graph, pool=pool.id):
        between = given.clone()
        result = between.clone()
        del between
    before = torch.cuda.memory_reserved()
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() == before
    graph.replay()
    del graph, result


# ---- past the cache ----


@pytest.fixture
def uncached() -> Iterator[None]:
    torch.cuda.memory.caching_allocator_enable(False)
    yield
    torch.cuda.memory.caching_allocator_enable(True)


def test_uncached_memory_goes_straight_back(uncached: None) -> None:
    free = torch.cuda.mem_get_info()[0]
    tensor = torch.arange(2 * MIB, dtype=torch.uint8).cuda()
    assert torch.equal(tensor.cpu(), torch.arange(2 * MIB, dtype=torch.uint8))
    assert torch.cuda.mem_get_info()[0] == free - 2 * MIB
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_snapshot() == []
    del tensor
    assert torch.cuda.mem_get_info()[0] == free


def test_uncached_memory_outlives_the_setting() -> None:
    torch.cuda.memory.caching_allocator_enable(False)
    free = torch.cuda.mem_get_info()[0]
    tensor = empty(4 * MIB)
    torch.cuda.memory.caching_allocator_enable(True)
    cached = empty(4 * MIB)
    assert torch.cuda.memory_allocated() == 4 * MIB
    del tensor, cached
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_uncached_memory_runs_out(uncached: None) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        empty(100 * 2**30)
    empty(MIB).add_(1)  # the error is not a kernel's


def test_caching_can_be_asked_for() -> None:
    is_enabled = getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)
    disabled = getattr(torch.cuda.memory, "caching_allocator_disabled", None)
    if is_enabled is None or disabled is None:
        pytest.skip("this torch cannot be asked")
    assert is_enabled()
    with disabled():
        assert not is_enabled()
    assert is_enabled()


def drop(tensors: list[torch.Tensor]) -> None:
    """In a cycle, so that the collector finds it, which may run in anything written in Python."""
    circle: list[object] = [tensors.pop()]
    circle.append(circle)
    del circle
    gc.collect()


@pytest.mark.parametrize(
    "use",
    [
        list.clear,
        drop,
        lambda tensors: tensors.append(empty(3 * MIB)),
        lambda tensors: tensors[0].record_stream(torch.cuda.Stream()),
        lambda tensors: torch.cuda.memory._snapshot(),
    ],
    ids=["free", "collect", "allocate", "record_stream", "snapshot"],
)
@pytest.mark.parametrize("when", ["alloc", "free"])
def test_an_own_allocator_uses_memory_itself(
    own: OwnAllocator, use: Callable[[list[torch.Tensor]], object], when: str
) -> None:
    pool = torch.cuda.MemPool(own.allocator)
    with torch.cuda.use_mem_pool(pool):
        tensors = [empty(30 * MIB)]
    tensors.append(empty(5 * MIB))
    uses = [use]

    def act() -> None:
        if uses:
            uses.pop()(tensors)

    faulthandler.dump_traceback_later(60, exit=True)
    own.on_alloc = act if when == "alloc" else own.on_alloc
    with torch.cuda.use_mem_pool(pool):
        other = empty(40 * MIB)
    own.on_free = act if when == "free" else own.on_free
    del other, pool
    gc.collect()
    torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    assert uses == []
    assert torch.cuda.memory_allocated() == sum(each.numel() for each in tensors)
    tensors.clear()


@pytest.mark.skipif(not IS_PYALLOC, reason="torch's own waits for ever")
@pytest.mark.parametrize(
    "ask",
    [
        torch.cuda.get_per_process_memory_fraction,
        torch.cuda.memory_stats,
        torch.cuda.memory_snapshot,
        pyalloc.status,
        pyalloc.get_limit,
        lambda: empty(5 * MIB),
    ],
)
def test_asking_while_an_own_allocator_waits_for_python(
    own: OwnAllocator, ask: Callable[[], object]
) -> None:
    """Whoever asks releases the GIL meanwhile, and an allocator written in Python is called without the heap's lock."""
    is_called, has_asked = threading.Event(), threading.Event()

    def allocate() -> None:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(own.allocator)):
            empty(3 * MIB)

    own.on_alloc = lambda: (is_called.set(), has_asked.wait(0.2))
    thread = threading.Thread(target=allocate)
    faulthandler.dump_traceback_later(600, exit=True)
    thread.start()
    assert is_called.wait(600)
    ask()
    has_asked.set()
    thread.join()
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(("value", "caches"), [("1", False), ("0", True)])
def test_no_caching_by_environment(value: str, caches: bool) -> None:
    program = (
        "import torch; x = torch.ones(1000).cuda(); assert x.cpu().sum() == 1000;"
        "print(torch.cuda.memory_reserved())"
    )
    done = run("-c", program, PYTORCH_NO_CUDA_MEMORY_CACHING=value)
    assert (int(done.stdout) > 0) == caches
