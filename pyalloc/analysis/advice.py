"""Advice: what to change, in words, with the numbers behind them.  Each finding has a test that plants the fault."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

from pyalloc.analysis import (
    allocators,
    attention,
    checkpoints,
    collected,
    leaks,
    passes,
    retries,
    training,
)
from pyalloc.analysis.falling import TRAINING, falls_by
from pyalloc.analysis.idle import idle_runs, knows_backwards
from pyalloc.analysis.meaning import FORWARDS, Analysis, in_all_layers
from pyalloc.common.units import size
from pyalloc.traces import source
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import Block

_STREAMS = 3  # streams with a workspace from which on it is told: a program may need two
_UNUSED_SHARE = 0.25  # of the parameters: from that on, gradients that no optimizer uses are told
# Of the peak: less is not told.  The second is for gradients and optimizers' state.
_SHARE, _SMALLER_SHARE = 0.05, 0.03
# Reductions that einsum cannot do.
_NO_PRODUCT = re.compile(r"softmax|logsumexp|cross_entropy|_loss\b")


def advise(analysis: Analysis) -> list[Advice]:
    """All findings, most saved bytes first; kept for the same replays, because a report asks several times."""
    if analysis.advised is None or analysis.advised[0] is not analysis.replays:
        analysis.advised = analysis.replays, _findings(analysis)
    return analysis.advised[1]


def _findings(analysis: Analysis) -> list[Advice]:
    runs, retained = idle_runs(analysis)
    idle = list(itertools.chain.from_iterable([*runs, *retained]))
    kept = passes.kept_by(idle, analysis)
    unused = list(_unused_gradients(analysis))
    found = [
        *_leak(analysis),
        *passes.advice(runs, retained, analysis),
        *_reductions(analysis),
        *_gradients(analysis),
        *unused,
        *_doubled_state(analysis),
        *_stale(analysis),
        *_stale_gradients(analysis),
        *_loaded(analysis),
        *_workspaces(analysis),
        *_autotuning(analysis),
        *retries.advice(analysis),
        *training.advice(analysis),
        *attention.advice(analysis),
        *collected.advice(analysis),
        # Only for forward passes that need a backward pass, and get one.
        *([] if passes.is_in_one(idle, analysis) or unused else checkpoints.advice(analysis, kept)),
        *allocators.advice(analysis),
    ]
    return sorted(found, key=lambda advice: -(advice.saved_bytes or 0))


def _leak(analysis: Analysis) -> Iterator[Advice]:
    turn = leaks.turn(analysis)
    graph = (
        " After backward(retain_graph=True), a loss that is kept also keeps everything it was computed from: leave "
        "that out."
        if "retain_graph" in analysis.notes
        else ""
    )
    for grown in leaks.growth(analysis)[:3]:
        blocks = [block for block in analysis.peak.blocks if block.stack == grown.stack]
        modules = Counter(in_all_layers(block.module) for block in blocks if block.module)
        within = f" (in {modules.most_common(1)[0][0]})" if modules else ""
        why = (
            "There are as many tensors as before, but larger ones: something is appended to (torch.cat), or is "
            "as long as an input. Inputs that grow from step to step are not a leak."
            if not grown.more_blocks
            else "Something keeps these gradients: a hook that collects them (register_full_backward_hook(), "
            "register_hook()), retain_grad(), or a list of what autograd.grad() returned."
            if grown.phase == "backward"
            else "The optimizer's state grows. LBFGS keeps two tensors more from each iteration until there are "
            "history_size of them, which is not a leak; a smaller history_size keeps fewer."
            if blocks and {analysis.category(block) for block in blocks} == {"optimizer state"}
            else "Something keeps these tensors: a list or sum of losses without .item() or .detach(), a cache, a "
            f"history, or what a hook collects.{graph}"
        )
        yield Advice(
            "leak",
            f"{grown.name}{within} holds {size(grown.per_step)} more at each {turn} "
            f"({size(grown.bytes)} over those examined). {why}",
            grown.bytes,
        )


def _is_dropped_with(analysis: Analysis, temporary: Block, other: Block) -> bool:
    """Is it of the same line, and freed no later than the temporary?  An expression can make several in turn."""
    is_short = other.free_event is not None and other.free_event <= (temporary.free_event or 0)
    return is_short and analysis.frames(other.stack) == analysis.frames(temporary.stack)


def _reductions(analysis: Analysis) -> Iterator[Advice]:
    for block, result in analysis.reductions:
        where = analysis.place(block.stack)
        if where is None or source.is_torchs(analysis.frames(block.stack)):
            continue
        code = source.text_of(where)
        if _NO_PRODUCT.search(code):
            continue
        shown = f" (`{code}`)" if code else ""
        yield Advice(
            "broadcast_product",
            f"{where}{shown} makes a temporary of {size(block.bytes)} and immediately reduces it to {size(result)}. "
            "torch.einsum, a matrix product or torch.cdist compute the same without it, needing at most a cuBLAS "
            "workspace (32 MiB).",
            sum(b.bytes for b in analysis.peak.blocks if _is_dropped_with(analysis, block, b))
            - result,
        )


def _is_accumulating(analysis: Analysis) -> bool:
    """Will gradients at the peak still be used: were they last in a backward pass, not in an optimizer's step?"""
    ends = {"backward": -1, "optimizer": -1}
    for phase in analysis.phases:
        if phase.name in ends and phase.end <= analysis.totals["peak_event"]:
            ends[phase.name] = phase.end
    has_optimizer = any(phase.name == "optimizer" for phase in analysis.phases)
    return has_optimizer and ends["backward"] > ends["optimizer"]


def _has_optimizers(analysis: Analysis) -> bool:
    """Do several optimizers take turns, so that a step of one says nothing about the gradients of another?"""
    end, step, has_backward = -1, -1, True
    for phase in analysis.phases:
        if phase.name == "backward":
            has_backward = True
        elif phase.name == "optimizer" and phase.begin >= end:  # not one within another
            if not has_backward or 0 <= phase.step == step:
                return True
            end, step, has_backward = phase.end, phase.step, False
    return False


def _old_gradients(analysis: Analysis) -> list[Block]:
    """Gradients at the peak that certainly nothing uses any more."""
    if _is_accumulating(analysis) or not knows_backwards(analysis):
        return []
    found = [
        b
        for b in analysis.peak.blocks
        if analysis.category(b) == "gradients" and not source.is_bucket(analysis.frames(b.stack))
    ]
    return found if not _has_optimizers(analysis) else _dropped_unused(found, analysis)


def _dropped_unused(gradients: list[Block], analysis: Analysis) -> list[Block]:
    """Those that are freed before the next backward pass or optimizer's step begins."""
    peak = analysis.totals["peak_event"]
    users = [p for p in analysis.phases if p.name in ("backward", "optimizer") and p.end >= peak]
    used = min((phase.begin for phase in users), default=analysis.totals["n_events"])
    return [b for b in gradients if b.free_event is not None and b.free_event <= used]


def _gradients(analysis: Analysis) -> Iterator[Advice]:
    least = _SMALLER_SHARE * analysis.totals["peak_bytes"]
    gradients = _old_gradients(analysis)
    phase = analysis.totals["peak_phase"]
    # A loss made of functions is not a phase.  Neither is a hand-written optimizer, which may be at work here.
    is_between = phase in ("", "inference") and any(p.name == "optimizer" for p in analysis.phases)
    idle = _dropped_unused(gradients, analysis) if is_between else gradients
    held = sum(block.bytes for block in idle)
    # Gradients that stay are alive in backward, too, where they would otherwise be made one by one.
    is_kept = len(_dropped_unused(idle, analysis)) < len(idle)
    alike = (*FORWARDS, "inference", *["backward"] * is_kept)
    is_idle = (phase in FORWARDS or is_between) and held > least
    saved = falls_by(idle, analysis, alike) if is_idle else 0
    if saved > least / 3:
        lies = f"in {phase}" if phase else "before backward"
        yield Advice(
            "zero_grad",
            f"{size(held)} of old gradients are alive at the peak, which lies {lies}. Call "
            "optimizer.zero_grad(set_to_none=True) before the forward pass to free them. "
            f"That would lower the peak by about {size(saved)}.",
            saved,
        )
    begin = min(
        (p.begin for p in analysis.phases if _is_peak_in(p, "backward", analysis)), default=0
    )
    held_besides = {block.alloc_event for block in _returned(analysis)}
    old = sum(
        b.bytes
        for b in gradients
        if b.category == "gradients" and b.alloc_event < begin and b.alloc_event not in held_besides
    )
    old -= _unused(analysis)[0]  # which no optimizer clears
    if old > least:
        yield Advice(
            "zero_grad",
            f"{size(old)} of old gradients are alive at the peak, which lies in backward. After "
            "optimizer.zero_grad(set_to_none=True) each gradient is made only when backward reaches it, which lowers "
            "the peak by up to as much.",
        )


def _unused(analysis: Analysis) -> tuple[int, str]:
    """Bytes of gradients that no optimizer's step uses, and the classes of the models, from the notes."""
    told = re.match(r"(\d+) bytes, (.*)", analysis.notes.get("unused_gradients", ""))
    return (int(told[1]), told[2]) if told else (0, "")


def _unused_gradients(analysis: Analysis) -> Iterator[Advice]:
    unused, models = _unused(analysis)
    held = sum(b.bytes for b in analysis.peak.blocks if analysis.category(b) == "gradients")
    of_all = sum(b.bytes for b in analysis.peak.blocks if analysis.category(b) == "parameters")
    is_large = min(unused, held) > _SMALLER_SHARE * analysis.totals["peak_bytes"]
    # Where they are for many of the parameters, what forward passes keep for them is far more than they are.
    if is_large or min(unused, held) > of_all * _UNUSED_SHARE > 0:
        yield Advice(
            "unused_gradients",
            f"{size(unused)} of gradients belong to parameters that no optimizer updates, in {models}. "
            "requires_grad_(False) on these (on a whole model: model.requires_grad_(False)) avoids them and, if the "
            "input needs no gradient either, all that the forward pass keeps for their backward pass (torch.no_grad() "
            "around it does the same then).",
            min(unused, held),
        )


def _is_peak_in(phase: Phase, name: str, analysis: Analysis) -> bool:
    return phase.name == name and phase.begin < analysis.totals["peak_event"] <= phase.end


def _doubled_state(analysis: Analysis) -> Iterator[Advice]:
    note = analysis.notes.get("doubled_state", "")
    told = re.match(r"(\d+) bytes of (\d+), (\d+) optimizers", note)
    if told is None:
        return
    most, total, n = map(int, told.groups())
    state = [b for b in analysis.peak.blocks if analysis.category(b) == "optimizer state"]
    # The peak may come before some or all of it was doubled: what one optimizer holds of the total comes first.
    doubled = min(most, sum(block.bytes for block in state) - (total - most))
    if doubled > _SMALLER_SHARE * analysis.totals["peak_bytes"]:
        yield Advice(
            "optimizer_state",
            f"{n} optimizers hold state for the same parameters, {size(doubled)} more at the peak than one would. "
            "Something (a list, a scheduler) keeps the old ones when a new one is made. Drop them, or keep using the "
            "first and set its learning rate.",
            doubled,
        )


def _stale(analysis: Analysis) -> Iterator[Advice]:
    """What an earlier step made and a variable still holds at the peak."""
    peak = analysis.peak
    step = analysis.totals["peak_step"]
    held: dict[str, list[Block]] = {}
    for block in peak.blocks:
        is_made_before = step is not None and 0 <= block.step < step
        is_dropped_later = block.free_event is not None and block.free_event >= peak.event
        if is_made_before and is_dropped_later and analysis.category(block) == "activations":
            held.setdefault(analysis.name(block.stack), []).append(block)
    sizes = {name: sum(block.bytes for block in blocks) for name, blocks in held.items()}
    total, least = sum(sizes.values()), _SHARE * peak.allocated_bytes
    if total <= least:
        return
    saved = falls_by(itertools.chain(*held.values()), analysis, (*FORWARDS, "inference"))
    if 3 * saved > least:
        name = max(sizes, key=lambda key: sizes[key])
        graph = (
            " backward(retain_graph=True) also keeps everything the output was computed from; leave it out."
            if "retain_graph" in analysis.notes
            else ""
        )
        yield Advice(
            "stale",
            f"{size(total)} at the peak were made in an earlier step, most of it at {name}, and are freed only later "
            "in this step: a variable (an output, a loss) holds them until it is reassigned. `del` it at the end of "
            f"the step, or put the step into a function.{graph} That would lower the peak by about {size(saved)}.",
            saved,
        )


def _returned(analysis: Analysis) -> list[Block]:
    """Gradients of the step before that are dropped right after the backward pass of the peak has made new ones.

    No optimizer has its turn in between: a variable holds what torch.autograd.grad() or torch.func returned.
    """
    peak = analysis.totals["peak_event"]
    own = next((p for p in analysis.phases if _is_peak_in(p, "backward", analysis)), None)
    if own is None or own.step < 1:
        return []
    later = (p.begin for p in analysis.phases if p.name == "optimizer" and p.begin >= peak)
    until = next(later, analysis.totals["n_events"])
    return [
        block
        for block in analysis.peak.blocks
        if block.step == own.step - 1
        and block.free_event is not None
        and own.end <= block.free_event < until
        and analysis.category(block) == "gradients"
        and not source.is_bucket(analysis.frames(block.stack))
    ]


def _stale_gradients(analysis: Analysis) -> Iterator[Advice]:
    held = _returned(analysis)
    least = _SHARE * analysis.peak.allocated_bytes
    saved = falls_by(held, analysis, TRAINING, least)
    if saved > least:
        yield Advice(
            "stale",
            f"{size(sum(block.bytes for block in held))} at the peak are gradients of the step before, which are freed "
            "only after this step's have been made: a variable holds what torch.autograd.grad() or torch.func "
            "returned until it is reassigned. `del` it at the end of the step, or put the step into a function. "
            f"That would lower the peak by about {size(saved)}.",
            saved,
        )


def _workspaces(analysis: Analysis) -> Iterator[Advice]:
    """Many streams with a cuBLAS workspace each, such as those on which CUDA graphs are warmed up."""
    held = [b for b in analysis.peak.blocks if analysis.category(b) == "workspace"]
    held.sort(key=lambda block: block.bytes, reverse=True)
    streams = Counter((block.device, block.stream) for block in held)
    # One stream of a device is needed, with the workspaces of all threads that use it (autograd has its own).
    needed = {
        device: max(n for key, n in streams.items() if key[0] == device) for device, _ in streams
    }
    spare = [
        block
        for device, n in needed.items()
        for block in [block for block in held if block.device == device][n:]
    ]
    least = _SHARE * analysis.peak.allocated_bytes
    is_many = len(streams) - len(needed) >= _STREAMS - 1
    saved = falls_by(spare, analysis, (), least) if is_many else 0
    if saved > least:
        yield Advice(
            "workspaces",
            f"{len(held)} cuBLAS workspaces hold {size(sum(b.bytes for b in held))} at the peak: torch keeps one for "
            f"each thread and stream in which a matrix product ran, here {len(streams)} streams. Use fewer streams "
            "(one for the warm-ups of all CUDA graphs, say), or smaller workspaces, which may be slower "
            "(CUBLAS_WORKSPACE_CONFIG=:4096:1). "
            f"That would lower the peak by up to {size(saved)}.",
            saved,
        )


def _autotuning(analysis: Analysis) -> Iterator[Advice]:
    """Kernels that are tried at the peak, on tensors of their own."""
    stacks = {block.stack for block in analysis.peak.blocks}
    tuning = {stack for stack in stacks if source.is_tuning(analysis.frames(stack))}
    found = [
        block
        for block in analysis.peak.blocks
        if block.stack in tuning and block.alloc_event not in analysis.workspaces
    ]
    least = _SHARE * analysis.peak.allocated_bytes
    saved = falls_by(found, analysis, (), least)
    if saved > least:
        yield Advice(
            "autotuning",
            f"{size(sum(block.bytes for block in found))} at the peak are tensors on which torch.compile or Triton "
            "tries kernels, to find the fastest one. Each kernel is tuned once. Inductor keeps the results in its "
            "cache, so the next run of the program does without (kernels of your own with @triton.autotune do with "
            f"TRITON_CACHE_AUTOTUNING=1). That would lower the peak by up to {size(saved)}.",
            saved,
        )


def _loaded(analysis: Analysis) -> Iterator[Advice]:
    """What torch.load() brought to the device and is not a parameter: a variable still holds the dictionary."""
    blocks = analysis.peak.blocks
    loaded = {n for n in {b.stack for b in blocks} if source.is_loaded(analysis.frames(n))}
    model = ("parameters", "buffers", "optimizer state")
    held = [b for b in blocks if b.stack in loaded and analysis.category(b) not in model]
    total = sum(block.bytes for block in held)
    if total > _SHARE * analysis.peak.allocated_bytes:
        yield Advice(
            "loaded",
            f"{size(total)} at the peak are tensors that torch.load() made at {analysis.name(held[0].stack)} and that "
            "are not parameters: a checkpoint's dictionary is still held. `del` it after load_state_dict(), or load it "
            'with map_location="cpu".',
            total,
        )
