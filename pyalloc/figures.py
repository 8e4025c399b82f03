"""Memory figures under torch's flat keys, for TensorBoard and Weights & Biases; neither needs to be installed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyalloc import _core
from pyalloc.inside.devices import index_of

if TYPE_CHECKING:
    from pyalloc.inside.devices import Device

_KEYS = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "active_bytes.all.current",
    "inactive_split_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
)


def stats(device: Device = None) -> dict[str, int]:
    """Returns every counter of a device: the keys of torch.cuda.memory_stats(), and pyalloc's own ("pyalloc_...").

    docs/limits.md explains pyalloc's own counters.

    Args:
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.

    Returns:
        Byte counts and event counts, by key.

    Raises:
        AllocatorError: pyalloc is not installed.
        ConfigError: there is no such device.
    """
    return _core.stats(index_of(device))


def scalars(device: int | None = None, prefix: str = "memory/") -> dict[str, int]:
    """Returns a device's figures, ready for `wandb.log(pyalloc.scalars())`, on torch's allocator and on pyalloc.

    Args:
        device: its number; None for the current one.
        prefix: put in front of each key; the keys are those of torch.cuda.memory_stats().

    Returns:
        Byte counts, and event counts under `num_...`; an empty dict before CUDA is used.

    Raises:
        AllocatorError: there is no such device (with torch's own allocator, the error that torch raises).
    """
    import torch

    stats = torch.cuda.memory_stats(device)
    return {prefix + key: int(stats[key]) for key in _KEYS if key in stats}


def add_scalars(writer: Any, step: int, device: int | None = None) -> None:
    """Adds the figures of scalars() to a torch.utils.tensorboard.SummaryWriter, or to anything with its add_scalar().

    Args:
        writer: its `add_scalar(key, value, step)` is called for each figure.
        step: the step that the figures belong to.
        device: its number; None for the current one.
    """
    for key, value in scalars(device).items():
        writer.add_scalar(key, value, step)


# ---- event files, written by hand: TFRecord framing and three small protobuf messages ----


def _crc_table() -> list[int]:
    table = []
    for i in range(256):
        value = i
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord requires."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return (
        length
        + struct.pack("<I", _masked_crc(length))
        + data
        + struct.pack("<I", _masked_crc(data))
    )


def _event(step: int, wall_time: float, rest: bytes) -> bytes:
    return _record(
        struct.pack("<Bd", 1 << 3 | 1, wall_time) + _varint(2 << 3) + _varint(step) + rest
    )


def event_file(rows: Iterable[tuple[int, float, Mapping[str, float]]]) -> bytes:
    """A TensorBoard event file of (step, seconds, {tag: value}) rows."""
    parts = [_event(0, 0.0, _bytes_field(3, b"brain.Event:2"))]
    for step, seconds, values in rows:
        summary = b"".join(
            _bytes_field(
                1,
                _bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, float(value)),
            )
            for tag, value in values.items()
        )
        parts.append(_event(step, seconds, _bytes_field(5, summary)))
    return b"".join(parts)
