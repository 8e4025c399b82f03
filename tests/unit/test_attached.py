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
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dry_support import PATIENCE_S, wait_until

from pyalloc import live
from pyalloc._bootstrap import injected, leaving
from pyalloc.errors import UsageError
from pyalloc.inside import attached, mainthread, recording


def waiting(error: str = "", end_s: float | None = None) -> attached._Attached:
    """For CUDA, as the only one."""
    each = attached._Attached(Path("out.pya"), error=error, end_s=end_s)
    attached._current[:] = [each]
    return each


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    attached._current.clear()


class Recorder:
    """Stands for recording.Recorder."""

    made: list[Recorder]

    def __init__(self, path: Path, *given: object, **named: object) -> None:
        self.path, self.given = path, (*given, named)
        self.done: list[str] = []
        self.writer: object = None
        self.made.append(self)

    def begin(self) -> None:
        self.done.append("begin")
        self.writer = "open"

    def follow(self) -> None:
        self.done.append("follow")

    def unfollow(self) -> None:
        self.done.append("unfollow")

    def is_at_work(self) -> bool:
        return False

    def is_over(self) -> bool:
        return self.writer is None

    def stop(self) -> None:
        self.done.append("stop")
        self.writer = None


class Cuda:
    """Stands for torch.cuda; has 6 bytes in use."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], object]] = []
        self.is_up = False

    def is_initialized(self) -> bool:
        return self.is_up

    def _lazy_call(self, call: Callable[[], object]) -> None:
        self.queued.append(call)

    def get_allocator_backend(self) -> str:
        return "native"

    def memory_allocated(self, device: int) -> int:
        return 2 * device

    def start(self) -> None:
        self.is_up = True
        for call in self.queued:
            call()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Of a torch that this process has imported."""
    found = Cuda()
    torch = SimpleNamespace(cuda=found, version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(attached, "_NEEDED", ())
    monkeypatch.setattr(attached.devices, "in_use", lambda torch: [1, 2] if found.is_up else [])
    monkeypatch.setattr(attached.live, "serve", lambda: None)
    monkeypatch.setattr(attached.leaving, "before", lambda call: None)
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    monkeypatch.setattr(recording, "Recorder", Recorder)
    return found


def begun(path: Path, **other: object) -> dict[str, Any]:
    """What the process answers to who wants to begin."""
    asked = {"stacks": "all", "marks": False, "force": True, "duration_s": None, **other}
    return attached.answer({"attach": "begin", "path": str(path), **asked})


def test_a_recording_begins_and_ends(cuda: Cuda, tmp_path: Path) -> None:
    cuda.is_up = True
    path = tmp_path / "out.pya"
    told = {"path": str(path), "waits": False, "allocator": "native", "bytes": 6, "in_main": True}
    assert begun(path) == told
    (recorder,) = Recorder.made
    assert recorder.given == ("all", False, {"overwrites": True})
    assert recorder.done == ["begin", "follow"]
    assert attached.state() == {"path": str(path), "waits": False, "left_s": None}
    how = f"to end that: pyalloc attach {os.getpid()} --stop"
    assert begun(path) == {"error": f"it is already being recorded to {path}; {how}"}
    assert attached.answer({"attach": "end"}) == {"path": str(path), "waits": False}
    assert recorder.done == ["begin", "follow", "unfollow", "stop"]
    assert attached.answer({"attach": "end"}) == {"error": "it is not being recorded"}
    assert begun(path) == told and attached.state() is not None
    Recorder.made[1].stop()  # by itself, as when the disk is full
    assert attached.state() is None
    assert begun(path) == told and len(Recorder.made) == 3


def test_a_recording_begins_once_cuda_is_used(cuda: Cuda, tmp_path: Path) -> None:
    path = tmp_path / "out.pya"
    found = begun(path)
    assert (found["waits"], found["bytes"]) == (True, 0)
    assert attached.state() == {"path": str(path), "waits": True, "left_s": None}
    error = begun(path)["error"]
    assert error.startswith(f"it will already be recorded once it uses CUDA, to {path};")
    cuda.start()
    (recorder,) = Recorder.made
    assert recorder.done == ["begin", "follow"]
    assert attached.state() == {"path": str(path), "waits": False, "left_s": None}
    cuda.start()  # torch drops its list; ours begins once all the same
    assert recorder.done == ["begin", "follow"]
    assert attached.answer({"attach": "end"})["waits"] is False


def test_a_recording_that_is_ended_while_it_begins_is_ended(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA comes up in the program's thread, which takes no lock of ours; who attached has changed his mind."""

    def begin_late(recorder: Recorder) -> None:
        assert "path" in attached.answer({"attach": "end"})
        recorder.writer = "open"

    monkeypatch.setattr(Recorder, "begin", begin_late)
    begun(tmp_path / "out.pya")
    cuda.start()
    assert Recorder.made[0].is_over() and attached.state() is None


def test_a_recording_ends_after_its_time(cuda: Cuda, tmp_path: Path) -> None:
    cuda.is_up = True
    begun(tmp_path / "1.pya", duration_s=1e-3)
    (each,) = attached._current
    assert each.ended.wait(PATIENCE_S)
    with attached._lock:  # who ended it has let go of it
        assert Recorder.made[0].done[-1] == "stop" and attached.state() is None
    begun(tmp_path / "2.pya", duration_s=PATIENCE_S)
    found = attached.state()
    assert found is not None and 0 < found["left_s"] <= PATIENCE_S
    (thread,) = (each for each in threading.enumerate() if each.name == "pyalloc-attached")
    ended = attached.answer({"attach": "end"})
    assert ended == {"path": str(tmp_path / "2.pya"), "waits": False}
    thread.join()  # it waits for that time no longer
    assert Recorder.made[1].done.count("stop") == 1

    waited: list[float] = []
    each = waiting()
    each.ended = SimpleNamespace(wait=lambda s: waited.append(s) or True)  # type: ignore[assignment]
    attached._end_after(each, 3.5)
    wait_until(lambda: waited)
    assert waited == [3.5]


def test_what_cannot_be_recorded_is_told(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.pya"
    path.touch()
    assert f"{path} already exists" in begun(path, force=False)["error"]
    assert "stacks must be one of" in begun(path, stacks="some")["error"]
    assert attached.answer({"attach": "begin"}) == {"error": "KeyError: 'path'"}
    sys.modules["torch"].version.cuda = None
    assert "its torch was built without CUDA" in begun(path)["error"]
    monkeypatch.delitem(sys.modules, "torch")
    assert "`pyalloc run --record out.pya`" in begun(path)["error"]
    assert attached.state() is None and Recorder.made == []


def test_a_forked_process_has_no_recording_of_its_parents(cuda: Cuda, tmp_path: Path) -> None:
    """Nor does it wait for a lock of the parent's: the thread that answered does not exist in the child."""
    begun(tmp_path / "out.pya")
    with attached._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of the test's own threads
        child = os.fork()
        if child == 0:
            found: list[object] = [attached.state()]
            answer = functools.partial(attached.answer, {"attach": "end"})
            thread = threading.Thread(target=lambda: found.append(answer()), daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
            cuda.start()
            found += Recorder.made[0].done
            os._exit(0 if found == [None, {"error": "it is not being recorded"}] else 1)
    assert os.waitpid(child, 0)[1] == 0


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
    waiting().recorder = SimpleNamespace(is_over=lambda: True)  # type: ignore[assignment]
    why = "its recording to out.pya ended early: the reason is on its standard error"
    assert attached.answer({"attach": "end"}) == {"error": why}


def test_a_main_thread_that_does_not_come_to_it_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time takes seconds.  Who asks stops the recorder then."""
    asked: list[object] = []
    done: list[str] = []
    monkeypatch.setattr(attached.mainthread, "run", lambda call, *_: bool(asked.append(call)))
    names = ("unfollow", "stop")
    calls = {name: lambda name=name: done.append(name) for name in names}
    attached._stop_recorder(SimpleNamespace(writer="open", **calls))  # type: ignore[arg-type]
    assert len(asked) == 1 and done == ["unfollow", "stop"]


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
    assert "pyalloc.inside" in injected._answer({"folder": str(tmp_path), "request": {}})["error"]


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


def test_a_service_answers_after_its_pyalloc_was_removed(run_python) -> None:  # type: ignore[no-untyped-def]
    """By pip, say: nothing but the modules that are loaded already is there any more."""
    program = """
    import os, sys
    from pyalloc import live

    class Gone:
        def find_spec(name, path, target=None):
            if name.startswith("pyalloc"):
                raise ModuleNotFoundError(name)

    assert live.serve() is not None
    sys.meta_path.insert(0, Gone)
    print(live.request(os.getpid(), {"attach": "end"}, 900), live.ask(os.getpid())["recording"])
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(program, env={"XDG_RUNTIME_DIR": folder})
    assert done.stdout == "{'error': 'it is not being recorded'} None\n"


def test_an_answer_of_somebody_else_is_not_taken(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders for temporary files are everybody's."""

    def ask_twice(words: str) -> None:
        for ask in (live.ask, lambda pid: live.request(pid, {"attach": "end"}, PATIENCE_S)):
            with pytest.raises(UsageError, match=words):
                ask(service)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lambda _path: SimpleNamespace(st_uid=os.getuid() + 1))
        ask_twice("belongs to another user and is not trusted")
    monkeypatch.setattr(live, "received", lambda _connection: b"{")
    monkeypatch.setattr("pyalloc.common.processes._ENDING_S", 0)  # no wait whether it ends
    with pytest.raises(UsageError, match=f"process {service} sent an answer that makes no sense"):
        live.request(service, {"attach": "end"}, PATIENCE_S)


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
