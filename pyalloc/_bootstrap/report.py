"""The memory figures of a process of `pyalloc dryrun`, written as JSON when it ends.

They are written at any end that Python notices.  os._exit() and Ctrl-C run no destructors, so this also writes the
counters of the host-memory runtime.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pyalloc._bootstrap import SPARE, answers, contents, leaving, sizes
from pyalloc._bootstrap.importing import after_import

_PEAKS = ("requested", "allocated", "reserved")  # of torch's figures, <name>_bytes.all.peak


@dataclass
class _Watch:
    """The error the program died of, and the peaks so far: a program may reset torch's own."""

    folder: str
    pid: int
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)
    error: str = ""
    limited: bool = False  # it ran out of memory at a limit, not at the device's size
    needed: int = 0  # bytes requested at the last out-of-memory error, including the refused ones
    wanted: int = 0  # devices that it needs, if it died because one does not exist


def watch(folder: str) -> None:
    """Writes torch.<pid>.json into the folder at exit, if the process used CUDA through torch."""
    state = _Watch(folder, os.getpid())
    atexit.register(_write, state)
    leaving.before(lambda: _write(state))
    os.register_at_fork(after_in_child=lambda: _begin_in_child(state))
    _note_uncaught(state)

    after_import("torch", lambda torch: _note_begin(torch, state))
    after_import("torch", lambda torch: _note_resets(torch, state))
    after_import("torch", lambda torch: _note_needs(torch, state))
    answers.give()


def _begin_in_child(state: _Watch) -> None:
    """Gives a forked child its own figures if its parent had not used the device; only then may the child use it."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        state.pid = os.getpid()


def _note_uncaught(state: _Watch) -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        reason = _out_of_memory(error) or error
        state.error = type(reason).__name__
        # Parts of both allocators' messages about a limit, and of pyalloc's about a pool's limit and `ulimit -v`.
        state.limited = any(
            text in str(reason)
            for text in (" allowed; ", "the pool is limited to ", "no address space left")
        )
        if "invalid device ordinal" in str(reason):
            state.wanted = _wanted_devices()
        shown(kind, error, trace)

    sys.excepthook = hook


def _wanted_devices() -> int:
    """A device for each rank that a launcher started on this node, or one more than there are."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    torch: Any = sys.modules["torch"]
    n_devices: int = torch.cuda.device_count()
    return max(n_devices + 1, int(ranks) if ranks.isdecimal() else 0)


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The torch.OutOfMemoryError among the error and its causes; None if there is none."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if type(error).__name__ == "OutOfMemoryError":
            return error
        seen.append(error)
        error = error.__cause__
    return None


def _note_peaks(torch: Any, state: _Watch) -> None:
    for device in range(torch.cuda.device_count()):
        try:
            stats = torch.cuda.memory_stats(device)
        except Exception:  # some pluggable allocators have no statistics
            continue
        peaks = state.peaks.setdefault(device, dict.fromkeys(_PEAKS, 0))
        for name in _PEAKS:
            peaks[name] = max(peaks[name], stats.get(f"{name}_bytes.all.peak", 0))
        peaks["ooms"] = max(peaks.get("ooms", 0), stats.get("num_ooms", 0))
        peaks["retries"] = max(peaks.get("retries", 0), stats.get("num_alloc_retries", 0))


def _note_begin(torch: Any, state: _Watch) -> None:
    """Leaves a file when the process begins to use the device: a killed process leaves nothing else."""

    def begin() -> None:
        mark = Path(state.folder) / f"begun.{os.getpid()}"
        with contextlib.suppress(OSError):
            try:
                mark.touch(0o600)
            except OSError:  # a full disk makes no file, but still renames one
                mark.with_name(SPARE).rename(mark)

    torch.cuda._lazy_call(begin)


def _note_resets(torch: Any, state: _Watch) -> None:
    """Notes peaks before torch.cuda or torch.accelerator resets them."""
    for name in ("cuda", "accelerator"):
        package: Any = getattr(torch, name, None)
        reset = getattr(package, "reset_peak_memory_stats", None)
        if reset is not None:
            package.reset_peak_memory_stats = _noting(reset, torch, state)
            package.memory.reset_peak_memory_stats = package.reset_peak_memory_stats


def _note_needs(torch: Any, state: _Watch) -> None:
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return

    def observe(device: int, asked: int, _allocated: int, _free: int) -> None:
        with contextlib.suppress(Exception):  # the program's own error matters more
            had = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
            state.needed = had + asked

    def start() -> None:
        with contextlib.suppress(RuntimeError):  # cudaMallocAsync has no observers
            attach(observe)

    torch.cuda._lazy_call(start)


def _noting(reset: Callable[..., None], torch: Any, state: _Watch) -> Callable[..., None]:
    @functools.wraps(reset)
    def reset_peak_memory_stats(*args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            _note_peaks(torch, state)
        reset(*args, **kwargs)

    return reset_peak_memory_stats


def _write(state: _Watch) -> None:
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    # A forked child inherits the registration, but not the right to use a device its parent used.
    if os.getpid() != state.pid or cuda is None:
        return
    if not (cuda.is_initialized() or state.wanted):
        return
    _note_peaks(torch, state)
    content = {
        "pid": state.pid,
        "torch": str(torch.__version__),
        "backend": str(cuda.get_allocator_backend()),
        "error": state.error,
        "limited": state.limited,
        "needed": state.needed,
        "wanted": state.wanted,
        **asdict(sizes.counted),
        **asdict(contents.reads),
        "unfollowed": not sizes.has_kernels(torch),
        "devices": state.peaks,
    }
    try:
        _write_file(Path(state.folder) / f"torch.{state.pid}.json", json.dumps(content))
        _write_counters()
    except OSError as error:  # a full disk
        begun = Path(state.folder) / f"begun.{state.pid}"
        # The folder is gone if `pyalloc dryrun` did not wait for this process before it printed its summary.
        with contextlib.suppress(OSError):
            begun.rename(begun.with_name(f"unwritten.{state.pid}.{error.errno}"))


def _write_file(final: Path, text: str) -> None:
    # Does not use pyalloc.common.files: the program may run in an environment without pyalloc.
    partial = final.with_suffix(".partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # the umask may have removed even the owner's rights
            file.write(text)
        partial.rename(final)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _write_counters() -> None:
    form = os.environ.get("PYALLOC_HOSTCUDA_COUNTERS", "")
    write = getattr(ctypes.CDLL(None, use_errno=True), "pya_hostcuda_write_counters", None)
    if form and write is not None and write(form.replace("%p", str(os.getpid())).encode()) != 0:
        raise OSError(ctypes.get_errno(), "the counters could not be written")
