"""`pyalloc attach` where nothing can be begun, and what it does to the process that it asks."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterator
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dry_support import PATIENCE_S

from pyalloc import attached, cli, debugger, live, mainthread, processes, recording
from pyalloc._bootstrap import injected, leaving
from pyalloc.errors import UsageError

PYTHON = (sys.executable, "-c", "input(), print(flush=True), input()")


@contextlib.contextmanager
def process(*words: str) -> Iterator[int]:
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()  # it has begun
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """By a command that fails."""
    assert cli.main(["attach", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_name_that_the_kernel_cut_within_a_character_is_no_error(tmp_path: Path) -> None:
    """It keeps 15 bytes of a program's."""
    program = tmp_path / ("ü" * 10)
    program.symlink_to(shutil.which("cat") or "")
    with process(str(program)) as pid:
        assert processes.find(pid).pid == pid


def test_processes_that_the_system_hides_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid=1 has the folders of others, and lets nobody else look into them."""
    read = Path.read_text

    def read_own(path: Path, *given: object, **named: object) -> str:
        if path.parts[:3] != ("/", "proc", str(os.getpid())):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return read(path, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_own)
    assert processes.with_torch_below(os.getpid()) == []
    with pytest.raises(UsageError, match="process 1 belongs to another user"):
        processes.find(1)


def test_a_process_that_proc_does_not_have_may_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc mounted with hidepid=2 has none of others; a chroot may have no /proc."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "self").mkdir()
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    with pytest.raises(UsageError, match=f"there is no process {2**22 + 1}$"):
        processes.find(2**22 + 1)
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(UsageError, match="process 1 belongs to another user"):
        processes.find(1)
    (tmp_path / "self").rmdir()
    with pytest.raises(UsageError, match="cannot be told: /proc is not mounted here"):
        live.ask(1)


def test_what_is_no_python_with_torch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with process("cat") as pid:
        assert f"process {pid} (cat) is not Python with torch; attach to" in said(capsys, str(pid))
        os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + PATIENCE_S
        while processes._status(pid)["State"][0] != "T" and time.monotonic() < end:
            time.sleep(0.01)
        assert f"kill -CONT {pid}" in said(capsys, str(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert f"process {pid} has ended" in said(capsys, str(pid))
    assert f"there is no process {pid}" in said(capsys, str(pid))
    with process(*PYTHON) as pid:
        found = said(capsys, str(pid))
        assert "has not loaded torch; attach to" in found and "`pyalloc run --record" in found
        assert f"process {pid} is not recorded" in said(capsys, str(pid), "--stop")
    assert "is this command itself" in said(capsys, str(os.getpid()))
    assert os.listdir() == []


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for another program, for nothing was mapped into it any more."""
    monkeypatch.setattr(processes, "_check_there", lambda *_: None)
    with process("cat") as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(UsageError, match=f"process {pid} has ended$"):
            processes.find(pid)


def test_a_thread_is_told_by_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert f"pyalloc attach {os.getpid()}" in said(capsys, str(thread.native_id))
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["/usr/lib/libpython3.9.so.1.0"], "runs Python 3.9, and pyalloc needs 3.10 or newer"),
        (["/usr/lib/libpython3.12.so.1.0"], "has not loaded torch"),
    ],
)
def test_a_python_is_known_by_its_files(
    files: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_offers", lambda file: "libpython" in file.name)
    with pytest.raises(UsageError, match=words):
        processes.check_python(processes.Process(os.getpid(), "train", frozenset(files)))


def test_of_a_launcher_the_programs_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those it started, and what these started."""
    monkeypatch.setattr(processes, "_TORCH", processes.re.compile("/libc[.-]"))  # stands in
    with process("sh", "-c", "sh -c 'cat; true'; true") as pid:
        first, second = processes.with_torch_below(pid)
        assert second.command == "cat"
        found = said(capsys, str(pid))
        assert f"these have torch: pyalloc attach {first.pid} # sh -c" in found
        assert f"pyalloc attach {second.pid} # cat" in found


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_process_of_another_user_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with process("setpriv", "--reuid=65534", "--clear-groups", "cat") as pid:
        assert "belongs to nobody" in said(capsys, str(pid))
        for command in ("stats", "live"):  # to attach to it, which they said, would be refused
            assert cli.main([command, str(pid)]) == 2
            told = capsys.readouterr().err
            assert told.split(": ", 1)[1] == (
                f"process {pid} belongs to nobody; run this as nobody, not as another user\n"
            )


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs leave to make a namespace",
)
def test_a_process_of_a_container_is_told_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    with process("unshare", "-m", "cat") as pid:
        assert "inside of it (docker exec" in said(capsys, str(pid))


# ---- gdb ----


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[processes.Process]:
    """A process that seems to have torch."""
    monkeypatch.setattr(processes, "_TORCH", processes.re.compile("python"))
    with process(*PYTHON) as pid:
        yield processes.find(pid)


def fake_gdb(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "gdb"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_without_gdb_it_is_said_what_to_install(
    python: processes.Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "apt install gdb" in said(capsys, str(python.pid))


@pytest.mark.parametrize(
    ("scope", "words"),
    [("1", "sysctl kernel.yama.ptrace_scope=0"), ("3", "scope is 3"), ("0", "SYS_PTRACE")],
)
def test_what_keeps_gdb_out_is_told(
    scope: str,
    words: str,
    python: processes.Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "scope").write_text(scope + "\n")
    monkeypatch.setattr(debugger, "_SCOPE", tmp_path / "scope")
    fake_gdb(tmp_path, "echo 'ptrace: Operation not permitted.'", monkeypatch)
    found = said(capsys, str(python.pid))
    assert words in found and "`pyalloc run`, which needs no debugger" in found


def test_what_else_gdb_says_is_passed_on(
    python: processes.Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_gdb(tmp_path, "echo 'No symbol \"mmap\" in current context.'", monkeypatch)
    assert 'the last it said: No symbol "mmap"' in said(capsys, str(python.pid))
    with monkeypatch.context() as patch:
        patch.setattr(processes, "tracer", lambda _pid: 77)
        assert "held by another debugger (process 77)" in said(capsys, str(python.pid))
    fake_gdb(tmp_path, f"kill -9 {python.pid}; echo gone", monkeypatch)
    is_there, looks = processes.is_there, []

    def late(pid: int) -> bool:
        looks.append(pid)
        return len(looks) < 3 or is_there(pid)

    monkeypatch.setattr(processes, "is_there", late)  # what ends takes its time
    assert f"process {python.pid} has ended meanwhile" in said(capsys, str(python.pid))


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
def test_gdb_brings_the_question_in_and_an_answer_out(
    python: processes.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python has no torch, which was only made to seem so."""
    found = said(capsys, str(python.pid))
    assert f"process {python.pid}: it has not imported torch" in found
    assert processes.is_there(python.pid)


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
@pytest.mark.parametrize(
    "wait",
    [
        "t = threading.Thread(target=input); t.start(); t.join()",
        "lock.acquire()",
        "queue.SimpleQueue().get()",
    ],
)
def test_gdb_comes_in_while_the_main_thread_waits_for_another(
    wait: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pythons differ in what they wait by: 3.13 has no lock behind join(), 3.14 none of that kind behind a lock."""
    monkeypatch.setattr(processes, "_TORCH", processes.re.compile("python"))
    source = "import queue, threading; lock = threading.Lock(); lock.acquire(); input(); print(flush=True); "
    with process(sys.executable, "-c", source + wait) as pid:
        found = said(capsys, str(pid), "--wait", "5m")
    assert f"process {pid}: it has not imported torch" in found


def test_what_is_put_into_a_process_calls_nobody_else(tmp_path: Path) -> None:
    """Who attaches has given up, or is another user: the text does nothing, and says nothing."""
    debugger._lay_down(tmp_path / "text", str(tmp_path / "nobody"))
    text = (tmp_path / "text").read_text().rstrip("\0")
    names = (
        f"before = None\nbefore = set(globals())\nexec({text!r})\nassert set(globals()) == before"
    )
    done = subprocess.run(
        [sys.executable, "-c", names], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_put_into_a_process_tells_nothing_to_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        monkeypatch.setattr(injected.os, "getuid", lambda: -1)
        injected._call_back(str(tmp_path / "s"))
        with listener.accept()[0] as connection:
            assert connection.recv(100) == b""


def test_pyalloc_is_loaded_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected._load(str(tmp_path))  # there is one: whatever lies in that folder
    monkeypatch.delitem(sys.modules, "pyalloc")
    with pytest.raises(FileNotFoundError):
        injected._load(str(tmp_path))
    assert "pyalloc" not in sys.modules


def test_nobody_but_the_process_calls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getpid(), os.getuid()
    closed: list[tuple[int, int]] = []
    coming = [
        SimpleNamespace(peer=peer, close=lambda peer=peer: closed.append(peer))
        for peer in ((me[0] + 1, me[1]), (me[0], me[1] + 1), me)
    ]
    listener = SimpleNamespace(accept=lambda: (coming.pop(0), None))
    monkeypatch.setattr(debugger, "peer_of", lambda connection: connection.peer)
    asked = processes.Process(me[0], "python", frozenset())
    found = debugger._awaited("gdb", asked, tmp_path, listener, PATIENCE_S, print)  # type: ignore[arg-type]
    assert found.peer == me and me not in closed and len(closed) == 2  # type: ignore[attr-defined]


# ---- what is begun and ended there ----


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
    assert "this process is not recorded: [Errno 28] the disk" in capsys.readouterr().err
    assert attached.state() is None
    why = "its recording to out.pya ended by itself: [Errno 28] the disk is full"
    assert attached.answer({"attach": "end"}) == {"error": why}
    assert attached.answer({"attach": "end"}) == {"error": "it is not recorded"}


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
    """What it returns, or raises, in another thread."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(call())  # type: ignore[operator]
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # Python code, between whose steps the call comes
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
    assert f"is not in {tmp_path}/pyalloc any more" in told and "start the program again" in told
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
    """A process may be attached to again and again, and each recording holds all names in its file."""
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
        while not attached._is_idle():
            time.sleep(0.01)
        found.append(mainthread.run(lambda: seen.append(1), within_s, lambda: is_idle))
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
    assert live.request(service, {"attach": "end"}, PATIENCE_S) == {"error": "it is not recorded"}
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


@pytest.mark.parametrize(("n", "is_cut"), [(50, False), (51, True)])
def test_a_long_command_line_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, is_cut: bool
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_text("x" * n + "\0")
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    assert processes.command(7) == ("x" * 49 + "…" if is_cut else "x" * n)


def test_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.pya.part").symlink_to(tmp_path / "nowhere")
    (tmp_path / "old.pya").write_text("old")
    pid = str(os.getppid())
    assert "exists" in said(capsys, pid, "-o", "old.pya")
    assert "there is no folder" in said(capsys, pid, "-o", "none/out.pya")
    assert "without -o and --duration" in said(capsys, pid, "--stop", "-o", "new.pya")
    for wrong in ("soon", "0s", "-1s", "8000h"):
        with pytest.raises(SystemExit):
            cli.main(["attach", pid, f"--duration={wrong}"])
        assert "is no time like 60s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_calls_that_wait_have_the_kernels_numbers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header} here")
    known = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", Path(header).read_text()))
    calls = processes._WAITS[machine] | {processes._FUTEX[machine]: "futex"}
    assert {name: int(known[name]) for name in calls.values()} == {
        name: number for number, name in calls.items()
    }


def test_a_debugger_is_for_the_processor_whose_registers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debugger.platform, "machine", lambda: "aarch64")
    with pytest.raises(UsageError, match="on x86-64 alone: start the program with `pyalloc run`"):
        debugger._gdb()
