"""Blocks that share pages keep every byte: shared_pages.py ROUNDS, under a limit that leaves little room.

--grains: more memory, much of it in grains of 4 pages, on a card also of 16, whose free ends and starts are stitched.

Each block is filled when it is allocated and checked when it is freed.  On a card, half of the blocks are also changed
by kernels on a second stream while their neighbours are changed on the first, so that two addresses of one page are
written at once.  Prints what happened as JSON; a wrong byte ends it with an error.
"""

import json
import random
import sys

import torch

import pyalloc
from pyalloc import _core

MIB = 2**20

rounds = int(sys.argv[1])
rng = random.Random(5)
on_card = "--kernels" in sys.argv
grained = "--grains" in sys.argv
limit = (3072 if on_card else 1280) * MIB if grained else 256 * MIB
pyalloc.install(limit=limit, memory="fast" if grained else "balanced")
second = torch.cuda.Stream()
noise = torch.randint(0, 256, (128 * MIB,), dtype=torch.uint8)
blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
n_full = 0
n_written = 0


def check(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    block, bytes_written = pair
    assert torch.equal(block.cpu(), bytes_written), (
        f"{block.numel()} bytes at {block.data_ptr():#x} changed"
    )


def change_at_once() -> None:
    """Adds 1 to every block, to every other one on the second stream, all at the same time."""
    second.wait_stream(torch.cuda.current_stream())
    for number, (block, written) in enumerate(blocks):
        with torch.cuda.stream(second if number % 2 else torch.cuda.current_stream()):
            block.add_(1)
        written.add_(1)
    torch.cuda.current_stream().wait_stream(second)


for number in range(rounds):
    size = rng.choice(
        (rng.randrange(1, 20 * MIB), rng.randrange(1, 3 * MIB), 5 * MIB - 512, 33_333_333)
    )
    offset = rng.randrange(noise.numel() - size)
    written = noise[offset : offset + size]
    if on_card:
        written = written.clone()
    while True:
        try:
            block = torch.empty(size, dtype=torch.uint8, device="cuda")
            break
        except torch.OutOfMemoryError:
            n_full += 1
            check(blocks.pop(rng.randrange(len(blocks))))
    block.copy_(written)
    n_written += size
    blocks.append((block, written))
    if on_card and number % 16 == 0:
        change_at_once()
    if rng.random() < 0.1:
        check(blocks.pop(rng.randrange(len(blocks))))
while blocks:
    check(blocks.pop())
stats = _core.stats(0)
print(
    json.dumps(
        {
            "shared_ranges": stats["pyalloc_shared_ranges"],
            "stitches": stats["pyalloc_stitches"],
            "times_full": n_full,
            "bytes_checked": n_written,
            "peak_live": stats["active_bytes.all.peak"],
            "peak_reserved": stats["reserved_bytes.all.peak"],
            "limit": limit,
        }
    ),
    flush=True,
)
