"""Recording: writes this process's CUDA memory events to a trace file, with stacks, steps, phases and categories.

The events come from pyalloc's history, or from torch's if its allocator is in use; marks are merged in by time.  The
history is moved to the file while the program runs: memory stays bounded, and a killed process leaves a readable file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyalloc import _core, marks
from pyalloc._bootstrap import leaving
from pyalloc.common import console, files, recorded
from pyalloc.errors import UsageError
from pyalloc.inside import history, mainthread, noted, sharing, snapshots
from pyalloc.inside.automarks import AutoMarks
from pyalloc.inside.eventsources import Ours, Source, Torchs, made
from pyalloc.traces import caveats
from pyalloc.traces.convert import KINDS, EventWriter, Mark, Row

STACK_CHOICES = ("python", "all", "none")
_FLUSH_S = 0.5  # events older than this are in the file
_CHECK_MARKS = 256  # checked after so many marks
_EXPLAIN_REST = 20  # pause after explaining out of memory, times its duration: some programs search for a batch size


class _Active:
    """The one recording of this process."""

    def __init__(self) -> None:
        self.observes_oom = False  # stays True once set: torch cannot remove an observer
        self._taken: dict[str, Recorder] = {}

    @property
    def recorder(self) -> Recorder | None:
        """It, if there is one."""
        return self._taken.get("")

    def take(self, recorder: Recorder) -> Recorder:
        """Makes this recorder the one unless there is one; returns the one.

        A single step, because another thread may begin a recording at the same time.  No lock would do: attached.py
        begins recordings in the main thread between two bytecodes, perhaps of this very function.
        """
        return self._taken.setdefault("", recorder)

    def let_go(self, recorder: Recorder) -> None:
        """From now on another recorder can be the one."""
        if self.recorder is recorder:
            self._taken.pop("", None)


_active = _Active()


def is_active() -> bool:
    """Is this process being recorded?"""
    return _active.recorder is not None


def active_path() -> Path | None:
    """The recording's file, or None.  Ask once: another thread may end the recording."""
    recorder = _active.recorder
    return None if recorder is None else recorder.path


@dataclass
class Recorder:
    """One recording; `record()` and `pyalloc run --record` make them."""

    path: Path
    stacks: str = "python"
    automatic: bool = True
    writer: EventWriter | None = None
    source: Source = field(init=False, repr=False)  # from start() on
    pending: list[Row] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    n_marks: int = 0
    hooks: Any = None
    switch_on_again: Callable[[], None] | None = None  # the program's own history on pyalloc
    explain_from: float = 0.0  # time.monotonic(): before it, out of memory is not explained again
    told_oom: Path | None = None  # the file with the explanation
    is_told: bool = False  # it was reported that there is no explanation
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    is_closing: bool = False  # its file does not have its final name yet
    # The recording of a process besides the intended one: removed if it is empty.
    is_extra: bool = False
    overwrites: bool = False  # replaces a file of that name at the end

    def __post_init__(self) -> None:
        """Makes the path absolute, since the program may change its working directory."""
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
            # Without steps (generation, a server), minutes of events would be lost if the process was killed.
            is_looked_at = kind == "step" or self.n_marks % _CHECK_MARKS == 0
            if is_looked_at and self.source.is_due():
                self.drain(at_mark=True)
        except Exception as error:  # must not reach the program
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
        """Like start(), but without the thread that moves events to the file, so that it takes no lock of Python."""
        other = _active.take(self)
        if other is not self:  # it has begun since check()
            raise _already(other.path)
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
        self.source = (Ours if _core.is_created() else Torchs)(writer, self.stacks)
        now = self.source.clock()
        for text in noted.about(torch, with_command=self.stacks != "none"):
            writer.mark(Mark(now, "user", text))
        for index in range(torch.cuda.device_count()):
            properties: Any = torch.cuda.get_device_properties(index)
            writer.mark(
                Mark(now, "device", properties.name, bytes=properties.total_memory, device=index)
            )
        if isinstance(self.source, Torchs):
            sharing.begin(torch, self.lock, self._move, self.source.switch)
        else:
            self.switch_on_again = history.again()
        try:
            self._begin_events(torch, writer, now)
        except BaseException:
            self._abandon()
            raise
        marks.listeners.append(self)
        _observe_oom(torch)
        history.hold(isinstance(self.source, Ours))
        atexit.register(self.stop_at_exit)

    def _begin_events(self, torch: Any, writer: EventWriter, now: int) -> None:
        with snapshots.uncollected():
            before = snapshots.take()
            self.source.begin(before)  # at once: events between the two are lost
        writer.state(before["segments"], now)
        if self.automatic:
            self.hooks = AutoMarks(self)
            self.hooks.install(torch)

    def follow(self) -> None:
        """Starts the thread that moves events to the file while the program runs."""
        thread = threading.Thread(target=self._follow, daemon=True, name="pyalloc-record")
        try:
            thread.start()
        except RuntimeError:  # the system allows no further threads
            self._abandon()
            raise
        self.thread = thread  # only now can it be joined

    def unfollow(self) -> None:
        """Stops that thread; the remaining events are moved at the end."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def is_over(self) -> bool:
        """Has a recording that began ended?  Then the file has its name, unless something went wrong."""
        return self.writer is None and not self.is_closing

    def is_at_work(self) -> bool:
        """Is this thread in the middle of moving events to the file?"""
        return bool(self.lock._is_owned())

    def _follow(self) -> None:
        """Moves events to the file while the program runs, so that even SIGKILL leaves a readable file."""
        while not self.ended.wait(_FLUSH_S):
            try:
                if self.source.in_background():
                    self.drain()
                self._write_out()
            except Exception as error:
                self._give_up(error)
                return

    def drain(self, *, at_mark: bool = False) -> None:
        """Moves events to the file."""
        with self.lock:
            if self.writer is not None:
                self.source.drain(self.pending, at_mark)

    def _move(self) -> None:
        """The same while the program waits: no exception may reach it."""
        try:
            self.drain(at_mark=True)
        except Exception as error:
            self._give_up(error)

    def tell_unexplained(self, error: Exception) -> None:
        """Reports, once, why there is no explanation: a full disk, or another pyalloc is installed than is running."""
        if not self.is_told:
            self.is_told = True
            print(
                f"pyalloc: out of memory, but finding out what held it failed ({type(error).__name__}: {error}); "
                f"once the program has ended, run: pyalloc report {console.quoted(self.path)}",
                file=sys.stderr,
            )

    def oom_path(self) -> Path:
        """The file that explains why memory ran out; a file that somebody else wrote since we began is kept."""
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
        """Like stop(), at exit: nobody could catch an exception, and Ctrl-C has nothing left to end."""
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
            if writer is None:  # it could not be written, which was reported
                return
            self.is_closing = True
            try:
                self.drain()
                if writer.gaps:
                    print(f"pyalloc: {self.path}: {caveats.gap(*writer.told_gap)}", file=sys.stderr)
            finally:
                try:
                    self._end()
                    writer.writer.close()
                finally:
                    self.is_closing = False
            if self.overwrites and self.told_oom is None:  # the overwritten one's
                recorded.beside(self.path).unlink(missing_ok=True)
            if self.is_extra and made()[0] == 0:  # such as a compiler that looked at the device
                self.path.unlink()

    def _give_up(self, error: Exception) -> None:
        """Ends the recording after an error; usually the disk is full."""
        with self.lock:  # two threads may find out at once
            if self.writer is not None:
                self._tell(error)
                self._end()

    def _tell(self, error: Exception) -> None:
        part = recorded.part(self.path)
        kept = f"; what was written so far is in {part}" * part.exists()
        print(f"pyalloc: the recording stopped: {error}{kept}", file=sys.stderr)

    def _abandon(self) -> None:
        """Ends a recording that has hardly begun, and removes its file."""
        self._end()
        recorded.part(self.path).unlink(missing_ok=True)

    def _end(self) -> None:
        """Ends history, ours and torch's, except for what the program itself asked for."""
        import torch

        self._detach()
        # At the end nobody is left to want it, and torch warns in other threads than the one that switched it on.
        if leaving.has_begun():
            return
        if isinstance(self.source, Torchs):
            sharing.hand_back(torch)
        elif torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(enabled=None)
            if self.switch_on_again is not None:
                self.switch_on_again()

    def _detach(self) -> None:
        """Stops listening to marks."""
        atexit.unregister(self.stop_at_exit)
        history.hold(False)
        sharing.leave()
        if self.hooks is not None:
            self.hooks.remove()
        self.writer = None
        if self in marks.listeners:
            marks.listeners.remove(self)
        _active.let_go(self)


def stop_at_exit() -> None:
    """Ends the current recording, if there is one."""
    recorder = _active.recorder
    if recorder is not None:
        recorder.stop_at_exit()


def _forget_in_child() -> None:
    """A forked process has neither the thread nor the file."""
    if _active.recorder is not None:
        _active.recorder._detach()


os.register_at_fork(after_in_child=_forget_in_child)


def _observe_oom(torch: Any) -> None:
    """Writes an explanation beside the trace when memory runs out, before the error reaches the program."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or _active.observes_oom:
        return

    def observe(device: int, asked: int, allocated: int, free: int) -> None:
        begin, recorder = time.monotonic(), _active.recorder
        if recorder is None or begin < recorder.explain_from:
            return
        try:
            dump_oom(recorder, device, asked)
        except Exception as error:  # the program's own matters more
            recorder.tell_unexplained(error)
        end = time.monotonic()
        recorder.explain_from = end + _EXPLAIN_REST * (end - begin)

    attach(observe)
    _active.observes_oom = True


def dump_oom(recorder: Recorder, device: int, asked: int) -> Path:
    """Writes `<trace>.oom.txt`: the request, who held the memory, and why it did not fit; overwrites an earlier one."""
    from pyalloc import trace
    from pyalloc.report import text

    part = recorder.flush()
    analysis = trace.analyse(part, device=device)
    path = recorder.oom_path()
    why = text.explain_oom(analysis, device, asked, recorder.path)
    files.write(path, f"{why}\n".encode())
    if recorder.told_oom is None:
        recorder.told_oom = path
        print(f"pyalloc: out of memory; explained in {path}", file=sys.stderr)
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

    Works with pyalloc and with torch's own allocator, whose memory history it uses.  The program may use that history
    at the same time (docs/parity.md says what it sees).

    Args:
        path: the file to write; it is called `<path>.part` until the recording ends.
        stacks: "python", "all" (also C++ frames, slower) or "none", which leaves out the command line too.
        automatic: use hooks to mark forward, backward and optimizer phases, steps, modules and tensors' categories.
        force: overwrite an existing file.

    Yields:
        The recording.  Its flush() writes what happened so far to the file and returns the file's current name.

    Raises:
        UsageError: the file exists or is a folder, a device or a pipe, another recording is running, stacks is none of
            the three, or CUDA is not available.
        TraceError: the file cannot be created.
        TypeError: path is not a path.
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
        raise UsageError(
            "there is no CUDA device to record; without one, use: pyalloc dryrun --record"
        )
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
    _check_free()
    check_stacks(stacks)
    recorded.check_name(path)
    for old in (path, recorded.part(path), recorded.beside(path)):
        if old.exists() and not force:
            raise UsageError(
                f"{old} already exists{recorded.cut_off(old)}; force=True overwrites it"
            )


def _check_free() -> None:
    path = active_path()
    if path is not None:
        raise _already(path)


def _already(path: Path) -> UsageError:
    return UsageError(
        f"already recording to {path}; a process makes one recording at a time: let that one end first, or start the "
        "program without --record"
    )


def check_stacks(stacks: str) -> None:
    """Is it one of the choices?

    Raises:
        UsageError: it is not.
    """
    if stacks not in STACK_CHOICES:
        raise UsageError(f"stacks must be one of {', '.join(STACK_CHOICES)}, not {stacks!r}")
