"""The runtime's libraries for ctypes, and real PyTorch on them in fresh interpreters."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dry_support import PATIENCE_S, python_for

from pyalloc import _bootstrap
from pyalloc.outside import hostcuda

PAGE = 2 << 20


class Prop(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("flags", ctypes.c_int),
    ]


class Cuda:
    """Driver, runtime and control functions, with 64-bit arguments where they are needed."""

    def __init__(self, folder: Path, major: int = 13) -> None:
        self.driver = ctypes.CDLL(str(folder / "libcuda.so.1"))
        self.runtime = ctypes.CDLL(str(folder / f"libcudart.so.{major}"))
        for name in ("calls", "device_ns", "live", "dtoh_copies", "dtoh_bytes", "launches"):
            getattr(self.driver, f"pya_hostcuda_{name}").restype = ctypes.c_uint64
        for name in ("used_bytes", "peak_bytes"):
            getattr(self.driver, f"pya_hostcuda_{name}").restype = ctypes.c_size_t

    def control(self, name: str, *args: object) -> int:
        return getattr(self.driver, f"pya_hostcuda_{name}")(*args)

    def live(self, what: str) -> int:
        return self.control("live", what.encode())

    def device_ns(self, name: str | None = None) -> int:
        return self.control("device_ns", None if name is None else name.encode())

    def used(self, device: int = 0) -> int:
        return self.control("used_bytes", device)

    def __call__(self, name: str, *args: object) -> int:
        """Calls an entry point; integers are passed as 64 bits."""
        library = self.runtime if name.startswith("cuda") else self.driver
        words = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
        return int(getattr(library, name)(*words))

    def ok(self, name: str, *args: object) -> None:
        code = self(name, *args)
        assert code == 0, f"{name} gave {code}"

    def out(self, name: str, *args: object) -> int:
        """Calls an entry point that writes 64 bits through its first argument."""
        value = ctypes.c_uint64()
        self.ok(name, ctypes.byref(value), *args)
        return value.value

    def malloc(self, size: int) -> int:
        return self.out("cudaMalloc", size)

    def handle(self, size: int = PAGE, device: int = 0) -> int:
        prop = Prop(1, 0, 1, device)
        return self.out("cuMemCreate", size, ctypes.byref(prop), 0)

    def reserve(self, size: int) -> int:
        return self.out("cuMemAddressReserve", size, 0, 0, 0)

    def access(self, start: int, size: int, flags: int = 3, device: int = 0) -> int:
        return self("cuMemSetAccess", start, size, ctypes.byref(Access(1, device, flags)), 1)

    def put(self, address: int, data: bytes) -> int:
        return self("cudaMemcpy", address, data, len(data), 1)

    def get(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.ok("cudaMemcpy", buffer, address, size, 2)
        return buffer.raw


@pytest.fixture(scope="session")
def libraries() -> Path:
    if not (hostcuda.LIBRARIES / "libcuda.so.1").exists():
        pytest.fail(f"build the runtime first: make -C csrc/hostcuda OUT={hostcuda.LIBRARIES}")
    return hostcuda.LIBRARIES


LIVE = ("plain", "handles", "reservations", "mappings", "streams", "events", "graphs", "pinned")


@pytest.fixture
def cuda(libraries: Path) -> Iterator[Cuda]:
    """Fails a test that leaves something behind."""
    found = Cuda(libraries)
    found.ok("cudaSetDevice", 0)  # the driver works in a context and does not choose one by itself
    before = {what: found.live(what) for what in LIVE}
    used = found.used()
    yield found
    found.control("fail_nth", ctypes.c_uint64(0), None, 0)
    found.control("set_event_delay", ctypes.c_uint64(0))
    found.control("set_capacity", 0, ctypes.c_size_t(80 << 30))
    assert {what: found.live(what) for what in LIVE} == before
    assert found.used() == used
    assert found.control("check") == 0


RunTorch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def torch_found() -> hostcuda.Torch:
    try:
        return hostcuda.find_torch(sys.executable)
    except hostcuda.HostCudaError as error:
        pytest.skip(f"needs a CUDA build of PyTorch: {error}")


@pytest.fixture
def run_torch(torch_found: hostcuda.Torch, libraries: Path, tmp_path: Path) -> RunTorch:
    """Runs source text with torch on host memory; keyword arguments are environment variables."""

    def run(source: str, expect: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        env = hostcuda.environment(_bootstrap.environment(dict(os.environ)), torch_found)
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env["PYALLOC_HOSTCUDA_MEMORY"] = "8GB"
        env["PYALLOC_HOSTCUDA_COUNTERS"] = str(tmp_path / "counters.json")
        env.update(variables)
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(source))
        done = subprocess.run(
            [python_for(source, variables), str(program)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        if done.returncode != expect:
            pytest.fail(
                f"exit code {done.returncode}, not {expect}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
            )
        return done

    return run


@pytest.fixture
def counters(tmp_path: Path) -> Callable[[], dict[str, object]]:
    """The counters that the last run_torch left."""
    return lambda: json.loads((tmp_path / "counters.json").read_text())
