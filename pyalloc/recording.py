"""Recording: what this process asks of its CUDA memory goes to a trace file, with stacks, steps, phases, categories.

The source is pyalloc's history, or torch's own where its allocator is in use; marks are merged in by time.  The history
is moved to the file while the program runs, so that memory stays bounded and a killed process leaves a readable file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pyalloc import (
    _core,
    caveats,
    files,
    history,
    mainthread,
    marks,
    noted,
    recorded,
    sharing,
    snapshots,
)
from pyalloc.convert import KINDS, EventWriter, Mark, Row
from pyalloc.errors import UsageError

STACK_CHOICES = ("python", "all", "none")
_MAX_ENTRIES = 10_000_000
_FLUSH_S = 0.5  # what happened longer ago is in the file
_TORCH_EVENTS = 200_000  # of torch's own history: moved to the file when this many wait
_TORCH_LEAST_S = 0.5  # or at the first step, or other mark that is looked at, after so long
_TORCH_BLOCK_S = 1e-4  # longer where a snapshot has many blocks: each takes 6 us, whatever is new
_TORCH_S = 5.0  # but no longer
_TORCH_BACK_S = 10.0  # where no mark is made
_TORCH_LONG_S = 60.0  # or whatever the program is doing
_TORCH_REST = 20  # earlier after so many times as long as it took
_CHECK_MARKS = 256  # how often that is looked at
_EXPLAIN_REST = 20  # after out of memory was explained, times as long as that took: some programs search for a size


@dataclass
class _Active:
    """The one recording of this process."""

    recorder: Recorder | None = None


_active = _Active()


def is_active() -> bool:
    """Is this process being recorded?"""
    return _active.recorder is not None


def active_path() -> Path | None:
    """Where to, if it is."""
    return None if _active.recorder is None else _active.recorder.path


class _Source(Protocol):
    """Where events come from: pyalloc's history or torch's."""

    has_record_stream: bool  # calls of Tensor.record_stream are among the events

    def clock(self) -> int:
        """Nanoseconds, comparable with the times of the events."""

    def begin(self, before: dict[str, Any]) -> None:
        """Events are kept from now on, and none from before, of which the snapshot tells."""

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        """Moves to the file what happened, with the marks up to then, which it takes from the list.

        at_mark: in the thread that makes one, so that the program itself waits meanwhile.
        """

    def is_due(self) -> bool:
        """At a mark, in the thread that makes it: is it time to drain?"""

    def in_background(self) -> bool:
        """Every half second, in a thread of its own: is it time to drain?"""


class _Ours:
    """pyalloc's history, moved from C to the file: nothing is lost whatever other threads do, and it costs little."""

    has_record_stream = True

    def __init__(self, writer: EventWriter, stacks: str) -> None:
        self.writer = writer
        self.stacks = stacks
        self.history = _core.HistoryWriter(writer.writer, writer.used)
        self.offset_ns = time.time_ns() - time.monotonic_ns()  # events have the monotonic clock
        self.n_lost = 0

    def clock(self) -> int:
        return time.monotonic_ns() + self.offset_ns

    def begin(self, before: dict[str, Any]) -> None:
        _torch_history(self.stacks, clear=True)  # torch's functions should know that it is on
        level = 0 if self.stacks == "none" else 2
        _core.history_start(level, True, _MAX_ENTRIES, 0, self.stacks == "all")

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        first = self.writer.n_events
        written, lost = self.history.drain(self.offset_ns, pending)
        self.writer.n_events += written
        if lost:
            self.n_lost += lost
            self.writer.gap(first, self.n_lost, self.clock())

    def is_due(self) -> bool:
        return False

    def in_background(self) -> bool:
        return True


class _Torchs:
    """torch's history, by way of its snapshots.

    What is done between a snapshot and the clearing after it is lost, and torch lets threads run while it makes one.
    So the history is cleared where the program itself makes a mark.  In the background, when it makes none and rests,
    or has made none for long, what is new is moved and all of it stays, unless that is much.  What is lost is counted
    and told.
    """

    has_record_stream = False

    def __init__(self, writer: EventWriter, stacks: str) -> None:
        self.writer = writer
        self.stacks = stacks
        self.n_seen = 0  # allocations
        # Entries that were moved and are still there, of each device and beside: how many, and the last one.
        self.kept: list[tuple[int, Any] | None] = []
        self.n_before = 0
        self.n_made = 0  # at the last move
        self.n_told = 0  # of those lost
        self.n_moved = 0  # allocations and frees at the last move
        self.n_looked = 0  # and at the last look from the background
        self.last = self.last_mark = self.last_clear = time.monotonic()
        self.cost = 0.0  # seconds that the last move took
        self.period = _TORCH_LEAST_S  # between moves at marks

    def clock(self) -> int:
        return time.time_ns()

    def begin(self, before: dict[str, Any]) -> None:
        self.n_made, self.n_moved = _made()
        self.n_before = self.n_made
        sharing.keep(before["device_traces"], *_others(before))
        _torch_history(self.stacks, clear=True)

    def drain(self, pending: list[Row], at_mark: bool) -> None:
        begin = time.monotonic()
        n_made, self.n_moved = _made()
        taken = snapshots.take()
        n_blocks = sum(len(segment["blocks"]) for segment in taken["segments"])
        self.period = min(max(n_blocks * _TORCH_BLOCK_S, _TORCH_LEAST_S), _TORCH_S)
        whole = [*taken["device_traces"], *_others(taken)]
        parts = [_new(*each) for each in zip(whole, self.kept or [None] * len(whole), strict=True)]
        # C++ may have switched it off, or cleared it, past what answers the program.
        is_off = not sharing.is_on()
        is_cut = is_off or any(each is None for each in parts)
        new = [each if part is None else part for each, part in zip(whole, parts, strict=True)]
        self.kept = [(len(each), each[-1]) if each else None for each in whole]
        is_long = begin - self.last_clear > _TORCH_LONG_S - self._interval()
        if at_mark or is_off or (is_long and sum(map(len, whole)) > _TORCH_EVENTS):
            _torch_history(self.stacks, clear=True)
            self.kept = []
            self.last_clear = begin
        self.last = time.monotonic()
        self.cost = self.last - begin
        marks = sorted(pending)
        del pending[: len(marks)]
        traces = [[entry for entry in trace if entry["action"] != "snapshot"] for trace in new[:-2]]
        sharing.keep(traces, *new[-2:])
        first = self.writer.n_events
        self.writer.merged(traces, marks)
        self.n_seen += sum(entry["action"] == "alloc" for trace in traces for entry in trace)
        if n_made < self.n_made:  # the program began to count anew
            self.n_before = n_made - self.n_seen - self.n_told
        self.n_made = n_made
        lost = max(n_made - self.n_before - self.n_seen, self.n_told)
        if is_cut or lost > self.n_told:
            self.n_told = lost
            self.writer.gap(first, lost, self.clock())

    def switch(self) -> None:
        """Torch's history is on as the program wants it now, and keeps what it has."""
        _torch_history(self.stacks)

    def n_lost(self) -> int:
        """Allocations that no snapshot had; to be asked after the last drain."""
        return max(_made()[0] - self.n_before - self.n_seen, 0)

    def is_due(self) -> bool:
        self.last_mark = time.monotonic()
        if self.last_mark - self.last > self.period:
            return True
        return _made()[1] - self.n_moved > _TORCH_EVENTS

    def in_background(self) -> bool:
        idle = time.monotonic() - max(self.last_mark, self.last)
        if idle <= _TORCH_S:
            return False
        before, self.n_looked = self.n_looked, _made()[1]
        rests = self.n_looked == before
        return self.n_looked > self.n_moved and (rests or idle > self._interval())

    def _interval(self) -> float:
        """Between moves from the background while the program works: the more there is, the longer a move takes."""
        return min(max(_TORCH_BACK_S, _TORCH_REST * self.cost), _TORCH_LONG_S)


def _made() -> tuple[int, int]:
    """Allocations of this process so far, and these with the frees."""
    import torch

    stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    allocs = sum(s.get("allocation.all.allocated", 0) for s in stats)
    return allocs, allocs + sum(s.get("allocation.all.freed", 0) for s in stats)


def _others(snapshot: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What its history has beside the devices' entries: of pinned memory, and the program's annotations."""
    return snapshot.get("host_traces", []), snapshot.get("external_annotations", [])


def _new(history: list[Any], kept: tuple[int, Any] | None) -> list[Any] | None:
    """What came after that; None: it is not there any more."""
    if kept is None:
        return history
    n, last = kept
    return history[n:] if len(history) >= n and history[n - 1] == last else None


def _torch_history(stacks: str, *, clear: bool = False) -> None:
    """Switches torch's history on, as wide as the recording and the program want it."""
    import torch

    keywords = {"enabled": "all", "max_entries": _MAX_ENTRIES, **sharing.wanted(stacks)}
    sharing.switch_on(torch, keywords, clear=clear)


@dataclass
class Recorder:
    """One recording; `record()` and `pyalloc run --record` make them."""

    path: Path
    stacks: str = "python"
    automatic: bool = True
    writer: EventWriter | None = None
    source: _Source = field(init=False, repr=False)  # from start() on
    pending: list[Row] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    n_marks: int = 0
    hooks: Any = None
    explain_from: float = 0.0  # time.monotonic(): until then out of memory is not explained again
    told_oom: Path | None = None  # where it was explained
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    # Of a process beside the one that was meant: nobody misses it if it is empty.
    is_extra: bool = False
    overwrites: bool = False  # what has the name, once the recording is whole

    def __post_init__(self) -> None:
        """The file stays where it was asked for when the program goes to another folder."""
        self.path = self.path.absolute()

    # ---- marks ----

    def add(self, kind: str, text: str, *, arg: int = 0, addr: int = 0, device: int = 0) -> None:
        """Remembers a mark until the next move to the file."""
        writer = self.writer
        if writer is None:
            return
        try:
            self.pending.append(
                (self.source.clock(), KINDS[kind], writer.string(text), arg, addr, 0, device)
            )
            self.n_marks += 1
            # What makes no steps (generation, a server) would be lost for minutes if it was killed.
            is_looked_at = kind == "step" or self.n_marks % _CHECK_MARKS == 0
            if is_looked_at and self.source.is_due():
                self.drain(at_mark=True)
        except Exception as error:  # the program at work is not to suffer from it
            self._give_up(error)

    def on_step(self, number: int) -> None:
        """A step begins."""
        self.add("step", "step", arg=number)

    def on_phase(self, name: str, begins: bool) -> None:
        """A phase begins or ends."""
        self.add("phase_begin" if begins else "phase_end", name)

    # ---- life ----

    def start(self) -> None:
        """Begins to record; CUDA must be up.

        Raises:
            UsageError: another recording runs.
        """
        self.begin()
        self.follow()

    def begin(self) -> None:
        """The same, without the thread that moves to the file what happened: no lock of Python's is taken for it."""
        if _active.recorder is not None:  # begun since check()
            raise UsageError(f"already recording to {_active.recorder.path}")
        _active.recorder = self
        try:
            with self.lock:
                self._begin()
        except BaseException:
            self._detach()
            raise

    def _begin(self) -> None:
        import torch

        writer = self.writer = EventWriter(
            _core.TraceWriter(self.path, self.overwrites), has_stacks=self.stacks != "none"
        )
        self.source = (_Ours if _core.is_created() else _Torchs)(writer, self.stacks)
        now = self.source.clock()
        for text in noted.about(torch, with_command=self.stacks != "none"):
            writer.mark(Mark(now, "user", text))
        for index in range(torch.cuda.device_count()):
            properties: Any = torch.cuda.get_device_properties(index)
            writer.mark(
                Mark(now, "device", properties.name, bytes=properties.total_memory, device=index)
            )
        if isinstance(self.source, _Torchs):
            sharing.begin(torch, self.lock, self._move, self.source.switch)
        try:
            self._begin_events(torch, writer, now)
        except BaseException:
            self._end()
            recorded.part(self.path).unlink(missing_ok=True)
            raise
        marks.listeners.append(self)
        _observe_oom(torch, self)
        history.hold(isinstance(self.source, _Ours))
        atexit.register(self.stop_at_exit)

    def _begin_events(self, torch: Any, writer: EventWriter, now: int) -> None:
        before = snapshots.take()
        self.source.begin(before)  # at once: what happens between the two is lost
        writer.state(before["segments"], now)
        if self.automatic:
            from pyalloc.automarks import AutoMarks

            self.hooks = AutoMarks(self)
            self.hooks.install(torch)

    def follow(self) -> None:
        """From now on what happens reaches the file while the program runs."""
        thread = threading.Thread(target=self._follow, daemon=True, name="pyalloc-record")
        thread.start()
        self.thread = thread  # from now on it can be waited for

    def unfollow(self) -> None:
        """What happens reaches the file at the end."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def is_at_work(self) -> bool:
        """Is this thread in the middle of moving to the file what happened?"""
        return bool(self.lock._is_owned())

    def _follow(self) -> None:
        """What happened reaches the file while the program runs, so that even SIGKILL leaves it readable."""
        while not self.ended.wait(_FLUSH_S):
            try:
                if self.source.in_background():
                    self.drain()
                self._write_out()
            except Exception as error:
                self._give_up(error)
                return

    def drain(self, *, at_mark: bool = False) -> None:
        """Moves what happened to the file."""
        with self.lock:
            if self.writer is not None:
                self.source.drain(self.pending, at_mark)

    def _move(self) -> None:
        """The same where the program waits for it, and is not to suffer."""
        try:
            self.drain(at_mark=True)
        except Exception as error:
            self._give_up(error)

    def oom_path(self) -> Path:
        """Where it is explained why memory ran out; what somebody else wrote there since we began is left."""
        path = recorded.beside(self.path)
        if self.told_oom is not None or self.overwrites or not path.exists():
            return self.told_oom or path
        return path.with_name(f"{self.path.stem}.{os.getpid()}.oom.txt")

    def flush(self) -> Path:
        """Everything so far is in the file, which is not whole yet: its name for the time being."""
        self.drain()
        self._write_out()
        return recorded.part(self.path)

    def _write_out(self) -> None:
        with self.lock:
            if self.writer is not None:
                self.writer.writer.flush()

    def stop_at_exit(self) -> None:
        """The same where nobody could catch what goes wrong, and an interrupt has nothing left to end."""
        try:
            self.stop()
        except KeyboardInterrupt:
            return
        except Exception as error:
            self._tell(error)

    def stop(self) -> None:
        """Ends the recording; the file gets its name."""
        if _active.recorder is self:
            with mainthread.interrupts_wait():
                self._stop()

    def _stop(self) -> None:
        if self.hooks is not None:
            self.hooks.categorise()
        self.unfollow()
        with self.lock:
            writer = self.writer
            if writer is None:  # it could not be written, which was told
                return
            try:
                self.drain()
                if writer.gaps:
                    print(f"pyalloc: {self.path}: {caveats.gap(*writer.told_gap)}", file=sys.stderr)
            finally:
                self._end()
                writer.writer.close()
            if self.is_extra and _made()[0] == 0:  # a compiler's, say, that looked at the device
                self.path.unlink()

    def _give_up(self, error: Exception) -> None:
        """Most often the disk is full."""
        with self.lock:  # two threads may find out at once
            if self.writer is not None:
                self._tell(error)
                self._end()

    def _tell(self, error: Exception) -> None:
        part = recorded.part(self.path)
        kept = f"; what there was room for: {part}" * part.exists()
        print(f"pyalloc: the recording ends here: {error}{kept}", file=sys.stderr)

    def _end(self) -> None:
        """Nothing is remembered any more, neither by us nor by torch, but for what the program wants itself."""
        import torch

        self._detach()
        if isinstance(self.source, _Torchs):
            sharing.hand_back(torch)
        elif torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(enabled=None)

    def _detach(self) -> None:
        """No marks come any more."""
        atexit.unregister(self.stop_at_exit)
        history.hold(False)
        sharing.leave()
        if self.hooks is not None:
            self.hooks.remove()
        self.writer = None
        if self in marks.listeners:
            marks.listeners.remove(self)
        if _active.recorder is self:
            _active.recorder = None


def _forget_in_child() -> None:
    """A forked process has neither the thread nor the file."""
    if _active.recorder is not None:
        _active.recorder._detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _observe_oom(torch: Any, recorder: Recorder) -> None:
    """On out of memory: an explanation beside the trace, before the error reaches the program."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return

    def observe(device: int, asked: int, allocated: int, free: int) -> None:
        begin = time.monotonic()
        if _active.recorder is not recorder or begin < recorder.explain_from:
            return
        with contextlib.suppress(Exception):  # the program's own error matters more
            dump_oom(recorder, device, asked)
        end = time.monotonic()
        recorder.explain_from = end + _EXPLAIN_REST * (end - begin)

    attach(observe)


def dump_oom(recorder: Recorder, device: int, asked: int) -> Path:
    """Writes `<trace>.oom.txt`: what was asked, who held the memory, and why it did not fit; the last time counts."""
    from pyalloc import trace
    from pyalloc.report import text

    part = recorder.flush()
    analysis = trace.analyse(part, device=device)
    path = recorder.oom_path()
    why = text.explain_oom(analysis, device, asked, recorder.path)
    files.write(path, f"{why}\n".encode())
    if recorder.told_oom is None:
        recorder.told_oom = path
        print(f"pyalloc: out of memory; why, in words: {path}", file=sys.stderr)
    return path


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str],
    *,
    stacks: str = "python",
    automatic: bool = True,
    force: bool = False,
) -> Iterator[Recorder]:
    """Records CUDA memory to a trace file: `with pyalloc.record("out.pya"):`, then `pyalloc report out.pya`.

    Works with torch's own allocator, whose memory history it uses, and with pyalloc.  The program may use that history
    itself meanwhile (docs/parity.md says what it sees).

    Args:
        path: the file to write; it has its name once the recording ended (`<path>.part` until then).
        stacks: "python", "all" (C++ frames too, slower) or "none", which leaves out the command line too.
        automatic: mark forward, backward and optimizer phases, steps, modules and tensors' categories by hooks.
        force: overwrite the file.

    Yields:
        The recording; its flush() moves to the file what happened so far, and returns the file's name until then.

    Raises:
        UsageError: the file exists, or is a folder, a device or a pipe, a recording runs already, stacks is none of the
            three, or CUDA is not available.
        TraceError: the file cannot be made.
        TypeError: path is no path.
    """
    recorder = begin(recorded.path_of(path), stacks, automatic=automatic, force=force)
    try:
        yield recorder
    finally:
        recorder.stop()


def begin(path: Path, stacks: str, *, automatic: bool, force: bool) -> Recorder:
    """A recording that runs until its stop(); what it needs, and refuses, is record()'s."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device to record; without one: pyalloc dryrun --record")
    check(path, stacks, force=force)
    torch.cuda.init()
    recorder = Recorder(path, stacks, automatic, overwrites=force)
    recorder.start()
    return recorder


def check(path: Path, stacks: str, *, force: bool) -> None:
    """Can a recording begin?

    Raises:
        UsageError: another runs, or the file exists.
    """
    if _active.recorder is not None:
        raise UsageError(f"already recording to {_active.recorder.path}")
    check_stacks(stacks)
    recorded.check_name(path)
    for old in (path, recorded.part(path), recorded.beside(path)):
        if old.exists() and not force:
            raise UsageError(f"{old} exists{recorded.cut_off(old)}; force=True overwrites it")


def check_stacks(stacks: str) -> None:
    """Is it one of the choices?

    Raises:
        UsageError: it is not.
    """
    if stacks not in STACK_CHOICES:
        raise UsageError(f"stacks is one of {', '.join(STACK_CHOICES)}, not {stacks!r}")
