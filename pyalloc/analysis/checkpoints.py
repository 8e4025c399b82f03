"""Where torch.utils.checkpoint would help, and how far the peak would fall."""

from __future__ import annotations

import bisect
import itertools
import math
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from pyalloc.analysis.falling import TRAINING, falls_by
from pyalloc.analysis.findings import outermost
from pyalloc.analysis.meaning import HOLDERS, Analysis
from pyalloc.common.units import size
from pyalloc.traces import source
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import Block

T = TypeVar("T")
_SHARE = 0.15  # of the peak: smaller savings do not justify recomputation
_CLEARLY = 1.25
_TINY = 256  # of the largest: what norms keep besides their results is smaller
_KINDS = 3  # of layers that are named
_SWITCHES = {  # libraries' own switches for checkpointing all layers, by where their models are
    "transformers/models/": "model.gradient_checkpointing_enable()",
    "diffusers/models/": "model.enable_gradient_checkpointing()",
    "timm/models/": "model.set_grad_checkpointing()",
    "torchtune/modules/transformer.py": "torchtune.training.set_activation_checkpointing()",
}


def advice(analysis: Analysis, idle: set[Block]) -> Iterator[Advice]:
    """Advice for layers, modules of a sequence, and functions.  idle: blocks that no backward will use."""
    peak = analysis.peak
    step = analysis.totals["peak_step"] or 0
    # The result of a checkpoint, or its last part, which it does not recompute.
    done = {n for n in {b.stack for b in peak.blocks} if source.is_checkpoint(analysis.frames(n))}
    twice = _differentiated(analysis)
    activations = [b for b in peak.blocks if analysis.category(b) == "activations"]
    begin = _begin_of_backward(analysis)
    again = [b for b in activations if b.alloc_event > begin and b.stack in done]
    yield from _of_one_checkpoint(again, analysis)
    held = [
        b
        for b in activations
        if b.phase != "inference"  # which has no backward
        and b not in idle
        and not 0 <= b.step < step - 1  # an old step's: something else keeps them
        and b.stack not in done
        and not any(p.begin < b.alloc_event <= p.end for p in twice)
    ]
    of_switches = _by_switch(held, analysis)
    own = of_switches.pop("", [])
    found = list(_of_families(own, peak.allocated_bytes * _SHARE, analysis))
    yield from _outermost_that_help(found)
    taken = {block for _, blocks in found for block in blocks}
    for switch, blocks in of_switches.items():
        levels = list(_of_switch(switch, blocks, analysis))
        best = max(map(_saved, levels), default=0)
        # Libraries checkpoint the layers within layers, unless that saves clearly less.
        yield from [each for each in levels if _CLEARLY * _saved(each) >= best][-1:]
        taken.update(blocks if levels else ())
    held = [block for block in held if block not in taken]
    functions: dict[str, list[Block]] = {}
    for block in held:
        where = source.inside(analysis.frames(block.stack)) or analysis.place(block.stack)
        if where is not None:
            functions.setdefault(where.function, []).append(block)
    for name, blocks in functions.items():
        of_sequence = [block for block in blocks if _is_in_sequence(block, analysis)]
        if len(of_sequence) >= 4 and _is_one_call(of_sequence):
            yield from _of_sequence("*", [[block] for block in of_sequence], analysis)
        elif len(blocks) >= 4:
            yield from _of_function(name, blocks, held, analysis)


def _begin_of_backward(analysis: Analysis) -> int:
    """Where the backward pass of the peak begins; the peak, if there is none, or it goes through several passes.

    In the other passes, more checkpoints would keep more.
    """
    peak: int = analysis.totals["peak_event"]
    before = [phase for phase in outermost(analysis.phases) if phase.begin < peak]
    if not before or before[-1].name != "backward" or before[-1].end < peak:
        return peak
    passes = itertools.takewhile(lambda phase: phase.name == "forward", before[-2::-1])
    return before[-1].begin if len(list(passes)) == 1 else peak


def _differentiated(analysis: Analysis) -> list[Phase]:
    """Passes of the peak's step that a backward pass of create_graph=True has gone through by the peak.

    What a checkpoint makes again there stays for the second backward pass, as in a gradient penalty.
    """
    if analysis.notes.get("create_graph") != "True":
        return []
    found: list[Phase] = []
    last: Phase | None = None
    peak = analysis.totals["peak_event"]
    for phase in outermost(analysis.phases):
        if phase.begin >= peak:
            break
        if phase.name == "forward":
            last = phase
        elif (
            phase.name == "backward"
            and last is not None
            and phase.step == analysis.totals["peak_step"]
        ):
            made = [b for b in analysis.peak.blocks if last.begin < b.alloc_event <= last.end]
            freed = [b for b in made if b.free_event is not None and b.free_event <= phase.end]
            if made and len(freed) < len(made) / 2:
                found.append(last)
    return found


def _by_switch(held: list[Block], analysis: Analysis) -> dict[str, list[Block]]:
    """What numbered modules hold, by the switch of the library whose model it is; "" for all other blocks."""
    found: dict[str, list[Block]] = {}
    known: dict[int, str] = {}
    for block in held:
        if block.stack not in known:
            known[block.stack] = _switch(analysis.frames(block.stack))
        is_of_layer = any(_numbered(block.module))
        found.setdefault(known[block.stack] if is_of_layer else "", []).append(block)
    return found


def _of_switch(switch: str, held: list[Block], analysis: Analysis) -> Iterator[Advice]:
    """Advice for a library's model, whose switch is for all of its layers; for layers within layers, outermost first.

    A layer is a numbered module with modules inside.
    """
    numbered = {block: list(_numbered(block.module)) for block in held}
    layers = {
        family
        for block, around in numbered.items()
        for family, _ in around
        if _depth(block.module) > family.count(".")
    }
    layers_of = {
        block: [each for each in around if each[0] in layers] for block, around in numbered.items()
    }
    for level in range(max(map(len, layers_of.values()))):
        members: dict[tuple[str, str], list[Block]] = {}
        # What layers make outside of those within them is the input of these, which stays.
        outer: set[tuple[str, str]] = set()
        for block, around in layers_of.items():
            if around:
                at = min(level, len(around) - 1)
                members.setdefault(around[at], []).append(block)
                outer.update(around[:at])
        members = {layer: blocks for layer, blocks in members.items() if layer not in outer}
        if len(members) > 1:
            of_layers = {layer: blocks for (_, layer), blocks in members.items()}
            yield from _of_layers(_kinds(members), of_layers, analysis, switch)


def _kinds(members: dict[tuple[str, str], list[Block]]) -> str:
    """Names of the families that hold most: `up_blocks.*, down_blocks.*, mid_block.resnets.0 and 2 more`."""
    layers: dict[str, list[str]] = {}
    sizes: Counter[str] = Counter()
    for (family, layer), blocks in members.items():
        layers.setdefault(family, []).append(layer)
        sizes[family] += sum(block.bytes for block in blocks)
    names = [_family(layers[family]) for family, _ in sizes.most_common()]
    rest = f" and {len(names) - _KINDS} more" * (len(names) > _KINDS)
    return ", ".join(names[:_KINDS]) + rest


def _family(layers: Sequence[str]) -> str:
    """The names of modules of one family, with * for the numbers that differ."""
    parts = zip(*(layer.split(".") for layer in layers), strict=True)
    return ".".join(each[0] if len(set(each)) == 1 else _alike(each[0]) for each in parts)


def _of_families(
    held: list[Block], least: float, analysis: Analysis
) -> Iterator[tuple[Advice | None, list[Block]]]:
    """Advice for numbered modules that hold at least `least`, outermost first: layers, layers inside a sequence."""
    for family, members in _families(held):
        blocks = [block for each in members.values() for block in each]
        if len(members) == 1 or sum(block.bytes for block in blocks) < least:
            continue
        layers = _with_modules(family, members)
        name = _family(list(layers or members))
        if len(layers) > 1:
            yield next(_of_layers(name, layers, analysis), None), blocks
        elif not layers:
            yield from _of_sequences(members, least, analysis)


def _families(held: list[Block]) -> list[tuple[str, dict[str, list[Block]]]]:
    """What numbered modules hold, by family and layer, outermost families first."""
    found: dict[str, dict[str, list[Block]]] = {}
    for block in held:
        for family, layer in _numbered(block.module):
            found.setdefault(family, {}).setdefault(layer, []).append(block)
    return sorted(found.items(), key=lambda item: item[0].count("*"))


def _with_modules(family: str, members: dict[str, list[Block]]) -> dict[str, list[Block]]:
    """Those with modules inside: a checkpoint around a single operator keeps as much as it saves."""
    inner = family.count(".")
    return {
        layer: blocks
        for layer, blocks in members.items()
        if any(_depth(block.module) > inner for block in blocks)
    }


def _of_one_checkpoint(again: list[Block], analysis: Analysis) -> Iterator[Advice]:
    """Outermost layers that one checkpoint is around, which makes all of them again at once."""
    for family, members in _families(again)[:1]:
        layers = _with_modules(family, members)
        if len(layers) > 1:
            how = "torch.utils.checkpoint around each, instead of the one around all of them,"
            yield from _of_layers(_family(list(layers)), layers, analysis, how)


def _of_sequences(
    members: dict[str, list[Block]], least: float, analysis: Analysis
) -> Iterator[tuple[Advice | None, list[Block]]]:
    """Advice for modules without modules inside, by the module that they are the parts of."""
    sequences: dict[str, dict[str, list[Block]]] = {}
    for layer, blocks in members.items():
        sequences.setdefault(layer.rpartition(".")[0], {})[layer] = blocks
    for parts in sequences.values():
        blocks = [block for each in parts.values() for block in each]
        if len(parts) >= 4 and sum(block.bytes for block in blocks) >= least:
            found = _of_sequence(_family(list(parts)), list(parts.values()), analysis)
            yield next(found, None), blocks


def _numbered(module: str) -> Iterator[tuple[str, str]]:
    """The numbered modules around one, as (family, layer).

    For `0.blocks.3.mlp`: (`*`, `0`) and (`*.blocks.*`, `0.blocks.3`).  For `layer2.0.conv`: (`layer*.*`, `layer2.0`).
    """
    parts = module.partition(".parametrizations.")[0].split(".")
    for i, part in enumerate(parts, 1):
        if part.isdecimal():
            yield ".".join(map(_alike, parts[:i])), ".".join(parts[:i])


def _alike(part: str) -> str:
    """The part of a module's name, with * for the number at its end."""
    stem = part.rstrip(string.digits)
    return part if stem == part else f"{stem}*"


def _outermost_that_help(found: list[tuple[Advice | None, list[Block]]]) -> Iterator[Advice]:
    """Prefers outer modules, unless inner ones save clearly more."""
    helping = [(made, set(blocks)) for made, blocks in found if made is not None]
    while helping:
        made, blocks = helping.pop(0)
        within = [each for each, others in helping if others & blocks]
        if all(_saved(each) <= _CLEARLY * _saved(made) for each in within):
            helping = [(each, others) for each, others in helping if not others & blocks]
            yield made


def _saved(made: Advice) -> int:
    return made.saved_bytes or 0


def _of_layers(
    family: str,
    members: dict[str, list[Block]],
    analysis: Analysis,
    how: str = "torch.utils.checkpoint around each",
) -> Iterator[Advice]:
    sizes = [sum(block.bytes for block in blocks) for blocks in members.values()]
    dropped, saved = _made_again(members, analysis)
    saved = _worth(saved, dropped, analysis)
    if saved:
        yield Advice(
            "checkpoint",
            f"Activations in {_modules(family, len(members))} hold {size(sum(sizes))} at the peak, "
            f"at most {size(max(sizes))} in one of them. {how} would recompute them in backward, one module at a time; "
            "what one module passes on to the next stays. "
            f"That would lower the peak by about {size(saved)}.",
            saved,
        )


def _of_sequence(family: str, members: list[list[Block]], analysis: Analysis) -> Iterator[Advice]:
    """Checkpoints around parts: one around all recomputes all at once; one around each keeps each module's input."""
    members = sorted(members, key=lambda blocks: blocks[0].alloc_event)
    blocks = [block for each in members for block in each]
    total = sum(block.bytes for block in blocks)
    n_parts = math.isqrt(len(members))
    parts = [[b for each in part for b in each] for part in _in_parts(members, n_parts)]
    # The input of a part may be a block that is not kept without checkpoints: that adds memory.
    sizes = [sum(block.bytes for block in part) for part in parts]
    between = sum(max(part, key=lambda b: b.alloc_event).bytes for part in parts[:-1])
    n_passes = min(map(_calls, members))
    last = sizes[-1] if n_passes > 1 else 0  # where nothing is recomputed
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
        # The part is recomputed as a whole once all later blocks are gone; its blocks then live until each is freed.
        after = sum(b.bytes for b in held if b.alloc_event > blocks[-1].alloc_event)
        first = min((b.free_event for b in blocks if b.free_event is not None), default=None)
        dropped = [block._replace(free_event=first) for block in blocks]
        saved = min(total - max(block.bytes for block in blocks), after)
    saved = _worth(saved, dropped, analysis)
    if saved:
        how = _checkpointing(analysis, blocks)
        whose = name
        if name.startswith("<"):  # a script's own lines, or a lambda's
            whose = _lines(blocks, analysis)
            how = how.replace("around it", "around each call there")
        fused = (
            " pyalloc.ops has fused attention that keeps little for backward."
            if "attention" in name.lower() and how not in _SWITCHES.values()
            else ""
        )
        yield Advice(
            "checkpoint",
            f"{len(blocks)} activations of {whose} hold {size(total)} at the peak. {how} would recompute them in "
            f"backward instead of keeping them. That would lower the peak by up to {size(saved)}.{fused}",
            saved,
        )


def _lines(blocks: list[Block], analysis: Analysis) -> str:
    """The line that made most of them, as reports name it."""
    sizes: Counter[str] = Counter()
    for block in blocks:
        sizes[analysis.name(block.stack)] += block.bytes
    most, _ = max(sizes.items(), key=lambda item: item[1])
    return f"{most}{' and other lines' * (len(sizes) > 1)}"


def _depth(module: str) -> int:
    """The module's depth; a parametrization, such as spectral_norm(), has the depth of its weight."""
    return module.partition(".parametrizations.")[0].count(".")


def _modules(family: str, n: int) -> str:
    return f"{n} modules of the model" if family == "*" else f"the {n} modules {family}"


def _is_in_sequence(block: Block, analysis: Analysis) -> bool:
    """Was it made by a module of torch's, or several, in an nn.Sequential: not by a library's module in it?"""
    frames = analysis.frames(block.stack)
    torchs = itertools.takewhile(lambda frame: source.is_torch(frame[1]), frames)
    return any(file.endswith("/torch/nn/modules/container.py") for _, file, _ in torchs)


def _is_one_call(of_sequence: list[Block]) -> bool:
    """Are these of one call of a sequence: has it modules that made something only once?  Layers may have one each."""
    return min(Counter((block.module, block.stack) for block in of_sequence).values()) == 1


def _calls(blocks: list[Block]) -> int:
    """The least number of calls of a function that made these blocks: a line may make several per call."""
    return min(Counter(block.stack for block in blocks).values())


def _passes(members: dict[str, list[Block]], analysis: Analysis) -> int:
    """The least number of calls of these modules: how often others of them came in between, or their lines came again.

    A line may make several blocks in a call, of sizes that differ; small blocks may be made only once.
    """
    made = sorted((b.alloc_event, layer) for layer, blocks in members.items() for b in blocks)
    turns = Counter(layer for layer, _ in itertools.groupby(layer for _, layer in made))
    return min(max(turns[layer], _repeats(each, analysis)) for layer, each in members.items())


def _repeats(blocks: list[Block], analysis: Analysis) -> int:
    """The least number of times that lines made large blocks of one size."""
    least = max(block.bytes for block in blocks) // 4
    found: dict[tuple[str, source.Frame | None], Counter[int]] = {}
    for block in blocks:
        if block.bytes >= least:
            at = block.module, source.innermost(analysis.frames(block.stack))
            found.setdefault(at, Counter())[block.bytes] += 1
    return min(max(sizes.values()) for sizes in found.values())


def _in_parts(found: Sequence[T], n: int) -> Iterator[list[T]]:
    """Splits into n parts, in order; the last ones may have one element less."""
    begin = 0
    for part in range(n):
        end = begin + (len(found) - begin) // (n - part)
        yield list(found[begin:end])
        begin = end


def _worth(saved: int, dropped: list[Block], analysis: Analysis) -> int:
    """What is really saved: less if another moment stays as high; 0: too little."""
    least = analysis.peak.allocated_bytes * _SHARE
    saved = min(saved, falls_by(dropped, analysis, TRAINING, least))
    return saved if saved > least else 0


class _Call(NamedTuple):
    """A module's call: what it made that is alive at the peak, in order."""

    layer: str
    blocks: list[Block]

    @property
    def begin(self) -> int:
        """The event of the first of these blocks."""
        return self.blocks[0].alloc_event

    def has(self, block: Block) -> bool:
        """Did the module make it, or one inside of it?"""
        return f"{block.module}.".startswith(f"{self.layer}.")


def _made_again(members: dict[str, list[Block]], analysis: Analysis) -> tuple[list[Block], int]:
    """The blocks that modules do not keep if each is checkpointed, and the bytes saved: one is recomputed at a time.

    Each module's output is kept, if it is without checkpoints.  Its input is kept in any case.
    """
    n_passes = _passes(members, analysis)
    calls = [
        _Call(layer, part)
        for layer, blocks in members.items()
        for part in _in_parts(sorted(blocks, key=lambda b: b.alloc_event), n_passes)
    ]
    calls.sort(key=lambda call: call.blocks[-1].alloc_event)
    insides: list[list[Block]] = []
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        end = following.begin if following else analysis.totals["peak_event"]
        made = _made_between(call.begin, end, analysis)
        output = _output(call, made, end)
        inside = [block for block in call.blocks if block.alloc_event != output.alloc_event]
        passed = [b for b in made if following and _is_alive(b, end) and not following.has(b)]
        insides.append(_less(inside, _bytes_to_keep(passed, analysis)))
    dropped = [*_until_made_again(insides), *_until_reached(calls[-1], insides[-1], analysis)]
    saved = sum(block.bytes for block in dropped)
    if all(block.free_event is None for blocks in insides for block in blocks):
        # Memory ran out before backward: the largest one would have been made again.
        sizes = [sum(block.bytes for block in blocks) for blocks in insides]
        saved = min(saved, sum(sizes) - max(sizes))
    return dropped, saved


def _made_between(begin: int, end: int, analysis: Analysis) -> list[Block]:
    """The large blocks of the peak's step that forward passes, or functions, made from one event to another."""
    spans = analysis.spans  # in order
    first, last = (
        bisect.bisect_left(spans, at, key=lambda b: b.alloc_event) for at in (begin, end)
    )
    return [
        block
        for block in spans[first:last]
        if block.phase != "backward" and analysis.category(block) not in HOLDERS
    ]


def _output(call: _Call, made: list[Block], end: int) -> Block:
    """What a call made last, of what is still alive when something is made elsewhere.

    made: from its beginning to `end`.
    """
    own = [block for block in made if call.has(block)] or call.blocks
    elsewhere = (block.alloc_event for block in made if block.alloc_event > own[-1].alloc_event)
    left = next(elsewhere, end)
    return _last_of([block for block in own if _is_alive(block, left)] or call.blocks)


def _is_alive(block: Block, event: int) -> bool:
    """Is a block that was made before an event freed after it?"""
    return block.free_event is None or block.free_event > event


def _last_of(blocks: list[Block]) -> Block:
    """What is made last; of an operator that makes several things (a norm: the deviations), the largest."""
    least = max(block.bytes for block in blocks) // _TINY
    *_, last = (block for block in blocks if block.bytes >= least)
    alike = (b for b in blocks if (b.stack, b.module) == (last.stack, last.module))
    return max(alike, key=lambda block: (block.bytes, block.alloc_event))


def _bytes_to_keep(passed: list[Block], analysis: Analysis) -> int:
    """Of what is there when the next call begins: its input's bytes, if only its checkpoint would keep that."""
    if not passed:
        return 0
    last = _last_of(passed)
    return 0 if _is_alive(last, analysis.totals["peak_event"]) else last.bytes


def _less(blocks: list[Block], n_bytes: int) -> list[Block]:
    """The blocks with so many bytes less in all."""
    found: list[Block] = []
    for block in blocks:
        taken = min(block.bytes, n_bytes)
        n_bytes -= taken
        found.append(block._replace(bytes=block.bytes - taken))
    return found


def _until_reached(last: _Call, inside: list[Block], analysis: Analysis) -> list[Block]:
    """What the last module does not keep until backward has done with everything made after it, such as the logits.

    Nothing if there was no more at the peak: then backward makes it again at once.
    """
    made = last.blocks[-1].alloc_event
    begun = min((b.free_event for b in inside if b.free_event is not None), default=0)
    later = (
        block.free_event
        for block in analysis.peak.blocks
        if block.alloc_event > made
        and block.free_event is not None
        and block.free_event < begun
        and analysis.category(block) == "activations"
    )
    reached = max(later, default=None)
    return [] if reached is None else [b._replace(free_event=reached) for b in inside]


def _until_made_again(parts: Sequence[Sequence[Block]]) -> list[Block]:
    """The blocks that are absent until backward reaches their part; the last part is recomputed at once."""
    dropped: list[Block] = []
    for part, after in itertools.pairwise(parts):
        freed = [block.free_event for block in part if block.free_event is not None]
        done = [block.free_event for block in after if block.free_event is not None]
        end = min([*freed, *([max(done)] if done else [])], default=None)
        dropped += [block._replace(free_event=end) for block in part]
    return dropped


def _checkpointing(analysis: Analysis, blocks: list[Block]) -> str:
    """How to checkpoint: by the library's own switch, if the model is a library's."""
    switches = (_switch(analysis.frames(block.stack)) for block in blocks)
    return next(filter(None, switches), "torch.utils.checkpoint around it")


def _switch(frames: tuple[source.Frame, ...]) -> str:
    """The switch of the library whose model requested this; "" if it is no library's."""
    for _, file, _ in frames:
        for models, switch in _SWITCHES.items():
            if f"-packages/{models}" in file:
                return switch
    return ""
