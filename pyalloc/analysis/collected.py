"""Results of passes without a backward that need not be there: in a list, joined by cat(), or of a whole prompt."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pyalloc.analysis import leaks
from pyalloc.analysis.falling import falls_alone, falls_by
from pyalloc.analysis.findings import outermost
from pyalloc.analysis.meaning import FORWARDS, HOLDERS, Analysis
from pyalloc.common.units import size
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import STEP, Block

_SHARE = 0.1  # of the peak: smaller savings are not mentioned
_PASSES = 4  # at least so many left a result: fewer may still be in use
_PHASES = ("forward", "backward", "optimizer", "inference")
_TOKENS = 4  # passes of a generation after the first one, at least
_POSITIONS = 8  # of a prompt, at least


def advice(analysis: Analysis) -> Iterator[Advice]:
    """For each line's results, the first kind that saves enough; leaks are reported elsewhere."""
    held: dict[int, list[Block]] = defaultdict(list)
    for block in analysis.peak.blocks:
        if analysis.category(block) not in HOLDERS:
            held[block.stack].append(block)
    for grown in leaks.growth(analysis):
        held.pop(grown.stack, None)
    passes = list(outermost(analysis.phases, _PHASES))
    results = _results(passes, analysis)
    for blocks in held.values():
        yield from _listed(blocks, passes, analysis)
        yield from _joined(blocks, analysis)
        yield from _of_prompt(blocks, results, analysis)


def _listed(blocks: list[Block], passes: Sequence[Phase], analysis: Analysis) -> Iterator[Advice]:
    """Results in a list: one of each pass, kept during later passes."""
    of_pass: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        at = bisect.bisect_left(passes, block.alloc_event, key=lambda phase: phase.begin) - 1
        if at >= 0 and passes[at].name == "inference":
            of_pass[at].append(block)
    of_pass.pop(max(of_pass, default=-1), None)  # the current pass may be using it
    kept = [block for made in of_pass.values() for block in made]
    if len(of_pass) < _PASSES:
        return
    least = _SHARE * analysis.peak.allocated_bytes
    whole = _made_of(blocks, analysis)
    saved = falls_by([*kept, *whole], analysis, ("inference",), least, is_used=False)
    if saved > least:
        joined = f" Joined, they hold {size(sum(b.bytes for b in whole))} besides." if whole else ""
        yield Advice(
            "collected",
            f"{len(kept)} tensors of {_name(blocks, analysis)} hold {size(sum(b.bytes for b in kept))} at the peak: "
            f"the results of {len(of_pass)} passes without backward, left on the device.{joined} "
            f"{_instead(blocks, analysis)} That would lower the peak by about {size(saved)}.",
            saved,
        )


def _made_of(parts: list[Block], analysis: Analysis) -> list[Block]:
    """What torch.cat() or torch.stack() made of all of them, now or at the end of an earlier evaluation."""
    total = sum(block.bytes for block in parts)
    return [
        block
        for block in analysis.peak.blocks
        if 0 <= total - block.bytes < STEP * len(parts) and analysis.category(block) not in HOLDERS
    ]


def _joined(blocks: list[Block], analysis: Analysis) -> Iterator[Advice]:
    """Concatenated results: during torch.cat() there are a part, the results so far, and a new tensor for both."""
    least = _SHARE * analysis.peak.allocated_bytes
    if len(blocks) != 2 or sum(block.bytes for block in blocks) <= least:
        return
    if any(block.phase in FORWARDS for block in blocks):  # inside the model: a cache
        return
    before, whole = sorted(blocks, key=lambda block: block.alloc_event)
    added = whole.bytes - before.bytes
    is_part = any(
        abs(block.bytes - added) <= STEP
        and before.alloc_event < block.alloc_event < whole.alloc_event
        for block in analysis.peak.blocks
    )
    saved = falls_by(blocks, analysis, ("inference",)) if is_part and added > 0 else 0
    if saved > least:
        yield Advice(
            "collected",
            f"{_name(blocks, analysis)} joins a tensor of {size(before.bytes)} and {size(added)} more into a new "
            "tensor, over and over: the old and the new one exist together, and few of them fit into memory that was "
            f"freed before. {_instead(blocks, analysis)} That would lower the peak by about {size(saved)}.",
            saved,
        )


def _results(passes: Sequence[Phase], analysis: Analysis) -> list[Block]:
    """What passes without a backward returned, of those around the peak: the last that each made of what stays."""
    ends = [phase.end for phase in passes]
    found: dict[int, Block] = {}
    for block in analysis.spans:  # in order
        at = bisect.bisect_left(ends, block.alloc_event)
        is_made = at < len(passes) and passes[at].begin < block.alloc_event
        is_left = block.free_event is None or (is_made and block.free_event > ends[at])
        if is_made and is_left and passes[at].name == "inference":
            found[at] = block
    return list(found.values())


def _of_prompt(
    blocks: list[Block], results: Sequence[Block], analysis: Analysis
) -> Iterator[Advice]:
    """The first pass of a generation: it returns for all positions what later passes return for a single one."""
    most = max(blocks, key=lambda block: block.bytes)
    least = _SHARE * analysis.peak.allocated_bytes
    at = bisect.bisect_left(results, most.alloc_event, key=lambda block: block.alloc_event)
    prompt, *tokens = results[at : at + 1 + _TOKENS] or blocks
    line, one = (most.stack, most.module), tokens[0].bytes if tokens else 0
    is_prompt = (
        most.bytes > least
        and prompt.alloc_event == most.alloc_event
        and [((each.stack, each.module), each.bytes) for each in tokens] == [(line, one)] * _TOKENS
        and most.bytes >= _POSITIONS * one
        and most.bytes % one == 0
    )
    saved = falls_alone([most], analysis) if is_prompt else 0
    if saved > least:
        yield Advice(
            "prompt",
            f"{size(most.bytes)} at the peak is what {_name(blocks, analysis)} made for all positions of a prompt: "
            f"the passes after it make {size(one)} each. If only the last position is used, compute the last layer for "
            "that alone (`head(hidden[:, -1:])`; in transformers logits_to_keep=1). "
            f"That would lower the peak by up to {size(saved)}.",
            saved,
        )


def _name(blocks: list[Block], analysis: Analysis) -> str:
    return analysis.name(blocks[0].stack)


def _instead(blocks: list[Block], analysis: Analysis) -> str:
    frames = analysis.frames(blocks[0].stack)
    if any(file.endswith("/transformers/trainer.py") for _, file, _ in frames):
        return (
            "In transformers' Trainer, eval_accumulation_steps=1 moves them to the host, and "
            "preprocess_logits_for_metrics keeps less of each (.argmax(-1))."
        )
    return (
        "If the device does not need them, move each to the host as it is made (`.cpu()`) and join them there, or "
        "keep less of each (`.argmax(-1)`, a sum)."
    )
