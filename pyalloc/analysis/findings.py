"""Findings that take another pass over the trace: reduced products, backwards without a phase, cuBLAS workspaces."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pyalloc import _core
from pyalloc.analysis.meaning import CUBLAS_WORKSPACES, Analysis
from pyalloc.common.config import CUBLAS_BYTES, CUBLAS_CACHE, CUBLAS_CONF, CUBLASLT_BYTES
from pyalloc.traces import source
from pyalloc.traces.caveats import has_beginning
from pyalloc.traces.facts import Phase
from pyalloc.traces.moments import Block, Moment, moments_of, rounded
from pyalloc.traces.told import Told, joined

Progress = Callable[[int, int], object]
_LARGE_SHARE = 0.2  # of the peak: smaller blocks are not examined as products that are reduced
_SHORT_LIFE = 12  # events
_REDUCED = 8  # what is left is at least this many times smaller
_BEFORE = 64  # events: between a product's result and its workspace, pages of 2 MiB may be mapped
_CANDIDATES = 64
_GAPS_TOLD = 100_000  # events after forward passes that are searched for a backward


def look_for_all(
    analysis: Analysis, file: Path, device: int, progress: Progress | None = None
) -> None:
    """Adds the findings to the analysis; makes a pass only where there may be some."""
    _reductions(analysis, file, device, progress)
    _backwards(analysis, file, device, progress)
    _workspaces(analysis, file, device, progress)


def outermost(
    phases: Iterable[Phase], names: Sequence[str] = ("forward", "backward", "optimizer")
) -> Iterator[Phase]:
    """The phases of these names, also inside phases of the program's own.

    Those inside one another are left out, such as a checkpoint's forward in a backward.
    """
    end = -1
    for phase in phases:
        if phase.name in names and phase.begin >= end:
            end = phase.end
            yield phase


def _reductions(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """Finds large blocks at the peak that are freed at once and leave something much smaller, made from them."""
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
    # Of several temporaries of a line, the last one is the one that is reduced.
    found: dict[int, tuple[Block, int]] = {}
    for (_, block), moment in zip(short, after, strict=True):
        made = [b.bytes for b in moment.blocks if b.alloc_event > block.alloc_event]
        if made and max(made) <= block.bytes // _REDUCED:
            found[block.stack] = block, max(made)
    analysis.reductions.extend(found.values())


def _backwards(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """Finds what autograd requested after forward passes that no phase "backward" follows.

    Recordings of older versions have no phase for torch.autograd.grad(); snapshots have only the program's own phases.
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
    if not gaps or len(analysis.stacks) < 2:  # only stacks tell autograd's requests from others
        return
    most = max(_GAPS_TOLD // len(gaps), 1)
    wanted = [event for begin, end in gaps for event in (begin, min(begin + most, end))]
    scan = _core.Scan(file, device=device, n_bins=2, ranges=wanted, progress=progress)
    analysis.unmarked.extend(
        told.event
        for told in map(Told._make, scan.told())
        if told.name == "alloc" and source.is_backward(analysis.frames(told.stack))
    )


def workspace_sizes(notes: dict[str, str]) -> tuple[int, ...]:
    """Bytes of cuBLAS workspaces, as torch said; else by the setting (pairs of KiB and count), or torch's defaults."""
    said = _said(notes, CUBLAS_BYTES)
    if said:
        return said
    told = notes.get(CUBLAS_CONF, "")
    if not re.fullmatch(r"(:\d{1,9}:\d{1,9})+", told):
        return CUBLAS_WORKSPACES
    numbers = [int(number) for number in told.split(":")[1:]]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return (rounded(sum(kib * 1024 * n for kib, n in pairs)),)


def _said(notes: dict[str, str], name: str) -> tuple[int, ...]:
    said = notes.get(name, "")
    if not re.fullmatch(r"\d{1,15}(,\d{1,15})*", said):
        return ()
    return tuple(rounded(int(each)) for each in said.split(","))


def gives_workspaces_back(notes: dict[str, str]) -> bool:
    """Does each product take a workspace and give it back, as since torch 2.15?"""
    version = re.match(r"(\d{1,4})\.(\d{1,4})", notes.get("torch", ""))
    is_new = version is not None and tuple(map(int, version.groups())) >= (2, 15)
    return is_new and notes.get(CUBLAS_CACHE) != "1"


def _workspaces(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """Finds the memory that torch's allocator gives cuBLAS at a thread's first matrix product on a stream.

    It comes right after the product's result, with the same stack.  It stays, or it is freed before anything else
    happens, as for each product since torch 2.15.  No other block does all of that.  Autograd's threads mostly have no
    line.  There, a gradient of this size that is added to another at once looks alike; but it is the first block that
    its node makes, so something was freed between the last product and it.  A product whose result is given makes
    nothing else.  Of what is made to tune kernels, nothing else stays.
    """
    if not has_beginning(analysis.notes):  # the first product may not be in the trace
        return
    likely = _likely(analysis)
    wanted = joined((max(b.alloc_event - _BEFORE, 0), b.alloc_event + 1) for b in likely)
    if not wanted:
        return
    ranges = [event for each in wanted for event in each]
    scan = _core.Scan(file, device=device, n_bins=2, ranges=ranges, progress=progress)
    second = _of_same_stack(map(Told._make, scan.told()), wanted, analysis)
    taken: dict[tuple[int, int, bool], int | None] = {}  # until when each has one; None: to the end
    for block in likely:
        frames = analysis.frames(block.stack)
        is_compiled = source.is_compiled(frames)
        key = block.device, block.stream, source.is_on_autograds(frames, block.phase)
        until = taken.get(key, -1)
        is_named = source.is_cublas(frames)  # by C++ frames, whichever thread it is of
        if not is_named and (until is None or block.alloc_event < until):
            continue
        is_tuned = source.is_tuning(frames) and block.free_event is None
        is_bare = _is_bare(block, analysis)  # _lives_so() has shown that it is not a gradient
        is_product = is_bare or is_tuned or source.is_matrix_product(frames)
        is_alone = is_tuned or is_compiled or source.is_given(frames)
        is_one = is_alone or block.alloc_event in second
        if is_product is None or is_named or (is_product and is_one):
            taken[key] = block.free_event
            if is_named or is_product is not None:  # None: it may be the one, and then no other is
                analysis.workspaces.add(block.alloc_event)


def _likely(analysis: Analysis) -> list[Block]:
    """Blocks with the size and lifetime of a workspace, at the peak, else at the end; in order of allocation."""
    sizes = workspace_sizes(analysis.notes)
    of_lt = _said(analysis.notes, CUBLASLT_BYTES)
    end = analysis.moments[max(analysis.moments)]
    found = [block for block in analysis.peak.blocks if block.bytes in sizes]
    # There may be very many blocks at the end: they are read only if a line holds enough bytes.
    if not found and end is not analysis.peak and _may_have_one(analysis, end, min(sizes)):
        found = [block for block in end.blocks if block.bytes in sizes]
    kept = [
        block
        for block in found
        if _lives_so(block, analysis) or source.has_result(analysis.frames(block.stack))
    ]
    # A workspace of cuBLASLt only if it is freed at once: a block that stays could be anything.
    kept += [b for b in analysis.peak.blocks if b.bytes in of_lt and b.stack and _goes_at_once(b)]
    return sorted(kept, key=lambda block: block.alloc_event)[:_CANDIDATES]


def _may_have_one(analysis: Analysis, moment: Moment, n_bytes: int) -> bool:
    """Does the line of a matrix product hold at least n_bytes?"""
    return any(
        total >= n_bytes and source.is_matrix_product(analysis.frames(stack))
        for stack, (total, _) in moment.by_stack.items()
        if stack
    )


def _is_bare(block: Block, analysis: Analysis) -> bool:
    """Is no line known that asked for it, as on autograd's threads?"""
    frames = analysis.frames(block.stack)
    return source.innermost_in_python(frames) is None and not source.is_cublas(frames)


def _goes_at_once(block: Block) -> bool:
    return block.free_event == block.alloc_event + 1


def _lives_so(block: Block, analysis: Analysis) -> bool:
    """Does it live to the end, for several steps (to _cuda_clearCublasWorkspaces()) or not at all, with no category?"""
    begins = [step[1] for step in analysis.steps]
    end = analysis.totals["n_events"] if block.free_event is None else block.free_event
    n_steps = bisect.bisect(begins, end) - bisect.bisect(begins, block.alloc_event)
    if block.category:
        return False
    if not _is_bare(block, analysis):
        return block.free_event is None or _goes_at_once(block) or n_steps > 2
    if _goes_at_once(block):
        return block.phase == "backward" and gives_workspaces_back(analysis.notes)
    # Where an optimizer's step begins, recordings mark which of backward's blocks are gradients.
    is_looked_at = n_steps > 2 or any(
        phase.name == "optimizer" and block.alloc_event < phase.begin < end
        for phase in analysis.phases
    )
    if "optimizers" in analysis.notes:
        return block.phase == "backward" and is_looked_at
    # Without one of torch's: a gradient stays beside the tensor that it is of.
    is_kept = block.free_event is None and block.phase == "backward"
    return is_kept and not _has_tensor(block, analysis)


def _has_tensor(block: Block, analysis: Analysis) -> bool:
    """Does a tensor that the block may be the gradient of live at the peak, or else at the end?"""
    sizes = workspace_sizes(analysis.notes)
    here = analysis.peak.blocks
    if block not in here:
        here = analysis.moments[max(analysis.moments)].blocks
    return any(
        other.bytes >= block.bytes
        and other.alloc_event < block.alloc_event
        and not (other.bytes in sizes and source.is_matrix_product(analysis.frames(other.stack)))
        for other in here
    )


def _of_same_stack(
    told: Iterable[Told], ranges: list[tuple[int, int]], analysis: Analysis
) -> set[int]:
    """Allocations right after one with the same stack on their stream, regardless of a dry run's own frames.

    Without a stack, nothing may be freed between the two either.
    """
    before: dict[tuple[int, int, int], tuple[source.Frame, ...]] = {}
    found: set[int] = set()
    begins = [begin for begin, _ in ranges]
    for row in told:
        key = bisect.bisect(begins, row.event), row.device, row.stream
        if row.name == "free_requested" and before.get(key) == ():
            del before[key]
        elif row.name == "alloc":
            frames = analysis.frames(row.stack)
            if source.is_autograd(frames):  # a dry run's kernels have Python on its threads
                frames = ()
            if before.get(key) == frames:
                found.add(row.event)
            before[key] = frames
    return found
