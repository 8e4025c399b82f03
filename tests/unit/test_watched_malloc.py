"""Libraries that intercept cudaMalloc see what private pools are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from dry_support import preloaded

pytestmark = pytest.mark.torch

WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int
cudaMalloc(void **out, size_t bytes) {
    int (*take)(void **, size_t) = dlsym(RTLD_NEXT, "cudaMalloc");
    printf("taken %zu\n", bytes);
    fflush(stdout);
    return take(out, bytes);
}

int
cudaFree(void *ptr) {
    int (*give)(void *) = dlsym(RTLD_NEXT, "cudaFree");
    if (ptr != NULL) {
        printf("given back\n");
        fflush(stdout);
    }
    return give(ptr);
}
"""

USE_POOLS = """
import torch

def take(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

outside = take(40)
print("a pool")
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    tensor = take(30)
del tensor, pool
print("a graph")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    tensor = take(16)
graph.replay()
print("too large")
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    try:
        take(1 << 14)
    except torch.OutOfMemoryError:
        torch.cuda.synchronize()
"""


@pytest.mark.parametrize("install", [False, True], ids=["native", "pyalloc"])
def test_pools_come_from_it(dry_python, install, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    watched = {"LD_PRELOAD": preloaded(WATCH, tmp_path)}
    lines = dry_python(USE_POOLS, install=install, env=watched).stdout.split("\n")
    pool, graph, end = (lines.index(each) for each in ("a pool", "a graph", "too large"))
    assert lines[pool + 1 : graph] == ["taken 31457280", "given back"]
    assert "taken 16777216" in lines[graph:end]
    assert "taken 17179869184" in lines[end:]
