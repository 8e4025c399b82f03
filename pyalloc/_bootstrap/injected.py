"""What a debugger injects into a running process: a thread that connects to `pyalloc attach` and does what it asks.

This file's text is executed in the main thread, at any point, by any version of Python.  So it uses nothing newer than
Python 3.6 until it knows the version, and it leaves the main thread at once.  It loads nothing that another user could
have planted: the folder of pyalloc is named over a socket whose peer is this user.
"""

import os
import sys
from typing import Any

OLDEST = (3, 10)
_PATIENCE_S = 60.0


def start(address: str) -> None:
    """Connects to address from a new thread; does nothing if nobody listens there any more."""
    import _thread  # threading's own functions take locks that the main thread may hold here

    _thread.start_new_thread(_call_back, (address,))


def _call_back(address: str) -> None:
    import json
    import socket
    import struct

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect(address)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            return
        connection.sendall(b"here\n")
        line = b""
        while not line.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                return
            line += part
        reply = _answer(json.loads(line.decode()))
        connection.sendall(json.dumps(reply).encode())
    except Exception:
        return  # must not reach the program; the asking side sees the closed connection
    finally:
        connection.close()


def _answer(asked: Any) -> Any:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return {"error": "it runs Python " + found + ", but pyalloc needs " + oldest + " or newer"}
    if "torch" not in sys.modules:
        return {"error": "it has not imported torch, so there is no CUDA memory to record"}
    try:
        _load(asked["folder"])
        from pyalloc.inside import attached
    except Exception as error:
        text = "pyalloc could not be loaded there (Python " + found + "): " + repr(error)
        file = getattr(sys.modules.get("pyalloc"), "__file__", None)
        if file is not None and not os.path.exists(file):
            text = (
                "the pyalloc that it started with is no longer in "
                + os.path.dirname(file)
                + ", so it cannot load its other modules; restart the program"
            )
        return {"error": text}
    return attached.answer(asked["request"])


def _load(folder: str) -> None:
    """Loads the package of that folder unless there is one.  Leaves sys.path alone: other threads may be importing."""
    import importlib.util

    if "pyalloc" in sys.modules:
        return
    package = os.path.join(folder, "pyalloc")
    spec = importlib.util.spec_from_file_location(
        "pyalloc", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError(package)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyalloc"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["pyalloc"]
        raise
