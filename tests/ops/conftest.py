"""The op tests need torch and the library; each CPU test runs under every instruction set there is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
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


@contextlib.contextmanager
def _selected(name: str) -> Iterator[str]:
    from pyalloc.ops import cpu_isa, set_cpu_isa

    if name not in available_isas():
        pytest.skip(f"this machine or build has no {name}")
    before = cpu_isa()
    set_cpu_isa(name)
    yield name
    set_cpu_isa(before)


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with _selected(request.param) as name:
        yield name


@contextlib.contextmanager
def building(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder to build something in, which all workers of pytest-xdist share; one at a time."""
    own = factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    out.mkdir(exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield out


@pytest.fixture(scope="session")
def emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU kernels with AMX's tiles in plain C, which serve every shape."""
    narrow = ("HAVE_AVX2=no", "HAVE_AVX512=no", "HAVE_AMX=emulated")
    source = Path(__file__).parents[2] / "csrc" / "ops"
    with building(tmp_path_factory, "emulated_tiles") as out:
        library = out / "libpyalloc_ops.so"
        places = (f"OUT={out}", f"OBJ={out}/obj")
        subprocess.run(["make", "-s", "-C", source, *places, *narrow, library], check=True)
    return library


@pytest.fixture
def in_emulated_tiles(emulated_tiles: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls go to that library, those that C serves too: C looks its kernels up once."""
    from pyalloc._core import attention_plain
    from pyalloc.ops import _library, _plain

    def forget() -> None:
        _library.library.cache_clear()
        _library.address.cache_clear()

    with monkeypatch.context() as patched:
        patched.setattr(_library, "LIBRARY", emulated_tiles)
        forget()
        serve, backward = attention_plain(_plain._PARTS, _plain._LIMITS)
        patched.setattr(_plain, "serve", serve)
        patched.setattr(_plain, "_backward", backward)
        yield
    forget()


@pytest.fixture(params=["scalar", "avx2", "avx512", "amx", "emulated amx"])
def attention_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Scaled attention has kernels of its own for AMX; those for large shapes only."""
    if request.param == "emulated amx":
        request.getfixturevalue("in_emulated_tiles")
    with _selected(request.param.removeprefix("emulated ")) as name:
        yield name


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels compiled for the CPU, behind the driver's interface."""
    from .emulation import build

    with building(tmp_path_factory, "emulator") as out:
        built = build(out)
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
