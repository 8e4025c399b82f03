"""What a recording notes about its process besides the events: versions, settings, rank, command line."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from pyalloc import _core
from pyalloc.common.config import CUBLAS_CACHE, CUBLAS_CONF, CUBLAS_NOTES, ENVIRONMENT, TORCH_CONF


def about(torch: Any, *, with_command: bool) -> Iterator[str]:
    """Yields notes of the form `name=value`."""
    yield f"torch={torch.__version__}"
    yield f"allocator={'pyalloc' if _core.is_created() else torch.cuda.get_allocator_backend()}"
    for name in (*TORCH_CONF, ENVIRONMENT, CUBLAS_CONF, CUBLAS_CACHE):
        if os.environ.get(name):
            yield f"{name}={os.environ[name]}"
    for library, note in CUBLAS_NOTES.items():
        ask = getattr(torch._C, f"_cuda_get{library}WorkspaceSize", None)  # since 2.14
        if ask is not None:
            yield f"{note}={ask()}"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if os.environ.get(name):
            yield f"{name.lower()}={os.environ[name]}"
    yield f"pid={os.getpid()}"
    if with_command:
        yield f"command={shlex.join(sys.orig_argv)}"
