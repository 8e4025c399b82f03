"""What a training can do otherwise: its optimizer's step, the loss over many classes, one backward for many passes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator

from pyalloc.analysis.falling import LASTING, TRAINING, falls_by
from pyalloc.analysis.idle import is_freed, runs_of
from pyalloc.analysis.meaning import HOLDERS, Analysis
from pyalloc.common.config import ANY_CHAINED
from pyalloc.common.units import size
from pyalloc.traces import source
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import Block
from pyalloc.traces.source import Frame, Place

_SHARE = 0.05  # of the peak: saving less is not worth a word
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # optimizers that have fused=True on a GPU
# Temporaries of one parameter's size, at most, where a step goes through them one by one.
_AT_ONCE = 4
_PARTS = 8  # of the rows of a loss
_IN_PART = 3  # tensors of a part that exist at once: its log-softmax and two gradients
_POSITIONS = 16  # of a row, at least
_HOOK = 4  # innermost frames among which a hook's is looked for


def advice(analysis: Analysis) -> Iterator[Advice]:
    """Each only where it saves something."""
    yield from _foreach(analysis)
    yield from _logits(analysis)
    yield from _one_backward(analysis)
    yield from _buckets(analysis)


def _is_worth(saved: int, analysis: Analysis) -> bool:
    return saved > _SHARE * analysis.peak.allocated_bytes


def _foreach(analysis: Analysis) -> Iterator[Advice]:
    """Temporaries of all parameters at once."""
    found = [
        block
        for block in analysis.peak.blocks
        if block.phase == "optimizer"
        and analysis.category(block) == "temporaries"
        and _is_of_all(analysis.frames(block.stack))
    ]
    if not found:
        return
    name = source.optimizer(analysis.frames(found[0].stack))
    held = sum(block.bytes for block in found)
    falls = falls_by(found, analysis, ("optimizer",))
    one = _AT_ONCE * max(block.bytes for block in found)
    saved = falls if name in _FUSED else min(falls, held - one)
    if not _is_worth(saved, analysis):
        return
    way = (
        "Pass fused=True to the optimizer to make none of them."
        if name in _FUSED
        else f"Pass foreach=False to the optimizer{', if it takes it,' * (not name)} to make those of one parameter at "
        "a time."
    )
    yield Advice(
        "foreach",
        f"{size(held)} at the peak are temporaries of the optimizer's step, which updates all parameters at once "
        f"(foreach). {way} That would lower the peak by about {size(saved)}.",
        saved,
    )


def _is_of_all(frames: tuple[Frame, ...]) -> bool:
    """Does an optimizer, of torch's or another library's, take all parameters at once here?"""
    at = source.innermost_in_python(frames)
    if at is not None and "_foreach_" in source.text_of(Place(at[1], at[2], at[0])):
        return True
    is_torchs = bool(source.optimizer(frames))
    return is_torchs and any(name.startswith("_multi_tensor_") for name, _, _ in frames)


def _is_of_classes(stack: int, analysis: Analysis) -> bool:
    """cross_entropy(), or log_softmax(), by which losses over tokens' log-probabilities begin."""
    where = analysis.place(stack)
    if where is not None and "log_softmax(" in source.text_of(where):
        return True
    return _is_in(("cross_entropy", "log_softmax"), stack, analysis)


def _is_in(functions: tuple[str, ...], stack: int, analysis: Analysis) -> bool:
    """Does one of these functions of torch.nn.functional run?"""
    return any(
        name in functions and file.endswith("/torch/nn/functional.py")
        for name, file, _ in analysis.frames(stack)
    )


def _is_as_large(n_bytes: int, most: int) -> bool:
    """Has it as many bytes as logits, or half as many: in half precision they may be there as well.

    Or a few more or less: the last position of each row is often left out (`logits[:, :-1]`).
    """
    return any(abs(n_bytes - n) <= n // _POSITIONS for n in (most, most // 2))


def _is_unpacked(block: Block, analysis: Analysis) -> bool:
    """Has a hook of autograd brought it back to the device: save_on_cpu()'s, or one of the same name?"""
    names = (name for name, _, _ in analysis.frames(block.stack)[:_HOOK])
    return block.phase == "backward" and any(name.startswith("unpack") for name in names)


def _logits(analysis: Analysis) -> Iterator[Advice]:
    """What cross_entropy() and log_softmax() make is as large as its logits, and so are the gradients of both."""
    peak = analysis.peak
    # What hooks have brought back from the host was made before, in the same step.
    returned = {block.bytes for block in peak.blocks if _is_unpacked(block, analysis)}
    before = [block for block in analysis.spans if block.bytes in returned]
    # A checkpoint makes those of one part, in backward again.
    forward = [block for block in (*peak.blocks, *before) if block.phase != "backward"]
    stacks = {block.stack for block in forward}
    of_losses = {
        stack
        for stack in stacks
        if stack
        and _is_of_classes(stack, analysis)
        and not source.is_checkpoint(analysis.frames(stack))
    }
    made = [block for block in forward if block.stack in of_losses]
    most = max(made, key=lambda block: block.bytes, default=None)
    if most is None or not _is_worth(most.bytes, analysis):
        return
    found, of_step = (
        [
            block
            for block in blocks
            if _is_as_large(block.bytes, most.bytes)
            and block.phase != "inference"  # an evaluation's, kept
            and analysis.category(block) not in HOLDERS
        ]
        for blocks in (peak.blocks, analysis.spans)
    )
    held = sum(block.bytes for block in found)
    part = most.bytes * min(len(found), _IN_PART) // _PARTS + _first_gradient(analysis)
    here = {block.alloc_event for block in found}
    beside = [block for block in of_step if block.alloc_event not in here]
    saved = min(falls_by(found, analysis, LASTING, beside=beside), held - part)
    if len(found) >= 2 and saved > held / 4 and held > peak.allocated_bytes / 4:
        has_gradients = any(block.phase == "backward" for block in found)
        others = (
            ", their log-softmax, and the gradients of both"
            if has_gradients
            else " and their log-softmax"
        )
        is_ctc = any(_is_in(("ctc_loss",), block.stack, analysis) for block in (*forward, *of_step))
        what, instead = (
            ("some of the sequences", "")
            if is_ctc
            else (
                "a part of the rows",
                "; torch 2.14 and newer have torch.nn.functional.linear_cross_entropy(..., "
                "options=torch.nn.LinearCrossEntropyOptions())",
            )
        )
        yield Advice(
            "logits",
            f"{len(found)} tensors of {size(most.bytes)} or half that hold {size(held)} at the peak: the logits of "
            f"{analysis.place(most.stack)}{others}. Compute the last layer and the loss for {what} at a time, with "
            f"torch.utils.checkpoint around each part, so that only one part's tensors exist at once{instead}. "
            f"That would lower the peak by up to {size(saved)}.",
            saved,
        )


def _first_gradient(analysis: Analysis) -> int:
    """Bytes of the last layer's gradient, if it is made after the peak: parts make it with the first of them."""
    peak = analysis.totals["peak_event"]
    end = next((p.end for p in analysis.phases if p.name == "backward" and p.end >= peak), peak)
    made = (
        block.bytes
        for block in analysis.spans  # in order
        if peak <= block.alloc_event < end
        and block.phase == "backward"
        and analysis.category(block) == "gradients"
    )
    return next(made, 0)


def _one_backward(analysis: Analysis) -> Iterator[Advice]:
    """Passes that all wait for one backward: parts of a batch whose losses are added up before it."""
    peak = analysis.peak
    for run, backwards in runs_of(analysis.phases):
        if len(run) < 2 or not backwards or not run[0].begin < peak.event <= backwards[-1].end:
            continue
        if _is_chained(len(run), analysis):
            return
        kept = _by_pass(run, peak.blocks, analysis)
        if len(backwards) > 1 or len(kept) < 2 or not is_freed(run, backwards):
            continue
        # By what they left, large or still there, as backward may have freed some.
        if not _are_alike(_by_pass(run, {*analysis.spans, *peak.blocks}, analysis)):
            continue  # of several models, or an encoder and a decoder
        sizes = [sum(block.bytes for block in blocks) for blocks in kept]
        most = sizes.index(max(sizes))
        dropped = [b for i, blocks in enumerate(kept) if i != most for b in blocks]
        saved = falls_by(dropped, analysis, TRAINING)
        if _is_worth(saved, analysis):
            yield Advice(
                "one_backward",
                f"{len(run)} forward passes in a row keep {size(max(sizes))} each until one backward pass frees them "
                "all. If they are parts of a batch whose losses are added up, call backward() on each loss by itself: "
                f"the gradients add up just the same, which would lower the peak by about {size(saved)}. Passes that "
                "feed into one another, or whose outputs one loss compares, need all of it.",
                saved,
            )
        return


def _is_chained(n_passes: int, analysis: Analysis) -> bool:
    """Does a pass of such a run go on from another's result: steps of a recurrent net, layers called one by one?"""
    lengths = analysis.notes.get("chained", "").split(",")
    return lengths == [ANY_CHAINED] or str(n_passes) in lengths


def _by_pass(run: list[Phase], blocks: Iterable[Block], analysis: Analysis) -> list[list[Block]]:
    """What they made and left, out of these blocks, of those that have something."""
    ends = [phase.end for phase in run]
    found: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        i = bisect.bisect_left(ends, block.alloc_event)
        is_activation = block.alloc_event not in analysis.workspaces and not block.category
        is_made = i < len(run) and run[i].begin < block.alloc_event and is_activation
        if is_made and (block.free_event is None or block.free_event > ends[i]):
            found[i].append(block)
    return [found[i] for i in sorted(found)]


def _are_alike(passes: list[list[Block]]) -> bool:
    """Were the same lines and modules at work in all of them?"""
    made = [{(block.stack, block.module) for block in blocks} for blocks in passes]
    return all(each == made[0] for each in made)


def _buckets(analysis: Analysis) -> Iterator[Advice]:
    """Gradients beside DistributedDataParallel's buckets, which hold the same numbers."""
    buckets, gradients = [], []
    for block in analysis.peak.blocks:
        if source.is_bucket(analysis.frames(block.stack)):
            buckets.append(block)
        elif analysis.category(block) == "gradients":
            gradients.append(block)
    held = sum(block.bytes for block in buckets)
    # One at a time is still made beside its bucket.
    twice = min(
        held, sum(b.bytes for b in gradients) - max((b.bytes for b in gradients), default=0)
    )
    saved = min(twice, falls_by(gradients, analysis, ("backward", "optimizer")))
    if _is_worth(saved, analysis):
        yield Advice(
            "buckets",
            f"Gradients are held twice at the peak: DistributedDataParallel keeps {size(held)} in buckets besides. "
            "Pass gradient_as_bucket_view=True to it (in Lightning to DDPStrategy, in Accelerate to "
            "DistributedDataParallelKwargs), so that they lie in the buckets. "
            f"That would lower the peak by about {size(saved)}.",
            saved,
        )
