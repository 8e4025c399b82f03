"""The CUDA kernels compiled for the CPU, behind the driver's interface."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from pyalloc.ops import _cuda
from pyalloc.ops._library import library

ROOT = Path(__file__).parents[2]


# where a card would read something else, or refuse
CHECKS = ("-O2", "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")
RACES = ("-O1", "-fsanitize=thread", "-DPYA_RACES")  # emulate_races.hpp


def build(out: Path, options: Sequence[str] = CHECKS) -> Path | None:
    """A library in the folder, unless it is there; None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    built = out / "cuda.so"
    if built.exists():
        return built
    subprocess.run(["make", "-s", "-C", str(ROOT / "cuda"), "source", f"OUT={out}"], check=True)
    flags = ["-std=c++17", *options, "-fPIC", "-w", f'-DPYA_KERNELS="{out / "ops.cu"}"']
    source, compiled = str(ROOT / "tests/ops/emulate.cpp"), str(out / "cuda.o")
    subprocess.run([compiler, *flags, "-c", source, "-o", compiled], check=True)
    # not with the options: a sanitizer's own library is not wanted
    subprocess.run([compiler, "-shared", compiled, "-o", str(built)], check=True)
    return built


def load(path: Path) -> _cuda.Target:
    assert library().pya_ops_cuda_open(str(path).encode()) == 0
    loaded = _cuda.Target()
    assert library().pya_ops_cuda_load(b"", ctypes.byref(loaded)) == 0
    return loaded


@contextmanager
def launching(path: Path) -> Iterator[_cuda.Target]:
    """CPU tensors are launched on the emulation instead of called."""
    loaded = load(path)
    with (
        mock.patch.object(_cuda, "on_device", lambda x: True),
        mock.patch.object(_cuda, "target", lambda like, family: bytes(loaded)),
    ):
        yield loaded
