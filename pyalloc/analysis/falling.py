"""How far the peak falls without some of the blocks that are alive at it: to what is left, or to another moment."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from pyalloc.analysis.meaning import FORWARDS, Analysis
from pyalloc.traces.facts import Phase
from pyalloc.traces.moments import Block
from pyalloc.traces.told import joined

TRAINING = (*FORWARDS, "backward")  # phases that hold activations, or make them again
LASTING = (*TRAINING, "optimizer")  # those that hold what a variable keeps, as well
# Phases whose peaks count; one of the program's own may be a whole step, and contain the peak.
_PHASES = (*TRAINING, "inference", "optimizer")
_HARDLY = 0.1  # share of the blocks; below it they count as absent: some are made once, and kept


def falls_by(
    dropped: Iterable[Block],
    analysis: Analysis,
    alike: Collection[str],
    least: float = 0,
    beside: Collection[Block] | None = None,
    is_used: bool = True,
) -> int:
    """By how many bytes the peak falls without some of the blocks that are alive at it.

    least: returns 0 at once if they have no more bytes than this, because there may be very many phases to look at.
    alike: names of phases that go without such blocks, too; where hardly any of these is alive, others like them are.
    With LASTING these are blocks that a variable may hold until the next step has made its own.
    beside: blocks of the peak's step that are not alive at the peak, and go, too; None: which are is not known.
    is_used: whether phases that are not alike need these blocks; else they go without those that are alive in them.
    """
    blocks = list(dropped)
    total = sum(block.bytes for block in blocks)
    if total <= least:
        return 0
    others = _Beside(blocks, analysis, alike, beside, is_used)
    elsewhere = max(itertools.chain(others.in_phases(), others.moment_by_moment()), default=0)
    left: int = analysis.totals["peak_bytes"] - elsewhere
    return max(min(total, left), 0)


def falls_alone(dropped: Collection[Block], analysis: Analysis) -> int:
    """By how many bytes the peak falls without these of its blocks, if everything else stays as it is."""
    peak = analysis.totals["peak_event"]
    bytes_at = alive_at(dropped, peak)
    left = max(most - _at(bytes_at, moment, peak) for moment, most in analysis.heights)
    fell: int = analysis.totals["peak_bytes"] - left
    return fell


class _Beside:
    """How many bytes are allocated without some blocks: moment by moment in the peak's step, elsewhere by phases."""

    def __init__(
        self,
        blocks: list[Block],
        analysis: Analysis,
        alike: Collection[str],
        beside: Collection[Block] | None,
        is_used: bool,
    ) -> None:
        self._peak: int = analysis.totals["peak_event"]
        # Activations belong to a step; blocks that are kept besides have others like them outside of phases.
        is_training, is_lasting = set(TRAINING) <= set(alike), set(LASTING) <= set(alike)
        step = self._step_of(analysis) if is_training else None
        if step and is_lasting:  # the next step has its own
            blocks = [_until(block, step[1] - 1) for block in blocks]
        self._blocks = blocks
        self._gone = _levels(beside or ())
        self._few = _HARDLY * sum(block.bytes for block in blocks)
        self._heights = analysis.heights
        self._alike = alike
        self._is_used = is_used
        self._phases = [phase for phase in analysis.phases if phase.name in _PHASES]
        around = (p for p in self._phases if p.begin < self._peak <= p.end)
        self._own = next(((p.begin + 1, p.end + 1) for p in around), (self._peak, self._peak))
        self._region = step or self._own
        # Blocks that the peak's own phase makes come and go in it: at its other moments there are others like them.
        coming = [b for b in blocks if b.alloc_event >= self._own[0]] if beside is None else []
        self._lasting = alive_at({*blocks} - {*coming}, self._peak)
        self._coming = sum(block.bytes for block in coming)
        self._bytes_at = alive_at(blocks, self._peak)
        # Such a pass has something beside it that waits for backward; without activations it has less in each step.
        self._waiting = set(_beside_waiting(self._phases)) if is_training else set()
        # So does an optimizer's step, beside what a variable holds until the next pass.
        self._updating = {p for p in self._phases if is_lasting and p.name == "optimizer"}
        passes, updates = (
            [self._alive_in(phase) for phase in phases if self._is_in_step(phase)]
            for phases in (self._waiting, self._updating)
        )
        self._beside_passes = max(passes, default=0)
        self._beside_updates = min(updates, default=0)

    def _step_of(self, analysis: Analysis) -> tuple[int, int] | None:
        """The first moment of the peak's step, and the first one after it; None before the first step."""
        begins = [step[1] for step in analysis.steps]
        at = bisect.bisect_left(begins, self._peak)
        end = begins[at] if at < len(begins) else analysis.totals["n_events"]
        return (begins[at - 1] + 1, end + 1) if at > 0 else None

    def _alive_in(self, phase: Phase) -> int:
        """The most bytes of the blocks during a phase: those at its edge nearest to the peak.  0 if these are few."""
        most = self._bytes_at(phase.end if phase.end <= self._peak else phase.begin)
        return most if most > self._few else 0

    def in_phases(self) -> Iterator[int]:
        """The height of each phase outside of the region, from its own peak."""
        for phase in self._phases:
            if self._is_in_step(phase) or self._is_own(phase):
                continue
            if phase in self._waiting:
                yield phase.peak_bytes - self._beside_passes
            elif phase in self._updating:
                yield phase.peak_bytes - self._beside_updates
            elif phase.name not in self._alike:
                yield phase.peak_bytes - (0 if self._is_used else self._alive_in(phase))
            elif alive := self._alive_in(phase):
                yield phase.peak_bytes - alive

    def _is_in_step(self, phase: Phase) -> bool:
        begin, end = self._region
        return begin <= phase.begin + 1 and phase.end < end

    def _is_own(self, phase: Phase) -> bool:
        return phase.begin < self._peak <= phase.end

    def moment_by_moment(self) -> Iterator[int]:
        """The height of each part of the region in which no block begins or ends."""
        others = [p for p in self._phases if self._is_in_step(p) and not self._is_own(p)]
        alike = [p for p in others if p.name in self._alike and p not in self._updating]
        near = [phase for phase in alike if self._alive_in(phase)]
        has_further, is_near = len(near) < len(alike), _within(near)
        is_unlike = _within(
            [p for p in others if p.name not in self._alike and p not in self._waiting]
        )
        cuts = {*self._region}
        cuts.update(block.alloc_event + 1 for block in self._blocks)
        cuts.update(b.free_event + 1 for b in self._blocks if b.free_event is not None)
        cuts.update(at + 1 for phase in self._phases for at in (phase.begin, phase.end))
        inside = sorted(at for at in cuts if self._region[0] <= at <= self._region[1])
        for begin, end in itertools.pairwise(inside):
            is_own = self._own[0] <= begin < self._own[1]
            alive = _at(self._lasting if is_own else self._bytes_at, begin, self._peak)
            spared = 0
            if is_own:
                spared = alive + self._coming
            elif not is_unlike(begin):
                spared = alive
                # What further passes keep goes, too.
                if alive <= self._few and has_further and not is_near(begin):
                    continue
            yield self._height(begin, end) - spared

    def _height(self, begin: int, end: int) -> int:
        first, last = (bisect.bisect_left(self._heights, (at,)) for at in (begin, end))
        most = max((most for _, most in self._heights[first:last]), default=0)
        if begin <= self._peak < end:
            return most
        at, until = (bisect.bisect_left(self._gone, (at,)) for at in (begin + 1, end))
        gone = max((most for _, most in self._gone[max(at - 1, 0) : until]), default=0)
        return most - gone  # they are large: where it is highest, they are there


def _at(bytes_at: Callable[[int], int], moment: int, peak: int) -> int:
    """bytes_at() for a moment: moment n comes right after event n - 1."""
    return bytes_at(moment - 1 if moment <= peak else moment)


def _until(block: Block, event: int) -> Block:
    """The block, freed at this event at the latest."""
    is_longer = block.free_event is None or block.free_event > event
    return block._replace(free_event=event) if is_longer else block


def _levels(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """Moments, each with how many bytes of these blocks are alive from it to the next."""
    changes: Counter[int] = Counter()
    for block in blocks:
        changes[block.alloc_event + 1] += block.bytes
        if block.free_event is not None:
            changes[block.free_event + 1] -= block.bytes
    moments = sorted(changes)
    return list(zip(moments, itertools.accumulate(changes[at] for at in moments), strict=True))


def _beside_waiting(phases: Iterable[Phase]) -> Iterator[Phase]:
    """Passes without gradients between a forward pass and its backward: of a teacher, of DPO's reference."""
    found: list[Phase] | None = None  # since a forward pass
    for phase in phases:
        if phase.name in FORWARDS:
            found = found or []
        elif phase.name == "inference" and found is not None:
            found.append(phase)
        elif phase.name == "backward":
            yield from found or ()
            found = None
        elif phase.name == "optimizer":
            found = None


def _within(phases: Iterable[Phase]) -> Callable[[int], bool]:
    """A predicate: does a moment lie in one of these phases?"""
    ranges = joined((phase.begin + 1, phase.end + 1) for phase in phases)

    def is_within(moment: int) -> bool:
        at = bisect.bisect_right(ranges, moment, key=lambda each: each[0])
        return at > 0 and moment < ranges[at - 1][1]

    return is_within


def alive_at(blocks: Collection[Block], peak: int) -> Callable[[int], int]:
    """A function: how many bytes of these blocks, all alive at the peak, are alive at an event; fast for thousands."""
    made = sorted((block.alloc_event, block.bytes) for block in blocks)
    freed = sorted((block.free_event, block.bytes) for block in blocks if block.free_event)
    by_made = list(itertools.accumulate((n for _, n in made), initial=0))
    by_freed = list(itertools.accumulate((n for _, n in freed), initial=0))

    def bytes_at(event: int) -> int:
        if event <= peak:  # all are freed later
            return by_made[bisect.bisect_right(made, event, key=lambda each: each[0])]
        return by_made[-1] - by_freed[bisect.bisect_left(freed, event, key=lambda each: each[0])]

    return bytes_at
