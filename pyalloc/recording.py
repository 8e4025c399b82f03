"""Recording: what this process asks of its CUDA memory goes to a trace file, with stacks, steps, phases, categories.

torch's own memory history is the source, whichever allocator is active (pyalloc answers it too); marks are merged in by
time.  The history is moved to the file as it grows, so that memory stays bounded.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pyalloc import _core, marks
from pyalloc.convert import EventWriter, Mark
from pyalloc.errors import UsageError

PATH = "PYALLOC_RECORD"  # environment: record every process that uses CUDA to this file
STACKS = "PYALLOC_RECORD_STACKS"  # python, all (C++ too) or none
MARKS = "PYALLOC_RECORD_MARKS"  # "0": no automatic phases, steps and categories
STACK_CHOICES = ("python", "all", "none")
_MAX_ENTRIES = 10_000_000
_DRAIN_EVENTS = 200_000  # moved to the file when this many are waiting
_CHECK_MARKS = 256  # how often that is looked at


@dataclass
class _Active:
    """The one recording of this process."""

    recorder: Recorder | None = None


_active = _Active()


@dataclass
class Recorder:
    """One recording; `record()` and `pyalloc run --record` make them."""

    path: Path
    stacks: str = "python"
    automatic: bool = True
    writer: EventWriter | None = None
    pending: list[Mark] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)
    n_marks: int = 0
    pid: int = field(default_factory=os.getpid)
    hooks: Any = None

    # ---- marks ----

    def add(self, mark: Mark) -> None:
        """Remembers a mark until the next move to the file."""
        self.pending.append(mark)
        self.n_marks += 1
        if self.n_marks % _CHECK_MARKS == 0:
            self.drain_if_long()

    def on_step(self, number: int) -> None:
        """A step begins."""
        self.add(Mark(time.time_ns(), "step", "step", arg=number))
        self.drain_if_long()

    def on_phase(self, name: str, begins: bool) -> None:
        """A phase begins or ends."""
        self.add(Mark(time.time_ns(), "phase_begin" if begins else "phase_end", name))

    def category(self, address: int, name: str) -> None:
        """The block at this address holds parameters, gradients or the like."""
        self.pending.append(Mark(time.time_ns(), "category", name, addr=address))

    # ---- life ----

    def start(self) -> None:
        """Begins to record; CUDA must be up."""
        import torch

        self.writer = EventWriter(_core.TraceWriter(self.path))
        now = time.time_ns()
        for text in _notes(torch):
            self.writer.mark(Mark(now, "user", text))
        for index in range(torch.cuda.device_count()):
            properties: Any = torch.cuda.get_device_properties(index)
            self.writer.mark(
                Mark(now, "device", properties.name, bytes=properties.total_memory, device=index)
            )
        before = torch.cuda.memory._snapshot()
        self.writer.state(before["segments"], now)
        self._history(torch, clear=False)
        if self.automatic:
            from pyalloc.automarks import AutoMarks

            self.hooks = AutoMarks(self)
            self.hooks.install(torch)
        marks.listeners.append(self)
        _observe_oom(torch, self)
        _active.recorder = self
        atexit.register(self.stop)

    def _history(self, torch: Any, *, clear: bool) -> None:
        function = torch.cuda.memory._record_memory_history
        keywords: dict[str, Any] = {
            "enabled": "all",
            "context": None if self.stacks == "none" else "alloc",
            "stacks": "all" if self.stacks == "all" else "python",
            "max_entries": _MAX_ENTRIES,
        }
        if clear and "clear_history" in inspect.signature(_unwrapped(function)).parameters:
            keywords["clear_history"] = True
        elif clear:
            function(enabled=None)
        function(**keywords)

    def drain_if_long(self) -> None:
        """Moves the history to the file if much of it waits."""
        import torch

        stats = torch.cuda.memory_stats()
        made = stats.get("allocation.all.allocated", 0) + stats.get("allocation.all.freed", 0)
        if made * 1.5 - self._written() > _DRAIN_EVENTS:
            self.drain()

    def _written(self) -> int:
        return self.writer.n_events if self.writer is not None else 0

    def drain(self) -> None:
        """Moves the history to the file and forgets it."""
        import torch

        with self.lock:
            if self.writer is None:
                return
            snapshot = torch.cuda.memory._snapshot()
            self._history(torch, clear=True)
            pending, self.pending = self.pending, []
            pending.sort(key=lambda mark: mark.time_ns)
            traces = [
                [entry for entry in trace if entry["action"] != "snapshot"]
                for trace in snapshot["device_traces"]
            ]
            self.writer.merged(traces, pending)

    def flush(self) -> Path:
        """Everything so far is in the file, which is not whole yet: its name for the time being."""
        self.drain()
        with self.lock:
            if self.writer is not None:
                self.writer.writer.flush()
        return self.path.with_name(self.path.name + ".part")

    def stop(self) -> None:
        """Ends the recording; the file gets its name."""
        if self.writer is None or os.getpid() != self.pid:
            return
        import torch

        if self.hooks is not None:
            self.hooks.categorise()
            self.hooks.remove()
        self.drain()
        with self.lock:
            writer, self.writer = self.writer, None
        torch.cuda.memory._record_memory_history(enabled=None)
        writer.writer.close()
        if self in marks.listeners:
            marks.listeners.remove(self)
        if _active.recorder is self:
            _active.recorder = None
        atexit.unregister(self.stop)


def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(function)


def _notes(torch: Any) -> Iterator[str]:
    yield f"torch={torch.__version__}"
    yield f"allocator={'pyalloc' if _core.is_created() else torch.cuda.get_allocator_backend()}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYALLOC_CONF"):
        if os.environ.get(name):
            yield f"{name}={os.environ[name]}"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if os.environ.get(name):
            yield f"{name.lower()}={os.environ[name]}"
    yield f"pid={os.getpid()}"
    yield f"command={' '.join(getattr(sys, 'orig_argv', sys.argv))}"


def _observe_oom(torch: Any, recorder: Recorder) -> None:
    """On out of memory: an explanation beside the trace, before the error reaches the program."""
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return

    def observe(device: int, asked: int, allocated: int, free: int) -> None:
        if _active.recorder is not recorder:
            return
        with contextlib.suppress(Exception):  # the program's own error matters more
            dump_oom(recorder, device, asked)

    attach(observe)


def dump_oom(recorder: Recorder, device: int, asked: int) -> Path:
    """Writes `<trace>.oom.txt`: what was asked, who held the memory, and why it did not fit."""
    from pyalloc import trace
    from pyalloc.report import text

    part = recorder.flush()
    analysis = trace.analyse(part, device=device)
    path = recorder.path.with_name(recorder.path.stem + ".oom.txt")
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text.explain_oom(analysis, device, asked, recorder.path) + "\n")
    temporary.replace(path)
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

    Works with torch's own allocator and with pyalloc.  While it runs, torch's memory history is in its hands.

    Args:
        path: the file to write; it has its name once the recording ended (`<path>.part` until then).
        stacks: "python", "all" (C++ frames too, slower) or "none".
        automatic: mark forward, backward and optimizer phases, steps, modules and tensors' categories by hooks.
        force: overwrite the file.

    Raises:
        UsageError: the file exists, a recording runs already, or CUDA is not available.
    """
    import torch

    target = Path(path)
    _check(target, stacks, force)
    if not torch.cuda.is_available():
        raise UsageError("there is no CUDA device to record; without one: pyalloc dryrun --record")
    torch.cuda.init()
    recorder = Recorder(target, stacks, automatic)
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop()


def _check(path: Path, stacks: str, force: bool) -> None:
    if _active.recorder is not None:
        raise UsageError(f"already recording to {_active.recorder.path}")
    if stacks not in STACK_CHOICES:
        raise UsageError(f"stacks is one of {', '.join(STACK_CHOICES)}, not {stacks!r}")
    if path.exists():
        if not force:
            raise UsageError(f"{path} exists; force=True overwrites it")
        path.unlink()


def prepare(path: Path, *, stacks: str, automatic: bool, force: bool) -> dict[str, str]:
    """Environment for processes that are to be recorded, for `pyalloc run` and `pyalloc dryrun`.

    Raises:
        UsageError: the file exists and force is not given.
    """
    if path.exists():
        if not force:
            raise UsageError(f"{path} exists; --force overwrites it")
        path.unlink()
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent}")
    return {PATH: str(path.absolute()), STACKS: stacks, MARKS: "1" if automatic else "0"}


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments `pyalloc run` and `pyalloc dryrun` share."""
    parser.add_argument(
        "--record", type=Path, metavar="OUT.pya", help="record memory to this trace file"
    )
    parser.add_argument(
        "--stacks", choices=STACK_CHOICES, default="python", help="stacks to record (python)"
    )
    parser.add_argument(
        "--no-marks", action="store_true", help="no automatic phases, steps and categories"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files")


def from_arguments(args: argparse.Namespace) -> dict[str, str]:
    """The environment that these arguments ask for."""
    if args.record is None:
        return {}
    return prepare(args.record, stacks=args.stacks, automatic=not args.no_marks, force=args.force)


def record_when_cuda_starts() -> None:
    """What the environment asks for, once torch starts CUDA in this process: others are not recorded."""
    from pyalloc.install import _after_import

    def register(torch: ModuleType | None = None) -> None:
        module: Any = sys.modules["torch"]
        module.cuda._lazy_call(_start_from_environment)

    if "torch" in sys.modules:
        register()
    else:
        _after_import("torch", register)


def _start_from_environment() -> None:
    if _active.recorder is not None:
        return
    path = _own_path(Path(os.environ[PATH]))
    recorder = Recorder(path, os.environ.get(STACKS, "python"), os.environ.get(MARKS, "1") == "1")
    try:
        recorder.start()
    except Exception as error:
        print(f"pyalloc: this process is not recorded: {error}", file=sys.stderr)


def _own_path(path: Path) -> Path:
    """One file for each rank; a second process without a rank gets its process number."""
    rank = os.environ.get("RANK")
    if rank is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    if path.exists() or path.with_name(path.name + ".part").exists():
        path = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    return path


def active() -> Recorder | None:
    """The recording that runs, if one does."""
    return _active.recorder
