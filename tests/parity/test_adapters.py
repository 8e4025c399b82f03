"""Memory of other libraries: real CuPy, Numba, RMM and cuda.core on torch's statistics and in its cache.

CuPy and RMM bring a CUDA runtime of their own, which finds no device here.  CuPy asks it for its current stream, so the
test answers instead.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parity.tensors import GIB, MIB, asked_of_destroyed_streams, empty

from pyalloc import adapters
from pyalloc.errors import ConfigError, InstallError

HUGE = 1 << 50


def live(device: int = 0) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def adapted(name: str, allocator: str) -> Any:
    if allocator != "pyalloc":
        pytest.skip("of pyalloc")
    library = pytest.importorskip(name)
    adapters.use(name)
    return library


def test_needs_pyalloc(allocator: str) -> None:
    if allocator == "pyalloc":
        pytest.skip("it is installed")
    with pytest.raises(InstallError, match=r"call pyalloc.install\(\) first"):
        adapters.use("cupy")


def test_unknown_library() -> None:
    with pytest.raises(ConfigError, match="there is no adapter for 'jax', only for cupy, numba"):
        adapters.use("jax")
    with pytest.raises(ConfigError, match=r"there is no adapter for \['cupy', 'rmm'\]"):
        adapters.use(["cupy", "rmm"])  # type: ignore[arg-type]


def test_nothing_is_changed_where_a_library_is_missing(
    allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allocator != "pyalloc":
        pytest.skip("of pyalloc")
    changed: list[Any] = []
    monkeypatch.setitem(adapters._ADAPTERS, "cupy", changed.append)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "rmm", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="rmm"):
        adapters.use("cupy", "rmm")
    assert not changed


# ---- Numba: one manager for a process ----


@pytest.fixture
def numba_cuda(allocator: str) -> Any:
    if allocator != "pyalloc":
        pytest.skip("of pyalloc")
    cuda = pytest.importorskip("numba.cuda")
    if all(device.primary_context is None for device in cuda.cudadrv.devices.gpus.lst):
        adapters.use("numba")
    return cuda


def test_numba_arrays_are_counted_and_shared(numba_cuda: Any) -> None:
    array = numba_cuda.device_array(4 * MIB, dtype="u1")
    address = array.__cuda_array_interface__["data"][0]
    assert live() == 4 * MIB
    view = array[MIB:]
    del array
    assert live() == 4 * MIB  # the view holds it
    tensor = torch.as_tensor(view, device="cuda")
    assert tensor.data_ptr() == address + MIB
    del view, tensor
    assert live() == 0
    assert empty(4 * MIB).data_ptr() == address  # what Numba freed is torch's again


def test_numba_copies_and_fills(numba_cuda: Any) -> None:
    numpy = pytest.importorskip("numpy")
    there = numba_cuda.to_device(numpy.arange(1000))
    assert (there.copy_to_host() == numpy.arange(1000)).all()
    assert live() > 0


def test_numba_on_another_device(numba_cuda: Any) -> None:
    with numba_cuda.gpus[1]:
        array = numba_cuda.device_array(2 * MIB, dtype="u1")
        info = tuple(numba_cuda.current_context().get_memory_info())
    assert (live(0), live(1)) == (0, 2 * MIB)
    assert info == torch.cuda.mem_get_info(1) != torch.cuda.mem_get_info(0)
    del array
    assert live(1) == 0


def test_numba_knows_the_cards_memory(numba_cuda: Any) -> None:
    info = numba_cuda.current_context().get_memory_info()
    assert tuple(info) == torch.cuda.mem_get_info()


def test_numba_says_what_it_cannot_do(numba_cuda: Any) -> None:
    with pytest.raises(MemoryError, match="Tried to allocate"):
        numba_cuda.device_array(HUGE, dtype="u1")
    array = numba_cuda.device_array(MIB, dtype="u1")
    with pytest.raises(NotImplementedError, match=r"torch\.multiprocessing"):
        array.get_ipc_handle()
    with pytest.raises(InstallError, match="numba has already used a device"):
        adapters.use("numba")


# ---- cuda.core: a resource for each device ----


def test_cuda_core_buffers(allocator: str) -> None:
    core = adapted("cuda.core", allocator)
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(3 * MIB, stream=stream)
    assert live() == 3 * MIB
    assert (buffer.is_device_accessible, buffer.is_host_accessible) == (True, False)
    buffer.close(stream)
    assert live() == 0
    buffer = device.allocate(MIB, stream=stream)
    del buffer
    assert live() == 0
    with pytest.raises(MemoryError, match="Tried to allocate"):
        device.allocate(HUGE, stream=stream)


def test_cuda_core_on_another_device(allocator: str) -> None:
    core = adapted("cuda.core", allocator)
    device = core.Device(1)
    device.set_current()
    buffer = device.allocate(MIB, stream=device.default_stream)
    assert (live(0), live(1), buffer.device_id) == (0, MIB, 1)
    buffer.close()
    assert live(1) == 0


def test_what_another_stream_uses_is_not_given_away(allocator: str, runtime: Any) -> None:
    core = adapted("cuda.core", allocator)
    device = core.Device(0)
    device.set_current()
    own, other = device.create_stream(), device.create_stream()
    buffer = device.allocate(32 * MIB, stream=own)
    address = int(buffer.handle)
    runtime.pya_hostcuda_set_event_delay(1_000_000)
    buffer.close(other)
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 0
    assert stats["active_bytes.all.current"] == 32 * MIB
    again = device.allocate(32 * MIB, stream=own)
    assert int(again.handle) != address
    again.close(own)
    runtime.pya_hostcuda_set_event_delay(0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_nothing_is_asked_of_a_stream_that_the_library_destroyed(
    allocator: str, runtime: Any
) -> None:
    core = adapted("cuda.core", allocator)
    device = core.Device(0)
    device.set_current()

    def use() -> None:
        own, last = device.create_stream(), device.create_stream()
        device.allocate(64 * MIB, stream=own).close(last)
        torch.cuda.synchronize()
        own.close()
        last.close()

    assert asked_of_destroyed_streams(runtime, use) == 0


# ---- RMM: what cuDF and cuML use ----


@pytest.fixture
def rmm(allocator: str) -> Iterator[Any]:
    yield adapted("rmm", allocator)


def test_rmm_takes_and_gives_back(rmm: Any) -> None:
    from rmm.pylibrmm.stream import DEFAULT_STREAM, LEGACY_DEFAULT_STREAM, Stream

    resource = rmm.mr.get_per_device_resource(0)
    for stream in (DEFAULT_STREAM, LEGACY_DEFAULT_STREAM, Stream(torch.cuda.Stream())):
        address = resource.allocate(5 * MIB, stream)
        assert live() == 5 * MIB
        resource.deallocate(address, 5 * MIB, stream)
        assert live() == 0


def test_rmm_names_of_the_default_stream_are_one(rmm: Any, runtime: Any) -> None:
    from rmm.pylibrmm.stream import DEFAULT_STREAM, LEGACY_DEFAULT_STREAM

    resource = rmm.mr.get_per_device_resource(0)
    runtime.pya_hostcuda_set_event_delay(1_000_000)
    address = resource.allocate(5 * MIB, LEGACY_DEFAULT_STREAM)
    resource.deallocate(address, 5 * MIB, DEFAULT_STREAM)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0  # no event is waited for
    assert empty(5 * MIB).data_ptr() == address


def test_rmm_freed_on_another_stream(rmm: Any, runtime: Any) -> None:
    from rmm.pylibrmm.stream import DEFAULT_STREAM, Stream

    resource = rmm.mr.get_per_device_resource(0)
    runtime.pya_hostcuda_set_event_delay(1_000_000)
    address = resource.allocate(5 * MIB, Stream(torch.cuda.Stream()))
    resource.deallocate(address, 5 * MIB, DEFAULT_STREAM)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 5 * MIB
    runtime.pya_hostcuda_set_event_delay(0)


def test_rmm_out_of_memory(rmm: Any) -> None:
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    with pytest.raises(MemoryError, match="Tried to allocate"):
        rmm.mr.get_per_device_resource(0).allocate(HUGE, DEFAULT_STREAM)
    resource = rmm.mr.get_per_device_resource(1)
    address = resource.allocate(MIB, DEFAULT_STREAM)
    assert (live(0), live(1)) == (0, MIB)
    resource.deallocate(address, MIB, DEFAULT_STREAM)


# ---- CuPy ----


@pytest.fixture
def cupy(allocator: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    library = adapted("cupy", allocator)
    monkeypatch.setattr(
        library.cuda,
        "get_current_stream",
        lambda: SimpleNamespace(ptr=torch.cuda.current_stream().cuda_stream),
    )
    yield library
    library.cuda.set_allocator(None)


def test_cupy_arrays_are_counted_and_shared(cupy: Any) -> None:
    array = cupy.empty(6 * MIB, dtype="u1")
    address = array.data.ptr
    assert live() == 6 * MIB
    view = array[100:]
    del array
    assert live() == 6 * MIB
    del view
    assert live() == 0
    assert empty(6 * MIB).data_ptr() == address


def test_cupy_streams_wait_for_one_another(cupy: Any, runtime: Any) -> None:
    """Memory that CuPy freed on a stream that is still busy goes only to that stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        address = cupy.empty(40 * MIB, dtype="u1").data.ptr
    runtime.pya_hostcuda_set_event_delay(1_000_000)
    assert cupy.empty(40 * MIB, dtype="u1").data.ptr != address
    with torch.cuda.stream(side):
        assert cupy.empty(40 * MIB, dtype="u1").data.ptr == address
    runtime.pya_hostcuda_set_event_delay(0)


def test_cupy_on_another_device_and_out_of_memory(cupy: Any) -> None:
    with torch.cuda.device(1):
        array = cupy.empty(MIB, dtype="u1")
        assert (live(0), live(1), array.data.device_id) == (0, MIB, 1)
        with pytest.raises(MemoryError, match=r"Tried to allocate 100\.00 GiB"):
            cupy.empty(100 * GIB, dtype="u1")
    assert cupy.empty(0, dtype="u1").nbytes == 0
