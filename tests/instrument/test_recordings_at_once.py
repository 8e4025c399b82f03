"""A recording's place in a program: one at a time, what it says when memory runs out, what is left of it."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from instrument.tools import MIB
from pyalloc import trace
from pyalloc.errors import UsageError
from pyalloc.inside import attached, recording

pytestmark = pytest.mark.torch


def _active(recorder: recording.Recorder) -> recording._Active:
    """As while it runs."""
    active = recording._Active()
    active.take(recorder)
    return active


def _observed() -> tuple[list[Any], SimpleNamespace]:
    """The observers called when memory runs out, and what torch is given for them."""
    observers: list[Any] = []
    attach = observers.append
    return observers, SimpleNamespace(
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attach)
    )


def test_programs_that_run_out_of_memory_all_the_time_are_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explaining reads the trace so far: after it took one second, it takes none of the next twenty."""
    observers, torch = _observed()
    recorder = recording.Recorder(tmp_path / "out.pya")
    now, explained = [100.0], []

    def explain(*arguments: object) -> None:
        explained.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(recording, "dump_oom", explain)
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recording, "_active", _active(recorder))
    recording._observe_oom(torch)
    for _ in range(300):
        observers[0](0, 1 << 20, 0, 0)
        now[0] += 0.1
    assert explained[0] == 100.0
    assert 2 <= len(explained) <= 3
    assert explained[1] >= 121.0


def test_out_of_memory_that_cannot_be_explained_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip replaced the running pyalloc, and the module that explains was not imported yet."""
    observers, torch = _observed()

    def explain(*arguments: object) -> None:
        raise ImportError("cannot import name 'analyse' from 'pyalloc.trace'")

    monkeypatch.setattr(recording, "dump_oom", explain)
    recorder = recording.Recorder(tmp_path / "out.pya")
    monkeypatch.setattr(recording, "_active", _active(recorder))
    recording._observe_oom(torch)
    for _ in range(3):
        recorder.explain_from = 0.0
        observers[0](0, 1 << 20, 0, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot import name 'analyse'" in line
    assert line.endswith(f"pyalloc report {tmp_path / 'out.pya'}")


def test_recordings_that_are_over_are_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps its out-of-memory observers for ever, and a program may record each of its requests."""
    observers, torch = _observed()
    active, told = recording._Active(), []
    monkeypatch.setattr(recording, "_active", active)
    monkeypatch.setattr(recording, "dump_oom", lambda recorder, *_: told.append(recorder.path.name))
    over = []
    for name in ("a.pya", "b.pya"):
        recorder = recording.Recorder(tmp_path / name)
        active.take(recorder)
        recording._observe_oom(torch)
        over.append(weakref.ref(recorder))
        for observe in observers:
            observe(0, 1 << 20, 0, 0)
        active.let_go(recorder)
    del recorder
    for observe in observers:
        observe(0, 1 << 20, 0, 0)
    gc.collect()
    assert told == ["a.pya", "b.pya"] and len(observers) == 1
    assert [each() for each in over] == [None, None]


def _begun(recorder: recording.Recorder) -> bool:
    """Did it begin?"""
    try:
        recorder.begin()
    except UsageError as error:
        assert "already recording to" in str(error)
        return False
    return True


def _begun_within(nth: int, first: recording.Recorder, second: recording.Recorder) -> list[bool]:
    """Did they begin?  The second tries before the nth line of what the first does; not at all if there is none."""
    n, found = 0, []

    def trace_line(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal n
        if frame.f_code.co_filename != recording.__file__:
            return None
        n += event == "line"
        if n == nth:
            sys.settrace(None)
            found.append(_begun(second))
        return trace_line

    sys.settrace(trace_line)
    try:
        is_first = _begun(first)
    finally:
        sys.settrace(None)
    return [is_first, *found]


def test_of_two_recordings_that_begin_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin in two threads, or the second in the middle of the first, as attached.py begins one."""
    monkeypatch.setattr(recording, "_active", recording._Active())
    monkeypatch.setattr(recording.Recorder, "_begin", lambda _recorder: None)
    outcomes = []
    while len(outcomes) == 0 or len(outcomes[-1]) == 2:
        both = [recording.Recorder(tmp_path / name) for name in ("1.pya", "2.pya")]
        outcomes.append(_begun_within(len(outcomes) + 1, *both))
        path = recording.active_path()
        assert outcomes[-1].count(True) == 1 and path == both[outcomes[-1].index(True)].path
        for each in both:
            each._detach()
    assert [True, False] in outcomes and [False, True] in outcomes


def test_a_recording_whose_thread_cannot_start_leaves_nothing(dry_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The system may allow no further threads.  The next recording is as good as any, also if what is left of the first
    ones goes while it runs."""
    dry_python(
        f"""
        import gc, os, threading, torch, pyalloc
        torch.cuda.init()
        start = threading.Thread.start

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refuse
        held = []
        for _ in range(2):
            try:
                with pyalloc.record({str(tmp_path / "out.pya")!r}):
                    raise SystemExit("it recorded")
            except RuntimeError as error:
                assert "start new thread" in str(error), error
                held.append(error)
            assert os.listdir({str(tmp_path)!r}) == [] and not torch._C._cuda_isHistoryEnabled()
        threading.Thread.start = start
        with pyalloc.record({str(tmp_path / "out.pya")!r}):
            held.clear()
            gc.collect()
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    assert trace.analyse(tmp_path / "out.pya").totals["peak_bytes"] == MIB


def test_a_recording_that_ends_while_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program, in another thread: it was reported as a recording to None, or not answered at all."""
    left: list[recording.Recorder | None] = []

    class Active:
        @property
        def recorder(self) -> recording.Recorder | None:
            return left.pop() if left else None

    monkeypatch.setattr(recording, "_active", Active())
    found = []
    for n_looks in (1, 2, 3):
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        found.append(attached.state())
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        found.append(attached.answer({"attach": "end"})["error"])
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        with pytest.raises(UsageError, match="already recording to "):
            recording.check(tmp_path / "out.pya", "none", force=False)
    states, errors = found[::2], found[1::2]
    assert states == [{"path": str(tmp_path / "own.pya")}] * 3
    assert all(f"its recording to {tmp_path / 'own.pya'} was started by" in each for each in errors)
