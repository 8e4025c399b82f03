"""What a debugger puts into a running process: a thread that calls `pyalloc attach` back and does what that asks.

Its text is executed in the main thread of whatever Python is there, in the middle of anything: until the version is
known it uses nothing newer than Python 3.6, and it leaves the main thread at once.  It loads nothing that another user
could have put in its way: pyalloc comes from the folder that is named over a socket of this user's.
"""

import os
import sys
from typing import Any

OLDEST = (3, 10)
_PATIENCE_S = 60.0


def start(address: str) -> None:
    """Calls back there, from a thread of its own; where nobody listens any more nothing is done."""
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
        return  # the program is not to see it, and who asked waits no longer
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
        from pyalloc import attached
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
    """The package of that folder, if there is none yet; sys.path, by which others may be importing, stays as it is."""
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
