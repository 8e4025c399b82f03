"""The answering side of `pyalloc attach`: a running process begins or ends a recording of itself.

The request comes over the process's live socket or from the debugger (_bootstrap/injected.py), in a thread of its own.
Nothing here may raise into the program.  The recording begins in the main thread, between two bytecodes, because events
between the look at what is in use and the first recorded event are lost.  If the main thread does not get there,
because it is in a long call into C, the recording begins in the asking thread.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyalloc import _core, live
from pyalloc._bootstrap import leaving
from pyalloc.common import processes
from pyalloc.errors import PyallocError, UsageError
from pyalloc.inside import devices, mainthread, recording

_MAIN_S = 5.0  # wait for the main thread this long
_TRIES = 50  # to end at a moment when the main thread is not writing
_NEEDED = ("torch.nn.modules.module", "torch.optim.optimizer")


@dataclass(eq=False)
class _Attached:
    """The recording that was requested from outside."""

    path: Path
    recorder: recording.Recorder | None = None  # None: CUDA is not yet in use
    end_s: float | None = None  # time.monotonic() when it ends by itself
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""


_lock = threading.RLock()  # among asking threads; the program's own threads never take it
_current: list[_Attached] = []  # one, or none


def _forget_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _current.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply: {"error": why not}, or the state of the recording afterwards."""
    try:
        with _lock:
            if request.get("attach") == "begin":
                return _begin(request)
            if request.get("attach") == "end":
                return _end()
        return {"error": "it runs another version of pyalloc and does not understand the request"}
    except PyallocError as error:
        return {"error": str(error)}
    except Exception as error:  # torch's, for example
        return {"error": f"{type(error).__name__}: {error}"}


def _is_over(attached: _Attached) -> bool:
    """Did it end by itself, or never begin?  Usually the disk was full, or the file existed."""
    return bool(attached.error) or (attached.recorder is not None and attached.recorder.is_over())


def state() -> dict[str, Any] | None:
    """The state of this process's recording, however it was begun; None if there is none."""
    for each in tuple(_current):
        if not _is_over(each):
            left = None if each.end_s is None else max(each.end_s - time.monotonic(), 0.0)
            return {"path": str(each.path), "waits": each.recorder is None, "left_s": left}
    path = recording.active_path()
    return None if path is None else {"path": str(path)}


# ---- begin ----


def _begin(request: dict[str, Any]) -> dict[str, Any]:
    torch = _torch()
    _check_free()
    path, stacks, force = Path(request["path"]), str(request["stacks"]), bool(request["force"])
    recording.check(path, stacks, force=force)
    for name in _NEEDED:
        importlib.import_module(name)
    recorder = recording.Recorder(path, stacks, bool(request["marks"]), overwrites=force)
    attached = _Attached(path)
    in_main = True
    if torch.cuda.is_initialized():
        in_main = _start(attached, recorder)
        _current.append(attached)
    else:
        _current.append(attached)
        torch.cuda._lazy_call(lambda: _start_with_cuda(attached, recorder))
    _end_after(attached, request["duration_s"])
    live.serve()
    return {**_told(torch, attached), "in_main": in_main}


def _check_free() -> None:
    _current[:] = [each for each in _current if not _is_over(each)]
    for each in _current:
        waits = "will already be recorded once it uses CUDA,"
        what = waits if each.recorder is None else "is already being recorded"
        raise UsageError(
            f"it {what} to {each.path}; to end that: pyalloc attach {os.getpid()} --stop"
        )
    path = recording.active_path()
    if path is not None:
        raise UsageError(
            f"it is already being recorded to {path}, at the request of its program or `pyalloc run --record`; "
            "you can read what is there so far at any time"
        )


def _torch() -> Any:
    if "torch" not in sys.modules:
        raise UsageError(
            "it has not imported torch, so there is no CUDA memory to record; attach once it has, or start it with "
            "`pyalloc run --record out.pya`"
        )
    torch = importlib.import_module("torch")  # waits for an import in progress
    if torch.version.cuda is None:
        raise UsageError("its torch was built without CUDA, so there is nothing to record")
    return torch


def _start(attached: _Attached, recorder: recording.Recorder) -> bool:
    """Did it begin in the main thread?"""
    in_main = mainthread.run(recorder.begin, _MAIN_S, _is_idle)
    if not in_main:
        recorder.begin()
    _follow(attached, recorder)
    return in_main


def _is_idle() -> bool:
    """Does the main thread wait for something outside of the process?"""
    return processes.doing(os.getpid())[0] in processes.WAITS


def _follow(attached: _Attached, recorder: recording.Recorder) -> None:
    recorder.follow()
    attached.recorder = recorder
    leaving.before(recording.stop_at_exit)


def _start_with_cuda(attached: _Attached, recorder: recording.Recorder) -> None:
    """Starts it when CUDA is first used, in the thread that does so."""
    if attached not in _current or attached.recorder is not None:
        return
    try:
        recorder.begin()
        _follow(attached, recorder)
        if attached.ended.is_set():  # meanwhile, by who found no recorder yet
            recorder.stop()
    except Exception as error:
        attached.error = str(error)
        print(f"pyalloc: this process is not being recorded: {error}", file=sys.stderr)


def _end_after(attached: _Attached, duration_s: float | None) -> None:
    if duration_s is None:
        return

    def wait() -> None:
        if not attached.ended.wait(duration_s):
            with _lock, contextlib.suppress(Exception):  # the recording itself reports errors
                _stop(attached)

    attached.end_s = time.monotonic() + duration_s
    threading.Thread(target=wait, daemon=True, name="pyalloc-attached").start()


def _told(torch: Any, attached: _Attached) -> dict[str, Any]:
    return {
        "path": str(attached.path),
        "waits": attached.recorder is None,
        "allocator": "pyalloc" if _core.is_created() else torch.cuda.get_allocator_backend(),
        "bytes": sum(map(torch.cuda.memory_allocated, devices.in_use(torch))),
    }


# ---- end ----


def _end() -> dict[str, Any]:
    if not _current:
        path = recording.active_path()
        if path is not None:
            raise UsageError(
                f"its recording to {path} was started by its program or `pyalloc run --record`, not by pyalloc "
                "attach, so it ends with the program; you can read what is there so far at any time"
            )
        raise UsageError("it is not being recorded")
    attached = _current[0]
    if _is_over(attached):
        _current.remove(attached)
        why = attached.error or "the reason is on its standard error"
        raise UsageError(f"its recording to {attached.path} ended early: {why}")
    _stop(attached)
    return {"path": str(attached.path), "waits": attached.recorder is None}


def _stop(attached: _Attached) -> None:
    if attached not in _current:
        return
    attached.ended.set()  # first: it may begin at this moment
    if attached.recorder is not None:
        _stop_recorder(attached.recorder)
    _current.remove(attached)


def _stop_recorder(recorder: recording.Recorder) -> None:
    """Stops it in the main thread, where it began, as part of torch's history belongs to that thread; else here."""
    recorder.unfollow()

    def stop() -> None:
        # Otherwise the main thread is writing, and the same events would be written twice.
        if not recorder.is_at_work():
            recorder.stop()

    for _ in range(_TRIES):
        if not mainthread.run(stop, _MAIN_S, _is_idle):
            break
        if recorder.writer is None:
            return
        time.sleep(0.01)
    recorder.stop()
