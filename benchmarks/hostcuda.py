"""The environment in which real torch runs on the host-memory CUDA runtime."""

from __future__ import annotations

import os
import sys

from pyalloc import _bootstrap, hostcuda
from pyalloc.errors import PyallocError


def why_not() -> str | None:
    """What is missing for a run on the host-memory runtime; None when nothing is."""
    try:
        hostcuda.preloads(hostcuda.find_torch(sys.executable).cuda_major)
    except PyallocError as error:
        return str(error)
    return None


def environment(memory: str = "4096GB") -> dict[str, str]:
    """The environment of a child process whose CUDA is the host-memory runtime with that capacity."""
    found = hostcuda.find_torch(sys.executable)
    return {
        **hostcuda.environment(_bootstrap.environment(dict(os.environ)), found),
        "PYALLOC_HOSTCUDA_MEMORY": memory,
    }
