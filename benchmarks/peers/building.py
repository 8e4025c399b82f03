"""Compiles other libraries' allocators as torch's pluggable allocator wants them: RMM's pool, GMLake.

RMM comes from the headers of its package.  GMLake is a changed file of torch 2.0 and has no package: it is compiled
from a clone of its repository.  CUDA's functions are those of the process that loads the result.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.torch_replay import ROOT

HERE = Path(__file__).parent
#: the last release that is headers alone; later ones bring a CUDA runtime that knows the real driver only
RMM_VERSION = "24.12.1"
INSTALL = f"pip install librmm-cu12=={RMM_VERSION} nvidia-cuda-crt"
GMLAKE_SOURCE = "GMLake/src/CUDACachingAllocator.cpp"
GMLAKE_HEADER = "GMLake/include/cuda_vmm_allocator.h"
#: what GMLake includes of torch 2.0; gmlake.cpp declares what it needs of these
TORCH_HEADERS = (
    "core/impl/GPUTrace.h",
    "cuda/CUDACachingAllocator.h",
    "cuda/CUDAException.h",
    "cuda/CUDAFunctions.h",
    "cuda/CUDAGuard.h",
    "util/Backtrace.h",
    "util/UniqueVoidPtr.h",
    "util/intrusive_ptr.h",
)


@dataclass(frozen=True)
class Peer:
    """An allocator to compare with.

    Attributes:
        name: as the tables call it.
        library: with foreign_alloc and foreign_free.
        environment: variables it needs.
        short_environment: variables beside these on a small device.
    """

    name: str
    library: Path
    environment: dict[str, str] = field(default_factory=dict)
    short_environment: dict[str, str] = field(default_factory=dict)


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or []]


def _cuda_headers() -> list[Path]:
    """CUDA's headers as torch's packages and nvidia-cuda-crt bring them; empty where some are missing."""
    includes = [path for place in _folders("nvidia") for path in sorted(place.glob("*/include"))]
    wanted = ("cuda_runtime_api.h", "crt/host_defines.h")
    chosen = [[folder for folder in includes if (folder / name).exists()] for name in wanted]
    return list(dict.fromkeys(path for part in chosen for path in part)) if all(chosen) else []


def _rmm_headers() -> Path | None:
    wanted = "rmm/mr/device/cuda_memory_resource.hpp"
    return next(
        (p / "include" for p in _folders("librmm") if (p / "include" / wanted).exists()), None
    )


def why_not(gmlake: Path | None) -> str | None:
    """What is missing; None when nothing is.

    Args:
        gmlake: a clone of GMLake's repository, or None to do without.
    """
    if _rmm_headers() is None or not _cuda_headers():
        return f"needs the headers of RMM and CUDA: {INSTALL}"
    if gmlake is not None:
        for name in (GMLAKE_SOURCE, GMLAKE_HEADER):
            if not (gmlake / name).is_file():
                return f"{gmlake} is no clone of GMLake's repository (antgroup/glake): {name} is missing"
    return None


def _compile(source: Path, includes: list[Path], flags: list[str]) -> Path:
    library = ROOT / "build" / "peers" / f"lib{source.stem}_peer.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = ["c++", "-std=c++17", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [*flags, *(flag for folder in includes for flag in ("-isystem", str(folder)))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run([*command, str(source), "-o", str(made)], check=True)
        made.replace(library)
    return library


def rmm() -> Peer:
    """RMM's pool.  It grows as it likes; on a small device it is the whole device from the start.

    Raises:
        subprocess.CalledProcessError: the compiler's messages are on standard error.
    """
    headers = _rmm_headers()
    assert headers is not None, INSTALL
    bundled = [headers / "rapids", headers / "rapids" / "libcudacxx"]
    flags = ["-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE", "-DRMM_DISABLE_NVTX"]
    flags += ["-DFMT_HEADER_ONLY", "-DSPDLOG_FMT_EXTERNAL"]
    library = _compile(HERE / "rmm.cpp", [headers, *bundled, *_cuda_headers()], flags)
    quiet = {"RMM_DEBUG_LOG_FILE": os.devnull}  # in the current folder otherwise
    return Peer("rmm", library, quiet, {"PYALLOC_BENCH_WHOLE_CARD": "1"})


def gmlake(clone: Path) -> Peer:
    """GMLake, stitching from 2 MiB on; by default it would from 512 MiB on, more than nearly every block here.

    Raises:
        subprocess.CalledProcessError: the compiler's messages are on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        headers = Path(folder)
        for name in TORCH_HEADERS:
            (headers / "c10" / name).parent.mkdir(parents=True, exist_ok=True)
            (headers / "c10" / name).touch()
        own = (clone / GMLAKE_HEADER).read_bytes()
        (headers / "c10" / "cuda" / "cuda_vmm_allocator.h").write_bytes(own)
        torch = [path / "include" for path in _folders("torch")]
        source = (clone / GMLAKE_SOURCE).resolve()
        flags = ["-w", "-Dc10=gmlake_c10", f'-DGMLAKE_SOURCE="{source}"']
        library = _compile(HERE / "gmlake.cpp", [headers, *torch, *_cuda_headers()], flags)
    return Peer("gmlake", library, {"fragLimit": str(2 << 20)})
