"""What /proc tells about a running process, for `pyalloc attach`: whose it is, and whether it has torch."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from pyalloc._bootstrap.injected import OLDEST
from pyalloc.common import elf
from pyalloc.common.console import printable
from pyalloc.errors import UsageError

_PROC = Path("/proc")
_TORCH = re.compile(r"/lib(torch|c10)(_cuda|_cpu|_python)?\.so")
_PYTHON = re.compile(r"python(\d)\.(\d+)")
ENTRY = "Py_AddPendingCall"  # every CPython exports it
_WIDTH = 50  # of a command line
_ENDING_S = 1.0  # for a process that is about to end
_LOOK_S = 0.01
_OTHERS = "process {} belongs to another user"
# By processor: system calls that wait for input or for a time.  Python releases its lock before it makes them.
_WAITS = {
    "x86_64": {
        0: "read", 7: "poll", 23: "select", 35: "nanosleep", 43: "accept", 45: "recvfrom", 47: "recvmsg", 61: "wait4",
        230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
        288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 72: "pselect6", 73: "ppoll", 95: "waitid", 101: "nanosleep",
        115: "clock_nanosleep", 202: "accept", 207: "recvfrom", 212: "recvmsg", 242: "accept4", 260: "wait4",
    },
}  # fmt: skip
WAITS: dict[int, str] = _WAITS.get(platform.machine(), {})
_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX = _FUTEX.get(platform.machine())


@dataclass(frozen=True)
class Process:
    """A process of this user that can be looked into."""

    pid: int
    command: str
    files: frozenset[str]  # mapped into it

    @property
    def has_torch(self) -> bool:
        """Is torch loaded?"""
        return any(_TORCH.search(file) for file in self.files)

    @property
    def has_pyalloc(self) -> bool:
        """Is pyalloc loaded, from whatever folder?"""
        return any("/pyalloc/_core." in file for file in self.files)

    @property
    def version(self) -> tuple[int, int] | None:
        """The version of its Python, if file names tell it."""
        found = [_PYTHON.search(os.path.basename(file)) for file in sorted(self.files)]
        named = [each for each in found if each is not None]
        return (int(named[0][1]), int(named[0][2])) if named else None

    @property
    def is_python(self) -> bool:
        """Does the program, or its libpython, export what a debugger can call?"""
        libraries = [Path(file) for file in sorted(self.files) if "libpython" in file]
        return any(map(_offers, [_PROC / str(self.pid) / "exe", *libraries]))


def _offers(file: Path) -> bool:
    try:
        return ENTRY in elf.read(file).defined
    except elf.ElfError:
        return False


def find(pid: int) -> Process:
    """What is known about a process.

    Raises:
        UsageError: there is no such process, or none that can be attached to; says why.
    """
    status = _status(pid)
    leader = int(status["Tgid"])
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}; run: pyalloc attach {leader}")
    if pid == os.getpid():
        raise UsageError(f"{pid} is this command itself")
    _check_there(pid, status)
    _check_user(pid, status, ", who would own the recording")
    if status["State"].startswith(("T", "t")) and status["TracerPid"] == "0":
        raise UsageError(f"process {pid} is stopped; to let it go on: kill -CONT {pid}")
    _check_place(pid)
    files = _files(pid)
    if not files and has_ended(pid):  # since it was looked at
        raise UsageError(f"process {pid} has ended")
    return Process(pid, command(pid), files)


def _status(pid: int) -> dict[str, str]:
    try:
        text = (_PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(_absent(pid)) from None
    except PermissionError:  # /proc may be mounted with hidepid=1
        raise UsageError(_OTHERS.format(pid)) from None
    return dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))


def _absent(pid: int) -> str:
    """What to say about a process that /proc does not have."""
    if not (_PROC / "self").exists():
        return f"cannot look up process {pid}, because /proc is not mounted here"
    try:
        os.kill(pid, 0)  # sends nothing
    except PermissionError:  # mounted with hidepid=2
        return _OTHERS.format(pid)
    except (OSError, OverflowError):
        pass
    return f"there is no process {pid}"


def tracer(pid: int) -> int:
    """The process number of its debugger, or 0."""
    return int(_status(pid)["TracerPid"])


def is_there(pid: int) -> bool:
    """Has it not ended yet?"""
    try:
        return not _status(pid)["State"].startswith(("Z", "X"))
    except UsageError:
        return False


def has_ended(pid: int) -> bool:
    """Has it ended, or does it end within a second?  Ask this where its end would explain an error.

    A process closes its files before it counts as ended.
    """
    end = time.monotonic() + _ENDING_S
    while is_there(pid):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def check_owner(pid: int) -> None:
    """Raises UsageError if the process is gone, or belongs to another user."""
    status = _status(pid)
    _check_there(pid, status)
    _check_user(pid, status)


def _check_there(pid: int, status: dict[str, str]) -> None:
    if status["State"].startswith(("Z", "X")):
        raise UsageError(f"process {pid} has ended")


def _check_user(pid: int, status: dict[str, str], why: str = "") -> None:
    user = int(status["Uid"].split()[1])
    if user == os.getuid():
        return
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    raise UsageError(f"process {pid} belongs to {name}{why}; run this command as {name}")


def variables(pid: int) -> dict[str, str]:
    """The environment that it was started with; empty if it cannot be read."""
    try:
        words = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(word).partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _check_place(pid: int) -> None:
    for space in ("mnt", "pid"):
        with contextlib.suppress(OSError):  # unreadable: gdb will not get in either
            if not (_PROC / str(pid) / "ns" / space).samefile(_PROC / "self" / "ns" / space):
                raise UsageError(
                    f"process {pid} runs in another container, which has its own files; run pyalloc attach inside "
                    "that container (docker exec, kubectl exec), with the process number used there"
                )


def command(pid: int) -> str:
    """Its command line, shortened, for people."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    text = " ".join(printable(shlex.join(words[:-1])).split()) or "?"
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _files(pid: int) -> frozenset[str]:
    try:
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except (PermissionError, ProcessLookupError, FileNotFoundError):
        raise UsageError(
            f"cannot look into process {pid} (it has ended, or runs with other privileges)"
        ) from None
    return frozenset(line.split(maxsplit=5)[5] for line in lines if "/" in line)


def check_python(process: Process) -> None:
    """Raises UsageError if it is not a Python process with torch that pyalloc can be loaded into."""
    pid, version = process.pid, process.version
    if not process.is_python:
        raise UsageError(
            f"process {pid} ({process.command}) is not a Python process with torch; {_instead(pid)}"
        )
    if version is not None and version < OLDEST:
        found, oldest = (".".join(map(str, each)) for each in (version, OLDEST))
        raise UsageError(f"process {pid} runs Python {found}, but pyalloc needs {oldest} or newer")
    if not process.has_torch:
        raise UsageError(f"process {pid} ({process.command}) has not loaded torch; {_instead(pid)}")


def _instead(pid: int) -> str:
    found = below(pid)
    if found:
        return f"of the processes it started, these have torch:{found}"
    return "attach to one that has, or start the program with `pyalloc run --record out.pya`"


def below(pid: int) -> str:
    """Commands that attach to its descendants with torch, one of which may be meant; empty if there are none."""
    found = with_torch_below(pid)
    return "".join(f"\n  pyalloc attach {each.pid}   # {each.command}" for each in found)


def with_torch_below(pid: int) -> list[Process]:
    """Its descendants that have torch."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(UsageError):  # it ended
                parent = int(_status(int(folder.name))["PPid"])
                children.setdefault(parent, []).append(int(folder.name))
    found: list[Process] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        child = waiting.pop(0)
        waiting += children.get(child, ())
        with contextlib.suppress(UsageError):
            process = find(child)
            found += [process] * process.has_torch
    return found


def doing(pid: int) -> tuple[int, str]:
    """The number of the system call that its main thread waits in, -1 if it does not wait; and that in words."""
    try:
        text = (_PROC / str(pid) / "task" / str(pid) / "syscall").read_text().split()[0]
        number = int(text) if text.lstrip("-").isdigit() else -1
    except (OSError, IndexError):
        return -1, "its main thread is inside C code"
    if number in WAITS:
        return number, f"its main thread waits ({WAITS[number]})"
    if number == FUTEX:
        return number, "its main thread waits for another thread"
    return -1, "its main thread is running C code"
