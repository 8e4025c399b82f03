"""The environment in which real torch runs on the host-memory CUDA runtime."""

from __future__ import annotations

import os
import sys

from pyalloc import _bootstrap
from pyalloc.common.config import ENVIRONMENT, PLAN, TORCH_CONF
from pyalloc.errors import PyallocError
from pyalloc.outside import hostcuda

#: variables that would change the measured allocator or its settings
OF_THE_CALLER = (
    *TORCH_CONF,
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    ENVIRONMENT,
    PLAN,
    _bootstrap.INSTALL,
    "PYALLOC_FAST_PATH",
)
EXPANDABLE = "expandable_segments:True"
#: of torch's own allocators; native is the one without a setting
SETTINGS = {"expandable": EXPANDABLE, "async": "backend:cudaMallocAsync"}


def why_not() -> str | None:
    """What is missing for a run on the host-memory runtime; None if nothing is."""
    try:
        hostcuda.preloads(hostcuda.find_torch(sys.executable).cuda_major)
    except PyallocError as error:
        return str(error)
    return None


def of_allocator(allocator: str) -> dict[str, str]:
    """The caller's environment, but with only the settings of torch's own allocators that this one needs.

    allocator: expandable switches torch's expandable segments on, async the driver's pools (cudaMallocAsync); pyalloc
    is installed by the child.
    """
    inherited = {name: text for name, text in os.environ.items() if name not in OF_THE_CALLER}
    return {
        **inherited,
        **dict.fromkeys(TORCH_CONF if allocator in SETTINGS else (), SETTINGS.get(allocator, "")),
    }


def environment(memory: str = "4096GB", allocator: str = "native") -> dict[str, str]:
    """The environment of a child process whose CUDA is the host-memory runtime with that capacity."""
    found = hostcuda.find_torch(sys.executable)
    return {
        **hostcuda.environment(_bootstrap.environment(of_allocator(allocator)), found),
        "PYALLOC_HOSTCUDA_MEMORY": memory,
    }
