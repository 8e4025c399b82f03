"""Who held memory over the run: at marks, many moments of which sums by stack are known, and by which they stayed."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyalloc import _core
from pyalloc.moments import Block

_PEAKS = 160  # moments of most, of so many parts of the run
_STEPS = 64  # begins of steps: moments that are alike


class Stay(NamedTuple):
    """Blocks that were alive at marks first to last, and have all the rest in common; as a Block's.

    is_freed_later: in another occurrence of their phase than the one they were made in.
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
    """Ascending: these moments, and where there is room the peaks of parts of the run and begins of steps.

    bins: as a scan's; most: marks, of which as many as there are blocks alive then take memory.
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
    """A scan's, in words."""
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
    """What is left of them without some blocks, each of which is in one; at: the marks."""
    left = {stay._replace(bytes=0, blocks=0): (stay.bytes, stay.blocks) for stay in stays}
    for block in blocks:
        key = over(block, at)
        if key not in left:
            key = key._replace(is_freed_later=True)  # a block does not tell
        if key in left:
            n_bytes, n_blocks = left[key]
            left[key] = n_bytes - block.bytes, n_blocks - 1
    return [key._replace(bytes=n, blocks=m) for key, (n, m) in left.items() if m]


def over(block: Block, at: Sequence[int]) -> Stay:
    """The stay of a block, without its bytes."""
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
