"""Random operations with real bytes: what was written is read back, whatever was allocated and freed between.

Blocks up to 1 MiB are filled entirely; larger ones are stamped in the first and last 512 bytes of every 2 MiB page.
Live bytes stay below 4 GiB.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

KIB, MIB, GIB = 2**10, 2**20, 2**30
STAMP = 512
PAGE = 2 * MIB
MOST_LIVE = 4 * GIB
STEPS = int(os.environ.get("PYALLOC_FUZZ_STEPS", "600"))


@dataclass
class Block:
    tensor: torch.Tensor
    value: int

    def places(self) -> list[slice]:
        size = self.tensor.numel()
        if size <= MIB:
            return [slice(0, size)]
        starts = range(0, size, PAGE)
        edges = [start for start in starts] + [min(start + PAGE, size) - STAMP for start in starts]
        return [slice(max(edge, 0), max(edge, 0) + STAMP) for edge in edges]

    def write(self) -> None:
        for place in self.places():
            part = self.tensor[place]
            part.copy_(torch.full((part.numel(),), self.value, dtype=torch.uint8))

    def verify(self) -> None:
        for place in self.places():
            found = self.tensor[place].cpu()
            assert bool((found == self.value).all()), (self.tensor.numel(), place)


def random_size(rng: random.Random) -> int:
    top = rng.choice([512, 4 * KIB, 64 * KIB, MIB, MIB, 16 * MIB, 128 * MIB, GIB])
    return rng.randint(1, top)


def sum_of(device: int, key: str) -> int:
    return torch.cuda.memory_stats(device)[key]


@pytest.mark.parametrize("seed", range(4))
def test_random_operations(seed: int, runtime) -> None:
    rng = random.Random(seed)
    streams = {device: [torch.cuda.Stream(device) for _ in range(4)] for device in (0, 1)}
    live: list[Block] = []
    total = 0
    base = [sum_of(device, "allocation.all.current") for device in (0, 1)]
    assert base == [sum_of(device, "active.all.current") for device in (0, 1)]
    requested = [sum_of(device, "requested_bytes.all.current") for device in (0, 1)]
    runtime.pya_hostcuda_set_event_delay(rng.choice([0, 3, 50]))
    for step in range(STEPS):
        kind = rng.random()
        if kind < 0.55:
            size, device = random_size(rng), rng.randrange(2)
            while live and total + size > MOST_LIVE:
                total -= drop(live, rng)
            with torch.cuda.device(device), torch.cuda.stream(rng.choice(streams[device])):
                block = Block(
                    torch.empty(size, dtype=torch.uint8, device="cuda"), rng.randrange(256)
                )
            block.write()
            live.append(block)
            total += size
        elif kind < 0.95 and live:
            total -= drop(live, rng)
        elif kind < 0.98 and live:
            block = rng.choice(live)
            block.tensor.record_stream(rng.choice(streams[block.tensor.device.index]))
        elif kind < 0.99:
            torch.cuda.empty_cache()
        else:
            for device in (0, 1):
                torch.cuda.synchronize(device)
        block = None  # or the tensor would outlive its removal from live
        if step % 50 == 0:
            check_statistics(live, base, requested)
    for block in live:
        block.verify()
    check_statistics(live, base, requested)


def drop(live: list[Block], rng: random.Random) -> int:
    block = live.pop(rng.randrange(len(live)))
    block.verify()
    return block.tensor.numel()


def check_statistics(live: list[Block], base: list[int], requested: list[int]) -> None:
    for device in (0, 1):
        mine = [block.tensor for block in live if block.tensor.device.index == device]
        assert sum_of(device, "allocation.all.current") == base[device] + len(mine)
        # Nothing waits for a stream.
        if sum_of(device, "active.all.current") == base[device] + len(mine):
            wanted = requested[device] + sum(tensor.numel() for tensor in mine)
            assert sum_of(device, "requested_bytes.all.current") == wanted
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in mine)
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start
        assert all(start % 512 == 0 for start, _ in spans)
        assert torch.cuda.memory_reserved(device) >= torch.cuda.memory_allocated(device)
