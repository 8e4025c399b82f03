"""What takes another look at the trace: reduced products, backwards that are no phases, workspaces of cuBLAS."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pyalloc import _core, source
from pyalloc.analysis import CUBLAS_WORKSPACES, Analysis
from pyalloc.caveats import has_beginning
from pyalloc.config import CUBLAS_BYTES, CUBLAS_CACHE, CUBLAS_CONF, CUBLASLT_BYTES
from pyalloc.facts import Phase
from pyalloc.moments import Block, Moment, moments_of, rounded
from pyalloc.told import Told, joined

Progress = Callable[[int, int], object]
_LARGE_SHARE = 0.2  # of the peak: what a reduction of a product is looked for in
_SHORT_LIFE = 12  # events
_REDUCED = 8  # so many times smaller is what is left
_BEFORE = 64  # events: a workspace in pieces of 2 MiB is mapped between a product's result and it
_CANDIDATES = 64
_GAPS_TOLD = 100_000  # events between forward passes that are looked at for a backward


def look_for_all(
    analysis: Analysis, file: Path, device: int, progress: Progress | None = None
) -> None:
    """Adds them to the analysis; a pass is made only where there may be some."""
    _reductions(analysis, file, device, progress)
    _backwards(analysis, file, device, progress)
    _workspaces(analysis, file, device, progress)


def outermost(
    phases: Iterable[Phase], names: Sequence[str] = ("forward", "backward", "optimizer")
) -> Iterator[Phase]:
    """Those of these names, in phases of the program's own too.

    Not in each other: a checkpoint's forward in backward is none.
    """
    end = -1
    for phase in phases:
        if phase.name in names and phase.begin >= end:
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

    Recordings of older versions have no such phase of torch.autograd.grad(), snapshots only the program's own.
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


def workspace_sizes(notes: dict[str, str]) -> tuple[int, ...]:
    """Bytes that torch gives cuBLAS, as it said; else pairs of KiB and how often in the setting, or its defaults."""
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
    """Does each product take one, and give it back?"""
    version = re.match(r"(\d{1,4})\.(\d{1,4})", notes.get("torch", ""))
    is_new = version is not None and tuple(map(int, version.groups())) >= (2, 15)
    return is_new and notes.get(CUBLAS_CACHE) != "1"


def _workspaces(analysis: Analysis, file: Path, device: int, progress: Progress | None) -> None:
    """The memory that torch's allocator gives cuBLAS at a thread's first matrix product on a stream.

    In the program's own it is below the line of that product, whose result it follows at once, with the same stack;
    and it stays, or goes before anything else happens, as torch 2.15 has it for each product.  No other block is all of
    that.  In a thread of autograd's, without a line, a gradient of this size that is added to another at once is the
    first that its node makes: what was freed is between it and the last product.
    """
    if not has_beginning(analysis.notes):  # the first product may be none of those that are told
        return
    likely = _likely(analysis)
    wanted = joined((max(b.alloc_event - _BEFORE, 0), b.alloc_event + 1) for b in likely)
    if not wanted:
        return
    ranges = [event for each in wanted for event in each]
    scan = _core.Scan(file, device=device, n_bins=2, ranges=ranges, progress=progress)
    second = _of_same_stack(map(Told._make, scan.told()), wanted, analysis)
    taken: dict[tuple[int, int, bool], int | None] = {}  # until when it has one; None: to the end
    for block in likely:
        key = block.device, block.stream, bool(block.stack)
        until = taken.get(key, -1)
        if until is None or block.alloc_event < until:
            continue
        frames = analysis.frames(block.stack)
        # Of a thread of autograd's it has been shown that it is no gradient.
        is_product = source.is_matrix_product(frames) if block.stack else True
        is_one = block.alloc_event in second or source.is_compiled(frames)
        if is_product is None or source.is_cublas(frames) or (is_product and is_one):
            taken[key] = block.free_event
            if is_product is not None:  # else it may be the one, and then no other is
                analysis.workspaces.add(block.alloc_event)


def _likely(analysis: Analysis) -> list[Block]:
    """Blocks at the peak, or at the end if it came after that, that have the size and the life, in their order."""
    sizes = workspace_sizes(analysis.notes)
    of_lt = _said(analysis.notes, CUBLASLT_BYTES)
    end = analysis.moments[max(analysis.moments)]
    found = [block for block in analysis.peak.blocks if block.bytes in sizes]
    # There may be very many at the end: these are read only where some line has as much.
    if not found and end is not analysis.peak and _may_have_one(analysis, end, min(sizes)):
        found = [block for block in end.blocks if block.bytes in sizes]
    kept = [block for block in found if _lives_so(block, analysis)]
    # That of cuBLASLt, where it goes at once: one that stays could be anything.
    kept += [b for b in analysis.peak.blocks if b.bytes in of_lt and b.stack and _goes_at_once(b)]
    return sorted(kept, key=lambda block: block.alloc_event)[:_CANDIDATES]


def _may_have_one(analysis: Analysis, moment: Moment, n_bytes: int) -> bool:
    """Does the line of a matrix product hold as much?"""
    return any(
        total >= n_bytes and source.is_matrix_product(analysis.frames(stack))
        for stack, (total, _) in moment.by_stack.items()
        if stack
    )


def _goes_at_once(block: Block) -> bool:
    return block.free_event == block.alloc_event + 1


def _lives_so(block: Block, analysis: Analysis) -> bool:
    """To the end, over steps until _cuda_clearCublasWorkspaces(), or not at all; and nobody said what it holds."""
    begins = [step[1] for step in analysis.steps]
    end = analysis.totals["n_events"] if block.free_event is None else block.free_event
    n_steps = bisect.bisect(begins, end) - bisect.bisect(begins, block.alloc_event)
    if block.category:
        return False
    if block.stack:
        return block.free_event is None or _goes_at_once(block) or n_steps > 2
    if _goes_at_once(block):
        return block.phase == "backward" and gives_workspaces_back(analysis.notes)
    # Of what backward makes, recordings tell which are gradients at each step.
    return block.phase == "backward" and n_steps > 2 and "optimizers" in analysis.notes


def _of_same_stack(
    told: Iterable[Told], ranges: list[tuple[int, int]], analysis: Analysis
) -> set[int]:
    """Allocations that follow one of the same stack on their stream, but for what a dry run has in it.

    Without a stack nothing is freed between the two either.
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
