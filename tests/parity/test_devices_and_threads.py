"""Several devices, many threads, forks, raw allocation, torch.accelerator, the profiler, cuDNN's benchmark mode."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.tensors import GIB, MIB, empty

# ---- devices ----


def test_devices_are_counted_apart() -> None:
    before = [torch.cuda.memory_allocated(device) for device in (0, 1)]
    tensor = empty(5 * MIB, 1)
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.cuda.memory_allocated(1) == before[1] + 5 * MIB
    del tensor
    assert torch.cuda.memory_allocated(1) == before[1]


def test_resets_are_per_device() -> None:
    a, b = empty(8 * MIB, 0), empty(8 * MIB, 1)
    peaks = [torch.cuda.max_memory_allocated(device) for device in (0, 1)]
    del a, b
    torch.cuda.reset_peak_memory_stats(0)
    assert torch.cuda.max_memory_allocated(1) == peaks[1]
    assert torch.cuda.max_memory_allocated(0) == peaks[0] - 8 * MIB


def test_current_device_is_the_default() -> None:
    with torch.cuda.device(1):
        tensor = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        assert tensor.device.index == 1
        assert torch.cuda.memory_allocated() == torch.cuda.memory_allocated(1)


def test_copy_between_devices() -> None:
    data = torch.arange(100_000)
    assert torch.equal(data.cuda(0).to("cuda:1").cpu(), data)


def test_one_full_device_leaves_the_other_alone() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        empty(100 * GIB, 1)
    assert empty(6 * GIB, 0).numel() == 6 * GIB


def test_a_stream_of_another_device_is_recorded() -> None:
    """Its event belongs to its own device, and the memory comes back without empty_cache()."""
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
    before = torch.cuda.memory_reserved(0)
    for _ in range(50):
        tensor = empty(64 * MIB, 0)
        tensor.record_stream(side)
        side.wait_stream(torch.cuda.current_stream(0))
        del tensor
    assert torch.cuda.memory_reserved(0) <= before + 4 * 64 * MIB


@pytest.mark.parametrize("of_default", [False, True])
def test_the_default_stream_of_another_device_is_recorded(of_default: bool, runtime: Any) -> None:
    """Default streams have one handle on all devices; this is another device's."""
    if of_default and os.environ["PYALLOC_PARITY"] == "native":
        pytest.skip("torch takes it for the block's own stream")
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    other = torch.cuda.default_stream(1)
    before = torch.cuda.memory_stats(0)["active.all.current"]
    with torch.cuda.stream(torch.cuda.default_stream(0) if of_default else torch.cuda.Stream()):
        tensor = empty(4 * MIB)
        address = tensor.data_ptr()
        with torch.cuda.stream(other):
            empty(4, 1).zero_()
        tensor.record_stream(other)
        del tensor
        torch.cuda.synchronize(0)  # which says nothing of device 1
        later = empty(4 * MIB)
        assert later.data_ptr() != address
        runtime.pya_hostcuda_set_event_delay(0)
        del later
        torch.cuda.synchronize(1)
        empty(512)  # looks at finished events
        assert torch.cuda.memory_stats(0)["active.all.current"] == before


def test_peer_access() -> None:
    assert torch.cuda.can_device_access_peer(0, 1) and not torch.cuda.can_device_access_peer(0, 0)
    data = torch.arange(3 * MIB, dtype=torch.int32)
    x, y = data.to("cuda:0"), torch.empty_like(data, device="cuda:1")
    y.copy_(x)
    assert torch.equal(y.cpu(), data)


def test_peers_are_copied_between_directly(runtime: Any) -> None:
    """Not through the host, as the call for memory that the other device cannot access may."""
    x = torch.arange(MIB, dtype=torch.int32).cuda(0)
    before = runtime.pya_hostcuda_calls(b"cudaMemcpyPeerAsync")
    y = x.to("cuda:1")
    z = y.to("cuda:0", non_blocking=True)
    assert torch.equal(y.cpu(), x.cpu()) and torch.equal(z.cpu(), x.cpu())
    assert runtime.pya_hostcuda_calls(b"cudaMemcpyPeerAsync") == before


@pytest.mark.parametrize("device", [-2, 2, 99])
def test_no_such_device(device: int, allocator: str) -> None:
    if allocator == "native" and device < 0:
        pytest.skip("torch reads what lies before its list of devices: any message, or none")
    with pytest.raises((RuntimeError, AssertionError, ValueError), match=r"device"):
        torch.cuda.set_per_process_memory_fraction(0.5, device)


def test_no_statistics_of_no_such_device() -> None:
    torch.cuda.init()
    for ask in (
        torch.cuda.memory_stats,
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.reset_accumulated_memory_stats,
        torch.cuda.get_per_process_memory_fraction,
    ):
        with pytest.raises(RuntimeError):
            ask(torch.cuda.device_count())


@pytest.mark.parametrize("device", ["cuda:1", 1, torch.device("cuda", 1)])
def test_forms_of_a_device(device: object) -> None:
    tensor = empty(MIB, 1)
    assert torch.cuda.memory_allocated(device) >= MIB
    del tensor


# ---- threads ----


@pytest.mark.parametrize("n_threads", [2, 16])
def test_threads_allocate_at_once(n_threads: int) -> None:
    before = torch.cuda.memory_stats()

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(60):
            size = int(torch.randint(1, 200_000, (1,), generator=generator))
            host = torch.full((size,), seed, dtype=torch.uint8)
            kept.append((host.cuda(), host))
            if len(kept) > 6:
                tensor, expected = kept.pop(size % len(kept))
                assert torch.equal(tensor.cpu(), expected)

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(work, range(n_threads)))
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["requested_bytes.all.current"] == before["requested_bytes.all.current"]


def test_threads_on_streams_of_their_own() -> None:
    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                host = torch.full((50_000,), seed, dtype=torch.uint8)
                assert torch.equal(host.cuda().cpu(), host)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_freed_by_another_thread() -> None:
    before = torch.cuda.memory_allocated()
    box = [empty(3 * MIB)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert torch.cuda.memory_allocated() == before


def test_autograd_threads() -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
    for _ in range(3):
        layers(torch.zeros(64, 256, device="cuda")).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_history_while_threads_allocate() -> None:
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1000)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            empty(10_000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        snapshot = torch.cuda.memory._snapshot()
        for segment in snapshot["segments"]:
            assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    stop.set()
    for thread in threads:
        thread.join()


# ---- raw allocation ----


@pytest.mark.parametrize("size", [1, 512, MIB, 20 * MIB])
def test_raw_alloc_and_delete(size: int) -> None:
    before = torch.cuda.memory_allocated()
    address = torch.cuda.caching_allocator_alloc(size)
    assert address % 512 == 0
    assert torch.cuda.memory_allocated() >= before + size
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == before


def test_raw_alloc_on_a_stream_and_device() -> None:
    side = torch.cuda.Stream(1)
    address = torch.cuda.caching_allocator_alloc(MIB, device=1, stream=side)
    assert torch.cuda.memory_allocated(1) >= MIB
    torch.cuda.caching_allocator_delete(address)


@pytest.mark.parametrize("priority", [0, -1])
def test_raw_alloc_on_a_stream_that_is_not_current(priority: int, runtime: Any) -> None:
    """It is torch's own, which lives for ever: knowing how far it is takes no wait for the device."""
    side = torch.cuda.Stream(priority=priority)
    address = torch.cuda.caching_allocator_alloc(MIB, stream=side)
    waits = runtime.pya_hostcuda_calls(b"cuCtxSynchronize")
    for step in range(
        1, 13
    ):  # each larger than any free block, so that memory of other streams is wanted
        empty((64 + 20 * step) * MIB)
        with torch.cuda.stream(side):
            empty((70 + 20 * step) * MIB)
    assert runtime.pya_hostcuda_calls(b"cuCtxSynchronize") == waits
    torch.cuda.caching_allocator_delete(address)


def test_raw_alloc_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.cuda.caching_allocator_alloc(100 * GIB)


def test_double_delete_is_refused() -> None:
    address = torch.cuda.caching_allocator_alloc(MIB)
    before = torch.cuda.memory_allocated()
    torch.cuda.caching_allocator_delete(address)
    with pytest.raises(RuntimeError):
        torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() < before


def test_foreign_delete_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.cuda.caching_allocator_delete(0x1234000)


def test_enable_is_callable() -> None:
    torch.cuda.memory.caching_allocator_enable(True)
    assert empty(MIB).numel() == MIB


# ---- torch.accelerator ----


accelerator = pytest.mark.skipif(
    not hasattr(getattr(torch, "accelerator", None), "memory_stats"),
    reason="this torch has no torch.accelerator.memory",
)


@accelerator
def test_accelerator_statistics() -> None:
    tensor = empty(3 * MIB)
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved()
    assert torch.accelerator.max_memory_allocated() == torch.cuda.max_memory_allocated()
    assert torch.accelerator.max_memory_reserved() == torch.cuda.max_memory_reserved()
    del tensor


@accelerator
def test_accelerator_keys_are_those_of_cuda() -> None:
    empty(1)
    keys = {key for key in torch.cuda.memory_stats() if key != "num_oom_rejections"}
    assert set(torch.accelerator.memory_stats()) == keys


@accelerator
def test_accelerator_empty_cache() -> None:
    empty(100 * MIB)
    before = torch.cuda.memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.cuda.memory_reserved() <= before - 100 * MIB


@accelerator
def test_accelerator_resets() -> None:
    tensor = empty(50 * MIB)
    del tensor
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0


# ---- tools ----


def test_profiler_shows_cuda_memory() -> None:
    from torch.profiler import ProfilerActivity, profile

    empty(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        tensor = empty(4 * MIB)
    (event,) = [event for event in recorded.key_averages() if event.key == "aten::empty"]
    assert event.device_memory_usage == 4 * MIB
    del tensor


def test_profiler_shows_frees() -> None:
    from torch.profiler import ProfilerActivity, profile

    tensor = empty(4 * MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        del tensor
    freed = [event.device_memory_usage for event in recorded.events() if event.name == "[memory]"]
    assert freed == [-4 * MIB]


def test_profiler_shows_what_was_refused(tmp_path: Path) -> None:
    """Not for more than any card has: torch looks for no memory then."""
    from torch.profiler import ProfilerActivity, profile

    kept = empty(3 * MIB)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for size in (100 * GIB + 1, 2**61):
            with pytest.raises(torch.OutOfMemoryError):
                empty(size)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (told,) = [event["args"] for event in events if event["name"] == "[OutOfMemory]"]
    assert (told["Device Type"], told["Device Id"]) == (1, 0)
    assert told["Bytes"] == 100 * GIB + 512
    assert told["Total Allocated"] == torch.cuda.memory_allocated() >= kept.numel()
    assert told["Total Reserved"] == torch.cuda.memory_reserved()


def test_profiler_names_the_device(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        tensor = empty(4 * MIB, 1)
        with pytest.raises(torch.OutOfMemoryError):
            empty(100 * GIB, 1)
        del tensor
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = [event["args"] for event in events if event["name"] in ("[memory]", "[OutOfMemory]")]
    assert {each["Bytes"]: each["Device Id"] for each in told if each["Device Type"] == 1} == {
        4 * MIB: 1,
        100 * GIB: 1,
        -4 * MIB: 1,
    }


@pytest.mark.parametrize("is_on", [False, True])
def test_convolutions_in_benchmark_mode(is_on: bool) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 4, 3)
    ).cuda()
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, is_on
    try:
        model(torch.zeros(4, 3, 32, 32, device="cuda")).sum().backward()
    finally:
        torch.backends.cudnn.benchmark = before
    assert model[0].weight.grad is not None


def test_checkpointing_and_amp() -> None:
    from torch.utils.checkpoint import checkpoint

    layers = torch.nn.ModuleList([torch.nn.Linear(128, 128) for _ in range(4)]).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.zeros(32, 128, device="cuda", requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
    x.float().sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_request_the_same_bytes(optimizer: type) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model = torch.nn.Linear(1000, 1000).cuda()
    chosen = optimizer(model.parameters(), lr=0.1)
    model(torch.zeros(4, 1000, device="cuda")).sum().backward()
    chosen.step()
    torch._C._cuda_clearCublasWorkspaces()  # they stay for later tests
    weights = 4 * (1000 * 1000 + 1000)
    states = 0 if optimizer is torch.optim.SGD else 2 * weights
    grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert 2 * weights + states <= grown <= 2 * weights + states + 1000


def test_storage_resize_and_views() -> None:
    before = torch.cuda.memory_allocated()
    tensor = empty(8 * MIB)
    view = tensor[:MIB]
    del tensor
    assert torch.cuda.memory_allocated() >= before + 8 * MIB
    view.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before


def test_dlpack() -> None:
    data = torch.arange(1000)
    tensor = torch.from_dlpack(data.cuda())
    assert torch.equal(tensor.cpu(), data)


def test_pinned_memory_is_untouched() -> None:
    before = torch.cuda.memory_allocated()
    pinned = torch.zeros(1 << 20, pin_memory=True)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(pinned.cuda(non_blocking=True).cpu(), pinned)
