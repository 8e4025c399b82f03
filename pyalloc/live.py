"""Serves figures of a running process on a Unix socket, as JSON.

Processes started by `pyalloc run` answer; others after `pyalloc attach` or `import pyalloc.live; pyalloc.live.serve()`.
Only its owner can use the socket.  A request is a number, of program lines to include in the figures, or a line of
JSON, which attached.py answers.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pyalloc import _core
from pyalloc._bootstrap.importing import after_import
from pyalloc.common import processes
from pyalloc.errors import AllocatorError, UsageError
from pyalloc.inside import devices, sharing, snapshots
from pyalloc.traces import source

ENABLE = "PYALLOC_LIVE"  # environment: "1": serve as soon as torch is imported
_TIMEOUT_S = 5.0
_YOUNG_S = 60.0
_LONGEST_REQUEST = 1 << 16  # bytes
_BEGUN = ".new"  # no longer than .sock: the names of sockets are short
_PAUSE_S = 0.1
# No more open files or memory, or the asking side is gone: go on with the next request.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}
_serving: set[Path] = set()  # a forked child only inherits the files


def _socket_paths(pid: int) -> list[Path]:
    """Where the process of that pid may listen; the first is where it would in this environment.

    Batch systems pass XDG_RUNTIME_DIR on to machines without that folder, and the asking side may not have it set; some
    give each job a TMPDIR of its own.
    """
    folders = [tempfile.gettempdir()]
    of_login = os.environ.get("XDG_RUNTIME_DIR")
    if of_login and os.access(of_login, os.W_OK | os.X_OK):
        folders.insert(0, of_login)
    if pid != os.getpid():
        given = processes.variables(pid)
        folders += filter(None, map(given.get, ("XDG_RUNTIME_DIR", "TMPDIR", "TEMP", "TMP")))
    return [Path(folder) / f"pyalloc-{os.getuid()}-{pid}.sock" for folder in folders]


def socket_path(pid: int) -> Path:
    """Where the process of that pid listens, or would."""
    paths = _socket_paths(pid)
    return next((path for path in paths if path.exists()), paths[0])


def figures(n_lines: int = 0) -> dict[str, Any]:
    """What is told: statistics of each device in use, torch's and, where it is installed, pyalloc's own.

    Devices that are not in use stay so, for a context costs memory.

    n_lines: number of program lines that hold most, to be included; they are None if no stacks are kept.
    """
    torch: Any = sys.modules.get("torch")  # it may be under import, as each of these
    # The program may have put anything there, and an embedded Python has none.
    words = [str(word) for word in getattr(sys, "argv", ())]
    result: dict[str, Any] = {"pid": os.getpid(), "argv": words, "devices": {}}
    state = getattr(sys.modules.get("pyalloc.inside.attached"), "state", None)
    if state is not None:
        result["recording"] = state()
    ask = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    if ask is None or not ask():
        return result
    for index in devices.in_use(torch):
        stats = dict(torch.cuda.memory_stats(index))
        free, total = torch.cuda.mem_get_info(index)
        stats.update({"device_free_bytes": free, "device_total_bytes": total})
        with contextlib.suppress(AllocatorError):  # it is not installed
            stats = _core.stats(index) | stats
        result["devices"][str(index)] = stats
    if n_lines:
        result["lines"] = _lines(n_lines) if sharing.is_on() else None
    return result


def _lines(n: int) -> list[dict[str, Any]]:
    """What each line of the program holds now, largest first; the rest is the last one."""
    sums: dict[str, list[int]] = {}
    for segment in snapshots.segments():
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                made = [(f["name"], f["filename"], f["line"]) for f in block.get("frames") or ()]
                frames = tuple(source.without_bootstrap(made))
                row = sums.setdefault(source.name(frames), [0, 0])
                row[0] += block["size"]
                row[1] += 1
    ordered = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    return shortened(
        [{"name": name, "bytes": row[0], "blocks": row[1]} for name, row in ordered], n
    )


def shortened(lines: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The first n lines; the rest is summed up in the last one."""
    rest = lines[n:]
    if not rest:
        return lines
    both = {key: sum(row[key] for row in rest) for key in ("bytes", "blocks")}
    return [*lines[:n], {"name": f"{len(rest)} more", **both}]


def serve() -> Path | None:
    """Answers from a thread until the process ends.  None if that is impossible (no Unix sockets, no folder)."""
    path = _socket_paths(os.getpid())[0]  # what is elsewhere may be another user's
    if path in _serving and path.exists():  # not swept away with old files
        return path
    # Now: the package may be removed or replaced later.
    importlib.import_module("pyalloc.inside.attached")
    _remove_left_behind(path.parent)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except (AttributeError, OSError):
        return None
    try:
        _listen(listener, path)
    except OSError:
        listener.close()
        return None
    owner = os.getpid()
    _serving.add(path)
    threading.Thread(target=_answer_all, args=(listener,), daemon=True, name="pyalloc-live").start()
    import atexit

    def remove() -> None:
        if os.getpid() == owner:
            path.unlink(missing_ok=True)

    atexit.register(remove)
    return path


def _listen(listener: socket.socket, path: Path) -> None:
    """Listens there; the file has that name last, because who finds it is answered."""
    begun = path.with_suffix(_BEGUN)
    begun.unlink(missing_ok=True)
    # Linux gives the file the socket's mode.  umask would affect the files of all threads.
    os.fchmod(listener.fileno(), 0o600)
    listener.bind(str(begun))
    begun.chmod(0o600)  # the umask may have removed even the owner's rights
    listener.listen(4)
    begun.replace(path)


def _remove_left_behind(folder: Path) -> None:
    """Removes sockets of killed processes.  Tries to connect, as the pid may belong to another container."""
    left = folder.glob(f"pyalloc-{os.getuid()}-*")
    for path in (each for each in left if each.suffix in (".sock", _BEGUN)):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(0)
            if time.time() - path.stat().st_mtime < _YOUNG_S:
                continue  # it may be about to listen
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def serve_when_torch_is_imported() -> None:
    """Serves once torch is imported, for `pyalloc run`: processes without torch have no figures."""
    after_import("torch", lambda _torch: serve())


def _answer_all(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in _PASSING:
                return
            time.sleep(_PAUSE_S)
            continue
        # What is asked first may wait for the program.
        thread = threading.Thread(
            target=_answer, args=(connection,), daemon=True, name="pyalloc-live"
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads for now
            connection.close()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(Exception):  # the program is not to see it
        connection.settimeout(_TIMEOUT_S)
        wanted = connection.recv(_LONGEST_REQUEST)
        if wanted.startswith(b"{"):
            reply = _attend(connection, wanted)
        else:
            reply = figures(int(wanted) if wanted.isdigit() else 0)
        connection.sendall(json.dumps(reply).encode())


def _attend(connection: socket.socket, begun: bytes) -> dict[str, Any]:
    if peer_of(connection)[1] not in (os.getuid(), 0):
        return {"error": "it belongs to another user"}
    from pyalloc.inside import attached  # late: it imports this module

    wanted = json.loads(_whole_line(connection, begun))
    if _is_gone(connection):  # it waited too long for this thread
        raise BrokenPipeError
    return attached.answer(wanted)


def _is_gone(connection: socket.socket) -> bool:
    is_readable = select.select([connection], [], [], 0)[0]
    return bool(is_readable) and not connection.recv(1, socket.MSG_PEEK)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Numbers of the process and of the user at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


def _whole_line(connection: socket.socket, begun: bytes) -> bytes:
    """Receives until the end of a line, or of the connection."""
    while not begun.endswith(b"\n") and len(begun) < _LONGEST_REQUEST:
        part = connection.recv(_LONGEST_REQUEST)
        if not part:
            break
        begun += part
    return begun


class BusyError(UsageError):
    """The process listens, but does not answer in time."""


def _busy(pid: int, within_s: float) -> str:
    return (
        f"process {pid} has not answered for {within_s:.0f} s: it is stopped, or busy in C code that lets no other "
        "Python code run. Try again"
    )


def ask(pid: int, n_lines: int = 0) -> dict[str, Any]:
    """The figures of another process, as it tells them.

    Raises:
        BusyError: it does not answer now.
        UsageError: it does not listen, or has ended.
    """
    try:
        return _exchange(pid, str(n_lines).encode(), _TIMEOUT_S)
    except (OSError, ValueError) as error:
        processes.check_owner(pid)
        if isinstance(error, TimeoutError):
            raise BusyError(_busy(pid, _TIMEOUT_S)) from None
        raise UsageError(
            f"process {pid} cannot be watched yet: run `pyalloc attach {pid}`, or start the program with `pyalloc "
            "run`, or let it run `import pyalloc.live; pyalloc.live.serve()`"
        ) from None


def request(pid: int, what: dict[str, Any], within_s: float) -> dict[str, Any] | None:
    """What another process answers to it (attached.py); None: nobody listens there.

    Raises:
        UsageError: it listens and does not answer.
    """
    try:
        found = _exchange(pid, json.dumps(what).encode() + b"\n", within_s)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except TimeoutError:
        raise BusyError(f"{_busy(pid, within_s)}, or wait longer: --wait 300") from None
    except (OSError, ValueError) as error:
        if processes.has_ended(pid):
            raise UsageError(f"process {pid} has ended in the meantime") from None
        raise UsageError(f"process {pid} sent an answer that makes no sense: {error}") from None
    if "devices" in found:
        raise UsageError(
            f"process {pid} runs another version of pyalloc, which cannot be attached to"
        )
    return found


def _exchange(pid: int, wanted: bytes, within_s: float) -> dict[str, Any]:
    path = socket_path(pid)
    if path.lstat().st_uid not in (os.getuid(), 0):
        raise UsageError(f"{path} belongs to another user and is not trusted")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within_s)
        connection.connect(str(path))
        connection.sendall(wanted)
        result: dict[str, Any] = json.loads(received(connection))
    return result


def received(connection: socket.socket) -> bytes:
    """Receives until the other side closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
