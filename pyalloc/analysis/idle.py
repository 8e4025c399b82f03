"""Forward passes that keep memory for a backward pass that never comes: evaluations without torch.no_grad()."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pyalloc.analysis.findings import outermost
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import MIB
from pyalloc.traces.facts import Phase

_MOST = 0.75
_KEPT = 3  # blocks that a pass leaves: fewer may be its results
Run = tuple[list[Phase], list[Phase]]  # forward passes, and the backward passes right after them
_Key = tuple[tuple[int, ...], bool]  # a run's shape, and whether it has backward passes


def runs_of(phases: Iterable[Phase]) -> Iterator[Run]:
    """Forward passes in a row without a backward pass between them, and the backward passes right after them."""
    run: list[Phase] = []
    backwards: list[Phase] = []
    for phase in outermost(phases):
        if phase.name == "backward":
            backwards.append(phase)
        elif phase.name == "forward":
            if backwards:
                yield run, backwards
                run, backwards = [], []
            run.append(phase)
        elif phase.name == "optimizer" and run:
            yield run, backwards
            run, backwards = [], []
    yield run, backwards


def is_freed(run: list[Phase], backwards: list[Phase]) -> bool:
    """Do the backward passes free what all forward passes keep: those of one loss, or the steps of a recurrent net?

    Most blocks or most bytes are enough: an output that a variable holds can be large among many, or one of a few.
    Passes that leave results alone count only if no other passes are there.
    """
    if not backwards or not run:
        return False
    keeping = [phase for phase in run if phase.n_left >= _KEPT] or run
    made_bytes = sum(phase.left_bytes for phase in backwards)
    freed_bytes = run[-1].end_bytes + made_bytes - backwards[-1].end_bytes
    return _n_freed(backwards) > _MOST * sum(
        phase.n_left for phase in keeping
    ) or freed_bytes > _MOST * sum(phase.left_bytes for phase in keeping)


def _n_freed(backwards: list[Phase]) -> int:
    """Blocks that the backward passes freed, apart from the gradients that they made."""
    made = sum(phase.n_left for phase in backwards)
    return backwards[0].n_live_begin + made - backwards[-1].n_live_end if backwards else 0


def _is_freed_later(run: list[Phase], backwards: list[Phase], after: Run) -> bool:
    """Do the next backward passes free what these leave of the forward passes, as in training a GAN's generator?"""
    passes, later = after
    kept = sum(phase.n_left for phase in run) - _n_freed(backwards)
    return _n_freed(later) - sum(phase.n_left for phase in passes) > _MOST * kept


def _dropped(run: list[Phase], backwards: list[Phase]) -> list[Phase]:
    """Passes most of whose blocks are gone when the next pass begins: the output was detached, or read."""
    return [
        phase
        for phase, following in itertools.pairwise([*run, *backwards])
        if phase.name == "forward"
        and phase.n_live_end - following.n_live_begin > _MOST * phase.n_left
    ]


def knows_backwards(analysis: Analysis) -> bool:
    """Does it have backward phases?  Recordings do; a snapshot has only phases that the program marked."""
    return "source" not in analysis.notes or any(p.name == "backward" for p in analysis.phases)


def idle_runs(analysis: Analysis) -> tuple[list[list[Phase]], list[list[Phase]]]:
    """Finds runs of forward passes that keep memory for a backward pass that never comes, such as evaluations.

    Returns:
        These runs, and those with a backward pass that kept the graph.
    """
    found: list[list[Phase]] = []
    retained: list[list[Phase]] = []
    if not knows_backwards(analysis):
        return found, retained
    runs = list(runs_of(_without_workspaces(analysis)))
    nothing: Run = [], []
    known = _known(runs, analysis)
    for (run, backwards), after in zip(runs, [*runs[1:], nothing], strict=True):
        is_used = known.get((_shape(run), bool(backwards)), [None] * len(run))
        if False in is_used:
            found.append([phase for phase, used in zip(run, is_used, strict=True) if used is False])
            continue
        if is_freed(run, backwards) or _is_freed_later(run, backwards, after):
            continue
        # The last forward passes of a run may belong to the backward passes that follow.
        unpaired = run[: max(len(run) - len(backwards), 0)]
        dropped = _dropped(run, backwards)
        others = sum(phase.n_left for phase in run if phase not in dropped)
        if _n_freed(backwards) > _MOST * others > 0:  # blocks: bytes may go before backward begins
            unpaired = dropped
        end = after[0][0].begin if after[0] else analysis.totals["n_events"]
        idle = [
            phase
            for phase, following, used in zip(run, [*run[1:], None], is_used, strict=False)
            if phase in unpaired
            and not used
            and not _has_backward(phase.end, end, analysis)
            and not _has_oom(phase.begin, following.begin if following else end, analysis)
        ]
        kept = [phase for phase in idle if phase.n_left >= _KEPT and phase.left_bytes >= MIB]
        if kept and (len(idle) >= 2 or unpaired is dropped):
            (retained if _is_retained(run, backwards, analysis) else found).append(kept)
    used = [_shape(run) for run in (*found, *retained) if _is_used(run, analysis)]
    return (
        [run for run in found if _shape(run) not in used],
        [run for run in retained if _shape(run) not in used],
    )


def _shape(passes: list[Phase]) -> tuple[int, ...]:
    """How many blocks each pass left: the same whenever the run comes again."""
    return tuple(phase.n_left for phase in passes)


@dataclass
class _Left:
    """What a pass leaves: bytes that a backward pass frees, and others; of which modules, and until when."""

    inside: int = 0
    outside: int = 0
    modules: set[str] = field(default_factory=set)
    end: int = 0


def _known(runs: list[Run], analysis: Analysis) -> dict[_Key, list[bool | None]]:
    """Of runs of the peak's step, by what frees the memory of each pass: does a backward pass use it?  None: not known.

    What is freed outside of backward may also be a pass's results, or a graph that a backward pass has gone through and
    kept; but then its model has gradients, and no other pass of its modules is freed by a backward.  One step tells for
    all, even for those in which other blocks go or stay beside them.
    """
    if not analysis.spans:
        return {}
    begin, end = (analysis.spans[at].alloc_event for at in (0, -1))
    near = [
        each for each in runs if each[0] and each[0][0].begin <= end and begin <= each[0][-1].end
    ]
    passes = [phase for run, _ in near for phase in run]
    left = dict(zip(passes, _left_by(passes, analysis), strict=True))
    used = {phase for phase, each in left.items() if each.inside > _MOST * phase.left_bytes}
    keeps = "retain_graph" in analysis.notes or analysis.notes.get("create_graph") == "True"
    models = [] if keeps else [left[phase].modules for phase in used]
    is_sure = bool(analysis.notes.get("untrained"))
    unused = {
        phase
        for phase, each in left.items()
        if each.outside > _MOST * phase.left_bytes >= _MOST * MIB
        and not each.inside
        and phase.n_left >= _KEPT
        and (is_sure or any(_are_alike(each.modules, others) for others in models))
        and not _has_backward(phase.end, each.end, analysis)
        and not _has_oom(phase.begin, each.end, analysis)
    }
    found: dict[_Key, list[bool | None]] = {}
    for run, backwards in near:
        of_run = found.setdefault((_shape(run), bool(backwards)), [None] * len(run))
        for i, phase in enumerate(run):
            if phase in used or phase in unused:
                of_run[i] = phase in used
    # The program may end before the backward passes of the last run.
    last, backwards = runs[-1]
    for (shape, _), which in list(found.items()) if last and not backwards else ():
        if shape[: len(last)] == _shape(last) and False in which[: len(last)]:
            found[_shape(last), False] = which[: len(last)]
    return found


def _left_by(passes: list[Phase], analysis: Analysis) -> list[_Left]:
    ends = [phase.end for phase in passes]
    found = [_Left(end=end) for end in ends]
    for block in {*analysis.spans, *analysis.peak.blocks}:
        i = bisect.bisect_left(ends, block.alloc_event)
        freed = block.free_event
        is_made = i < len(passes) and passes[i].begin < block.alloc_event and not block.category
        if is_made and freed is not None and freed > ends[i]:
            found[i].modules.update([block.module] if block.module else ())
            if block.free_phase == "backward":
                found[i].inside += block.bytes
            else:
                found[i].outside += block.bytes
                found[i].end = max(found[i].end, freed)
    return found


def _are_alike(modules: set[str], others: set[str]) -> bool:
    """Are they of one model?  In an evaluation, some keep nothing, such as dropout."""
    return bool(modules) and modules <= others and len(modules) >= len(others) / 3


def _is_used(passes: list[Phase], analysis: Analysis) -> bool:
    """Is most of what they made that is alive at the peak freed by a backward pass, one after another model's?"""
    by_phase = {True: 0, False: 0}
    for block in analysis.peak.blocks:
        at = bisect.bisect_left(passes, block.alloc_event, key=lambda phase: phase.end)
        if at < len(passes) and passes[at].begin < block.alloc_event:
            by_phase[block.free_phase == "backward"] += block.bytes
    return by_phase[True] > by_phase[False]


def _without_workspaces(analysis: Analysis) -> list[Phase]:
    """The phases, with forward's n_left and left_bytes less cuBLAS's workspaces, which no backward pass frees."""
    peak = analysis.peak.blocks
    made = {b.alloc_event: b.bytes for b in peak if b.alloc_event in analysis.workspaces}
    return [
        replace(
            phase,
            n_left=phase.n_left - sum(phase.begin < at < phase.end for at in made),
            left_bytes=phase.left_bytes
            - sum(n for at, n in made.items() if phase.begin < at < phase.end),
        )
        if phase.name == "forward" and made
        else phase
        for phase in analysis.phases
    ]


def _has_backward(begin: int, end: int, analysis: Analysis) -> bool:
    """Did a backward pass that is not a phase run between these events, maybe for what was made before?"""
    at = bisect.bisect_left(analysis.unmarked, begin)
    return at < len(analysis.unmarked) and analysis.unmarked[at] < end


def _has_oom(begin: int, end: int, analysis: Analysis) -> bool:
    """Did memory run out between these events, so that what was to follow never came?"""
    return any(begin <= event < end for event, *_ in analysis.ooms)


def _is_retained(run: list[Phase], backwards: list[Phase], analysis: Analysis) -> bool:
    """Did a backward pass with retain_graph=True keep the graph of these forward passes?"""
    has_kept = "retain_graph" in analysis.notes and bool(backwards)
    return has_kept and _n_freed(backwards) < 0.5 * max(phase.n_left for phase in run)
