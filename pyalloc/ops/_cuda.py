"""The CUDA kernels of the ops: not there yet on this machine, so the eager path serves the device."""

from __future__ import annotations

from pyalloc.errors import OpError


def available() -> bool:
    return False


def refuse_dropout(dropout: float) -> None:
    if dropout > 0:
        raise OpError("scaled_attention: dropout on CUDA needs the CUDA kernels, which are missing")
