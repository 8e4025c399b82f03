"""Snapshots as torch pickles them: read without executing anything, and written piece by piece.

Only plain containers, numbers and strings are read.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pyalloc import _core
from pyalloc.errors import TraceError
from pyalloc.traces.convert import NEEDS_SIZE

MAX_BYTES = 8 * 2**30
_MAX_QUOTED = 300
_MOST_PER_BYTE = 100  # bytes of memory that a pickle can fairly need: an empty dict takes 64
_MOST_BESIDE = 2**30
Progress = Callable[[int, int], object]
_Checked = tuple[set[int], set[int]]
# Guards the limit on address space.  The process has only one, and a second reader would find it lowered.
_lock = threading.Lock()


def _forget_in_child() -> None:
    """In a forked child, nobody holds the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function: a snapshot needs none."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(
            f"the pickle tries to load {module}.{name}; memory snapshots hold plain data only, so it was refused "
            "and nothing was executed"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise TraceError("the pickle refers to objects outside itself, so it was refused")


class _Watched:
    """A file that reports how far it has been read.

    The unpickler calls it some thousand times.  Each call lets Ctrl-C in, which would otherwise wait until the end.
    """

    def __init__(self, file: io.BufferedReader, progress: Progress, n_bytes: int) -> None:
        self.file, self.progress, self.n_bytes = file, progress, n_bytes
        self.peek, self.readline = file.peek, file.readline

    def read(self, n: int) -> bytes:
        self.progress(self.file.tell(), self.n_bytes)
        return self.file.read(n)


def load(path: Path, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Loads a snapshot that torch.cuda.memory._dump_snapshot() wrote; progress: of bytes done and in total.

    Raises:
        TraceError: the file is damaged, hostile, or not a snapshot.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > MAX_BYTES:
        raise TraceError(
            f"{path}: a pickle of {path.stat().st_size / 2**30:.1f} GiB is too large to load; record with "
            "`pyalloc run --record` instead, whose files are read piece by piece"
        )
    with path.open("rb") as file:
        n_bytes = path.stat().st_size
        value = _load(path, _Watched(file, progress, n_bytes), n_bytes)
    return check(path, value, n_bytes)


@contextlib.contextmanager
def _bounded(n_bytes: int) -> Iterator[None]:
    """Limits address space to what the pickle can fairly need: a few bytes can name a place in a table of gigabytes."""
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_BESIDE + n_bytes * _MOST_PER_BYTE
        limits = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _load(path: Path, file: _Watched | BinaryIO, n_bytes: int) -> Any:
    try:
        with _bounded(n_bytes):
            return _PlainUnpickler(file).load()
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except MemoryError:
        raise TraceError(f"{path}: loading the pickle needs more memory than is allowed") from None
    # A damaged pickle can raise nearly anything from within the C unpickler.
    except Exception as error:
        raise TraceError(f"{path}: not a readable pickle ({error})") from None


def check(path: Path | str, value: Any, n_bytes: int) -> dict[str, Any]:
    """Returns the value of a pickle of n_bytes if it has the shape of a snapshot; older ones are a list of segments.

    Raises:
        TraceError: it does not.
    """
    if isinstance(value, list):
        value = {"segments": value, "device_traces": []}
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        raise TraceError(f"{path}: not a memory snapshot (a dict with the key 'segments')")
    try:
        _check_size(value, n_bytes)
        _check_parts(value)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path}: the snapshot is malformed: {_clip(error)}") from None
    return value


def _check_size(value: dict[str, Any], n_bytes: int) -> None:
    """Refuses a pickle that repeats one list of blocks again and again, and would keep us busy for days."""
    n = 0
    for parts in (
        *(_dict(segment)["blocks"] for segment in value["segments"]),
        *_list(value.get("device_traces", [])),
    ):
        n += len(parts)
        if n > n_bytes:
            raise ValueError("more blocks and entries than it has bytes")


def _clip(error: Exception) -> str:
    try:
        text = repr(error)
    except (RecursionError, ValueError):
        # It quotes something that is nested too deeply, or a number with too many digits.
        text = type(error).__name__
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "..."


def _check_parts(value: dict[str, Any]) -> None:
    traces = value.setdefault("device_traces", [])
    if not isinstance(value.get("allocator_settings") or {}, dict):
        raise TypeError("allocator_settings is not a dict")
    if len(_list(traces)) > _core.MAX_DEVICES:
        raise ValueError(f"traces of more than {_core.MAX_DEVICES} devices")
    # Ids of lists of frames, and of frames: in torch, many entries share one object.
    checked: _Checked = set(), set()
    for segment in value["segments"]:
        _check_segment(_dict(segment), checked)
    for trace in traces:
        for entry in _list(trace):
            _check_entry(_dict(entry), checked)
    told = [_dict(each) for each in _list(value.get("external_annotations") or [])]
    told = [each for each in told if each.keys() >= {"name", "stage"}]
    for each in told:
        _natural(each["time_us"], 2**53)
        _text(each["name"], each["stage"])
    value["external_annotations"] = told


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of a dict")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return list(value) if isinstance(value, tuple) else value


def _natural(value: Any, below: int = 2**63) -> int:
    if not isinstance(value, int) or not 0 <= value < below:
        raise ValueError("a number that is not an address, size or time")
    return value


def _text(*values: Any) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("a name that is not a string")


def _check_segment(segment: dict[str, Any], checked: _Checked) -> None:
    at = _natural(segment["address"])
    _natural(segment["total_size"])
    _natural(segment.get("stream", 0), 2**64)
    _natural(segment.get("device", 0), _core.MAX_DEVICES)
    segment.setdefault("stream", 0)
    _check_frames(segment.get("frames"), checked)
    for block in _list(segment["blocks"]):
        at = _natural(_dict(block).get("address", at)) + _natural(block["size"])
        _natural(block.get("requested_size", 0))
        _check_frames(block.get("frames"), checked)
        if not isinstance(block["state"], str):
            raise TypeError("a state that is not a string")


def _check_entry(entry: dict[str, Any], checked: _Checked) -> None:
    _natural(entry.get("addr", 0), 2**64)
    _natural(entry.get("size", 0))
    _natural(entry.get("device_free", 0), 2**64)
    _natural(entry.get("stream", 0), 2**64)
    _natural(entry.get("time_us", 0), 2**53)
    if not isinstance(entry["action"], str):
        raise TypeError("an action that is not a string")
    if entry["action"] in NEEDS_SIZE:
        _natural(entry["size"])
    _check_frames(entry.get("frames"), checked)


def _check_frames(frames: Any, checked: _Checked) -> None:
    lists, single = checked
    if not frames or id(frames) in lists:
        return
    lists.add(id(frames))
    for frame in _list(frames):
        if id(frame) in single:
            continue
        single.add(id(frame))
        line = _dict(frame)["line"]
        if not isinstance(line, int):
            raise TypeError("a line that is not a number")
        if not 0 <= line < 2**32:  # torch writes -1 as unsigned if code has no line
            frame["line"] = 0
        if not isinstance(frame["name"], str) or not isinstance(frame["filename"], str):
            raise TypeError("a frame without name or file")


def loads(data: bytes) -> dict[str, Any]:
    """load() from memory; raises the same TraceError."""
    return check("snapshot", _load(Path("snapshot"), io.BytesIO(data), len(data)), len(data))


class SnapshotWriter:
    """Writes a snapshot's pickle (protocol 4) piece by piece: begin(), a trace() for each device, end().

    pickle itself needs the whole snapshot in memory first.  Strings and stacks are written once, where they are first
    needed, and referred to after that.  memory_viz's page knows only a few of pickle's instructions; only those are
    used here.
    """

    _BATCH = 1000  # items between two marks, as pickle writes them

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.texts: dict[str, bytes] = {}  # the instruction that refers to each
        self.pairs: dict[tuple[int, int], bytes] = {}
        self.stacks: dict[int, bytes] = {}
        self.defined: dict[int, list[dict[str, Any]]] = {}  # not written yet
        self.n_kept = 0

    def _keep(self) -> bytes:
        """Gives the value just written a number; returns the instruction that refers to it."""
        number = struct.pack("<I", self.n_kept)
        self.n_kept += 1
        self.out.write(pickle.MEMOIZE)
        return pickle.LONG_BINGET + number

    def _text(self, text: str) -> None:
        known = self.texts.get(text)
        if known is not None:
            self.out.write(known)
            return
        data = text.encode("utf-8", "surrogatepass")
        self.out.write(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)
        self.texts[text] = self._keep()

    def _add(self, parts: list[bytes], table: dict[Any, bytes], key: Any, value: Any) -> None:
        """Appends a reference to a value of `table`; writes and clears the parts, then the value, if it is new."""
        known = table.get(key)
        if known is not None:
            parts.append(known)
            return
        self.out.write(b"".join(parts))
        parts.clear()
        self._value(value)
        if key not in table:
            table[key] = self._keep()

    def _add_item(self, parts: list[bytes], value: Any) -> None:
        """A string, a number or a pair of numbers."""
        if isinstance(value, int):
            parts.append(self._number(value))
        else:
            self._add(parts, self.texts if isinstance(value, str) else self.pairs, value, value)

    @staticmethod
    def _number(value: int) -> bytes:
        if 0 <= value < 1 << 31:
            return pickle.BININT + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return pickle.LONG1 + bytes((len(data),)) + data

    def _value(self, value: Any) -> None:
        """Anything that a snapshot holds."""
        if isinstance(value, bool):
            self.out.write(pickle.NEWTRUE if value else pickle.NEWFALSE)
        elif isinstance(value, int):
            self.out.write(self._number(value))
        elif isinstance(value, str):
            self._text(value)
        elif isinstance(value, tuple):
            self.out.write(pickle.MARK)
            for item in value:
                self._value(item)
            self.out.write(pickle.TUPLE)
        elif isinstance(value, dict):
            self.out.write(pickle.EMPTY_DICT + pickle.MARK)
            for key, item in value.items():
                self._text(key)
                self._value(item)
            self.out.write(pickle.SETITEMS)
        else:
            self._list(value, self._value)

    def _list(self, items: Iterable[Any], write: Callable[[Any], None]) -> None:
        self.out.write(pickle.EMPTY_LIST + pickle.MARK)
        n = 0
        for n, item in enumerate(items, 1):
            write(item)
            if n % self._BATCH == 0:
                self.out.write(pickle.APPENDS + pickle.MARK)
        self.out.write(pickle.APPENDS)

    def begin(self) -> None:
        """Writes everything before the traces."""
        self.out.write(pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.MARK)
        self._text("device_traces")
        self.out.write(pickle.EMPTY_LIST + pickle.MARK)

    def knows(self, stack: int) -> bool:
        """Is this stack defined?"""
        return stack in self.stacks or stack in self.defined

    def define(self, stack: int, frames: list[dict[str, Any]]) -> None:
        """Defines a stack, innermost frame first, for entries to come; the first one that has it writes it."""
        self.defined[stack] = frames

    def trace(self, entries: Iterable[tuple[dict[str, Any], int]]) -> None:
        """Writes one device's entries of numbers, pairs and strings, each with the number of a defined stack."""

        def write(row: tuple[dict[str, Any], int]) -> None:
            entry, stack = row
            parts = [pickle.EMPTY_DICT, pickle.MARK]
            for key, value in entry.items():
                known = self.texts.get(key)  # nearly always
                if known is None:
                    self._add(parts, self.texts, key, key)
                else:
                    parts.append(known)
                self._add_item(parts, value)
            self._add(parts, self.texts, "frames", "frames")
            self._add(parts, self.stacks, stack, self.defined.pop(stack, None))
            parts.append(pickle.SETITEMS)
            self.out.write(b"".join(parts))

        self._list(entries, write)

    def end(self, rest: dict[str, Any]) -> None:
        """Writes the rest of the snapshot, which completes the pickle."""
        self.out.write(pickle.APPENDS)
        for key, value in rest.items():
            self._text(key)
            self._value(value)
        self.out.write(pickle.SETITEMS + pickle.STOP)
