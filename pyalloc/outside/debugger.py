"""The way into a process that does not listen: through gdb, which makes it connect back.

The process is stopped for a fraction of a second.  gdb makes only two calls in it: mmap(), for a page with the text of
_bootstrap/injected.py, and Py_AddPendingCall(), which takes no lock and allocates nothing.  The main thread then runs
the text between two bytecodes.  A main thread that waits for something outside does not get there; if it is known to
hold no lock, the text is run in the middle of its wait.

A gdb that cannot write all registers notices that only during a call, and the program would not survive it.  So a
register is written before anything else.  Versions before 14 can write it on processors with AMX only with csrc/gdb.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyalloc
from pyalloc._bootstrap import injected
from pyalloc.common import files, processes
from pyalloc.common.processes import ENTRY, FUTEX, WAITS, Process
from pyalloc.errors import UsageError
from pyalloc.live import peer_of, received

_GDB_S = 120.0  # it usually takes half a second; after this we give up
_DIRECT_S = 2.0  # time for the main thread to run it by itself
_ANSWER_S = 90.0
_LOOK_S = 0.25
_TEXT, _SCRIPT, _PRELOADED = "text", "script", "preloaded"  # files in the private folder
_LIBRARY = Path(__file__).parent.parent / "lib" / "libpyalloc_gdb.so"
_OPTIONS = ("-nx", "-q", "-batch")
_FASTER = "-readnever"  # does not read debug information, which only backtraces need
# Load, look up and run nothing that the process or a folder provides; let its other threads run during calls.
_SETTINGS = (
    "set auto-load off", "set auto-solib-add off", "set confirm off", "set pagination off", "set language c",
    "set unwindonsignal on", "set print thread-events off",
)  # fmt: skip
_LIBRARIES = ("libpython", r"/libc[.-]", "ld-musl")
# Functions that wait for another thread while holding none of Python's locks.  The second exists since 3.13, for join()
# and queues, and from 3.14 on for locks, too.
_FOR_ANOTHER = ("PyThread_acquire_lock_timed", "_PySemaphore_Wait")
# Changes the invalid-operation flag twice: gdb does not write a register whose value stays the same.
_WRITES_REGISTERS = ["set var $mxcsr = $mxcsr ^ 1"] * 2
_CANNOT_WRITE = "extended state"
_MAPPED = "((unsigned long (*)(void *, unsigned long, int, int, int, long)) mmap)(0, {size}, 3, 0x22, -1, 0)"
_ADD = f"call ((int (*)(void *, void *)) {ENTRY})((void *) PyRun_SimpleString, (void *) $text)"
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_DONE = "pyalloc: asked"


def ask(
    process: Process,
    request: dict[str, Any],
    wait_s: float,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """The process's answer to a request (attached.py).

    tell: called with what the process is doing while it does not get to the request.

    Raises:
        UsageError: the debugger could not get in, or the process did not get to the request; then it never will.
    """
    gdb = _gdb()
    with files.temporary_folder("pyalloc-", _short_folder()) as name:
        folder = Path(name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            address = str(folder / "s")
            listener.bind(address)
            os.chmod(address, 0o600)  # whatever the umask
            listener.listen(4)
            listener.settimeout(_LOOK_S)
            _lay_down(folder / _TEXT, address)
            # A link under another name, because the loader splits LD_PRELOAD at spaces and colons.
            (folder / _PRELOADED).symlink_to(_LIBRARY)
            _call(gdb, process, folder, direct=False)
            connection = _awaited(gdb, process, folder, listener, wait_s, tell)
        with connection:
            return _asked(connection, process, request)


def _gdb() -> str:
    if platform.machine() != "x86_64":  # _script() names its registers
        raise UsageError(
            "the process was not started with `pyalloc run`, so a debugger would have to enter it, which works on "
            "x86-64 only; start the program with `pyalloc run`"
        )
    found = shutil.which("gdb")
    if found is None:
        raise UsageError(
            "the process was not started with `pyalloc run`, so a debugger has to enter it, but gdb is not installed: "
            "apt install gdb (or dnf, conda), or start the program with `pyalloc run`"
        )
    return found


def _short_folder() -> str | None:
    """A parent folder for a socket, whose path can have at most 107 characters."""
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 80 else None


def _lay_down(file: Path, address: str) -> None:
    """Writes the text that the process runs: it leaves no names in the program and lets no exception out."""
    source = f"{Path(injected.__file__).read_text()}\nstart({address!r})\n"
    text = (
        "try:\n"
        f"    __import__('builtins').exec({source!a}, {{'__name__': 'pyalloc_attach'}})\n"
        "except BaseException:\n"
        "    pass\n"
    )
    files.write(file, text.encode() + b"\0")


def _script(process: Process, size: int, direct: bool) -> str:
    lines = [*_SETTINGS, f"attach {process.pid}", "handle all nostop noprint pass"]
    lines += [*_WRITES_REGISTERS, *(f"sharedlibrary {name}" for name in _LIBRARIES)]
    lines += ["set $call = (int) $orig_rax", "set $has_lock = ((int (*)(void)) PyGILState_Check)()"]
    mapped = [f"set $text = {_MAPPED.format(size=size)}", f"restore {_TEXT} binary $text"]
    if direct:
        waits = " || ".join(f"$call == {number}" for number in WAITS)
        callers = " || ".join(f'$_any_caller_is("{name}", 8)' for name in _FOR_ANOTHER)
        for_lock = f"$call == {FUTEX} && ({callers})"
        lines += [f"if $has_lock == 0 && ({waits} || ({for_lock}))", *mapped]
        lines += [
            "set $state = ((int (*)(void)) PyGILState_Ensure)()",
            "call ((int (*)(void *)) PyRun_SimpleString)((void *) $text)",
            "call ((void (*)(int)) PyGILState_Release)($state)",
            "end",
        ]
    else:
        lines += [*mapped, _ADD]
    return "\n".join([*lines, "detach", f"echo {_DONE}\\n", ""])


def _call(gdb: str, process: Process, folder: Path, *, direct: bool) -> None:
    size = (folder / _TEXT).stat().st_size
    files.write(folder / _SCRIPT, _script(process, size, direct).encode())
    env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "HOME": str(folder)}
    if (folder / _PRELOADED).exists():
        env["LD_PRELOAD"] = f"./{_PRELOADED}"
    # In a session of its own: Ctrl-C would kill gdb and leave the process in the middle of gdb's call.
    child = subprocess.Popen(
        [
            gdb,
            *_OPTIONS,
            *[_FASTER] * (not direct),
            "-iex",
            "set debuginfod enabled off",
            "-x",
            _SCRIPT,
        ],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=_GDB_S)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"gdb (process {child.pid}) has been in process {process.pid} for {_GDB_S:.0f} s, waiting for a thread. It "
            f"is left running, because killing it would kill the program; to give up: kill -INT {child.pid}"
        ) from None
    if _DONE not in said:
        raise UsageError(_why_not(process, said))


def _why_not(process: Process, said: str) -> str:
    """Says why it failed, and what to do."""
    pid = process.pid
    if processes.has_ended(pid):
        return f"process {pid} has ended in the meantime"
    other = processes.tracer(pid)
    if other:
        return f"another debugger (process {other}) is attached to process {pid}; end it first"
    if _CANNOT_WRITE in said:
        return (
            f"this gdb cannot write all registers of this processor. Process {pid} was left as it was. Use gdb 14 or "
            "newer (`gdb --version` shows yours), or start the program with `pyalloc run`, which needs no debugger"
        )
    if "not permitted" in said or "ptrace" in said:
        return f"gdb may not attach to process {pid}: {_leave()}"
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing"]
    return f"gdb could not call into process {pid}; its last line of output: {lines[-1]}"


def _leave() -> str:
    """Which setting of the system keeps debuggers out."""
    other = "or start the program with `pyalloc run`, which needs no debugger"
    try:
        scope = _SCOPE.read_text().strip()
    except OSError:
        scope = "0"
    if scope in ("1", "2"):
        return (
            f"kernel.yama.ptrace_scope is {scope}. Run `sudo sysctl kernel.yama.ptrace_scope=0`, which until the next "
            f"reboot lets each of your processes attach to the others, {other}"
        )
    if scope == "3":
        return f"kernel.yama.ptrace_scope is 3, which only a reboot can change. Reboot, {other}"
    return f"in a container this needs --cap-add SYS_PTRACE (Kubernetes: capabilities, SYS_PTRACE). Add it, {other}"


def _awaited(
    gdb: str,
    process: Process,
    folder: Path,
    listener: socket.socket,
    wait_s: float,
    tell: Callable[[str], object],
) -> socket.socket:
    """The connection that the process makes."""
    begin = time.monotonic()
    direct_from = begin + _DIRECT_S
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            connection = None
        if connection is not None:
            if peer_of(connection) == (process.pid, os.getuid()):
                return connection
            connection.close()
        if not processes.is_there(process.pid):
            raise UsageError(f"process {process.pid} has ended in the meantime")
        now = time.monotonic()
        number, words = processes.doing(process.pid)
        if now - begin > wait_s:
            raise UsageError(
                f"the main thread of process {process.pid} has run no Python code for {wait_s:.0f} s: {words}. No "
                "recording was started, and none will be. Try again, or wait longer: --wait 600"
            )
        if now > direct_from and number >= 0:
            _call(gdb, process, folder, direct=True)
            direct_from = time.monotonic() + _DIRECT_S
        if now - begin > 1:
            tell(f"{now - begin:.0f} s: {words}")


def _asked(connection: socket.socket, process: Process, request: dict[str, Any]) -> dict[str, Any]:
    folder = str(Path(pyalloc.__file__).resolve().parent.parent)
    connection.settimeout(_ANSWER_S)
    try:
        line = json.dumps({"folder": folder, "request": request}).encode() + b"\n"
        connection.sendall(line)
        found: dict[str, Any] = json.loads(received(connection).partition(b"\n")[2])
    except TimeoutError:
        raise UsageError(
            f"process {process.pid} got the request but has not answered for {_ANSWER_S:.0f} s; `pyalloc live "
            f"{process.pid}` shows whether it acts on it later"
        ) from None
    except (OSError, ValueError):
        if processes.has_ended(process.pid):
            raise UsageError(f"process {process.pid} has ended in the meantime") from None
        raise UsageError(f"process {process.pid} closed the connection; try again") from None
    return found
