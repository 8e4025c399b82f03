"""The op tests need torch and the library; each CPU test runs under every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

torch = pytest.importorskip("torch")

# The same cases in every run, on any machine; fuzz_ops.py looks for others.
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
    from .emulation import build

    built = build(tmp_path_factory.mktemp("emulator"))
    if built is None:
        pytest.skip("the emulation needs a C++ compiler")
    return built


@pytest.fixture
def device(emulator: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """CPU tensors are launched on the emulation instead of called."""
    from pyalloc.ops import _cuda

    from .emulation import load

    loaded = load(emulator)
    monkeypatch.setattr(_cuda, "on_device", lambda x: True)
    monkeypatch.setattr(_cuda, "target", lambda like, family: bytes(loaded))
    return loaded
