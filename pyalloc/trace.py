"""One loader for our trace files and torch's snapshots.

A snapshot is first written as a trace into a temporary file, so that everything else reads one format.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pyalloc import _core
from pyalloc.analysis import asked, findings
from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console, files, ranked
from pyalloc.errors import TraceError, UsageError
from pyalloc.traces import pickles, ranges, source, stays
from pyalloc.traces.caveats import n_before, notes_of
from pyalloc.traces.convert import KINDS, EventWriter, Mark, state_before, with_frees
from pyalloc.traces.moments import STEP, Moment, moments_of
from pyalloc.traces.told import Told, around, joined, shown
from pyalloc.traces.turns import begin_of, begins_of, looked_at, numbers_of, turns_of

MAGIC = b"PYATRACE"
_XZ = b"\xfd7zXZ\x00"
_GZIP = b"\x1f\x8b"
_PACKED = {
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it first (zstd -d)",
    b"BZh": "compressed by bzip2; unpack it first (bunzip2)",
    b"PK\x03\x04": "a zip archive, such as torch.save() writes; if it holds a snapshot or a recording, unzip it first",
}
Progress = Callable[[int, int], object]
Steps = int | tuple[int, int] | Literal["all"]
_MOST_UNPACKED = 500  # most bytes from a byte of .xz or .gz; recordings reach 20
_MOST_UNPACKED_BESIDE = 64 << 20
_WINDOW_BINS = 600
_WINDOW_EVENTS = 100_000  # around the peak, if there are no steps
# Events one by one: of what is looked at block by block, and around each moment.
_TOLD_OF_WINDOW, _TOLD_AROUND = 3000, 40
_TOLD_FOR_EACH_SHOWN = 4  # among frees alone, every second event is not shown
_MOST_BLOCKS = 500_000  # of all states that are only looked at if asked for
_MOST_WRONG = 0.02  # of a history's entries: torch lets threads run between state and trace


# Files that read_once() holds, each with its trace: the file itself or a temporary one.
_made: dict[Path, Path] = {}


@contextlib.contextmanager
def read_once(path: Path, progress: Progress | None = None) -> Iterator[None]:
    """Lets all readers of `path` share one trace while it lasts: converting a large snapshot takes most of the time.

    Raises:
        TraceError: the file is missing, damaged or of another kind.
    """
    with _as_trace_file(path, progress) as file:
        _made[path] = file
        try:
            yield
        except TraceError as error:
            raise error if path.exists() else TraceError(f"{error}{_beside(path)}") from None
        finally:
            del _made[path]


@contextlib.contextmanager
def as_trace_file(
    path: Path, progress: Progress | None = None, *, no_source: bool = False
) -> Iterator[Path]:
    """A trace file with the contents of `path`: itself, or a temporary one; no_source: without_source().

    Raises:
        TraceError: the file is missing, damaged or of another kind.
    """
    made = _made.get(path)
    with _as_trace_file(path, progress) if made is None else contextlib.nullcontext(made) as file:
        if not no_source:
            yield file
            return
        with _written_again(path, partial(without_source, file)) as target:
            yield target


def without_source(path: Path, target: Path) -> None:
    """Writes a trace again without stacks and without the command line.

    Raises:
        TraceError: the file is damaged, or target cannot be written.
    """
    reader, writer = _core.TraceReader(path), _core.TraceWriter(target)
    try:
        copy_without_source(reader, writer)
    finally:
        writer.close()
    if not reader.is_complete():  # neither is the copy
        with target.open("rb+") as file:
            file.truncate(target.stat().st_size - 1)


def copy_without_source(
    reader: _core.TraceReader, writer: _core.TraceWriter, most_steps: int | None = None
) -> int:
    """Appends every event but its stack, and the command line's, up to where step number most_steps begins.

    Returns:
        How many steps begin in what was appended.

    Raises:
        TraceError: what is read is damaged, or cannot be written.
    """
    texts: dict[int, int] = {0: 0}  # the writer's numbers by the reader's, -1 for the command line
    n_steps = 0
    for kind, device, longs, number in _events_of(reader):
        if kind == KINDS["step"]:
            if n_steps == most_steps:
                break
            n_steps += 1
        if number not in texts:
            text = reader.text(number) or ""
            texts[number] = -1 if text.startswith("command=") else writer.string(text)
        if texts[number] < 0:
            continue
        time_ns, thread, stream, addr, size, arg = longs
        writer.event(
            kind,
            device=device,
            time_ns=time_ns,
            thread=thread,
            stream=stream,
            addr=addr,
            bytes=size,
            arg=arg,
            text=texts[number],
        )
    return n_steps


def _events_of(reader: _core.TraceReader) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """Kind, device, the fields of eight bytes, the text's number."""
    while True:
        columns = [memoryview(c) for c in reader.read()]
        kinds, devices = columns[0].cast("B"), columns[1].cast("B")
        if not kinds:
            return
        longs = zip(*(column.cast("Q") for column in columns[2:8]), strict=True)
        yield from zip(kinds, devices, longs, columns[9].cast("I"), strict=True)


@contextlib.contextmanager
def _as_trace_file(
    path: Path, progress: Progress | None, *, is_unpacked: bool = False
) -> Iterator[Path]:
    if str(path) == "-":
        raise TraceError(
            "'-' does not work here, because the input is read more than once; name a file"
        )
    try:
        if path.is_dir():
            raise TraceError(f"{path} is a folder; name a file in it")
        if path.is_fifo():  # opening one waits for a writer
            raise TraceError(
                f"{path} is a pipe, but the input is read more than once; write it to a file first"
            )
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}{_beside(path)}") from None
    if magic == MAGIC:
        yield path
    elif (magic[:6] == _XZ or magic[:2] == _GZIP) and not is_unpacked:  # some unpack to themselves
        with files.temporary_folder("pyalloc-") as folder:
            unpacked = _unpacked(path, Path(folder))
            try:
                with _as_trace_file(unpacked, progress, is_unpacked=True) as file:
                    yield file
            except TraceError as error:
                raise TraceError(str(error).replace(str(unpacked), str(path))) from None
    elif (packed := _packed_as(magic)) is not None:
        raise TraceError(f"{path}: {packed}")
    elif magic[:1] == b"\x80" or magic[:1] in (b"(", b"]", b"}"):
        with _written_again(path, partial(_write_pickled, path, progress=progress)) as target:
            yield target
    elif not magic:
        raise TraceError(f"{path}: the file is empty")
    else:
        raise TraceError(
            f"{path}: neither a recording of `pyalloc run --record` nor a snapshot of "
            "torch.cuda.memory._dump_snapshot()"
        )


def _packed_as(magic: bytes) -> str | None:
    """What a file with this beginning is and what to do with it; None if unknown or unpacked here."""
    for begin, words in _PACKED.items():
        if magic.startswith(begin):
            return words
    return None


def _beside(path: Path) -> str:
    """Suggests existing files for the name of a missing one."""
    part = f"{path}.part"
    if os.path.exists(part):
        return f"; its recording still runs or was cut off, so read {part}"
    if path.suffix == ".part" and os.path.exists(path.with_suffix("")):
        return f"; its recording has ended, so read {path.with_suffix('')}"
    ranks = console.joined(ranked.existing(path))
    return f"; each rank has its own file: {ranks}" if ranks else ""


@contextlib.contextmanager
def _written_again(path: Path, write: Callable[[Path], None]) -> Iterator[Path]:
    """A temporary file made from `path`; errors name `path`, because nobody knows the temporary name."""
    with files.temporary_folder("pyalloc-") as folder:
        target = Path(folder) / "trace.pya"
        try:
            write(target)
        except TraceError as error:
            text = str(error).replace(str(target), str(path))
            # A recording has this name only once it is complete.
            if str(target) in str(error) and not target.exists():
                text += f" (while writing a copy in {tempfile.gettempdir()}; TMPDIR chooses another folder)"
            raise TraceError(text if str(path) in text else f"{path}: {text}") from None
        try:
            yield target
        except TraceError as error:
            if str(target) not in str(error):
                raise
            raise TraceError(str(error).replace(str(target), str(path))) from None


def _by_bytes(progress: Progress, n_bytes: int) -> Progress:
    """The same progress function, called with entries instead of bytes."""
    return lambda done, total: progress(n_bytes * done // max(total, 1), n_bytes)


def _write_pickled(path: Path, target: Path, progress: Progress | None) -> None:
    """Writes a snapshot's file as a trace, and drops the snapshot, which takes much memory."""
    told = _by_bytes(progress or (lambda done, total: None), path.stat().st_size)
    write_snapshot(
        pickles.load(path, lambda done, total: told(done, 2 * total)),
        target,
        lambda done, total: told(total + done, 2 * total),
    )


def _unpacked(path: Path, folder: Path) -> Path:
    """Unpacks .xz and .gz."""
    import gzip
    import lzma
    import zlib

    with path.open("rb") as file:
        module: Any = gzip if file.read(2) == _GZIP else lzma
    target = folder / "unpacked"
    most = _MOST_UNPACKED_BESIDE + path.stat().st_size * _MOST_UNPACKED
    try:
        with module.open(path, "rb") as source, target.open("wb") as file:
            while file.tell() <= most and (piece := source.read(1 << 20)):
                file.write(piece)
            if file.tell() > most:
                raise TraceError(
                    f"{path}: refused, because it unpacks to far more than a recording would"
                )
    except EOFError:
        raise TraceError(f"{path}: the file ends too early; copy it again") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: {error}") from None
    except OSError as error:
        raise TraceError(
            f"{path}: while unpacking it in {folder.parent}: {error.strerror}; TMPDIR chooses another folder"
        ) from None
    return target


def write_snapshot(
    snapshot: dict[str, Any], target: Path, progress: Progress | None = None
) -> None:
    """Writes torch's snapshot as a trace: the state before its entries, then the entries.

    Raises:
        TraceError: the snapshot holds numbers no trace can.
    """
    settings = snapshot.get("allocator_settings") or {}
    writer = EventWriter(_core.TraceWriter(target), joins_pages="pyalloc" in settings)
    traces = [with_frees(trace) for trace in snapshot["device_traces"]]
    times = [int(trace[0].get("time_us", 0)) * 1000 for trace in traces if trace]
    first = min(times, default=0)
    try:
        before, n_wrong = state_before(snapshot["segments"], traces)
        history = _history(traces, before)
        if n_wrong > 1 + _MOST_WRONG * sum(map(len, traces)):
            history, traces = "torn", []
            before, _ = state_before(snapshot["segments"], traces)
        writer.mark(Mark(first, "user", "source=torch snapshot"))
        writer.mark(Mark(first, "user", f"history={history}"))
        for note in _settings(settings):
            writer.mark(Mark(first, "user", note))
        writer.state(before, first)
        told = snapshot.get("external_annotations") or []
        marks = ranges.marks(told, first) if any(traces) else []
        writer.merged(traces, [writer.row(mark) for mark in marks], progress)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"the snapshot is malformed: {error!r}") from None
    finally:
        writer.writer.close()


def _settings(told: dict[str, Any]) -> Iterator[str]:
    """The allocator settings that differ from the defaults, in the form in which one sets them."""
    if "pyalloc" in told:
        yield "allocator=pyalloc"
        return  # torch's own have no effect there
    if told.get("expandable_segments"):
        yield "expandable_segments=True"
    bound = told.get("max_split_size")
    if isinstance(bound, int) and bound > 0:
        yield f"max_split_size_mb={bound >> 20}"
    if told.get("garbage_collection_threshold"):
        yield f"garbage_collection_threshold={told['garbage_collection_threshold']}"
    if told.get("PYTORCH_CUDA_ALLOC_CONF"):
        yield f"PYTORCH_CUDA_ALLOC_CONF={told['PYTORCH_CUDA_ALLOC_CONF']}"


def _history(traces: list[list[dict[str, Any]]], before: list[dict[str, Any]]) -> str:
    """How much of the program's history a snapshot has: "whole", "late" (blocks were alive before) or "none".

    If needed entries are missing it is "torn", and not used.
    """
    if sum(map(len, traces)) <= 1:  # enabled="state" keeps one
        return "none"
    return "late" if any(segment["blocks"] for segment in before) else "whole"


def analyse(
    path: str | os.PathLike[str],
    *,
    device: int = -1,
    moments: int = 0,
    step: Steps | None = None,
    temporary: int | None = None,
    oom: int | None = None,
    n_bins: int = 1000,
    progress: Progress | None = None,
) -> Analysis:
    """Analyses a file, in two passes.

    Args:
        path: a trace or a snapshot.
        device: only this one; -1: all, summed.
        moments: so many more states evenly over the run, for a segment map that can be scrubbed, with the events around
            them; fewer where very many blocks are alive at once. And a few hundred of which sums by stack are known.
        step: the one, or the first and the last, to be looked at block by block, or "all"; None: that of the peak.
        temporary: blocks are, before whose free at most so many further requests of their device come; None: none is.
        oom: which out-of-memory error is told of, from 0 on; -1: the last; None: the first, if there is one.
        n_bins: resolution of the timeline.
        progress: called with bytes done and bytes in all.

    Raises:
        TraceError: the file is missing, damaged or of another kind.
    """
    path = Path(path)
    with as_trace_file(path, progress) as file:
        short_life = 0 if temporary is None else temporary + 1
        first = _core.Scan(
            file, device=device, n_bins=n_bins, progress=progress, short_life=short_life
        )
        totals = first.totals()
        most = _MOST_BLOCKS // max(totals["n_live_at_most"], 1)
        error = [] if oom is None else [oom_at(first.ooms(), oom)]
        at = sorted({*_interesting(first, totals, min(moments, most)), *error})
        steps = [each[1] for each in first.steps()]
        marks = stays.marks(first.bins(), steps, at, most) if moments else at
        window = _window(first, totals) if step is None else _steps(first, totals, step)
        second = _core.Scan(
            file,
            device=device,
            n_bins=_WINDOW_BINS,
            moments=at,
            marks=marks,
            around=totals["peak_event"],
            progress=progress,
            window=window,
            ranges=_told(totals, window, at) if moments else [],
        )
        result = Analysis.of(path, first, second, at, marks, window[1], oom or 0)
        findings.look_for_all(result, file, device, progress)
        return result


def oom_at(ooms: Sequence[tuple[int, ...]], which: int) -> int:
    """The moment of an out-of-memory error, counted from 0; -1: the last one."""
    if not ooms:
        raise UsageError("memory never ran out in this recording; leave out --oom")
    if which >= len(ooms):
        n = {1: "once", 2: "twice"}.get(len(ooms), f"{len(ooms)} times")
        raise UsageError(f"there is no oom:{which + 1}: memory ran out {n} in this recording")
    return ooms[which][0]


def check_device(found: Analysis, device: int) -> None:
    """Raises UsageError if the analysis of one device found no events of it."""
    if device < 0 or found.totals["device_peak"] or found.ooms:
        return
    peaks = totals(found.path)["device_peak"]
    have = f"only of {', '.join(map(str, peaks))}" if peaks else "nor of any other"
    raise UsageError(f"{found.path} has no memory of device {device}, {have}")


def moments_at(
    path: Path, at: list[int], device: int = -1, progress: Progress | None = None
) -> dict[int, Moment]:
    """What was alive at these moments (ascending)."""
    with as_trace_file(path, progress) as file:
        scan = _core.Scan(file, device=device, n_bins=2, moments=at, progress=progress)
    return dict(zip(at, moments_of(scan), strict=True))


def events_around(
    path: Path, event: int, n: int, device: int = -1, progress: Progress | None = None
) -> list[Told]:
    """The n single events around one, without those that say nothing by themselves."""
    with as_trace_file(path, progress) as file:
        n_events = _core.Scan(file, n_bins=2, progress=progress).totals()["n_events"]
        wanted = list(around(event, _TOLD_FOR_EACH_SHOWN * n, n_events))
        scan = _core.Scan(file, device=device, n_bins=2, ranges=wanted, progress=progress)
    rows = list(shown(map(Told._make, scan.told())))
    begin, end = around(bisect.bisect_left(rows, event, key=lambda row: row.event), n, len(rows))
    return rows[begin:end]


def _interesting(scan: _core.Scan, totals: dict[str, Any], moments: int) -> list[int]:
    """Moments to look at closely: the peaks, out of memory, begins of the history and of some steps, the end."""
    n = totals["n_events"]
    before = n_before(notes_of(scan.notes()))
    wanted = {totals["peak_event"], n, *([before] if before else [])}
    if totals["peak_reserved_bytes"] > 0:
        wanted.add(totals["peak_reserved_event"])
    wanted.update(oom[0] for oom in scan.ooms()[:4])
    phases = ((scan.text(row[0]), row[3], row[4]) for row in scan.phases())
    wanted.update(looked_at(turns_of([step[1] for step in scan.steps()], phases)))
    if moments > 0:
        wanted.update(i * n // moments for i in range(1, moments))
    return sorted(wanted)


def _told(totals: dict[str, Any], window: tuple[int, int], at: list[int]) -> list[int]:
    """Which events to tell one by one, as begins and ends in turns."""
    n = totals["n_events"]
    begin, end = window
    if end - begin > _TOLD_OF_WINDOW:
        middle = totals["peak_event"] if begin <= totals["peak_event"] <= end else begin
        near = around(middle, _TOLD_OF_WINDOW, n)
        begin, end = max(begin, near[0]), min(end, near[1])
    each = [around(event, _TOLD_AROUND, n) for event in at]
    return [number for one in joined([(begin, end), *each]) for number in one]


def _steps(scan: _core.Scan, totals: dict[str, Any], wanted: Steps) -> tuple[int, int]:
    """Begin and end of a step, or of several."""
    n = max(totals["n_events"], 1)
    if wanted == "all":
        return 0, n
    first, last = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    steps = scan.steps()
    for number in (first, last):
        if begin_of(steps, number) is None:
            raise UsageError(f"there is no step {number}; {numbers_of(steps)}")
    found = begins_of(steps, first, last)
    if found is None:
        raise UsageError(f"no step {first} comes before the last step {last}")
    return found[0], min((step[1] for step in steps if step[1] > found[1]), default=n)


def _window(scan: _core.Scan, totals: dict[str, Any]) -> tuple[int, int]:
    """The range to look at block by block: the step of the peak, a whole short trace, else events around the peak."""
    peak, n = totals["peak_event"], max(totals["n_events"], 1)
    begins = [step[1] for step in scan.steps()]
    at = bisect.bisect_left(begins, peak)
    if len(begins) > 1 and at > 0:
        return begins[at - 1], begins[at] if at < len(begins) else n
    if n <= _WINDOW_EVENTS:
        return 0, n
    return max(peak - _WINDOW_EVENTS // 2, 0), min(peak + _WINDOW_EVENTS // 2, n)


def notes(file: Path, progress: Progress | None = None) -> dict[str, str]:
    """The notes of a trace file, in one pass."""
    return notes_of(_core.Scan(file, n_bins=2, progress=progress).notes())


def totals(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """The totals of a file, in one pass."""
    with as_trace_file(path, progress) as file:
        return _totals(_core.Scan(file, n_bins=2, progress=progress))


def _totals(scan: _core.Scan) -> dict[str, Any]:
    lost = notes_of(scan.notes()).get("lost_events", "")
    return scan.totals() | ({"lost_events": lost} if lost else {})


def figures(
    path: Path, progress: Progress | None = None
) -> tuple[dict[str, Any], list[asked.Asked], list[asked.Size]]:
    """The totals, and the requests by line and by size."""

    def name(stack: int, phase: str) -> str:
        frames = tuple(source.without_bootstrap(scan.frames(stack))) if stack else ()
        return source.name(frames, phase)

    with as_trace_file(path, progress) as file:
        scan = _core.Scan(file, n_bins=2, progress=progress)
        stackless = [(phase, row) for phase, *row in scan.stackless()]
        lines = asked.by_line(scan.stacks(), stackless, name)
        return _totals(scan), lines, asked.by_size(scan.sizes(), STEP)


@contextlib.contextmanager
def program(path: Path, progress: Progress | None = None) -> Iterator[_core.Program]:
    """The file made ready for replay."""
    with as_trace_file(path, progress) as file:
        yield _core.Program(file, progress=progress)
