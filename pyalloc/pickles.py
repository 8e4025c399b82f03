"""Snapshots that torch pickled, read without executing anything: plain containers, numbers and texts only."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, BinaryIO

from pyalloc.errors import TraceError

MAX_BYTES = 8 * 2**30


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function: a snapshot needs none."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(
            f"the pickle wants to call {module}.{name}; memory snapshots hold plain data only, so it was refused "
            "and nothing was executed"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise TraceError("the pickle refers to objects outside of itself; it was refused")


def load(path: Path) -> dict[str, Any]:
    """A snapshot as torch.cuda.memory._dump_snapshot() writes it.

    Raises:
        TraceError: the file is damaged, hostile, or no snapshot.
    """
    if path.stat().st_size > MAX_BYTES:
        raise TraceError(
            f"{path}: {path.stat().st_size / 2**30:.1f} GiB of pickle would not fit memory; record with "
            "`pyalloc run --record` instead, whose files stream"
        )
    with path.open("rb") as file:
        value = _load(path, file)
    return check(path, value)


def _load(path: Path, file: BinaryIO) -> Any:
    try:
        return _PlainUnpickler(file).load()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except MemoryError:
        raise TraceError(f"{path}: the pickle asks for more memory than there is") from None
    # A damaged pickle can raise nearly anything from within the C unpickler.
    except Exception as error:
        raise TraceError(f"{path}: not a readable pickle ({error})") from None


def check(path: Path | str, value: Any) -> dict[str, Any]:
    """The value, if it has the shape of a snapshot; older ones are a bare list of segments.

    Raises:
        TraceError: it has not.
    """
    if isinstance(value, list):
        value = {"segments": value, "device_traces": []}
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise TraceError(f"{path}: no memory snapshot (a dict with the key 'segments')")
    traces = value.setdefault("device_traces", [])
    try:
        for segment in value["segments"]:
            _check_segment(segment)
        for trace in traces:
            for entry in trace:
                _check_entry(entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}: the snapshot is malformed: {error!r}") from None
    return value


def _natural(value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is no address or size")


def _check_segment(segment: dict[str, Any]) -> None:
    _natural(segment["address"])
    _natural(segment["total_size"])
    for block in segment["blocks"]:
        _natural(block["size"])
        _natural(block.get("address", 0))
        _natural(block.get("requested_size", 0))
        _check_frames(block.get("frames"))
        block["state"].isascii()


def _check_entry(entry: dict[str, Any]) -> None:
    _natural(entry.get("addr", 0))
    _natural(entry.get("size", 0))
    _natural(entry.get("device_free", 0))
    _natural(entry.get("stream", 0))
    if not isinstance(entry["action"], str):
        raise ValueError("an action that is no text")
    _check_frames(entry.get("frames"))


def _check_frames(frames: Any) -> None:
    for frame in frames or ():
        if not isinstance(frame["line"], int) or frame["name"] is None:
            raise ValueError("a frame without line or name")


def loads(data: bytes) -> dict[str, Any]:
    """As load(), from memory."""
    return check("snapshot", _load(Path("snapshot"), io.BytesIO(data)))
