"""What the tests of this folder allocate, where it lies, and what the history says of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

MIB, GIB = 2**20, 2**30


def empty(size: int, device: int | None = None) -> torch.Tensor:
    """So many bytes on that device; None: on the current one."""
    return torch.empty(
        size, dtype=torch.uint8, device="cuda" if device is None else f"cuda:{device}"
    )


def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The id of the private pool that holds the tensor; (0, 0): the default pool."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("the tensor lies in no segment")


def trace(device: int = 0) -> list[dict]:
    """The entries of a device's history."""
    return torch.cuda.memory._snapshot()["device_traces"][device]


def of(address: int) -> list[dict]:
    """The entries for an address of the first device."""
    return [entry for entry in trace() if entry.get("addr") == address]


def own_stream() -> torch.cuda.ExternalStream:
    """A stream that this program may destroy; torch keeps its own for ever."""
    handle = ctypes.c_void_p()
    assert int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) == 0
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value)


def destroy(stream: torch.cuda.Stream) -> None:
    assert int(torch.cuda.cudart().cudaStreamDestroy(stream.cuda_stream)) == 0


def asked_of_destroyed_streams(runtime: ctypes.CDLL, use_and_destroy: Callable[[], None]) -> int:
    """Driver calls about streams that were used and destroyed, while others request the memory they left."""
    runtime.pya_hostcuda_live.restype = ctypes.c_uint64
    torch.cuda.empty_cache()
    side = torch.cuda.Stream()
    spare = [own_stream() for _ in range(200)]
    before = runtime.pya_hostcuda_live(b"stale_calls")
    use_and_destroy()
    with torch.cuda.stream(side):
        empty(512).zero_()
    for each in spare:  # streams that torch makes from here on get the handles of these
        destroy(each)
    # Each is larger than any free block.
    for step in range(1, 13):
        mine = empty((64 + 20 * step) * MIB)
        del mine
        with torch.cuda.stream(side):
            other = empty((70 + 20 * step) * MIB)
            del other
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(runtime.pya_hostcuda_live(b"stale_calls") - before)
