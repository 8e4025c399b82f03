"""What pyalloc costs a process besides the time of requests: its start, and host memory for its own tables.

Part of ``python -m benchmarks.speed``.  Each start is a fresh process that has imported torch: wall and processor
time of ``import pyalloc`` and of ``install()``.  Host memory is what `pyalloc_host_bytes` says (all tables that
pyalloc makes for a device): per live block of 512 B; per page of 2 MiB, beyond what the block in it costs; and per
page that is mapped a second time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks import hostcuda
from benchmarks.torch_replay import ROOT

START = """
import json, time, torch
def clocks():
    return 1e3 * time.perf_counter(), 1e3 * time.process_time()
at = [clocks()]
import pyalloc
at.append(clocks())
pyalloc.install()
at.append(clocks())
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in zip(at, at[1:])]))
"""
HOST_MEMORY = """
import json, sys, torch, pyalloc
n_blocks, n_pages = map(int, sys.argv[1:])
PAGE = 2 << 20
pyalloc.install(memory="tight")
take, give = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
def host_bytes(device):
    return pyalloc.stats(device)["pyalloc_host_bytes"]
def taken(device, n, size):
    before = (give(take(512, device)), host_bytes(device))[1]
    held = [take(size, device) for _ in range(n)]
    return held, host_bytes(device) - before
per_block = taken(0, n_blocks, 512)[1] / n_blocks
held, with_pages = taken(1, 2 * n_pages, PAGE)
per_page = (with_pages - taken(2, 2 * n_pages, 512)[1]) / (2 * n_pages)
for block in held[::2]:
    give(block)
before = host_bytes(1)
for block in [take(n_pages // 16 * PAGE, 1) for _ in range(16)]:
    give(block)
stitches = pyalloc.stats(1)["pyalloc_stitches"]
assert stitches == 16, stitches
print(json.dumps([per_block, per_page, (host_bytes(1) - before) / n_pages]))
"""


@dataclass(frozen=True)
class Start:
    """Medians over the rounds, milliseconds; the spread is that of install()'s processor time."""

    import_wall_ms: float
    import_cpu_ms: float
    install_wall_ms: float
    install_cpu_ms: float
    install_cpu_least_ms: float
    install_cpu_most_ms: float
    rounds: int
    target_ms: float = 5.0


@dataclass(frozen=True)
class HostMemory:
    """Host memory per item, and the most that it should be."""

    what: str
    n: int
    host_bytes: float
    target_bytes: int


def _child(source: str, *words: str) -> Any:
    env = {**hostcuda.environment("64GB"), "PYALLOC_HOSTCUDA_DEVICES": "3"}
    env["PYTHONDONTWRITEBYTECODE"] = ""  # later starts find compiled modules, as for users
    command = [sys.executable, "-W", "ignore", "-c", source, *words]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def start(rounds: int) -> Start:
    """How long a process waits for pyalloc before its first request."""
    runs = [_child(START) for _ in range(rounds)]
    (import_wall, import_cpu), (wall, cpu) = (
        [[run[part][clock] for run in runs] for clock in range(2)] for part in range(2)
    )
    middle = statistics.median
    return Start(
        import_wall_ms=middle(import_wall),
        import_cpu_ms=middle(import_cpu),
        install_wall_ms=middle(wall),
        install_cpu_ms=middle(cpu),
        install_cpu_least_ms=min(cpu),
        install_cpu_most_ms=max(cpu),
        rounds=rounds,
    )


def host_memory(n_blocks: int = 1_000_000, n_pages: int = 4096) -> list[HostMemory]:
    """Host memory of live blocks, of pages and of second mappings."""
    block, page, mapping = _child(HOST_MEMORY, str(n_blocks), str(n_pages))
    return [
        HostMemory("live block", n_blocks, block, 128),
        HostMemory("page", 2 * n_pages, page, 64),
        HostMemory("second mapping of a page", n_pages, mapping, 8),
    ]


def lines(begun: Start, memory: list[HostMemory]) -> list[str]:
    """The figures as text."""
    late = f" (want {begun.target_ms:.0f})" if begun.install_cpu_ms > begun.target_ms else ""
    found = [
        f"install(): {begun.install_wall_ms:.1f} ms, {begun.install_cpu_ms:.1f} of processor time "
        f"({begun.install_cpu_least_ms:.1f}..{begun.install_cpu_most_ms:.1f}, {begun.rounds} processes){late}; "
        f"import pyalloc before it: {begun.import_wall_ms:.1f} ms, {begun.import_cpu_ms:.1f} of processor time"
    ]
    for row in memory:
        much = f" (want {row.target_bytes})" if row.host_bytes > row.target_bytes else ""
        found.append(f"host memory for a {row.what}: {row.host_bytes:.1f} bytes{much}, n {row.n}")
    return found
