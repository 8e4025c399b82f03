"""Passes that keep memory for a backward pass that never comes, or after it: advice, and how far the peak falls."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from pyalloc.analysis.falling import LASTING, alive_at, falls_by
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import size
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import Block

# Of the peak: a single pass that keeps memory for nothing is told if that saves more.
_SINGLE = 0.03
_Maker = tuple[int, str]  # a stack and a module


def advice(
    runs: list[list[Phase]], retained: list[list[Phase]], analysis: Analysis
) -> Iterator[Advice]:
    """runs: passes in a row, as idle_runs() finds them; retained: those whose backward kept the graph."""
    yield from _no_grad(runs, analysis)
    yield from _retain_graph(retained, analysis)


def _passes_of(runs: list[list[Phase]]) -> list[Phase]:
    return list(itertools.chain.from_iterable(runs))


def is_in_one(phases: list[Phase], analysis: Analysis) -> bool:
    """Does the peak lie in one of these phases?"""
    peak = analysis.totals["peak_event"]
    return any(phase.begin < peak <= phase.end for phase in phases)


def _in_pass(passes: list[Phase], begin: int, end: int) -> Phase | None:
    """The first of these passes, given in order, that overlaps these events."""
    at = bisect.bisect_right(passes, begin, key=lambda phase: phase.end)
    return passes[at] if at < len(passes) and passes[at].begin < end else None


def kept_by(passes: list[Phase], analysis: Analysis) -> set[Block]:
    """What these passes made that is alive at the peak, and after the end of its pass."""
    kept = set()
    for block in analysis.peak.blocks:
        made = _in_pass(passes, block.alloc_event - 1, block.alloc_event)
        if (
            made is not None
            and block.alloc_event not in analysis.workspaces
            and (block.free_event is None or block.free_event > made.end)
        ):
            kept.add(block)
    return kept


def _results(kept: set[Block], passes: list[Phase]) -> set[Block]:
    """Of these, what passes returned and something holds: it stays without gradients as well.

    A pass makes it last, and it is freed last.  What only the graph holds goes with the graph, which begins at its end.
    """
    of_pass = _by_pass(kept, passes)
    left = {phase.begin: phase.left_bytes for phase in passes}
    found = set()
    for begin, (*others, last) in of_pass.items():
        frees = [block.free_event for block in others if block.free_event is not None]
        is_alone = not others and last.bytes <= left[begin] / 2  # the graph is gone
        is_last = len(frees) == len(others) > 0 and (
            last.free_event is None or last.free_event > max(frees)
        )
        if is_alone or is_last:
            found.add(last)
    return found


def _cached(kept: set[Block], passes: list[Phase]) -> set[Block]:
    """Of the last pass, what is larger in each pass, while most is not: a cache of keys and values, held anyway."""
    first, second, last = [[], [], [], *_by_pass(kept, passes).values()][-3:]
    sizes: list[Counter[_Maker]] = []
    for blocks in (first, second, last):
        sizes.append(Counter())
        for block in blocks:
            sizes[-1][block.stack, block.module] += block.bytes
    grown = {key for key in sizes[2] if 0 < sizes[0][key] < sizes[1][key] < sizes[2][key]}
    found = {block for block in last if (block.stack, block.module) in grown}
    return found if 2 * len(found) < len(last) else set()


def _by_pass(kept: set[Block], passes: list[Phase]) -> dict[int, list[Block]]:
    """What each pass made, in order, by where it begins."""
    found: dict[int, list[Block]] = {}
    for block in sorted(kept, key=lambda block: block.alloc_event):
        made = _in_pass(passes, block.alloc_event - 1, block.alloc_event)
        if made is not None:
            found.setdefault(made.begin, []).append(block)
    return found


def _bytes_through(kept: set[Block], analysis: Analysis) -> Callable[[Phase], int]:
    """A function: how many bytes of these blocks, all alive at the peak, are alive throughout a phase."""
    peak = analysis.totals["peak_event"]
    bytes_at = alive_at(kept, peak)

    def through(phase: Phase) -> int:
        if phase.end <= peak:  # all are freed later
            return bytes_at(phase.begin)
        if phase.begin >= peak:  # all were made earlier
            return bytes_at(phase.end)
        return sum(
            block.bytes
            for block in kept
            if block.alloc_event <= phase.begin
            and (block.free_event is None or block.free_event >= phase.end)
        )

    return through


def _bytes_before(runs: list[list[Phase]], analysis: Analysis) -> Callable[[Phase], int]:
    """A function: how many more bytes are alive when a phase begins than when the run of passes around it began.

    The passes kept so much until then, whether it is alive at the peak or not.
    """
    ends = [p.begin for p in analysis.phases if p.name in ("backward", "optimizer")]

    def before(phase: Phase) -> int:
        at = bisect.bisect(runs, phase.begin, key=lambda run: run[0].begin) - 1
        if at < 0:
            return 0
        first = runs[at][0]
        if bisect.bisect(ends, phase.begin) > bisect.bisect(ends, first.begin):
            return 0
        return max(0, phase.begin_bytes - first.begin_bytes)

    return before


def _bytes_likewise(
    kept: set[Block], runs: list[list[Phase]], analysis: Analysis
) -> Callable[[Phase], int]:
    """A function: how many more bytes are alive in a phase because of the run of passes before it, by the peak's turn.

    A program that repeats itself has other blocks each time.  The phase is as far from its run as the one by which it
    is judged is from the last run before the peak.
    """
    starts = [run[0].begin for run in runs]
    begins = [phase.begin for phase in analysis.phases]
    turns = [bisect.bisect_left(begins, start) for start in (*starts, analysis.totals["n_events"])]
    last = bisect.bisect_left(starts, analysis.totals["peak_event"]) - 1
    if last < 0:
        return lambda _: 0
    own = {block for block in kept if block.alloc_event > starts[last]}
    through = _bytes_through(own, analysis)

    def likewise(phase: Phase) -> int:
        turn = bisect.bisect(starts, phase.begin) - 1
        if turn < 0 or turn == last:
            return 0
        at = turns[last] + bisect.bisect_left(begins, phase.begin) - turns[turn]
        if at >= turns[last + 1] or analysis.phases[at].name != phase.name:
            return 0
        alive, left = through(analysis.phases[at]), sum(each.left_bytes for each in runs[turn])
        return min(alive, left) if alive > left / 2 else 0  # less may be the passes' results

    return likewise


def _falls_without(kept: set[Block], runs: list[list[Phase]], analysis: Analysis) -> int:
    """By how many bytes the peak falls if these passes keep nothing: to what is needed, or to another phase's peak."""
    if not kept:
        return 0
    goes = _bytes_gone(kept, runs, analysis)
    needed = max(block.bytes for block in kept)  # by the operation at work
    idle = _passes_of(runs)
    # Those around the peak, of whose blocks it is known how long they live.
    at = bisect.bisect_left(runs, analysis.totals["peak_event"], key=lambda run: run[0].begin)
    near = _passes_of(runs[max(at - 1, 0) : at + 1])
    peak: int = analysis.totals["peak_bytes"]
    elsewhere = peak - sum(block.bytes for block in kept)
    if is_in_one(idle, analysis):
        elsewhere += needed
    for phase in sorted(analysis.phases, key=lambda phase: -phase.peak_bytes):
        if phase.peak_bytes <= elsewhere:
            break
        if _in_pass(idle, phase.begin, phase.end) is None:
            elsewhere = max(elsewhere, phase.peak_bytes - goes(phase))
        elif phase in near and not is_in_one([phase], analysis):
            temporary = phase.peak_bytes - phase.end_bytes
            elsewhere = max(elsewhere, phase.begin_bytes + needed + temporary - goes(phase))
    return max(peak - elsewhere, 0)


def _bytes_gone(
    kept: set[Block], runs: list[list[Phase]], analysis: Analysis
) -> Callable[[Phase], int]:
    """A function: how many bytes fewer are alive in a phase if these passes keep nothing; at least so many."""
    through = _bytes_through(kept, analysis)
    before = _bytes_before(runs, analysis)
    likewise = _bytes_likewise(kept, runs, analysis)
    starts = [run[0].begin for run in runs]
    peak = analysis.totals["peak_event"]

    def gone(phase: Phase) -> int:
        of_peak, of_run = through(phase), max(before(phase), likewise(phase))
        at = bisect.bisect(starts, phase.begin) - 1
        # What a later run keeps comes on top of what is still there of the peak's.
        return of_peak + of_run if at >= 0 and starts[at] >= peak else max(of_peak, of_run)

    return gone


def _without_graph(kept: set[Block], analysis: Analysis) -> int:
    """By how many bytes the peak falls without what is still there although its backward pass has ended."""
    ended = [
        phase.begin
        for phase in analysis.phases
        if phase.name == "backward" and phase.end <= analysis.totals["peak_event"]
    ]
    last = max(ended, default=0)
    return falls_by([b for b in kept if b.alloc_event < last], analysis, (*LASTING, "inference"))


def _in_words(runs: list[list[Phase]], saved: int) -> tuple[int, str, str]:
    """Length of the longest run, what its passes keep, and how far the peak falls."""
    most = max(runs, key=len)
    left = [phase.left_bytes for phase in most]
    each = f"{'up to ' * (2 * min(left) < max(left))}{size(max(left))}"
    falls = (
        f"That would lower the peak by about {size(saved)}."
        if saved
        else "The peak lies elsewhere and would not change."
    )
    return len(most), each, falls


def _no_grad(runs: list[list[Phase]], analysis: Analysis) -> Iterator[Advice]:
    if not runs:
        return
    passes = _passes_of(runs)
    kept = kept_by(passes, analysis)
    stays = _results(kept, passes) | _cached(kept, passes)
    saved = _falls_without(kept - stays, runs, analysis)
    n, each, falls = _in_words(runs, saved)
    keep, what = (
        (f"{n} forward passes in a row keep {each} each", "evaluation")
        if n > 1
        else (f"A forward pass keeps {each}", "a pass whose output is detached, or only read")
    )
    if n > 1 or saved > _SINGLE * analysis.totals["peak_bytes"]:
        yield Advice(
            "no_grad",
            f"{keep} for a backward pass that never comes. Put `with torch.no_grad():` (or torch.inference_mode()) "
            f"around {what}. {falls}",
            saved,
        )


def _retain_graph(runs: list[list[Phase]], analysis: Analysis) -> Iterator[Advice]:
    if runs:
        passes = _passes_of(runs)
        saved = _without_graph(kept_by(passes, analysis), analysis)
        n, each, falls = _in_words(runs, saved)
        keep = f"{n} forward passes in a row keep {each} each" if n > 1 else f"A pass keeps {each}"
        yield Advice(
            "retain_graph",
            f"{keep} after the backward pass, which was called with retain_graph=True. Leave that out, and "
            "`.detach()` what one step passes on to the next (a hidden state). "
            f"{falls}",
            saved,
        )
