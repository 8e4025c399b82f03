"""Compiles RMM's pool for torch's interface for pluggable allocators, from the headers of its package.

The library calls the CUDA functions of the process that loads it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compiling import making
from benchmarks.torch_replay import ROOT

HERE = Path(__file__).parent
#: the last release of headers only; later ones bring a CUDA runtime that works only with the real driver
RMM_VERSION = "24.12.1"
INSTALL = f"pip install librmm-cu12=={RMM_VERSION} nvidia-cuda-crt"


@dataclass(frozen=True)
class Peer:
    """An allocator to compare with.

    Attributes:
        name: its name in the tables.
        library: exports foreign_alloc and foreign_free.
        environment: variables that it needs.
        short_environment: further variables on a small device.
    """

    name: str
    library: Path
    environment: dict[str, str] = field(default_factory=dict)
    short_environment: dict[str, str] = field(default_factory=dict)


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else [Path(p) for p in spec.submodule_search_locations or []]


def _cuda_headers() -> list[Path]:
    """Folders of CUDA's headers, from torch's packages and nvidia-cuda-crt; empty if some are missing."""
    includes = [path for place in _folders("nvidia") for path in sorted(place.glob("*/include"))]
    wanted = ("cuda_runtime_api.h", "crt/host_defines.h")
    chosen = [[folder for folder in includes if (folder / name).exists()] for name in wanted]
    return list(dict.fromkeys(path for part in chosen for path in part)) if all(chosen) else []


def _rmm_headers() -> Path | None:
    wanted = "rmm/mr/device/cuda_memory_resource.hpp"
    return next(
        (p / "include" for p in _folders("librmm") if (p / "include" / wanted).exists()), None
    )


def why_not() -> str | None:
    """What is missing; None if nothing is."""
    if _rmm_headers() is None or not _cuda_headers():
        return f"needs the headers of RMM and CUDA: {INSTALL}"
    return None


def _compile(source: Path, includes: list[Path], flags: list[str]) -> Path:
    library = ROOT / "build" / "peers" / f"lib{source.stem}_peer.so"
    command = ["c++", "-std=c++17", "-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [*flags, *(flag for folder in includes for flag in ("-isystem", str(folder)))]
    with making(library) as made:
        subprocess.run([*command, str(source), "-o", str(made)], check=True)
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
    quiet = {"RMM_DEBUG_LOG_FILE": os.devnull}  # otherwise it logs into the current folder
    return Peer("rmm", library, quiet, {"PYALLOC_BENCH_WHOLE_CARD": "1"})
