"""Lets other libraries of the process take CUDA memory from pyalloc too: CuPy, Numba, RMM (cuDF, cuML), cuda.core.

One cache serves them all: memory freed by a data frame goes to the model, and no library hoards a pool of its own while
the others run out of memory.  Their blocks appear in torch's statistics, in recordings and in out-of-memory errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pyalloc import _core
from pyalloc.errors import ConfigError, InstallError

_LEGACY_STREAM = 1  # CUDA's second name of stream 0


def use(*libraries: str) -> None:
    """Makes libraries take device memory from pyalloc from now on, on all devices; they keep what they already hold.

    Memory belongs to the stream on which a library requests it, and becomes available to other streams once that
    stream has passed the free, as with tensors.  Numba names no stream, so its memory belongs to the default stream.
    Keep a Numba array alive until its work is done if it is used on a stream that does not wait for the default stream
    (``cuStreamNonBlocking``).

    When memory runs out, the library raises a MemoryError with the text of torch's OutOfMemoryError.

    Args:
        *libraries: "cupy", "numba", "rmm", "cuda.core".

    Raises:
        ConfigError: a name is none of these; nothing was changed.
        ImportError: a library is missing; nothing was changed.
        InstallError: pyalloc is not installed, or Numba has already used a device and keeps its memory manager.
    """
    for name in libraries:
        if name not in tuple(_ADAPTERS):  # a list of names has no hash
            raise ConfigError(f"there is no adapter for {name!r}, only for {', '.join(_ADAPTERS)}")
    if not _core.is_created():
        raise InstallError(
            "pyalloc is not installed, so it has no memory to hand out; call pyalloc.install() first"
        )
    for name, library in [(name, importlib.import_module(name)) for name in libraries]:
        _ADAPTERS[name](library)


def _n_devices() -> int:
    import torch

    return int(torch.cuda.device_count())


def _allocate(size: int, device: int, stream: int) -> int:
    """The address of `size` bytes for a stream's handle; 0 for none."""
    import torch

    try:
        return int(torch.cuda.caching_allocator_alloc(size, device, _named(stream)))
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def _free(address: int, last_stream: int | None = None) -> None:
    """Frees a block; address 0: none.  last_stream: where it was used last, if that may differ from its own stream."""
    if last_stream is not None:
        _core.record_stream(address, _named(last_stream))
    _core.free(address)


def _named(stream: int) -> int:
    return 0 if stream == _LEGACY_STREAM else stream


def _handle(stream: Any) -> int:
    """The number of any library's stream object."""
    return int(stream.__cuda_stream__()[1])


class _Owner:
    """Frees a block when nobody refers to it any more."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __del__(self) -> None:
        _free(self._address)


# ---- each library's own interface for foreign allocators ----


def _adapt_cupy(cupy: Any) -> None:
    import torch

    memory = cupy.cuda.memory

    def allocate(size: int) -> Any:
        device = torch.cuda.current_device()
        address = _allocate(size, device, cupy.cuda.get_current_stream().ptr)
        return memory.MemoryPointer(memory.UnownedMemory(address, size, _Owner(address), device), 0)

    cupy.cuda.set_allocator(allocate)


def _adapt_rmm(rmm: Any) -> None:
    def on(device: int) -> Any:
        return rmm.mr.CallbackMemoryResource(
            lambda size, stream: _allocate(size, device, _handle(stream)),
            lambda address, _size, stream: _free(address, _handle(stream)),
        )

    for device in range(_n_devices()):
        rmm.mr.set_per_device_resource(device, on(device))


def _adapt_numba(_numba: Any) -> None:
    import ctypes
    import functools

    from numba import cuda
    from numba.cuda.cudadrv.devices import gpus

    if any(device.primary_context is not None for device in gpus.lst):
        raise InstallError(
            "numba has already used a device and cannot change its memory manager any more; "
            'call pyalloc.adapters.use("numba") before its first CUDA call'
        )

    class MemoryManager(cuda.HostOnlyCUDAMemoryManager):
        """Numba's plug-in for device memory; pinned memory stays Numba's."""

        interface_version = 1

        def initialize(self) -> None:
            """Nothing: pyalloc is there."""

        def memalloc(self, size: int) -> Any:
            """A block that is freed with the last array that uses it."""
            address = _allocate(size, self.context.device.id, 0)
            return cuda.MemoryPointer(
                self.context,
                ctypes.c_void_p(address),
                size,
                finalizer=functools.partial(_free, address),
            )

        def get_memory_info(self) -> Any:
            """(free, total) bytes of the device."""
            import torch

            return cuda.MemoryInfo(*torch.cuda.mem_get_info(self.context.device.id))

        def get_ipc_handle(self, memory: Any) -> Any:
            """Not possible: a block may span several of the driver's allocations."""
            raise NotImplementedError(
                "pyalloc's memory has no single IPC handle; send it as a tensor through torch.multiprocessing "
                "(torch.as_tensor(array, device='cuda'))"
            )

    cuda.set_memory_manager(MemoryManager)


def _adapt_cuda_core(core: Any) -> None:
    class MemoryResource(core.MemoryResource):
        """One device's memory."""

        is_device_accessible = True
        is_host_accessible = False

        def __init__(self, device_id: int) -> None:
            self._device_id = device_id

        @property
        def device_id(self) -> int:
            """The device's number."""
            return self._device_id

        def allocate(self, size: int, *, stream: Any) -> Any:
            """A buffer that is freed through this resource."""
            address = _allocate(size, self._device_id, _handle(stream))
            return core.Buffer.from_handle(address, size, self, stream=stream)

        def deallocate(self, ptr: Any, _size: int, *, stream: Any) -> None:
            """Frees the block once the stream has reached this point."""
            _free(int(ptr), _handle(stream))

    for index in range(_n_devices()):
        core.Device(index).memory_resource = MemoryResource(index)


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "cupy": _adapt_cupy,
    "numba": _adapt_numba,
    "rmm": _adapt_rmm,
    "cuda.core": _adapt_cuda_core,
}
