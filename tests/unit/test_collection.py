"""garbage_collection_threshold on real PyTorch: what torch promises of it holds on both allocators."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

PROGRAM = """
    import torch

    MIB = 2**20
    torch.cuda.set_per_process_memory_fraction(0.5)
    most = 0
    for size in range(200, 1000, 50):
        tensor = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        del tensor
        most = max(most, torch.cuda.memory_reserved())
    stats = torch.cuda.memory_stats()
    print(most // MIB, stats["num_ooms"], stats["num_alloc_retries"])
"""


@pytest.mark.torch
@pytest.mark.parametrize("install", [False, True], ids=["native", "pyalloc"])
def test_cached_memory_stays_near_the_threshold(
    dry_python: Callable[..., CompletedProcess[str]], install: bool
) -> None:
    """Sixteen sizes in turn: without it, native caches up to its limit of 4 GiB and then has to start over."""
    name = "PYALLOC_CONF" if install else "PYTORCH_CUDA_ALLOC_CONF"
    done = dry_python(PROGRAM, install=install, env={name: "garbage_collection_threshold:0.4"})
    most, ooms, retries = map(int, done.stdout.split())
    assert ooms == 0
    assert retries == 0
    assert most <= 0.4 * 4096 + 1000
