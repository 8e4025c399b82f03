"""Machine code of the CUDA kernels: how NVRTC or nvcc compile it, and how it is kept, found again and loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyalloc.errors import OpError
from pyalloc.ops import _cuda

ROOT = Path(__file__).parents[2]


def test_a_familys_kernels_are_not_loaded_during_a_capture(monkeypatch):
    """Each family's separately."""
    monkeypatch.setattr(_cuda, "is_captured", lambda device: True)
    for family in _cuda.FAMILIES:
        with pytest.raises(OpError, match="call the op once on device 5 before"):
            _cuda._module(5, family)


def test_cache_is_private_and_checked(tmp_path):
    path = tmp_path / "pyalloc" / "ops.cubin"
    path.parent.mkdir()
    _cuda.write_cached(path, b"machine code")
    assert _cuda.read_cached(path) == b"machine code"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-1])
    assert _cuda.read_cached(path) is None
    _cuda.write_cached(path, b"again")
    other = path.with_name("other.cubin")  # of another source or architecture
    other.write_bytes(path.read_bytes())
    other.chmod(0o600)
    assert _cuda.read_cached(other) is None
    other.unlink()
    other.symlink_to(path)
    assert _cuda.read_cached(other) is None
    path.chmod(0o666)
    assert _cuda.read_cached(path) is None
    assert _cuda.read_cached(tmp_path / "none") is None


@pytest.mark.parametrize("home", ["missing", "read-only", "of others"])
def test_without_a_home_the_kernels_are_kept_among_temporary_files(
    tmp_path, monkeypatch, capfd, home
):
    """As for a container's nameless user.  They are compiled once, which is reported."""
    (tmp_path / "ops.cu").write_bytes(b"text")
    monkeypatch.setattr(_cuda, "SOURCE", tmp_path / "ops.cu")
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: b"compiled")
    monkeypatch.setattr(_cuda.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nameless():
        raise RuntimeError("Could not determine home directory.")

    if home == "missing":
        monkeypatch.setattr(Path, "home", nameless)
    elif home == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    else:
        shared = tmp_path / "shared" / "pyalloc"
        shared.mkdir(parents=True)
        shared.chmod(0o777)
        monkeypatch.setenv("XDG_CACHE_HOME", str(shared.parent))
    assert next(_cuda.images_for((9, 0), "additive")) == b"compiled"
    kept = tmp_path / f"pyalloc-{os.getuid()}"
    assert (
        f"additive kernels for sm_90 takes between a few seconds and half a minute, once; kept in {kept}"
        in capfd.readouterr().err
    )
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: pytest.fail("the cache was not used"))
    assert next(_cuda.images_for((9, 0), "additive")) == b"compiled"
    assert capfd.readouterr().err == ""
    # If another user was there first, nothing is kept.
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: b"again")
    kept.chmod(0o777)
    assert next(_cuda.images_for((9, 0), "additive")) == b"again"
    assert "in each process" in capfd.readouterr().err


def test_ranks_that_begin_at_once_compile_once(tmp_path, monkeypatch):
    (tmp_path / "ops.cu").write_bytes(b"text")
    monkeypatch.setattr(_cuda, "SOURCE", tmp_path / "ops.cu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled = []

    def slow(*_):
        compiled.append(b"compiled")
        finished.wait(0.2)  # the others arrive meanwhile
        return b"compiled"

    finished = threading.Event()
    monkeypatch.setattr(_cuda, "compile_text", slow)
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(lambda _: next(_cuda.images_for((9, 0), "additive")), range(4)))
    assert images == [b"compiled"] * 4
    assert len(compiled) == 1


def test_what_the_driver_refuses_is_compiled_again(tmp_path, monkeypatch):
    """A fatbin of a newer CUDA than the driver's."""
    (tmp_path / "ops.cu").write_bytes(b"text")
    digest = hashlib.sha256(b"text").hexdigest()[:16]
    (tmp_path / f"ops-{digest}.fatbin").write_bytes(b"built")
    monkeypatch.setattr(_cuda, "SOURCE", tmp_path / "ops.cu")
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: b"compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tried = []

    def refuse(image, to):
        tried.append(image)
        return image == b"built"

    _cuda.load(SimpleNamespace(pya_ops_cuda_load=refuse), (9, 0), "ps")
    assert tried == [b"built", b"compiled"]


@pytest.mark.parametrize(("cuda", "major"), [("12.8", "12"), ("13.2", "13")])
def test_nvrtc_is_of_torchs_own_cuda(tmp_path, monkeypatch, cuda, major):
    """A driver that runs this torch may refuse the output of a newer compiler; the cache keeps the two apart."""
    for name in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "ops.cu").write_bytes(b"text")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(_cuda.ctypes, "CDLL", lambda name: name)
    monkeypatch.setattr(_cuda.torch.version, "cuda", cuda)
    monkeypatch.setattr(_cuda, "SOURCE", tmp_path / "ops.cu")
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: cuda.encode())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _cuda._nvrtc().endswith(f"/libnvrtc.so.{major}")
    assert next(_cuda.images_for((9, 0), "additive")) == cuda.encode()
    monkeypatch.setattr(_cuda.torch.version, "cuda", "11.8")
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: b"another")
    assert next(_cuda.images_for((9, 0), "additive")) == b"another"


def test_nvrtc_finds_its_other_half(tmp_path, monkeypatch):
    """It asks for that by name alone, so that must be open before, but never a file in the current folder."""
    folder = tmp_path / "cu13" / "lib"
    folder.mkdir(parents=True)
    halves = [str(folder / name) for name in ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13")]
    for half in halves:
        Path(half).touch()
    opened = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(_cuda.ctypes, "CDLL", opened.append)
    monkeypatch.setattr(_cuda.torch.version, "cuda", "13.0")
    for roots in ([str(tmp_path)], []):
        spec = SimpleNamespace(submodule_search_locations=roots)
        monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name, spec=spec: spec)
        _cuda._nvrtc()
    assert opened == [*halves, "libnvrtc.so.13"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The kernels as one text, if there is a compiler for it."""
    try:
        _cuda._nvrtc()
    except OpError:
        pytest.skip("no NVRTC here")
    out = tmp_path_factory.mktemp("text")
    subprocess.run(["make", "-s", "-C", str(ROOT / "cuda"), "source", f"OUT={out}"], check=True)
    return (out / "ops.cu").read_bytes()


SPILLED_BYTES = 32  # the most for a kernel: nvcc 13.0 for 10.0 (28 for 8.0, 20 for 9.0)
SPILLED_BY_NVRTC = 52  # 13.0 for 8.0 (24 for 9.0): addresses that are computed once and read once a tile, by its SASS


def require_few_spills(log: str, n_kernels: int, most: int = SPILLED_BYTES) -> None:
    """From what ptxas -v says of each kernel."""
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spilled) >= n_kernels, log[-3000:]
    assert max(int(n) for pair in spilled for n in pair) <= most, log[-3000:]


def count_kernels(text: bytes, arch: str, family: str = "") -> int:
    """The tensor-core kernels exist where they pay: not on cards of 12.x, nor before 8.0."""
    assert len(_cuda.kernel_names(text)) == text.count(b'extern "C" __global__')
    kernels = _cuda.kernel_names(text, family)
    return sum(arch in {"80", "90", "100"} or not name.endswith(b"_tensor") for name in kernels)


def compiled_by_nvrtc(text: bytes, arch: str) -> bytes:
    """The same in one text as in all of its families: those that are not left out count."""
    image, log = _cuda.compile_with_log(text, arch, "--ptxas-options=-v")
    assert "warning" not in log, log
    left_out = [f for f in _cuda.FAMILIES if f"#define PYA_WITHOUT_{f}\n".encode() in text]
    n_left_out = sum(count_kernels(text, arch.removeprefix("sm_"), f) for f in left_out)
    n_kernels = count_kernels(text, arch.removeprefix("sm_")) - n_left_out
    require_few_spills(log, n_kernels, SPILLED_BY_NVRTC)
    return image


@pytest.mark.parametrize("family", _cuda.FAMILIES)
def test_nvrtc_image_is_found_again(family, text, tmp_path, monkeypatch):
    (tmp_path / "ops.cu").write_bytes(text)
    monkeypatch.setattr(_cuda, "SOURCE", tmp_path / "ops.cu")
    monkeypatch.setattr(_cuda, "compile_text", compiled_by_nvrtc)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    image = next(_cuda.images_for((9, 0), family))
    assert image[:4] == b"\x7fELF"
    assert [f for f in _cuda.FAMILIES if f"pya_{f}_".encode() in image] == [family]
    monkeypatch.setattr(_cuda, "compile_text", lambda *_: pytest.fail("the cache was not used"))
    assert next(_cuda.images_for((9, 0), family)) == image
    digest = hashlib.sha256((tmp_path / "ops.cu").read_bytes()).hexdigest()[:16]
    (tmp_path / f"ops-{digest}.fatbin").write_bytes(b"built")
    assert next(_cuda.images_for((9, 0), family)) == b"built"


# The last test has nvcc do everything that it can, and the one before did 9.0 with NVRTC.
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_120"])
def test_nvrtc_compiles_without_warnings_and_hardly_spills(arch, text):
    if nvcc_knows(arch):
        pytest.skip("nvcc is here and does this one")
    if arch == "sm_120" and not nvrtc_knows(120):
        pytest.skip("this NVRTC is older than that")
    assert compiled_by_nvrtc(text, arch)[:4] == b"\x7fELF"


@pytest.mark.slow
def test_tensor_core_kernels_hardly_spill_on_blackwell(text):
    """Only these: NVRTC takes minutes for all."""
    if nvcc_knows("sm_100"):
        pytest.skip("nvcc is here and does this one")
    if not nvrtc_knows(100):
        pytest.skip("this NVRTC is older than that")
    kernel = re.compile(rb'extern "C" __global__ [^{]*\{.*?\n\}\n', flags=re.DOTALL)
    alone = kernel.sub(lambda found: found[0] if b"_tensor(" in found[0] else b"", text)
    names = _cuda.kernel_names(alone)
    assert names and all(name.endswith(b"_tensor") for name in names)
    _, log = _cuda.compile_with_log(alone, "sm_100", "--ptxas-options=-v")
    require_few_spills(log, len(names), SPILLED_BY_NVRTC)


def nvcc_knows(arch: str) -> bool:
    if shutil.which("nvcc") is None:
        return False
    command = ["nvcc", "--list-gpu-arch"]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return arch.replace("sm_", "compute_") in known.split()


def nvrtc_knows(arch: int) -> bool:
    nvrtc, count = _cuda._nvrtc(), ctypes.c_int()
    assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    known = (ctypes.c_int * count.value)()
    assert nvrtc.nvrtcGetSupportedArchs(known) == 0
    return arch in known


def what_make_would_run(tmp_path, *known):
    """With an nvcc that knows these generations."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n" + "".join(f"echo compute_{n}\n" for n in known))
    nvcc.chmod(0o700)
    command = ["make", "-n", "-C", str(ROOT / "cuda"), f"OUT={tmp_path}", f"NVCC={nvcc} -ccbin gcc"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_build_stops_at_no_warning(tmp_path):
    """13.5 spills a few bytes where 13.2 spills none."""
    text = what_make_would_run(tmp_path, 75, 90)
    assert "-ccbin gcc -std=c++17" in text and "-fatbin" in text
    assert "-Werror" not in text


def test_a_build_has_the_generations_that_nvcc_knows(tmp_path):
    """Cards of 12.x ran the tensor-core kernels of 9.0: a driver compiles their text for any later card."""
    text = what_make_would_run(tmp_path, 70, 75, 80, 86, 89, 90, 100, 103, 120)
    assert re.findall(r"code=(\w+)", text) == [
        *(f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)),
        "compute_90",
    ]
    older = what_make_would_run(tmp_path, 75, 80, 86)
    assert re.findall(r"code=(\w+)", older) == ["sm_75", "sm_80", "sm_86", "compute_86"]
    silent = what_make_would_run(tmp_path)  # an nvcc that cannot list them
    assert re.findall(r"code=(\w+)", silent) == [
        *(f"sm_{n}" for n in (75, 80, 86, 89, 90)),
        "compute_90",
    ]


@pytest.mark.slow
def test_nvcc_compiles_without_warnings_and_hardly_spills(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc here")
    strict = "-Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v"
    done = subprocess.run(
        ["make", "-C", str(ROOT / "cuda"), f"OUT={tmp_path}", f"STRICT={strict}"],
        capture_output=True,
        text=True,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    text = (tmp_path / "ops.cu").read_bytes()
    archs = set(re.findall(r"code=sm_(\d+)", log))
    assert {"75", "80", "86", "89", "90"} <= archs
    require_few_spills(log, sum(count_kernels(text, arch) for arch in archs))
    assert list(tmp_path.glob("ops-*.fatbin"))
