"""Attention that is written out: scores and weights of all pairs of places, kept for backward."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from pyalloc import source
from pyalloc.analysis import Advice, Analysis
from pyalloc.falling import TRAINING, falls_by
from pyalloc.moments import Block
from pyalloc.units import size

_SHARE = 0.05  # of the peak: saving less is not worth a word
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
_ALIKE = (
    8,
    4,
    2,
    1,
)  # quarters of the weights' bytes: scores in float32 of half ones, masks of dropout


def advice(analysis: Analysis) -> Iterator[Advice]:
    """For each function whose softmax goes into a matrix product."""
    found: dict[tuple[str, str], list[tuple[source.Place, Block]]] = defaultdict(list)
    for block in analysis.peak.blocks:
        if analysis.category(block) in ("activations", "temporaries", "backward temporaries"):
            frames = analysis.frames(block.stack)
            where = source.inside(frames) or source.place(frames)
            if where is not None:
                found[where.file, where.function].append((where, block))
    for held in found.values():
        yield from _of_function(held, analysis)


def _of_function(held: list[tuple[source.Place, Block]], analysis: Analysis) -> Iterator[Advice]:
    """Which holds these blocks; what backward makes has its size alone."""
    weights = [(place, block) for place, block in held if _is_softmax(place, block, analysis)]
    most = max((block.bytes for _, block in weights), default=0)
    lines = {place.line: place for place, block in weights if block.bytes == most}
    where = next((place for place in lines.values() if _is_multiplied(place)), None)
    if where is None:
        return
    alike = {most * n // 4 for n in _ALIKE}
    made = {block for _, block in held if block.bytes in alike}
    gradients = {b for b in analysis.peak.blocks if b.bytes == most and b.phase == "backward"}
    blocks = made | gradients
    saved = falls_by(blocks, analysis, TRAINING)
    if saved > _SHARE * analysis.peak.allocated_bytes:
        yield Advice(
            "attention",
            f"{len(blocks)} tensors of {where} hold {size(sum(b.bytes for b in blocks))} at the peak: scores and "
            "weights of attention, for all pairs of places. "
            "torch.nn.functional.scaled_dot_product_attention() keeps none of them, nor does "
            'pyalloc.ops.scaled_attention(); libraries have a switch ("sdpa", fused attention). The peak falls by '
            f"{size(saved)} or more then.",
            saved,
        )


def _is_softmax(place: source.Place, block: Block, analysis: Analysis) -> bool:
    called = any(
        name == "softmax" and file.endswith("/torch/nn/functional.py")
        for name, file, _ in analysis.frames(block.stack)
    )
    return called or "softmax(" in source.text_of(place).replace("log_softmax(", "")


def _is_multiplied(place: source.Place) -> bool:
    """Does what the line makes go into a matrix product, as it is or by another name?"""
    names: set[str] = set()
    for statement in source.statements_around(place):
        if (statement.end_lineno or statement.lineno) < place.line:
            continue
        is_here = statement.lineno <= place.line
        if any(_has(factor, names, is_here) for factor in _factors(statement)):
            return True
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            value = statement.value
            is_it = is_here or (value is not None and _is_same(value, names))
            names |= _targets(statement) if is_it else set()
    return False


def _targets(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    }


def _factors(statement: ast.stmt) -> Iterator[ast.expr]:
    """Of the matrix products in it."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield from (node.left, node.right)
        elif isinstance(node, ast.Call) and _called(node) in _PRODUCTS:
            yield from node.args
            if isinstance(node.func, ast.Attribute):
                yield node.func.value


def _has(expression: ast.expr, names: set[str], is_here: bool) -> bool:
    """One of these names, or in the line itself the softmax."""
    return any(
        (isinstance(each, ast.Name) and each.id in names)
        or (is_here and isinstance(each, ast.Call) and _called(each) == "softmax")
        for each in ast.walk(expression)
    )


def _is_same(value: ast.expr, names: set[str]) -> bool:
    """As many numbers: dropped out, converted, masked."""
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
