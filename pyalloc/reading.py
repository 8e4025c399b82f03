"""Reads a recording event by event, for questions that no command answers.

    from pyalloc import reading

    for event in reading.events("out.pya"):
        if event.kind == "alloc" and event.bytes > 1 << 30:
            print(event.time_ns, event.bytes, event.stack[:3])

pyalloc.trace.analyse() gives what pyalloc derives from a recording: blocks with their lifetimes, categories, advice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pyalloc import _core, trace
from pyalloc.traces import source
from pyalloc.traces.convert import NAMES
from pyalloc.traces.source import Frame

Progress = Callable[[int, int], object]
FIELDS = ("kind", "device", "time_ns", "thread", "stream", "addr", "bytes", "arg", "stack", "text")
_FORMATS = ("B", "B", "Q", "Q", "Q", "Q", "Q", "Q", "I", "I")
MEANINGS: dict[str, str] = {name: meaning for name, _, _, meaning in _core.trace_kinds()}


class Event(NamedTuple):
    """One event.

    number: counted from 0.  kind: a key of MEANINGS, which says what happened and what arg is.  time_ns: since 1970.
    thread: the system's number for it, 0 if not recorded.  addr: of a block or of device memory.  bytes: as requested,
    not rounded.  stack: (function, file, line), innermost first; equal stacks are the same tuple.
    """

    number: int
    kind: str
    device: int
    time_ns: int
    thread: int
    stream: int
    addr: int
    bytes: int
    arg: int
    stack: tuple[Frame, ...]
    text: str


def events(path: str | os.PathLike[str], progress: Progress | None = None) -> Iterator[Event]:
    """Yields all events of a recording or of torch's snapshot, in order.

    Of a recording, only its distinct stacks and texts are kept in memory; a snapshot is read whole.

    Args:
        path: the file, packed (.gz, .xz) or not; one that was cut off yields the events that it has.
        progress: called with the bytes read so far and the bytes in total.

    Raises:
        TraceError: the file is missing, damaged or of another kind.
    """
    stacks: dict[int, tuple[Frame, ...]] = {0: ()}
    texts: dict[int, str] = {0: ""}
    with trace.as_trace_file(Path(path)) as file:
        for first, piece, reader in rows(file, 0, progress):
            for number, row in enumerate(piece, first):
                kind, device, time_ns, thread, stream, addr, size, arg, stack, text = row
                if stack not in stacks:
                    stacks[stack] = tuple(frames(reader, stack))
                if text not in texts:
                    texts[text] = reader.text(text) or ""
                yield Event(
                    number,
                    NAMES.get(kind, str(kind)),
                    device,
                    time_ns,
                    thread,
                    stream,
                    addr,
                    size,
                    arg,
                    stacks[stack],
                    texts[text],
                )


def pieces(
    file: Path, progress: Progress | None
) -> Iterator[tuple[int, tuple[bytes, ...], _core.TraceReader]]:
    """Yields (number of the first event, columns packed as in _FORMATS, the reader that has their stacks and texts)."""
    reader = _core.TraceReader(file)
    at = 0
    while True:
        columns = reader.read()
        if progress is not None:
            progress(*reader.position())
        if not columns[0]:
            return
        yield at, columns, reader
        at += len(columns[0])


def rows(
    file: Path, skip: int = 0, progress: Progress | None = None
) -> Iterator[tuple[int, Iterator[tuple[int, ...]], _core.TraceReader]]:
    """Yields the pieces as rows, without the first `skip` events, which progress does not count."""
    skipped = 0
    for at, columns, reader in pieces(file, None):
        n = len(columns[0])
        done, total = reader.position()
        if at + n <= skip:
            skipped = done
        else:
            if progress is not None:
                progress(done - skipped, total - skipped)
            arrays = [
                struct.unpack(f"<{n}{code}", column)
                for code, column in zip(_FORMATS, columns, strict=True)
            ]
            first = max(skip - at, 0)
            yield at + first, zip(*(array[first:] for array in arrays), strict=True), reader


def frames(reader: _core.TraceReader, stack: int) -> list[Frame]:
    """A stack's frames in the program, innermost first."""
    found: list[Frame] = []
    at = stack
    while at:
        frame = reader.frame(at)
        if frame is None:
            break
        found.append((reader.text(frame[1]) or "?", reader.text(frame[2]) or "?", frame[3]))
        at = frame[0]  # a smaller number, or the file is refused as damaged
    return source.without_bootstrap(found)
