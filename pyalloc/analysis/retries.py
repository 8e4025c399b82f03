"""Models of earlier attempts or trainings that are still held when the next one has been made."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from pyalloc.analysis.meaning import MODEL, Analysis
from pyalloc.common.units import size
from pyalloc.traces.facts import Advice
from pyalloc.traces.moments import Block, Moment

_SHARE = 0.03  # of what is in use: less is not mentioned


def advice(analysis: Analysis) -> Iterator[Advice]:
    """What an attempt that ran out of memory left behind; else what trainings did that ended."""
    retried = list(_retried(analysis))
    yield from retried or _of_trainings(analysis)


def _of_trainings(analysis: Analysis) -> Iterator[Advice]:
    told = re.match(r"(\d+) bytes, (\d+), (.*)", analysis.notes.get("left_over", ""))
    if told is None:
        return
    held = sum(b.bytes for b in analysis.peak.blocks if analysis.category(b) in MODEL)
    n_bytes, n = min(int(told[1]), held), int(told[2])
    if n_bytes > _SHARE * analysis.peak.allocated_bytes:
        models = f"{n} models were" if n > 1 else "A model was"
        yield Advice(
            "left_over",
            f"{models} trained ({told[3]}) and not called with gradients again since another of the same modules was "
            f"first called; with gradients and optimizer state, {size(n_bytes)} of this are still held. Where each "
            "training makes its own model, drop the one before: a list of results or a closure may hold it, or a "
            "reference cycle, which gc.collect() frees. Of models that are still needed, drop gradients and "
            f"optimizer, or move them to the host until then. That would lower the peak by up to {size(n_bytes)}.",
            n_bytes,
        )


def _retried(analysis: Analysis) -> Iterator[Advice]:
    """Of the moment at which most of it is held: the peak, or when memory ran out again."""
    errors = [analysis.moments[oom[0]] for oom in analysis.ooms if oom[0] in analysis.moments]
    looked_at = [analysis.peak, *errors] if analysis.ooms else []
    found = [(text_of(analysis, moment), moment) for moment in looked_at]
    told = [(n_bytes, text, moment) for (n_bytes, text), moment in found if n_bytes]
    if told:
        n_bytes, text, moment = max(told, key=lambda each: each[0])
        when = "at the peak" if moment is analysis.peak else "when memory ran out again"
        yield Advice("retried", f"{text} That held {size(n_bytes)} {when}.", n_bytes)


def text_of(analysis: Analysis, moment: Moment) -> tuple[int, str]:
    """Bytes of a moment that an earlier attempt left behind, and what to do about it; 0 bytes if they are few."""
    left = _left_behind(analysis, moment)
    total = sum(block.bytes for block in left)
    if total <= _SHARE * moment.allocated_bytes:
        return 0, ""
    by_category: Counter[str] = Counter()
    for block in left:
        by_category[analysis.category(block)] += block.bytes
    what = ", ".join(f"{size(n)} of {name}" for name, n in by_category.most_common())
    parameters = [block for block in left if analysis.category(block) == "parameters"]
    return total, (
        f"{what} were made before an earlier out-of-memory error and were still held after "
        f"{analysis.name(parameters[0].stack)} had made such parameters again: the model of the attempt that failed. "
        "Release it before the next attempt: leave the `except` block first (the exception holds the variables of the "
        "functions it passed), then call gc.collect()."
    )


def _left_behind(analysis: Analysis, moment: Moment) -> list[Block]:
    """Parameters that a line has made again since memory ran out, and what else of a model is as old."""
    errors = [oom[0] for oom in analysis.ooms if oom[0] < moment.event]
    if not errors:
        return []
    model = [block for block in moment.blocks if analysis.category(block) in MODEL]
    made_by: dict[int, list[int]] = defaultdict(list)
    for block in model:
        if analysis.category(block) == "parameters":
            made_by[block.stack].append(block.alloc_event)
    before = 0  # the last error between parameters of one line
    for made in made_by.values():
        at = bisect.bisect_left(errors, max(made)) - 1
        if at >= 0 and min(made) < errors[at]:
            before = max(before, errors[at])
    again = {stack for stack, made in made_by.items() if max(made) >= before}
    return [
        block
        for block in model
        if block.alloc_event < before
        and (block.stack in again or analysis.category(block) != "parameters")
    ]
