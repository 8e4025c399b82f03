"""Where torch.utils.checkpoint would help, and how far the peak would fall."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

from pyalloc import source
from pyalloc.analysis import Analysis
from pyalloc.facts import Advice
from pyalloc.falling import TRAINING, falls_by
from pyalloc.moments import Block
from pyalloc.units import size

T = TypeVar("T")
_SHARE = 0.15  # of the peak: saving less is not worth doing it all again
_CLEARLY = 1.25
_SWITCHES = {  # of libraries' models: checkpointing of all layers
    "transformers": "model.gradient_checkpointing_enable()",
    "diffusers": "model.enable_gradient_checkpointing()",
    "timm": "model.set_grad_checkpointing()",
}


def advice(analysis: Analysis, idle: set[Block]) -> Iterator[Advice]:
    """Of layers, of the modules of a sequence, and of functions.  idle: what no backward is for."""
    peak = analysis.peak
    step = analysis.totals["peak_step"] or 0
    # One's result, or its last part, which it does not make again.
    done = {n for n in {b.stack for b in peak.blocks} if source.is_checkpoint(analysis.frames(n))}
    held = [
        b
        for b in peak.blocks
        if analysis.category(b) == "activations"
        and b.phase != "inference"  # which has no backward
        and b not in idle
        and not 0 <= b.step < step - 1  # their backward was long ago: something else keeps them
        and b.stack not in done
    ]
    found = list(_of_families(held, peak.allocated_bytes * _SHARE, analysis))
    yield from _outermost_that_help(found)
    taken = {block for _, blocks in found for block in blocks}
    held = [block for block in held if block not in taken]
    functions: dict[str, list[Block]] = {}
    for block in held:
        where = source.inside(analysis.frames(block.stack)) or analysis.place(block.stack)
        if where is not None:
            functions.setdefault(where.function, []).append(block)
    for name, blocks in functions.items():
        of_sequence = [block for block in blocks if _is_in_sequence(block, analysis)]
        if len(of_sequence) >= 4:
            yield from _of_sequence("*", [[block] for block in of_sequence], analysis)
        elif len(blocks) >= 4:
            yield from _of_function(name, blocks, held, analysis)


def _of_families(
    held: list[Block], least: float, analysis: Analysis
) -> Iterator[tuple[Advice | None, list[Block]]]:
    """Of numbered modules that hold so much, the outermost first: layers, layers of a model in a sequence."""
    families: dict[str, dict[str, list[Block]]] = {}
    for block in held:
        for family, layer in _numbered(block.module):
            families.setdefault(family, {}).setdefault(layer, []).append(block)
    for family in sorted(families, key=lambda family: family.count("*")):
        members = families[family]
        blocks = [block for each in members.values() for block in each]
        if len(members) == 1 or sum(block.bytes for block in blocks) < least:
            continue
        inner = family.count(".")
        has_inner = any(_depth(block.module) > inner for block in blocks)
        parents = {layer.rpartition(".")[0] for layer in members}
        name = f"{parents.pop()}.*".lstrip(".") if len(parents) == 1 else family
        if has_inner:
            yield next(_of_layers(name, list(members.values()), analysis), None), blocks
        elif len(members) >= 4 and not parents:  # of one sequence
            yield next(_of_sequence(name, list(members.values()), analysis), None), blocks


def _numbered(module: str) -> Iterator[tuple[str, str]]:
    """`*` and `0`, `*.blocks.*` and `0.blocks.3` of `0.blocks.3.mlp`: where the modules lie that are numbered."""
    parts = module.partition(".parametrizations.")[0].split(".")
    for i, part in enumerate(parts, 1):
        if part.isdecimal():
            family = ("*" if each.isdecimal() else each for each in parts[:i])
            yield ".".join(family), ".".join(parts[:i])


def _outermost_that_help(found: list[tuple[Advice | None, list[Block]]]) -> Iterator[Advice]:
    """Inner ones in place of those around them only where they save clearly more."""
    helping = [(made, set(blocks)) for made, blocks in found if made is not None]
    while helping:
        made, blocks = helping.pop(0)
        within = [each for each, others in helping if others & blocks]
        if all(_saved(each) <= _CLEARLY * _saved(made) for each in within):
            helping = [(each, others) for each, others in helping if not others & blocks]
            yield made


def _saved(made: Advice) -> int:
    return made.saved_bytes or 0


def _of_layers(family: str, members: list[list[Block]], analysis: Analysis) -> Iterator[Advice]:
    sizes = [sum(block.bytes for block in blocks) for blocks in members]
    dropped, saved = _made_again(members, analysis)
    saved = _worth(saved, dropped, analysis)
    if saved:
        how = _checkpointing(analysis, members[0], "each")
        yield Advice(
            "checkpoint",
            f"Activations in {_modules(family, len(members))} hold {size(sum(sizes))} at the peak, "
            f"at most {size(max(sizes))} in one of them. {how} would recompute them in backward, one module at a time; "
            "what one module passes on to the next stays. "
            f"That would lower the peak by about {size(saved)}.",
            saved,
        )


def _of_sequence(family: str, members: list[list[Block]], analysis: Analysis) -> Iterator[Advice]:
    """One around all would make everything again at once, and one around each keeps what goes into the next."""
    members = sorted(members, key=lambda blocks: blocks[0].alloc_event)
    blocks = [block for each in members for block in each]
    total = sum(block.bytes for block in blocks)
    n_parts = math.isqrt(len(members))
    parts = [[b for each in part for b in each] for part in _in_parts(members, n_parts)]
    # What goes into a part may be none of what is kept without: then there is more.
    sizes = [sum(block.bytes for block in part) for part in parts]
    between = sum(max(part, key=lambda b: b.alloc_event).bytes for part in parts[:-1])
    n_passes = min(map(_calls, members))
    last = sizes[-1] if n_passes > 1 else 0  # in which nothing is made again
    saved = total - n_passes * between - last - max(sizes) // n_passes
    saved = _worth(saved, blocks, analysis)
    if saved:
        yield Advice(
            "checkpoint",
            f"Activations in {_modules(family, len(members))} hold {size(total)} at the peak. "
            f"torch.utils.checkpoint.checkpoint_sequential(sequence, {n_parts}, x, use_reentrant=False), in place of "
            f"sequence(x), would recompute them in backward, one of {n_parts} parts at a time (one checkpoint around "
            f"all of it would save nothing). That would lower the peak by up to {size(saved)}.",
            saved,
        )


def _of_function(
    name: str, blocks: list[Block], held: list[Block], analysis: Analysis
) -> Iterator[Advice]:
    blocks = sorted(blocks, key=lambda block: block.alloc_event)
    total = sum(block.bytes for block in blocks)
    n_calls = _calls(blocks)
    if n_calls > 1:
        parts = list(_in_parts(blocks, n_calls))
        again = max(sum(block.bytes for block in part) for part in parts)
        dropped, saved = _until_made_again(parts), total - again
    else:
        # All of it is made again at once, when what was made after it is gone, and is there until each is freed.
        after = sum(b.bytes for b in held if b.alloc_event > blocks[-1].alloc_event)
        first = min((b.free_event for b in blocks if b.free_event is not None), default=None)
        dropped = [block._replace(free_event=first) for block in blocks]
        saved = min(total - max(block.bytes for block in blocks), after)
    saved = _worth(saved, dropped, analysis)
    if saved:
        how = _checkpointing(analysis, blocks)
        fused = (
            " pyalloc.ops has fused attention that keeps little for backward."
            if "attention" in name.lower() and how not in _SWITCHES.values()
            else ""
        )
        yield Advice(
            "checkpoint",
            f"{len(blocks)} activations of {name} hold {size(total)} at the peak. {how} would recompute them in "
            f"backward instead of keeping them. That would lower the peak by up to {size(saved)}.{fused}",
            saved,
        )


def _depth(module: str) -> int:
    """How deep it lies; what makes a weight of others (spectral_norm()) lies where the weight does."""
    return module.partition(".parametrizations.")[0].count(".")


def _modules(family: str, n: int) -> str:
    return f"{n} modules of the model" if family == "*" else f"the {n} modules {family}"


def _is_in_sequence(block: Block, analysis: Analysis) -> bool:
    """Did a line of the user's call an nn.Sequential that made it?"""
    frames = analysis.frames(block.stack)
    torchs = itertools.takewhile(lambda frame: source.is_foreign(frame[1]), frames)
    return any(file.endswith("/torch/nn/modules/container.py") for _, file, _ in torchs)


def _calls(blocks: list[Block]) -> int:
    """How often a function was called for these, at least: some lines make several in each call."""
    return min(Counter(block.stack for block in blocks).values())


def _passes(blocks: list[Block], analysis: Analysis) -> int:
    """How often a module was called for these, at least: by whichever lines, and small ones may be made but once."""
    least = max(block.bytes for block in blocks) // 4
    large = [block for block in blocks if block.bytes >= least]
    return min(Counter((b.module, analysis.frames(b.stack)[:1]) for b in large).values())


def _in_parts(found: Sequence[T], n: int) -> Iterator[list[T]]:
    """In their order, as many in each, or one fewer in the last ones."""
    begin = 0
    for part in range(n):
        end = begin + (len(found) - begin) // (n - part)
        yield list(found[begin:end])
        begin = end


def _worth(saved: int, dropped: list[Block], analysis: Analysis) -> int:
    """As much, or less where another moment stays as high; 0: too little."""
    least = analysis.peak.allocated_bytes * _SHARE
    saved = min(saved, falls_by(dropped, analysis, TRAINING, least))
    return saved if saved > least else 0


def _made_again(members: list[list[Block]], analysis: Analysis) -> tuple[list[Block], int]:
    """What some modules do not keep with a checkpoint around each, and what that saves: one is made again at a time.

    What goes into the next one is kept.
    """
    n_passes = min(_passes(blocks, analysis) for blocks in members)
    in_order = [sorted(blocks, key=lambda b: b.alloc_event) for blocks in members]
    calls = [part for blocks in in_order for part in _in_parts(blocks, n_passes)]
    calls.sort(key=lambda blocks: blocks[-1].alloc_event)
    sizes = [sum(block.bytes for block in blocks) for blocks in calls]
    # A module makes last what goes into the next one; of the last of them it may be gone.
    results = [blocks[-1].bytes for blocks in calls]
    results[-1] = min(results[-2:])
    again = max(a - b for a, b in zip(sizes, results, strict=True))
    dropped = _until_made_again([blocks[:-1] for blocks in calls])
    return dropped, sum(sizes) - sum(results) - again


def _until_made_again(parts: Sequence[Sequence[Block]]) -> list[Block]:
    """What is not there until backward, which has done what came after, comes to it; the last part it makes at once."""
    dropped: list[Block] = []
    for part, after in itertools.pairwise(parts):
        freed = [block.free_event for block in part if block.free_event is not None]
        done = [block.free_event for block in after if block.free_event is not None]
        end = min([*freed, *([max(done)] if done else [])], default=None)
        dropped += [block._replace(free_event=end) for block in part]
    return dropped


def _checkpointing(analysis: Analysis, blocks: list[Block], what: str = "it") -> str:
    """The library's own switch, where the model is a library's."""
    for block in blocks:
        for _, file, _ in analysis.frames(block.stack):
            for library, switch in _SWITCHES.items():
                if f"-packages/{library}/models/" in file:
                    return switch
    return f"torch.utils.checkpoint around {what}"
