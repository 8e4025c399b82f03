"""The environment in which real torch runs on the host-memory CUDA runtime."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

LIBRARIES = Path(__file__).resolve().parent.parent / "pyalloc" / "lib" / "hostcuda"


def cuda_major() -> int | None:
    """CUDA major version the installed torch was built for; None without a CUDA build of torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b.*?=\s*['\"](\d+)\.", text, re.MULTILINE)
    return int(found.group(1)) if found else None


def why_not() -> str | None:
    """What is missing for a run on the host-memory runtime; None when nothing is."""
    major = cuda_major()
    if major is None:
        return "the CUDA build of torch is not installed (pip install torch)"
    if not (LIBRARIES / f"libcudart.so.{major}").exists():
        return f"libcudart.so.{major} of the host-memory runtime is not built (make -C csrc/hostcuda)"
    return None


def environment(memory: str = "4096GB") -> dict[str, str]:
    """The environment of a child process whose CUDA is the host-memory runtime with that capacity."""
    names = [f"libcudart.so.{cuda_major()}", "libcuda.so.1", "libnvidia-ml.so.1", "libpya_cudalibs.so"]
    preload = [str(LIBRARIES / name) for name in names]
    return {
        **os.environ,
        "LD_PRELOAD": ":".join([*preload, *filter(None, [os.environ.get("LD_PRELOAD")])]),
        "PYALLOC_HOSTCUDA_MEMORY": memory,
    }
