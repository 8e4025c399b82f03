"""Within a process that is attached to: recordings that begin and end there, calls of its main thread, its service."""

from __future__ import annotations

import errno
import functools
import gc
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dry_support import PATIENCE_S, wait_until

from pyalloc import attached, live, mainthread, recording
from pyalloc._bootstrap import injected, leaving
from pyalloc.errors import UsageError


def waiting(error: str = "", end_s: float | None = None) -> attached._Attached:
    """For CUDA, as the only one."""
    each = attached._Attached(Path("out.pya"), error=error, end_s=end_s)
    attached._current[:] = [each]
    return each


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    attached._current.clear()


def test_what_was_ended_before_cuda_is_used_is_not_begun() -> None:
    recorder = SimpleNamespace(begin=lambda: pytest.fail("begun"))
    each = waiting(end_s=0.0)
    assert attached.state() == {"path": "out.pya", "waits": True, "left_s": 0.0}
    assert attached.answer({"attach": "end"}) == {"path": "out.pya", "waits": True}
    assert each.ended.is_set()  # nobody waits for its time any more
    attached._start_with_cuda(each, recorder)  # type: ignore[arg-type]
    assert not each.error


def test_what_could_not_be_begun_is_told_to_who_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    attached._start_with_cuda(waiting(), SimpleNamespace(begin=begin))  # type: ignore[arg-type]
    assert "this process is not being recorded: [Errno 28] the disk" in capsys.readouterr().err
    assert attached.state() is None
    why = "its recording to out.pya ended early: [Errno 28] the disk is full"
    assert attached.answer({"attach": "end"}) == {"error": why}
    assert attached.answer({"attach": "end"}) == {"error": "it is not being recorded"}


def test_a_forked_process_has_no_recording_of_its_parents() -> None:
    waiting()
    attached._forget_in_child()
    assert attached.state() is None


def test_a_recorder_that_is_writing_is_not_stopped_in_the_middle() -> None:
    done: list[str] = []

    class Recorder:
        writer: object = "open"

        def unfollow(self) -> None:
            done.append("unfollow")

        def is_at_work(self) -> bool:
            done.append("look")
            return len(done) < 4

        def stop(self) -> None:
            done.append("stop")
            self.writer = None

    attached._stop_recorder(Recorder())  # type: ignore[arg-type]
    assert done == ["unfollow", "look", "look", "look", "stop"]


# ---- the main thread ----


def beside(call: object) -> list[object]:
    """What it returns or raises in another thread."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(call())  # type: ignore[operator]
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # Python code; the call comes between two of its steps
        pass
    return found


def test_a_process_whose_pyalloc_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = types.ModuleType("pyalloc")
    package.__file__ = str(tmp_path / "pyalloc" / "__init__.py")
    package.__path__ = [str(tmp_path / "pyalloc")]
    for name in [name for name in sys.modules if name.startswith("pyalloc.")]:
        monkeypatch.delitem(sys.modules, name)
    # An editable install has a finder that needs no folder of the package.
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder])
    monkeypatch.setitem(sys.modules, "pyalloc", package)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    told = injected._answer({"folder": str(tmp_path), "request": {}})["error"]
    assert f"is no longer in {tmp_path}/pyalloc," in told and "restart the program" in told
    (tmp_path / "pyalloc").mkdir()
    Path(package.__file__).touch()  # another version's, which lacks it
    assert "attached" in injected._answer({"folder": str(tmp_path), "request": {}})["error"]


def test_calls_come_to_the_main_thread() -> None:
    seen: list[object] = []
    assert beside(
        lambda: mainthread.run(lambda: seen.append(threading.current_thread()), PATIENCE_S)
    ) == [True]
    assert seen == [threading.main_thread()]
    assert mainthread.run(lambda: seen.append(1), 0) and seen[1:] == [1]
    (error,) = beside(lambda: mainthread.run(lambda: 1 / 0, PATIENCE_S))
    assert isinstance(error, ZeroDivisionError)


class Kept:
    """What a call holds."""

    def fail(self) -> None:
        raise ValueError

    def succeed(self) -> None:
        return


@pytest.mark.parametrize("how", ["succeed", "fail", "given up", "leaving"])
def test_what_was_called_is_let_go_of(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be attached to again and again, and each recording has all names in its file."""
    kept = Kept()
    known = weakref.ref(kept)
    if how == "leaving":
        calls: list[object] = []
        monkeypatch.setattr(leaving, "_calls", calls)
        monkeypatch.setattr(leaving, "_wrap", lambda: None)
        for _ in range(2):
            recorder: Any = SimpleNamespace(follow=kept.succeed)
            attached._follow(attached._Attached(Path("out.pya")), recorder)
        del recorder
        assert calls == [recording.stop_at_exit]
    elif how == "given up":
        monkeypatch.setattr(mainthread.ctypes.pythonapi, "Py_AddPendingCall", lambda *_: 0)
        assert beside(functools.partial(mainthread.run, kept.succeed, 0)) == [False]
    else:
        beside(functools.partial(mainthread.run, getattr(kept, how), PATIENCE_S))
    del kept
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_middle_of_a_call_is_the_programs(kind: type[BaseException]) -> None:
    def handle(number: int, _frame: object) -> None:
        raise kind(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(kind) as caught:
            (error,) = beside(
                lambda: mainthread.run(lambda: signal.raise_signal(signal.SIGINT), PATIENCE_S)
            )
            assert isinstance(error, InterruptedError)
            while True:  # it comes in a moment
                pass
        assert caught.value.args == (signal.SIGINT,)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_and_a_second_one_does_not() -> None:
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        with mainthread.interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert len(seen) == 1 and signal.getsignal(signal.SIGINT) is handle
        with mainthread.interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert len(seen) == 2
        with mainthread.interrupts_wait():
            pass
        assert len(seen) == 3
        # Only the main thread runs handlers.
        assert beside(lambda: mainthread.interrupts_wait().__enter__()) == [None]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with mainthread.interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("within_s", "is_idle"), [(0.1, False), (PATIENCE_S, True)])
def test_a_main_thread_that_waits_is_given_up_and_not_called_later(
    within_s: float, is_idle: bool
) -> None:
    seen: list[int] = []
    found: list[bool] = []
    ours, its = os.pipe()

    def work() -> None:
        try:
            wait_until(attached._is_idle)
            found.append(mainthread.run(lambda: seen.append(1), within_s, lambda: is_idle))
        finally:
            os.write(its, b"x")

    thread = threading.Thread(target=work)
    thread.start()
    os.read(ours, 1)
    thread.join()
    os.close(ours)
    os.close(its)
    assert found == [False] and seen == []


# ---- the socket ----


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process listens, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        assert live.serve() == live.serve()
        yield os.getpid()


def test_questions_over_the_socket_are_answered(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live.request(service, {"attach": "end"}, PATIENCE_S) == {
        "error": "it is not being recorded"
    }
    found = live.request(service, {"attach": "fly"}, PATIENCE_S)
    assert found is not None and "another version" in found["error"]
    assert live.ask(service)["recording"] is None
    monkeypatch.setattr(live, "peer_of", lambda _connection: (1, os.getuid() + 1))
    found = live.request(service, {"attach": "end"}, PATIENCE_S)
    assert found == {"error": "it belongs to another user"}
    live.socket_path(service).unlink()
    assert live.request(service, {"attach": "end"}, PATIENCE_S) is None
    assert live.serve() is not None and live.socket_path(service).exists()  # swept away


def test_an_older_service_is_told_by_its_answer(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_attend", lambda *_: live.figures())
    with pytest.raises(UsageError, match="another version of pyalloc"):
        live.request(service, {"attach": "end"}, PATIENCE_S)


def test_who_waits_no_longer_is_not_answered(service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(attached, "answer", asked.append)
    ours, its = socket.socketpair()
    with ours, its:
        ours.sendall(json.dumps({"attach": "begin"}).encode() + b"\n")
        ours.close()
        with pytest.raises(BrokenPipeError):
            live._attend(its, its.recv(1000))
    assert asked == []


def test_a_service_that_does_not_come_to_it_is_told(service: int) -> None:
    with attached._lock, pytest.raises(UsageError, match=r"has not answered .* --wait 300"):
        live.request(service, {"attach": "end"}, 0.1)


# ---- the command ----
