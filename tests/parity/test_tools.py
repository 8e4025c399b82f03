"""torch's tools that look at memory, and calls with odd arguments: the same on both."""

from __future__ import annotations

import ctypes
import gc
import inspect
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.programs import run
from parity.tensors import MIB, empty

import pyalloc
from pyalloc.inside import snapshots


@pytest.fixture
def cached() -> Iterator[None]:
    yield
    torch.cuda.memory.caching_allocator_enable(True)
    torch.cuda.memory._record_memory_history(None)


# ---- torch's own functions ----

NAMES = [
    name
    for name in ("_cuda_memoryStats", "_cuda_memorySnapshot", "_accelerator_emptyCache")
    if hasattr(torch._C, name)
]


@pytest.mark.parametrize("name", NAMES)
def test_functions_have_torchs_names(name: str) -> None:
    """And they can send it to other processes."""
    function = getattr(torch._C, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert (function.__module__, function.__name__) == ("torch._C", name)


def test_all_replaced_functions_do(allocator: str) -> None:
    if allocator != "pyalloc":
        pytest.skip("of pyalloc")
    replaced = pyalloc.status().replaced
    assert {f"torch._C.{name}" for name in NAMES} <= set(replaced)
    for each in replaced:
        function = getattr(torch._C, each.removeprefix("torch._C."))
        assert pickle.loads(pickle.dumps(function)) is function, each
        assert f"{function.__module__}.{function.__qualname__}" == each
    if hasattr(torch._C, "_accelerator_emptyCache"):
        assert torch._C._accelerator_emptyCache.__doc__.startswith("_accelerator_emptyCache(")


# ---- raw allocation, streams ----


def test_nothing_is_freed_and_made() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(0)
    assert torch.cuda.caching_allocator_alloc(0) == 0
    assert torch.cuda.memory_allocated() == before


def test_a_stream_must_be_one() -> None:
    with pytest.raises(TypeError, match="stream"):
        torch.cuda.caching_allocator_alloc(100, stream="main")


def test_memory_of_others_may_be_recorded_on_streams(cached: None) -> None:
    """Memory outside the cache, and a library's own: nothing is kept for it, and nothing raises."""
    side = torch.cuda.Stream()
    torch.cuda.memory.caching_allocator_enable(False)
    tensor = empty(MIB)
    tensor.record_stream(side)
    torch.cuda.memory.caching_allocator_enable(True)
    tensor.record_stream(side)
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    place = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(4096)) == 0

    interface = {"shape": (4096,), "typestr": "|u1", "data": (place.value, False), "version": 3}
    theirs = torch.as_tensor(
        type("Theirs", (), {"__cuda_array_interface__": interface})(), device="cuda"
    )
    theirs.record_stream(side)
    assert theirs.data_ptr() == place.value
    del theirs
    assert runtime.cudaFree(place) == 0


@pytest.mark.skipif(
    os.environ["PYALLOC_PARITY"] == "native" and torch.__version__ < (2, 11),
    reason="to torch 2.9's own a memory fraction is worth a context",
)
def test_using_one_device_touches_no_other() -> None:
    """A context takes hundreds of MiB of a card that others may use."""
    program = """
import torch
from torch.cuda import memory
x = torch.zeros(1000, device="cuda:1")
for call in (
    torch.cuda.memory_stats, lambda: torch.cuda.memory_stats(1), torch.cuda.memory_snapshot, memory._snapshot,
    memory._record_memory_history, lambda: memory._record_memory_history(None), torch.cuda.memory_summary,
    lambda: torch.cuda.reset_peak_memory_stats(0), lambda: torch.cuda.get_per_process_memory_fraction(1),
    lambda: torch.cuda.set_per_process_memory_fraction(0.5, 1), x.cpu, torch.cuda.empty_cache,
    lambda: torch.cuda.set_per_process_memory_fraction(0.5, 0), lambda: torch.cuda.get_per_process_memory_fraction(0),
    getattr(torch.accelerator, "empty_cache", torch.cuda.empty_cache), torch.cuda.ipc_collect,
):
    call()
    assert not torch._C._cuda_hasPrimaryContext(0), call
"""
    run("-c", program)


# ---- statistics and settings ----


def test_free_memory_by_way_of_the_accelerator() -> None:
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if ask is None:
        pytest.skip("this torch cannot be asked")
    kept = empty(100 * MIB)
    assert ask() == torch.cuda.mem_get_info()
    assert ask(1) == torch.cuda.mem_get_info(1)
    del kept


def test_statistics_of_the_host_are_reset() -> None:
    pinned = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    del pinned
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    stats = torch.cuda.host_memory_stats()
    assert (
        stats[
            "active_requests.allocated"
            if "active_requests.allocated" in stats
            else "allocation.allocated"
        ]
        == 0
    )
    assert torch.cuda.host_memory_stats_as_nested_dict()


@pytest.mark.parametrize(
    "text", ["expandable_segments:False", "pinned_use_background_threads:False", "no_such_key:1"]
)
def test_settings_while_the_program_runs(text: str) -> None:
    """Libraries switch expandable segments off for a while; a setting that torch does not know is an error."""
    choose = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if choose is None:
        pytest.skip("this torch has another function for it")
    if text.startswith("no"):
        with pytest.raises((RuntimeError, ValueError), match="no_such_key"):
            choose(text)
        choose("")  # torch reports it in snapshots, refused or not
    else:
        choose(text)
    assert empty(MIB).numel() == MIB


def test_an_observer_of_out_of_memory_that_raises() -> None:
    program = """
import torch
def complain(*_):
    raise KeyError("mine")
torch.cuda.init()
torch._C._cuda_attach_out_of_memory_observer(complain)
try:
    torch.empty(2**40, device="cuda")
except KeyError:
    print(torch.empty(1000, device="cuda").numel())
"""
    assert run("-c", program).stdout.split() == ["1000"]


# ---- snapshots and tools ----


def test_snapshots_without_traces(cached: None) -> None:
    pool = torch.cuda.MemPool()
    try:
        pool.snapshot(include_traces=False)
    except TypeError:
        pytest.skip("this torch's snapshots have all traces")
    torch.cuda.memory._record_memory_history(stacks="python")
    with torch.cuda.use_mem_pool(pool):
        inside = empty(MIB)
    outside = empty(MIB)
    assert pool.snapshot() == pool.snapshot(include_traces=False)
    whole = torch.cuda.memory_snapshot()
    assert whole == torch.cuda.memory_snapshot((0, 0), include_traces=False)
    assert torch._C._cuda_memorySnapshot((0, 0, False))["device_traces"] == []
    assert [
        segment for segment in whole if tuple(segment["segment_pool_id"]) == pool.id
    ] == pool.snapshot()
    assert not any(torch._C._cuda_memorySnapshot((*pool.id, False))["device_traces"])
    assert any(torch._C._cuda_memorySnapshot((*pool.id, True))["device_traces"])
    del inside, outside


def test_snapshots_leave_the_numbers_of_a_pool_alone(allocator: str) -> None:
    if allocator == "native":
        pytest.skip("torch 2.14 drops references to them that it does not own")
    number = int("123456789")  # not a constant, because constants are kept
    held = [number] * 100
    before = sys.getrefcount(number)
    for _ in range(10):
        torch._C._cuda_memorySnapshot((0, number))
    assert sys.getrefcount(number) == before
    del held


def test_what_is_torchs_own_in_snapshots_without_traces(cached: None) -> None:
    memory = torch.cuda.memory
    if "include_traces" not in inspect.signature(torch.cuda.memory_snapshot).parameters:
        pytest.skip("this torch's snapshots have all traces")
    if (
        "record_pinned_host_memory"
        not in inspect.signature(memory._record_memory_history).parameters
    ):
        pytest.skip("this torch records no pinned memory")
    memory._record_memory_history("all", context=None, record_pinned_host_memory=True)
    with torch.profiler.record_function("range"):
        pinned = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    for wanted, has_traces in ((0, 0), True), ((0, 0, True), True), ((0, 0, False), False):
        snapshot = torch._C._cuda_memorySnapshot(wanted)
        assert pinned.data_ptr() in [each["address"] for each in snapshot["host_segments"]]
        for name in ("external_annotations", "host_traces"):
            assert bool(snapshot[name]) is has_traces, name


TAKES_REFERENCES = (
    "2.14's own takes one away a call: as many calls as there are, some thousands, end the process"
)
ASKS = {
    "with traces": lambda: torch.cuda.memory_snapshot(include_traces=True),
    "without": lambda: torch.cuda.memory_snapshot(include_traces=False),
    "pyalloc live": snapshots.segments,
}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="nobody counts who uses True there")
@pytest.mark.parametrize("ask", ASKS)
def test_snapshots_take_no_references_away(ask: str, allocator: str) -> None:
    if "include_traces" not in inspect.signature(torch.cuda.memory_snapshot).parameters:
        pytest.skip("this torch's snapshots have all traces")
    if allocator == "native" and ask != "pyalloc live":
        pytest.skip(TAKES_REFERENCES)
    empty(1)
    before = [sys.getrefcount(flag) for flag in (False, True)]
    for _ in range(200):
        ASKS[ask]()
    lost = [then - sys.getrefcount(flag) for then, flag in zip(before, (False, True), strict=True)]
    assert max(lost) < 100


def test_memory_in_the_profilers_timeline(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    layer = torch.nn.Linear(256, 256).cuda()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        profile_memory=True,
        record_shapes=True,
        with_stack=True,
    ) as recorded:
        layer(torch.zeros(64, 256, device="cuda")).sum().backward()
    recorded.export_memory_timeline(str(tmp_path / "timeline.json"), device="cuda:0")
    times, sizes = json.loads((tmp_path / "timeline.json").read_text())
    assert len(times) == len(sizes) > 4
    assert max(sum(size) for size in sizes) >= 2 * 4 * 256 * 256
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    told = [
        event["args"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 1
    ]
    assert told
    assert all(0 < each["Total Allocated"] <= each["Total Reserved"] for each in told)


def test_cycles_that_hold_memory_are_found(cached: None) -> None:
    from torch.utils.viz._cycles import observe_tensor_cycles

    gc.collect()
    found: list[str] = []
    stop = observe_tensor_cycles(found.append)
    cycle: list[object] = [torch.zeros(100_000, device="cuda")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    stop()
    assert len(found) == 1 and Path(__file__).name in found[0]


def test_memory_tracker() -> None:
    tracking = pytest.importorskip("torch.distributed._tools.memory_tracker")
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU()).cuda()
    tracker = tracking.MemoryTracker()
    tracker.start_monitor(model)
    model(torch.zeros(8, 100, device="cuda")).sum().backward()
    tracker.stop()
    assert tracker.memories_allocated and tracker.memories_reserved


def test_a_pool_within_compiled_code() -> None:
    if not hasattr(torch.cuda.CUDAGraph, "pools"):
        pytest.skip("this torch's compiler knows no pools")
    pool = torch.cuda.MemPool()

    @torch.compile(backend="aot_eager")
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.use_mem_pool(pool):
            inside = x + 1
        return inside, inside * 2

    for _ in range(2):
        results = function(torch.zeros(MIB, device="cuda"))
        inside = {segment["address"]: segment["total_size"] for segment in pool.snapshot()}
        is_inside = [
            any(0 <= result.data_ptr() - at < size for at, size in inside.items())
            for result in results
        ]
        assert is_inside == [True, False]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "maker"), [("_save_memory_usage", "_memory"), ("_save_segment_usage", "_segments")]
)
def test_usage_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, maker: str
) -> None:
    """A program that torch fetches from the network draws the picture; here its input is kept."""
    draw = getattr(torch.cuda.memory, maker)
    monkeypatch.setattr(
        torch.cuda.memory, maker, lambda snapshot: draw(snapshot, format_flamegraph=str)
    )
    torch.cuda.memory._record_memory_history(stacks="python")
    tensor = empty(3 * MIB)
    path = tmp_path / "usage.svg"
    getattr(torch.cuda.memory, name)(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert "test_usage_is_saved" in path.read_text() or maker == "_segments"
    assert str(tensor.numel()) in path.read_text()
