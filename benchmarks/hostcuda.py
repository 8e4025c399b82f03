"""The environment in which real torch runs on the host-memory CUDA runtime."""

from __future__ import annotations

import os
import sys

from pyalloc import _bootstrap, hostcuda
from pyalloc.errors import PyallocError

#: what would make another allocator, or other settings, of the one that is measured
OF_THE_CALLER = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYALLOC_CONF",
    "PYALLOC_INSTALL",
    "PYALLOC_FAST_PATH",
)


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
    inherited = {name: text for name, text in os.environ.items() if name not in OF_THE_CALLER}
    return {
        **hostcuda.environment(_bootstrap.environment(inherited), found),
        "PYALLOC_HOSTCUDA_MEMORY": memory,
    }
