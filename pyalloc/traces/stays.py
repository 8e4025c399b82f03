"""Who held memory over the run: marks are moments, stays are sums of the blocks alive from one mark to another."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyalloc import _core
from pyalloc.traces.moments import Block

_PEAKS = 160  # parts of the run, each with a mark at its peak
_STEPS = 64  # marks where steps begin, at moments that are alike


class Stay(NamedTuple):
    """Blocks that are alive exactly at the marks first..last and agree in all fields after blocks, named as in Block.

    is_freed_later: freed in another occurrence of their phase than the one that allocated them.
    """

    first: int
    last: int
    bytes: int
    blocks: int
    stack: int
    phase: str
    free_phase: str
    category: str
    is_freed_later: bool
    thread: int
    stream: int
    device: int


def marks(
    bins: Sequence[tuple[int, ...]], steps: Sequence[int], at: Iterable[int], most: int
) -> list[int]:
    """These moments and, where there is room, the peaks of parts of the run and the beginnings of steps; ascending.

    bins: a scan's; most: of the peaks, because each mark may take memory for every block that is alive at it.
    """
    found = set(at)
    n_peaks = min(_PEAKS, len(bins), most)
    for i in range(n_peaks):
        part = bins[i * len(bins) // n_peaks : (i + 1) * len(bins) // n_peaks]
        found.add(max(part, key=lambda each: each[2])[8])
    if n_peaks == _PEAKS or n_peaks == len(bins):
        found.update(steps[:: max(1, -(-len(steps) // _STEPS))])
    return sorted(found)


def of(scan: _core.Scan) -> list[Stay]:
    """The stays of a scan, with texts instead of their numbers."""
    words: dict[int, str] = {}

    def text(number: int) -> str:
        if number not in words:
            words[number] = scan.text(number)
        return words[number]

    found = []
    for row in scan.stays():
        first, last, n, blocks, stack, phase, free_phase, category, is_later, *origin = row
        names = text(phase), text(free_phase), text(category)
        thread, stream, device = origin
        found.append(
            Stay(first, last, n, blocks, stack, *names, bool(is_later), thread, stream, device)
        )
    return found


def without(stays: Iterable[Stay], blocks: Iterable[Block], at: Sequence[int]) -> list[Stay]:
    """The stays without some blocks, each of which is in one of them; at: the marks."""
    left = {stay._replace(bytes=0, blocks=0): (stay.bytes, stay.blocks) for stay in stays}
    for block in blocks:
        key = over(block, at)
        if key not in left:
            key = key._replace(is_freed_later=True)  # a block does not have this
        if key in left:
            n_bytes, n_blocks = left[key]
            left[key] = n_bytes - block.bytes, n_blocks - 1
    return [key._replace(bytes=n, blocks=m) for key, (n, m) in left.items() if m]


def over(block: Block, at: Sequence[int]) -> Stay:
    """The stay that a block is in, without its bytes; at: the marks."""
    first = bisect.bisect_right(at, block.alloc_event)
    last = len(at) if block.free_event is None else bisect.bisect_right(at, block.free_event)
    return Stay(
        first,
        last - 1,
        0,
        0,
        block.stack,
        block.phase,
        block.free_phase,
        block.category,
        False,
        block.thread,
        block.stream,
        block.device,
    )
