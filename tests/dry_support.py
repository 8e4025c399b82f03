"""Running programs on the host-memory runtime, for the fixtures and for tests that start programs themselves."""

from __future__ import annotations

import ast
import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm

from pyalloc import _bootstrap
from pyalloc.outside import hostcuda

RunPython = Callable[..., subprocess.CompletedProcess[str]]  # what the fixtures of conftest.py give

ROOT = Path(__file__).parent.parent
COUNTED = "parity"  # prefix of the properties in which a test counts the tests inside it
PATIENCE_S = 900  # a program that takes longer hangs; a loaded machine needs a tenth of it
SOON_S = 180  # the same for what a program does at once
# From before any test changed it: the Python that many tests fork is started during one of them.
FOUND_ENVIRONMENT = dict(os.environ)


def run_checked(
    command: list[str],
    *,
    expect: int | None = 0,
    env: dict[str, str] | None = None,
    timeout: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if expect is not None and done.returncode != expect:
        pytest.fail(
            f"exit code {done.returncode}, not {expect}\n--- stdout\n{done.stdout[-4000:]}"
            f"\n--- stderr\n{done.stderr[-6000:]}"
        )
    return done


def wait_until(is_so: Callable[[], object], process: subprocess.Popen[Any] | None = None) -> None:
    """For what should happen at once; process: the one it depends on."""
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert process is None or process.poll() is None, process.communicate(timeout=SOON_S)
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@cache
def dry_torch() -> hostcuda.Torch | None:
    """The PyTorch beside these tests, or None if it cannot be dry-run."""
    try:
        found = hostcuda.find_torch(sys.executable)
        hostcuda.preloads(found.cuda_major)
    except hostcuda.HostCudaError:
        return None
    return found


def dry_environment(
    *, install: bool = False, memory: str = "8GB", devices: int = 1, zeros: bool = False
) -> dict[str, str]:
    """An environment in which torch runs on the host-memory runtime.

    install: on pyalloc, as `pyalloc run` does; zeros: as under `pyalloc dryrun`.
    """
    torch = dry_torch()
    assert torch is not None
    env = hostcuda.environment(_bootstrap.environment(FOUND_ENVIRONMENT), torch, zeros=zeros)
    env["PYALLOC_HOSTCUDA_MEMORY"] = memory
    env["PYALLOC_HOSTCUDA_DEVICES"] = str(devices)
    env.pop(_bootstrap.INSTALL, None)
    if install:
        env[_bootstrap.INSTALL] = "1"
    return env


def preloaded(source: str, folder: Path, devices: int = 1) -> str:
    """LD_PRELOAD with these C functions before the runtime's own."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    library = folder / "libwatch.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return f"{library}:{dry_environment(install=True, devices=devices)['LD_PRELOAD']}"


def warm_python(source: str, *, dryrun: bool = False) -> str:
    """A stand-in for Python that has imported torch already (warm.py).

    An optimizer imports torch's compiler, which takes as long again, so programs with one get that too.
    dryrun: for programs that `pyalloc dryrun` starts.
    """
    return _warm_python("torch._dynamo" if "torch.optim" in source else "torch", dryrun)


@cache
def _warm_python(module: str, zeros: bool) -> str:
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    return until_exit.enter_context(warmed(dry_environment(zeros=zeros), module))


@contextlib.contextmanager
def warmed(env: dict[str, str], module: str = "torch") -> Iterator[str]:
    """A stand-in for Python that has imported the module in that environment (warm.py), without pyalloc's variables.

    For programs with the same LD_PRELOAD.
    """
    given = {name: value for name, value in env.items() if not name.startswith("PYALLOC_")}
    with tempfile.TemporaryDirectory(prefix="pyalloc-warm-") as folder:
        program, server = warm.start(folder, module, given)
        try:
            yield program
        finally:
            server.communicate()


def torch_python() -> tuple[str, dict[str, str]]:
    """A Python for programs that import torch first and do not use CUDA, and its environment."""
    if dry_torch() is None:
        return sys.executable, dict(os.environ)
    return warm_python(""), {**os.environ, **dry_environment()}


def python_for(source: str, variables: Iterable[str] = (), *, dryrun: bool = False) -> str:
    """The Python to run a program with: one that has imported torch already, if the program does that first.

    Not if environment variables are set that torch may read during its import.
    """
    is_warm = _imports_torch_first(source) and all(
        name.startswith("PYALLOC_") for name in variables
    )
    return warm_python(source, dryrun=dryrun) if is_warm else sys.executable


def _imports_torch_first(source: str) -> bool:
    """Before pyalloc, whose import may wait for torch's, and before it does anything else."""
    for statement in ast.parse(textwrap.dedent(source)).body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module or ""]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the program's docstring
        else:
            return False
        ours = [name for name in names if name.split(".")[0] in ("torch", "pyalloc")]
        if ours:
            return ours[0].startswith("torch")
    return False
