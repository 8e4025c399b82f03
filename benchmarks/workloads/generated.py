"""Adversarial traces generated from a seed, without torch and without files.

Each generator yields operations: ("alloc", block, bytes, stream[, device]), ("free", block), ("record", block, stream),
("pool_begin" | "pool_end" | "pool_release", pool).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Operation = tuple[Any, ...]

KIB = 1 << 10
MIB = 1 << 20


def log_size(rng: random.Random, low: int, high: int) -> int:
    """A size from low to high bytes, each power of two about equally likely."""
    return int(low * (high / low) ** rng.random())


def growing(rng: random.Random) -> Iterator[Operation]:
    """One tensor that grows: each copy is made while the one before is alive."""
    n, held = 0, None
    for step in range(600):
        yield "alloc", n, 4 * MIB + step * 1_300_000 + rng.randrange(4096), 0
        yield "alloc", n + 1, log_size(rng, 512, 8 * MIB), 0
        if held is not None:
            yield "free", held
        yield "free", n + 1
        held, n = n, n + 2


def random_lifetimes(rng: random.Random) -> Iterator[Operation]:
    """512 B to 256 MiB, freed in random order, up to about 6 GiB."""
    live: dict[int, int] = {}
    total = 0
    for n in range(20000):
        size = log_size(rng, 512, 256 * MIB)
        while total + size > 6 << 30:
            victim = rng.choice(list(live))
            total -= live.pop(victim)
            yield "free", victim
        live[n] = size
        total += size
        yield "alloc", n, size, 0
        if rng.random() < 0.5 and live:
            victim = rng.choice(list(live))
            total -= live.pop(victim)
            yield "free", victim


def two_phases(rng: random.Random) -> Iterator[Operation]:
    """Two alternating sets of sizes, neither of which fits the holes of the other."""
    phases = [[rng.randrange(2 * MIB, 90 * MIB) for _ in range(40)] for _ in range(2)]
    n = 0
    for step in range(60):
        first = n
        for size in phases[step % 2]:
            yield "alloc", n, size, 0
            n += 1
        order = list(range(first, n))
        rng.shuffle(order)
        for block in order:
            yield "free", block


def pinned_between(rng: random.Random) -> Iterator[Operation]:
    """Small blocks that stay, allocated between large ones that are freed."""
    n = 0
    stay: list[int] = []
    for _ in range(80):
        large = []
        for _ in range(30):
            yield "alloc", n, rng.randrange(8 * MIB, 40 * MIB), 0
            large.append(n)
            yield "alloc", n + 1, rng.randrange(1100 * KIB, 3 * MIB), 0
            if rng.random() < 0.05:
                stay.append(n + 1)
            else:
                large.append(n + 1)
            n += 2
        rng.shuffle(large)
        for block in large:
            yield "free", block
        while len(stay) > 60:
            yield "free", stay.pop(rng.randrange(len(stay)))


def medium_sizes(rng: random.Random) -> Iterator[Operation]:
    """Many live blocks of 64 KiB to 6 MiB, sizes that no allocator has a class for."""
    live: list[int] = []
    for n in range(25000):
        yield "alloc", n, log_size(rng, 64 * KIB, 6 * MIB), 0
        live.append(n)
        target = 700 + 300 * ((n // 2500) % 2)
        while len(live) > target:
            yield "free", live.pop(rng.randrange(len(live)))


def scattered_small(rng: random.Random) -> Iterator[Operation]:
    """Waves of small blocks, a few of which stay, then large ones."""
    n = 0
    kept: list[int] = []
    for _ in range(40):
        wave = []
        for _ in range(600):
            yield "alloc", n, log_size(rng, 512, MIB), 0
            wave.append(n)
            n += 1
        rng.shuffle(wave)
        kept += wave[:12]
        for block in wave[12:]:
            yield "free", block
        for _ in range(8):
            yield "alloc", n, rng.randrange(16 * MIB, 128 * MIB), 0
            yield "free", n
            n += 1
        while len(kept) > 200:
            yield "free", kept.pop(rng.randrange(len(kept)))


def hand_over(rng: random.Random) -> Iterator[Operation]:
    """Three streams pass blocks around with record_stream; load shifts from stream to stream."""
    live: list[int] = []
    for n in range(8000):
        stream = (n // 1000 + (rng.random() < 0.2)) % 3
        yield "alloc", n, log_size(rng, 4 * KIB, 64 * MIB), stream
        live.append(n)
        if rng.random() < 0.3:
            yield "record", n, (stream + 1) % 3
        while len(live) > 90:
            yield "free", live.pop(rng.randrange(len(live)))


def graph_pools(rng: random.Random) -> Iterator[Operation]:
    """Graphs are captured into private pools between eager steps; some are dropped and replaced by others."""
    n = 0
    graphs: list[tuple[int, list[int]]] = []
    for number in range(1, 25):
        yield "pool_begin", number
        inside: list[int] = []
        for _ in range(60):
            yield "alloc", n, log_size(rng, 64 * KIB, 48 * MIB), 0
            inside.append(n)
            n += 1
            while len(inside) > 12:
                yield "free", inside.pop(rng.randrange(len(inside)))
        yield "pool_end", number
        graphs.append((number, inside))
        step = []
        for _ in range(40):
            yield "alloc", n, log_size(rng, 4 * KIB, 64 * MIB), 0
            step.append(n)
            n += 1
        rng.shuffle(step)
        for block in step:
            yield "free", block
        if len(graphs) > 6:
            dropped, blocks = graphs.pop(rng.randrange(len(graphs)))
            for block in blocks:
                yield "free", block
            yield "pool_release", dropped


def two_devices(rng: random.Random) -> Iterator[Operation]:
    """A model split over two devices: activations on one, weights and buffers on the other; load shifts."""
    live: list[int] = []
    for n in range(6000):
        device = (n // 500 + (rng.random() < 0.3)) % 2
        yield "alloc", n, log_size(rng, 4 * KIB, 64 * MIB), 0, device
        live.append(n)
        while len(live) > 80 + 40 * ((n // 500) % 2):
            yield "free", live.pop(rng.randrange(len(live)))


GENERATED: dict[str, Callable[[random.Random], Iterator[Operation]]] = {
    "growing": growing,
    "random_lifetimes": random_lifetimes,
    "two_phases": two_phases,
    "pinned_between": pinned_between,
    "medium_sizes": medium_sizes,
    "scattered_small": scattered_small,
    "hand_over": hand_over,
    "graph_pools": graph_pools,
    "two_devices": two_devices,
}
