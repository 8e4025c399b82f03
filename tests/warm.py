"""A Python that has imported torch already.  Forking it is immediate; the import takes three seconds.

For programs that import torch before pyalloc, and tests that are not about how a process starts.  No process forked
here has used CUDA yet.  What `pyalloc run` and `pyalloc dryrun` do at the start of a process happens in the fork,
according to the fork's own environment.

python warm.py SOCKET serve MODULE              the process to fork; ends when its standard input does
python -IS warm.py SOCKET PROGRAM WORDS...      a fork of it, as `python PROGRAM WORDS...`; also -c, -m, -W and -u
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import sys
from typing import Any

_REQUEST_BYTES = 1 << 18  # at most: an environment and a program's text
_STANDARD = (0, 1, 2)


def start(folder: str, module: str, env: dict[str, str]) -> tuple[str, Any]:
    """A program that stands in for Python, and the process that it forks, which ends when its input does."""
    import subprocess

    address = os.path.join(folder, "socket")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore:nvml", __file__, address, "serve", module],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"{module} could not be imported")
    program = os.path.join(folder, "warm-python")
    cold = shlex.quote(sys.executable)
    words = shlex.join([sys.executable, "-IS", __file__, address])
    with open(program, "w") as file:
        # The server has this LD_PRELOAD; any other one gets a process of its own.
        file.write(
            f'#!/bin/sh\n[ "$LD_PRELOAD" = {shlex.quote(env.get("LD_PRELOAD", ""))} ] || exec {cold} "$@"\n'
        )
        file.write(f'exec {words} "$@"\n')
    os.chmod(program, 0o755)
    return program, server


def _ask(address: str, words: list[str]) -> int:
    request = {"words": words, "folder": os.getcwd(), "env": dict(os.environ), "nice": os.nice(0)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(request).encode()], _STANDARD)
        code = int(connection.recv(100))
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has only this handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _serve(address: str, module: str) -> dict[str, Any]:
    """Returns in every fork, with the request."""
    import gc
    import importlib

    importlib.import_module("torch")
    gc.freeze()  # or each fork goes through them at its end; before Triton, which reports frozen objects as leaked
    importlib.import_module(module)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    return _attend(connection)
            with contextlib.suppress(ChildProcessError):  # there were no forks before
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _attend(connection: socket.socket) -> dict[str, Any]:
    """Returns in the program's process.  This one waits for its end, and ends it once nobody waits any more."""
    text, files, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, len(_STANDARD))
    program = os.fork()
    if program != 0:
        end = os.pidfd_open(program)
        if end not in select.select([end, connection], [], [])[0]:
            os.kill(program, signal.SIGKILL)
            os.waitpid(program, 0)
            os._exit(1)
        _, status = os.waitpid(program, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, file in zip(_STANDARD, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    request: dict[str, Any] = json.loads(text)
    return request


def _become(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    os.nice(request["nice"] - os.nice(0))
    sys.modules.pop("sitecustomize", None)
    import sitecustomize  # noqa: F401


if __name__ == "__main__":
    if sys.argv[2] != "serve":
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
    asked = _serve(sys.argv[1], sys.argv[3])
    _become(asked)
    first, *others = asked["words"]
    while first in ("-W", "-u"):  # -u: torchrun asks for it; nothing here depends on it
        if first == "-W":
            import warnings

            warnings._processoptions([others.pop(0)])  # type: ignore[attr-defined]
        first, *others = others
    if first == "-m":
        import runpy

        sys.argv, sys.path[0] = others, ""
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        # Nothing here may keep the program's module: then its contents are finalized when those of a real program are.
        main = type(sys)("__main__")
        if first == "-c":
            name, source = "<string>", others.pop(0)
            sys.argv, sys.path[0] = ["-c", *others], ""
        else:
            name = main.__file__ = os.path.abspath(first)
            with open(first) as file:
                source = file.read()
            sys.argv, sys.path[0] = [first, *others], os.path.dirname(name)
        sys.modules["__main__"] = main
        del main
        exec(compile(source, name, "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
