"""`pyalloc attach` where nothing can be started, and what it does to the process that it asks."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dry_support import PATIENCE_S, wait_until

from pyalloc import cli, live
from pyalloc._bootstrap import injected
from pyalloc.common import processes
from pyalloc.errors import UsageError
from pyalloc.outside import debugger

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
    """Through a command that fails."""
    assert cli.main(["attach", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_name_that_the_kernel_cut_within_a_character_is_no_error(tmp_path: Path) -> None:
    """It keeps 15 bytes of a program's name."""
    program = tmp_path / ("ü" * 10)
    program.symlink_to(shutil.which("cat") or "")
    with process(str(program)) as pid:
        assert processes.find(pid).pid == pid


def test_processes_that_the_system_hides_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid=1 has the folders of others, but nobody else may look into them."""
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
    with pytest.raises(UsageError, match="because /proc is not mounted here"):
        live.ask(1)


def test_what_is_no_python_with_torch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with process("cat") as pid:
        assert f"process {pid} (cat) is not a Python process with torch; attach to" in said(
            capsys, str(pid)
        )
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: processes._status(pid)["State"][0] == "T")
        assert f"kill -CONT {pid}" in said(capsys, str(pid))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert f"process {pid} has ended" in said(capsys, str(pid))
    assert f"there is no process {pid}" in said(capsys, str(pid))
    with process(*PYTHON) as pid:
        found = said(capsys, str(pid))
        assert "has not loaded torch; attach to" in found and "`pyalloc run --record" in found
        assert f"process {pid} is not being recorded" in said(capsys, str(pid), "--stop")
    assert "is this command itself" in said(capsys, str(os.getpid()))
    assert os.listdir() == []


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for another program, because nothing was mapped into it any more."""
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
        (["/usr/lib/libpython3.9.so.1.0"], "runs Python 3.9, but pyalloc needs 3.10 or newer"),
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
    """Those it started, and those that they started."""
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
        for command in ("stats", "live"):  # they do not suggest `attach`, which would be refused
            assert cli.main([command, str(pid)]) == 2
            told = capsys.readouterr().err
            assert told.split(": ", 1)[1] == (
                f"process {pid} belongs to nobody; run this command as nobody\n"
            )


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs leave to make a namespace",
)
def test_a_process_of_a_container_is_told_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    with process("unshare", "-m", "cat") as pid:
        assert "inside that container (docker exec" in said(capsys, str(pid))


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
    assert 'its last line of output: No symbol "mmap"' in said(capsys, str(python.pid))
    with monkeypatch.context() as patch:
        patch.setattr(processes, "tracer", lambda _pid: 77)
        assert "another debugger (process 77) is attached" in said(capsys, str(python.pid))
    fake_gdb(tmp_path, f"kill -9 {python.pid}; echo gone", monkeypatch)
    is_there, looks = processes.is_there, []

    def late(pid: int) -> bool:
        looks.append(pid)
        return len(looks) < 3 or is_there(pid)

    monkeypatch.setattr(processes, "is_there", late)  # ending takes its time
    assert f"process {python.pid} has ended in the meantime" in said(capsys, str(python.pid))


def test_a_gdb_that_cannot_write_registers_is_told(
    python: processes.Process,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = "Couldn't write extended state status: Bad address."
    fake_gdb(tmp_path, f'echo "{refusal}"', monkeypatch)
    found = said(capsys, str(python.pid))
    assert "cannot write all registers" in found and "gdb 14 or newer" in found


WRITES_A_PART = """
import ctypes, os, signal, sys

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long

class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

def ptrace(request, address=0, data=None):
    return libc.ptrace(request, child, ctypes.c_void_p(address), data), ctypes.get_errno()

def registers(size):
    found = ctypes.create_string_buffer(size)
    part = Part(ctypes.addressof(found), size)
    assert ptrace(0x4204, 0x202, ctypes.byref(part))[0] == 0
    return found, part

child = os.fork()
if child == 0:
    signal.pause()
assert ptrace(16)[0] == 0
os.waitpid(child, 0)
before, whole = registers(1 << 16)
assert whole.bytes > 576
found, part = registers(576)  # what every processor has: x87 and SSE registers, and the header
found[24] = bytes([found.raw[24] ^ 1])  # of mxcsr
print(ptrace(0x4205, 0x202, ctypes.byref(part)))
after, _ = registers(1 << 16)
print([at for at in range(whole.bytes) if before.raw[at] != after.raw[at]])
os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_a_part_of_the_registers_is_written_on_top_of_the_rest(is_preloaded: bool) -> None:
    """Linux takes them as a whole; gdb before 14 knows only a part of them on processors with AMX."""
    if platform.machine() != "x86_64":
        pytest.skip("gdb is used on x86-64 only")
    env = {**os.environ, **({"LD_PRELOAD": str(debugger._LIBRARY)} if is_preloaded else {})}
    done = subprocess.run(
        [sys.executable, "-c", WRITES_A_PART], env=env, capture_output=True, text=True, check=False
    )
    refused = f"(-1, {errno.EFAULT})\n[]\n"
    assert done.stderr == "" and done.stdout == ("(0, 0)\n[24]\n" if is_preloaded else refused)


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
def test_a_gdb_without_help_leaves_the_program_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It brings the request in, or it cannot write registers here and says so."""
    monkeypatch.setattr(processes, "_TORCH", processes.re.compile("python"))
    monkeypatch.setattr(debugger, "_LIBRARY", tmp_path / "none")
    command = (sys.executable, "-c", "input(); print(flush=True); print(input(), flush=True)")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    with child:
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        found = said(capsys, str(child.pid))
        assert "it has not imported torch" in found or "gdb 14 or newer" in found
        child.stdin.write("goes on\n")
        child.stdin.close()
        assert child.stdout.read() == "goes on\n"
    assert child.returncode == 0


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
def test_gdb_brings_the_question_in_and_an_answer_out(
    python: processes.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python has no torch; it was only made to look so."""
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
    """Pythons wait differently: 3.13 has no lock behind join(), 3.14 none of that kind behind a lock."""
    monkeypatch.setattr(processes, "_TORCH", processes.re.compile("python"))
    source = "import queue, threading; lock = threading.Lock(); lock.acquire(); input(); print(flush=True); "
    with process(sys.executable, "-c", source + wait) as pid:
        found = said(capsys, str(pid), "--wait", "5m")
    assert f"process {pid}: it has not imported torch" in found


def test_what_is_put_into_a_process_calls_nobody_else(tmp_path: Path) -> None:
    """Whoever attaches has given up, or is another user: the text does nothing and says nothing."""
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
    assert "leave out -o, --duration" in said(capsys, pid, "--stop", "-o", "new.pya")
    for wrong in ("soon", "0s", "-1s", "168.1h"):
        with pytest.raises(SystemExit):
            cli.main(["attach", pid, f"--duration={wrong}"])
        assert "is not a duration; write for example 60s" in capsys.readouterr().err


def begun(
    monkeypatch: pytest.MonkeyPatch, *words: str, waits: bool = False
) -> tuple[int, list[object], dict[str, object]]:
    """The exit code of a command for a process that can be attached to, and what it asked of it."""
    asked: list[object] = []
    named: dict[str, object] = {}

    def begin(*given: object, **options: object) -> dict[str, object]:
        asked.extend(given)
        named.update(options)
        return {"waits": waits, "allocator": "native", "bytes": 0, "in_main": True}

    monkeypatch.setattr("pyalloc.outside.attach.begin", begin)
    return cli.main(["attach", *words]), asked, named


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("7s", 7), ("1.5m", 90), ("2 h", 7200), ("168h", 604_800)]
)
def test_a_process_is_asked_for_what_was_typed(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = os.getppid()
    words = ["--wait", text, "--stacks", "all", "--no-marks", "--force"]
    code, asked, named = begun(monkeypatch, str(pid), *words)
    assert code == 0 and asked == [pid, Path(f"out.{pid}.pya")]
    assert named.pop("tell") is not None
    assert named == {
        "stacks": "all", "marks": False, "duration_s": None, "force": True, "wait_s": seconds,
    }  # fmt: skip
    told = f"\nnext: pyalloc live {pid}, or pyalloc attach {pid} --stop\n"
    assert capsys.readouterr().err.endswith(told)


def test_a_process_whose_children_use_cuda_may_not_be_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for children in ("", "\n  pyalloc attach 8   # python"):
        monkeypatch.setattr(processes, "below", lambda _pid, found=children: found)
        assert begun(monkeypatch, str(os.getppid()), waits=True)[0] == 0
        told = capsys.readouterr().err
        assert "It has not used CUDA yet; the recording begins when it does." in told
        meant = (
            "  Or did you mean one of the processes it started?\n  pyalloc attach 8   # python\n"
        )
        assert (meant in told) == ("did you mean" in told) == bool(children)


def test_a_recording_of_some_time_is_watched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the process is busy for a while; another recording is not taken for it."""
    pid = str(os.getppid())
    at_work = {"recording": {"path": str(tmp_path / "out.pya")}}
    other = {"recording": {"path": str(tmp_path / "other.pya")}}
    busy = live.BusyError("it is stopped")
    answers: list[object] = []

    def ask(_pid: int) -> object:
        found = answers.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    def watched(*given: object, wait: str = "60s") -> tuple[int, str]:
        answers[:] = given
        code = begun(monkeypatch, pid, "-o", "out.pya", "--duration", wait, "--force")[0]
        return code, capsys.readouterr().err

    monkeypatch.setattr(live, "ask", ask)
    monkeypatch.setattr("pyalloc.cli.attach._LOOK_S", 0)
    for last in ({"recording": None}, other):
        code, told = watched(at_work, busy, at_work, last)
        assert code == 2 and not answers
        assert f"nothing was recorded: process {pid} did not use CUDA in that time" in told
    code, told = watched(at_work, KeyboardInterrupt())
    assert code == 130 and f"still recording; to end it: pyalloc attach {pid} --stop\n" in told
    (tmp_path / "out.pya").touch()
    assert watched({"recording": None})[0] == 0
    monkeypatch.setattr("pyalloc.cli.attach._PATIENCE_S", 0)
    code, told = watched(*[busy] * 9999, wait="0.01s")
    assert code == 0 and answers and "recorded: out.pya\nnext: pyalloc report out.pya\n" in told


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
    with pytest.raises(UsageError, match="x86-64 only; start the program with `pyalloc run`"):
        debugger._gdb()
