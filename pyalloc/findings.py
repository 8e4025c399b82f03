"""What takes another look at the trace: products that are reduced, and backwards that are no phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyalloc import _core, source
from pyalloc.analysis import Analysis, Phase
from pyalloc.moments import Block, moments_of
from pyalloc.told import Told

Progress = Callable[[int, int], object]
_LARGE_SHARE = 0.2  # of the peak: what a reduction of a product is looked for in
_SHORT_LIFE = 12  # events
_REDUCED = 8  # so many times smaller is what is left
_GAPS_TOLD = 100_000  # events between forward passes that are looked at for a backward


def look_for_all(
    analysis: Analysis, file: Path, device: int, progress: Progress | None = None
) -> None:
    """Adds them to the analysis; a pass is made only where there may be some."""
    _reductions(analysis, file, device, progress)
    _backwards(analysis, file, device, progress)


def outermost(phases: Iterable[Phase]) -> Iterator[Phase]:
    """Forward, backward and optimizer, in phases of the program's own too.

    Not in each other: a checkpoint's forward in backward is none.
    """
    end = -1
    for phase in phases:
        if phase.name in ("forward", "backward", "optimizer") and phase.begin >= end:
            end = phase.end
            yield phase


def _reductions(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """Large blocks of the peak that die at once, leaving something much smaller made from them."""
    peak = analysis.peak
    limit = peak.allocated_bytes * _LARGE_SHARE
    short = [
        (block.free_event, block)
        for block in peak.blocks
        if block.bytes > limit
        and block.free_event is not None
        and block.free_event - block.alloc_event <= _SHORT_LIFE
    ]
    short.sort(key=lambda pair: pair[0])
    if not short:
        return
    at = [event for event, _ in short]
    after = moments_of(_core.Scan(file, device=device, n_bins=2, moments=at, progress=progress))
    # Of a line's temporaries the last one, which is reduced.
    found: dict[int, tuple[Block, int]] = {}
    for (_, block), moment in zip(short, after, strict=True):
        made = [b.bytes for b in moment.blocks if b.alloc_event > block.alloc_event]
        if made and max(made) <= block.bytes // _REDUCED:
            found[block.stack] = block, max(made)
    analysis.reductions.extend(found.values())


def _backwards(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """What autograd asked for after forward passes that no phase "backward" follows.

    torch.autograd.grad() is no such phase: of CUDA graphs' warm-ups and captures, of updates by hand.
    """
    phases = list(outermost(analysis.phases))
    followers = [*phases[1:], None]
    gaps = [
        (phase.end, analysis.totals["n_events"] if after is None else after.begin)
        for phase, after in zip(phases, followers, strict=False)
        if phase.name == "forward"
        and phase.left_bytes
        and not (after is not None and after.name == "backward")
    ]
    gaps = [(begin, end) for begin, end in gaps if begin < end]
    if not gaps or len(analysis.stacks) < 2:  # without stacks nothing tells one from the other
        return
    most = max(_GAPS_TOLD // len(gaps), 1)
    wanted = [event for begin, end in gaps for event in (begin, min(begin + most, end))]
    scan = _core.Scan(file, device=device, n_bins=2, ranges=wanted, progress=progress)
    analysis.unmarked.extend(
        told.event
        for told in map(Told._make, scan.told())
        if told.name == "alloc" and source.is_backward(analysis.frames(told.stack))
    )
