"""The op tests need torch and the library; each CPU test runs under every instruction set there is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]

# The same cases in every run, however slow the machine is; fuzz_ops.py is what looks for others.
settings.register_profile(
    "pyalloc",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pyalloc")


def available_isas() -> list[str]:
    from pyalloc.ops import _library

    names = _library.ISA_NAMES
    return list(names[: _library.library().pya_ops_isa_best() + 1])


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    from pyalloc.ops import cpu_isa, set_cpu_isa

    if request.param not in available_isas():
        pytest.skip(f"this machine or build has no {request.param}")
    before = cpu_isa()
    set_cpu_isa(request.param)
    yield request.param
    set_cpu_isa(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels compiled for the CPU, behind the driver's interface."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the emulation needs a C++ compiler")
    out = tmp_path_factory.mktemp("emulator")
    subprocess.run(["make", "-s", "-C", str(ROOT / "cuda"), "source", f"OUT={out}"], check=True)
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-w",
        f'-DPYA_KERNELS="{out / "ops.cu"}"',
    ]
    subprocess.run(
        [*command, str(ROOT / "tests/ops/emulate.cpp"), "-o", str(out / "cuda.so")], check=True
    )
    return out / "cuda.so"
