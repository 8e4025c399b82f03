"""What the tests of this folder allocate, where it lies, and what the history tells of it."""

from __future__ import annotations

import torch

MIB, GIB = 2**20, 2**30


def empty(size: int, device: int | None = None) -> torch.Tensor:
    """So many bytes on that device; None: on the current one."""
    return torch.empty(
        size, dtype=torch.uint8, device="cuda" if device is None else f"cuda:{device}"
    )


def pool_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The id of the private pool that the tensor's memory is of; (0, 0): the default pool."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("the tensor lies in no segment")


def trace(device: int = 0) -> list[dict]:
    """The entries of the history of a device."""
    return torch.cuda.memory._snapshot()["device_traces"][device]


def of(address: int) -> list[dict]:
    """Those of an address of the first device."""
    return [entry for entry in trace() if entry.get("addr") == address]
