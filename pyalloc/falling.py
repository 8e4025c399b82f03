"""How far the peak falls if some of what is alive at it is not there: to what is left, or to another phase's peak."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable

from pyalloc.analysis import Analysis
from pyalloc.moments import Block

TRAINING = ("forward", "loss", "backward")  # in which activations are, or are made again
# Whose peaks count: a phase of the program's own may be a whole step, with the peak of it.
_PHASES = (*TRAINING, "inference", "optimizer")


def falls_by(
    dropped: Iterable[Block], analysis: Analysis, alike: Collection[str], least: float = 0
) -> int:
    """Of blocks that are alive at the peak and need not be.

    least: 0 at once where they are not more bytes than that: there may be very many phases to look at.
    alike: names of phases that go without such blocks; where none of these is alive, others are, which go as well.
    """
    blocks = list(dropped)
    total = sum(block.bytes for block in blocks)
    if total <= least:
        return 0
    peak = analysis.totals["peak_event"]
    bytes_at = alive_at(blocks, peak)
    elsewhere = 0
    for phase in analysis.phases:
        if phase.name not in _PHASES or phase.begin < peak <= phase.end:
            continue
        if phase.name not in alike:
            elsewhere = max(elsewhere, phase.peak_bytes)
        else:
            # All of them are alive at the peak: nearest to it are most, and so is the phase's own peak.
            alive = bytes_at(phase.end if phase.end <= peak else phase.begin)
            elsewhere = max(elsewhere, phase.peak_bytes - alive if alive else 0)
    left: int = analysis.totals["peak_bytes"] - elsewhere
    return max(min(total, left), 0)


def alive_at(blocks: Collection[Block], peak: int) -> Callable[[int], int]:
    """How much of blocks that are alive at the peak is so at an event, for thousands of either."""
    made = sorted((block.alloc_event, block.bytes) for block in blocks)
    freed = sorted((block.free_event, block.bytes) for block in blocks if block.free_event)
    by_made = list(itertools.accumulate((n for _, n in made), initial=0))
    by_freed = list(itertools.accumulate((n for _, n in freed), initial=0))

    def bytes_at(event: int) -> int:
        if event <= peak:  # freed later, all of them
            return by_made[bisect.bisect_right(made, event, key=lambda each: each[0])]
        return by_made[-1] - by_freed[bisect.bisect_left(freed, event, key=lambda each: each[0])]

    return bytes_at
