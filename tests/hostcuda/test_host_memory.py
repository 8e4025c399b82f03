"""Host memory that calls take is freed with what they made."""

from __future__ import annotations

import ctypes
import os

import pytest
from growth import left_by

from .conftest import PAGE, Cuda
from .streams import GLOBAL, launch, stream_new
from .test_shared_handles import others_file, page_of


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def destroy(_data: int) -> None:
    pass


def graph(cuda: Cuda, stream: int) -> None:
    """A graph, and one that contains it, run once; with objects of others."""
    thing = ctypes.c_uint64()
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    for _ in range(20):
        assert launch(cuda, stream) == 0
    inner = cuda_end(cuda, stream)
    for _ in range(8):
        cuda.ok("cudaUserObjectCreate", ctypes.byref(thing), 42, destroy, 1, 1)
        cuda.ok("cudaGraphRetainUserObject", inner, thing.value, 1, 1)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", inner, 0)
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    cuda.ok("cudaGraphLaunch", runnable, stream)
    outer = cuda_end(cuda, stream)
    cuda.ok("cudaGraphExecDestroy", runnable)
    cuda.ok("cudaGraphDestroy", inner)
    cuda.ok("cudaGraphDestroy", outer)


def cuda_end(cuda: Cuda, stream: int) -> int:
    made = ctypes.c_uint64()
    cuda.ok("cudaStreamEndCapture", stream, ctypes.byref(made))
    return made.value


def imported(cuda: Cuda, _stream: int) -> None:
    fd = others_file()
    cuda.ok("cuMemRelease", page_of(cuda, fd, 0))
    os.close(fd)


def memory(cuda: Cuda, _stream: int) -> None:
    at, handle = cuda.reserve(2 * PAGE), cuda.handle()
    for each in (at, at + PAGE):
        cuda.ok("cuMemMap", each, PAGE, 0, handle, 0)
    cuda.ok("cuMemUnmap", at, 2 * PAGE)
    cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", at, 2 * PAGE)
    cuda.ok("cudaFree", cuda.malloc(PAGE))


def from_pools(cuda: Cuda, stream: int) -> None:
    cuda.ok("cudaFreeAsync", cuda.out("cudaMallocAsync", PAGE, stream), stream)
    cuda.ok("cudaMemPoolTrimTo", cuda.out("cudaDeviceGetDefaultMemPool", 0), 0)


def streams(cuda: Cuda, _stream: int) -> None:
    stream, event = stream_new(cuda), cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok("cudaEventRecord", event, stream)
    cuda.ok("cudaEventDestroy", event)
    cuda.ok("cudaStreamDestroy", stream)


@pytest.mark.parametrize("call", [graph, imported, memory, from_pools, streams])
def test_calls_leave_no_host_memory(cuda: Cuda, call: object) -> None:
    stream = stream_new(cuda)
    assert left_by(lambda: call(cuda, stream)) is None  # type: ignore[operator]
    cuda.ok("cudaStreamDestroy", stream)
