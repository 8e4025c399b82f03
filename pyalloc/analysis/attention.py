"""Finds attention that is written out: it keeps scores and weights of all pairs of positions for backward."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from pyalloc.analysis.falling import TRAINING, falls_by
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import size
from pyalloc.traces import source
from pyalloc.traces.facts import Advice
from pyalloc.traces.moments import Block

_SHARE = 0.05  # of the peak: smaller savings are not mentioned
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
# In quarters of the weights' bytes: float32 scores of half-precision weights, dropout masks.
_ALIKE = (8, 4, 2, 1)


def advice(analysis: Analysis) -> Iterator[Advice]:
    """Advice for each function whose softmax goes into a matrix product."""
    found: dict[tuple[str, str], list[tuple[source.Place, Block]]] = defaultdict(list)
    for block in analysis.peak.blocks:
        if analysis.category(block) in ("activations", "temporaries", "backward temporaries"):
            frames = analysis.frames(block.stack)
            where = source.inside(frames) or source.place(frames)
            if where is not None:
                found[where.file, where.function].append((where, block))
    for held in found.values():
        yield from _of_function(held, analysis)
    yield from _of_flex(analysis)


def _of_flex(analysis: Analysis) -> Iterator[Advice]:
    """Advice for flex_attention() that is not compiled: it then makes all scores, forward and backward."""
    spans = [block for block in analysis.spans if _is_of_flex(block, analysis)]
    blocks = [block for block in analysis.peak.blocks if _is_of_flex(block, analysis)]
    here = {block.alloc_event for block in blocks}
    beside = [block for block in spans if block.alloc_event not in here]
    least = _SHARE * analysis.peak.allocated_bytes
    # Its backward calls a module without gradients, which is a phase.
    saved = falls_by(blocks, analysis, (*TRAINING, "inference"), least, beside)
    if saved > least:
        yield Advice(
            "flex_attention",
            f"{len(blocks)} tensors hold {size(sum(b.bytes for b in blocks))} at the peak because flex_attention() is "
            "not compiled: it makes the scores of all pairs of positions. Call "
            "torch.compile(torch.nn.attention.flex_attention.flex_attention), which makes none of them. That would "
            f"lower the peak by up to {size(saved)}.",
            saved,
        )


def _is_of_flex(block: Block, analysis: Analysis) -> bool:
    return any(
        file.endswith("/torch/_higher_order_ops/flex_attention.py")
        for _, file, _ in analysis.frames(block.stack)
    )


def _of_function(held: list[tuple[source.Place, Block]], analysis: Analysis) -> Iterator[Advice]:
    """Advice for the function that holds these blocks; those made in backward are recognised by size alone."""
    weights = [(place, block) for place, block in held if _is_softmax(place, block, analysis)]
    most = max((block.bytes for _, block in weights), default=0)
    at_lines = {place.line: place for place, block in weights if block.bytes == most}
    where, lines = next(
        ((place, found) for place in at_lines.values() if (found := _lines(place))), (None, set())
    )
    alike = {most * n // 4 for n in _ALIKE}
    made = {block for place, block in held if block.bytes in alike and place.line in lines}
    gradients = {b for b in analysis.peak.blocks if b.bytes == most and b.phase == "backward"}
    blocks = made | gradients if made else made
    least = _SHARE * analysis.peak.allocated_bytes
    saved = falls_by(blocks, analysis, TRAINING, least)
    if saved > least:
        yield Advice(
            "attention",
            f"{len(blocks)} tensors of {where} hold {size(sum(b.bytes for b in blocks))} at the peak: attention scores "
            "and weights, for all pairs of positions. "
            "torch.nn.functional.scaled_dot_product_attention() keeps none of them, and neither does "
            'pyalloc.ops.scaled_attention(); model libraries have a switch for it ("sdpa", fused attention). That '
            f"would lower the peak by {size(saved)} or more.",
            saved,
        )


def _is_softmax(place: source.Place, block: Block, analysis: Analysis) -> bool:
    called = any(
        name == "softmax" and file.endswith("/torch/nn/functional.py")
        for name, file, _ in analysis.frames(block.stack)
    )
    return called or "softmax(" in source.text_of(place).replace("log_softmax(", "")


def _lines(place: source.Place) -> set[int]:
    """The lines that compute scores, weights and dropout, if the result goes into a matrix product.

    Empty if one line has several statements.
    """
    statements = source.statements_around(place)
    here = [each for each in statements if place.line in _lines_of(each)]
    if len(here) != 1:
        return set()
    scores = _names({"softmax"}, here[0])
    weights: set[str] = set()
    lines, is_multiplied = _lines_of(here[0]), False
    for statement in statements:
        is_here = statement is here[0]
        if statement.lineno < here[0].lineno:
            lines |= _lines_of(statement) if scores & _targets(statement) else set()
            continue
        if any(_has(factor, weights, is_here) for factor in _factors(statement)):
            is_multiplied = True
        elif is_here or _is_same(statement, weights):
            weights |= _targets(statement)
            lines |= _lines_of(statement)
    return lines if is_multiplied else set()


def _lines_of(statement: ast.stmt) -> set[int]:
    return set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))


def _names(called: set[str], statement: ast.stmt) -> set[str]:
    """Names of the arguments and objects that such functions and methods are called on."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and _called(node) in called:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


def _targets(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = [each for target in targets for each in getattr(target, "elts", [target])]
    return {each.id for each in names if isinstance(each, ast.Name)}


def _factors(statement: ast.stmt) -> Iterator[ast.expr]:
    """The factors of the matrix products in a statement."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield from (node.left, node.right)
        elif isinstance(node, ast.Call) and _called(node) in _PRODUCTS:
            yield from node.args
            if isinstance(node.func, ast.Attribute):
                yield node.func.value


def _has(expression: ast.expr, names: set[str], is_here: bool) -> bool:
    """Does the expression contain one of these names, or, in the softmax's own line, the softmax?"""
    return any(
        (isinstance(each, ast.Name) and each.id in names)
        or (is_here and isinstance(each, ast.Call) and _called(each) == "softmax")
        for each in ast.walk(expression)
    )


def _is_same(statement: ast.stmt, names: set[str]) -> bool:
    """Does the statement keep the number of elements: dropout, conversion, masking?"""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call):
        return isinstance(value, ast.Name) and value.id in names
    of = [*value.args, *([value.func.value] if isinstance(value.func, ast.Attribute) else [])]
    name = _called(value)
    is_alike = "drop" in name or name in ("to", "type_as", "float", "half", "masked_fill", "type")
    return is_alike and any(isinstance(each, ast.Name) and each.id in names for each in of)


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
