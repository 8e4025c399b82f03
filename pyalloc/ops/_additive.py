"""Additive attention's kernels: how they are called, and how they are registered with torch."""
# mypy: disable-error-code="untyped-decorator"
#   mypy does not follow torch: what it decorates has no type
# ruff: noqa: PLR0913, PLR0917  (a registered op has the arguments of its schema)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyalloc.ops import _cuda, _eager, _sharded
from pyalloc.ops._composed import composable, is_transformed
from pyalloc.ops._library import (
    SOMEWHERE,
    AdditiveArgs,
    Call,
    dense_rows,
    dtype_code,
    packer,
    places,
    threads,
)
from pyalloc.ops._plans import Plans, maker, nothing, row_major
from pyalloc.ops._sizes import is_empty
from pyalloc.ops._vmap import asks_gradient, choose_backward, fold, is_plain, unfold

_pack = packer(AdditiveArgs)
_SOURCES = "query keys values v mask probs"
_FORWARD_PLACES = places(AdditiveArgs, *f"{_SOURCES} context workspace".split())
_BACKWARD_PLACES = places(
    AdditiveArgs, *f"{_SOURCES} grad grad_probs d_query d_keys d_values d_v workspace".split()
)
_NO_ROWS = (0, 0, 0)


def _rows(stride: Sequence[int]) -> tuple[int, int, int]:
    """Struct pya_ops_view of the rows of a (B, rows, n) tensor, or of a (B, n) tensor with one row each."""
    return SOMEWHERE, stride[1] if len(stride) == 3 else 0, stride[0]


def _rows_of(x: Tensor | None) -> tuple[int, int, int]:
    return _NO_ROWS if x is None else _rows(x.stride())


def _inputs(query: Tensor, keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """The structure's fields from the sizes to the score vector."""
    n_b, n_s, n_h = keys.shape
    n_q = query.shape[1] if query.dim() == 3 else 1
    rows = (number for x in (query, keys, values) for number in _rows(x.stride()))
    return (n_b, n_q, n_s, n_h, values.shape[2], *rows, SOMEWHERE)


def _options(query: Tensor, keys: Tensor, values: Tensor, *, accumulate: bool) -> tuple[int, ...]:
    """The structure's last fields."""
    work = 16 * query[..., 0].numel() * keys.shape[1] * (keys.shape[2] + values.shape[2])
    # a tanh takes as long as 16 multiply-adds
    return 0, 0, accumulate, dtype_code(keys.dtype), threads(work)


class _Forward(NamedTuple):
    call: Call
    context: Callable[[], Tensor]
    probs: Callable[[], Tensor]
    workspace: Callable[[], Tensor | None]


def _plan_forward(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None, on_device: bool
) -> _Forward:
    context = (*query.shape[:-1], values.shape[2])
    args = _pack(
        *_inputs(query, keys, values),
        *(_NO_ROWS if mask is None else (SOMEWHERE, *mask.stride())),
        SOMEWHERE,
        *_rows(row_major(context)),
        *(5 * _NO_ROWS),  # no gradients
        *(0, 0),  # d_v, workspace
        *_options(query, keys, values, accumulate=False),
    )
    return _Forward(
        Call.of("additive", "forward", args, _FORWARD_PLACES, on_device=on_device),
        maker(context, values),
        maker((*query.shape[:-1], keys.shape[1]), values),
        maker((_cuda.room("additive", args),), keys) if on_device else nothing,
    )


class _Backward(NamedTuple):
    call: Call
    query: Callable[[], Tensor]
    v: Callable[[], Tensor]
    workspace: Callable[[], Tensor | None]


def _plan_backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    probs: Tensor,
    grad: Tensor,
    grad_probs: Tensor | None,
    d_keys: Tensor | None,
    d_values: Tensor | None,
    accumulate: bool,
    on_device: bool,
) -> _Backward:
    args = _pack(
        *_inputs(query, keys, values),
        *_NO_ROWS,  # no mask: the probabilities of what it hides are 0
        SOMEWHERE,
        *_NO_ROWS,  # no context
        *_rows_of(grad),
        *_rows_of(grad_probs),
        *_rows(row_major(query.shape)),
        *_rows_of(d_keys),
        *_rows_of(d_values),
        *(SOMEWHERE, 0),  # d_v, workspace
        *_options(query, keys, values, accumulate=accumulate),
    )
    return _Backward(
        Call.of("additive", "backward", args, _BACKWARD_PLACES, on_device=on_device),
        maker(query.shape, query),
        maker((keys.shape[0], keys.shape[2]), v),
        maker((probs.numel(),), keys) if on_device else nothing,
    )


_READS = (dense_rows, dense_rows, dense_rows, dense_rows)
_forward_plans = Plans((*_READS, None), _plan_forward)
# The probabilities are as the forward made them, unless vmap folded them.
_backward_plans = Plans(
    (*_READS, Tensor.contiguous, dense_rows, dense_rows, None, None), _plan_backward
)


def forward_kernel(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Takes a query (B, Q, H) or (B, H); results have as many dimensions."""
    on_device = _cuda.on_device(keys)
    plan, tensors = _forward_plans.find((query, keys, values, v, mask), on_device)
    context, probs = plan.context(), plan.probs()
    _cuda.perform(plan.call, keys, *tensors, probs, context, plan.workspace())
    return context, probs


def backward_kernel(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    probs: Tensor,
    grads: tuple[Tensor, Tensor | None],
    sinks: tuple[Tensor | None, Tensor | None],
    *,
    accumulate: bool,
) -> tuple[Tensor, Tensor]:
    """Returns gradients of query and, per batch entry, v; writes those of keys and values to the sinks, if any."""
    on_device = _cuda.on_device(inputs[1])
    tensors = (*inputs, probs, *grads, *sinks)
    plan, found = _backward_plans.find(tensors, accumulate, on_device)
    query, keys, values, v, probs, grad, grad_probs, d_keys, d_values = found
    d_query, d_v = plan.query(), plan.v()
    sources = query, keys, values, v, None, probs, grad, grad_probs
    results = d_query, d_keys, d_values, d_v
    _cuda.perform(plan.call, keys, *sources, *results, plan.workspace())
    return d_query, d_v


def _gradients(
    grad: Tensor,
    grad_probs: Tensor | None,
    probs: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Of query, keys, values and, per batch entry, v; None where keys or values need none."""
    d_keys, d_values = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in ((keys, needs[1]), (values, needs[2]))
    )
    sinks = d_keys, d_values
    d_query, d_v = backward_kernel(
        (query, keys, values, v), probs, (grad, grad_probs), sinks, accumulate=False
    )
    return d_query, d_keys, d_values, d_v


def run_direct(*args: Any) -> tuple[Tensor, Tensor]:
    """Like run(), for calls that only autograd sees and that the kernels can serve."""
    run = _Direct.apply if asks_gradient(args[:4]) else forward_kernel
    context, probs = run(*args)
    return context, probs


def run(*args: Any) -> tuple[Tensor, Tensor]:
    """Calls the registered op; in plain eager mode does the same without the dispatcher's cost.

    Takes query, keys, values, v, mask.
    """
    run = torch.ops.pyalloc.additive_attention
    if is_empty(*args[:3]):
        run = _eager.additive
    elif is_transformed():
        run = _transformable
    elif is_plain(args) and _cuda.is_direct("additive", args[1]):
        return run_direct(*args)
    elif _sharded.is_sharded(args):
        run = _sharded.additive
    if args[0].dim() == 3:
        context, probs = run(*args)
        return context, probs
    context, probs = run(args[0].unsqueeze(1), *args[1:])
    return context.squeeze(1), probs.squeeze(1)


@torch.library.custom_op("pyalloc::additive_attention", mutates_args=())
def _additive(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _cuda.declines(keys, "additive") or is_empty(query, keys, values):
        context, probs = _eager.additive(query, keys, values, v, mask)
        return context.contiguous(), probs.contiguous()
    return forward_kernel(query, keys, values, v, mask)


@_additive.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    n_b, n_q, _ = query.shape
    return values.new_empty(n_b, n_q, values.shape[2]), values.new_empty(n_b, n_q, keys.shape[1])


@torch.library.custom_op("pyalloc::additive_attention_backward", mutates_args=())
def _additive_backward(
    grad: Tensor,
    grad_probs: Tensor | None,
    probs: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if _cuda.declines(keys, "additive") or is_empty(query, keys, values):
        inputs = (query, keys, values, v)
        found = _eager.additive_vjp(inputs, mask, (grad, grad_probs), needs)
        d_query, d_keys, d_values, d_v = (x.contiguous() for x in found)
        return d_query, d_keys, d_values, d_v
    of_each = _gradients(grad, grad_probs, probs, query, keys, values, v, mask, needs)
    d_query, d_keys, d_values, d_v = (keys.new_empty(0) if x is None else x for x in of_each)
    return d_query, d_keys, d_values, d_v


@_additive_backward.register_fake
def _(
    grad: Tensor,
    grad_probs: Tensor | None,
    probs: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_keys = keys.new_empty(keys.shape if needs[1] else (0,))
    d_values = values.new_empty(values.shape if needs[2] else (0,))
    return query.new_empty(query.shape), d_keys, d_values, v.new_empty(keys.shape[0], *v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs)
    ctx.set_materialize_grads(False)


def _vjp(
    ctx: Any, grad: Tensor | None, grad_probs: Tensor | None, backward: Any = None
) -> tuple[Any, ...]:
    probs, query, keys, values, v, mask = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    if grad is None:
        grad = values.new_zeros((*query.shape[:-1], values.shape[2]))
    backward = backward or torch.ops.pyalloc.additive_attention_backward
    *of_each, d_v = backward(grad, grad_probs, probs, query, keys, values, v, mask, needs)
    grads = (*of_each, d_v.sum(0) if needs[3] else None)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None)


class _Direct(torch.autograd.Function):
    """The registered op, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        outputs = forward_kernel(*args)
        _setup(ctx, args, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_probs: Tensor | None) -> tuple[Any, ...]:
        forms = _transformable_backward, _gradients, "additive_attention_backward"
        backward = choose_backward((grad, grad_probs), *forms)
        if backward is not _gradients and ctx.saved_tensors[1].dim() == 2:
            backward = partial(_of_one_query, backward)
        return _vjp(ctx, grad, grad_probs, backward)


def _of_one_query(backward: Any, *args: Any) -> tuple[Tensor, ...]:
    """Calls a backward that takes queries (B, 1, H) for one of (B, H): grad, grad_probs, probs, query and the rest."""
    four = (None if x is None else x.unsqueeze(1) for x in args[:4])
    d_query, *others = backward(*four, *args[4:])
    return (d_query.squeeze(1), *others)


_additive.register_autograd(_vjp, setup_context=_setup)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.needs = inputs
    ctx.save_for_backward(*tensors)


def _backward_vjp(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    grad, grad_probs, probs, query, keys, values, v, mask = ctx.saved_tensors
    given = (grad, torch.zeros_like(probs) if grad_probs is None else grad_probs)
    needs = [True, ctx.needs[1], ctx.needs[2], True]

    def first(grad: Tensor, grad_probs: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(_eager.additive_vjp(inputs, mask, (grad, grad_probs), needs))

    _, pull = torch.func.vjp(first, *given, query, keys, values, v)
    g, g_probs, *rest = pull(tuple(grads))
    return (g, None if grad_probs is None else g_probs, None, *rest, None, None)


_additive_backward.register_autograd(_backward_vjp, setup_context=_backward_setup)


def _rule(
    call: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    n = info.batch_size
    *three, v, mask = args
    if in_dims[3] is not None:  # score vectors differ: one call each
        parts = [call(*_entry(args, in_dims, i)) for i in range(n)]
        return (torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])), (0, 0)
    three = [fold(x, d, n, 0) for x, d in zip(three, in_dims[:3], strict=True)]
    folded_mask = None if mask is None else fold(mask, in_dims[4], n, 0)
    context, probs = call(*three, v, folded_mask)
    return (unfold(context, n, 0), unfold(probs, n, 0)), (0, 0)


def _backward_rule(
    call: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    n = info.batch_size
    *six, v, mask, needs = args
    dims = tuple(0 if need else None for need in (True, needs[1], needs[2], True))
    if in_dims[6] is not None:
        parts = [call(*_entry(args[:8], in_dims[:8], i), needs) for i in range(n)]
        return tuple(
            p[0] if d is None else torch.stack(p)
            for p, d in zip(zip(*parts, strict=True), dims, strict=True)
        ), dims
    six = [None if x is None else fold(x, d, n, 0) for x, d in zip(six, in_dims[:6], strict=True)]
    folded_mask = None if mask is None else fold(mask, in_dims[7], n, 0)
    found = call(*six, v, folded_mask, needs)
    return tuple(
        x if d is None else unfold(x, n, 0) for x, d in zip(found, dims, strict=True)
    ), dims


def _entry(args: tuple[Any, ...], in_dims: tuple[int | None, ...], i: int) -> list[Any]:
    return [
        x if x is None or d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)
    ]


_additive.register_vmap(partial(_rule, torch.ops.pyalloc.additive_attention))
_additive_backward.register_vmap(
    partial(_backward_rule, torch.ops.pyalloc.additive_attention_backward)
)


def _plain_backward(
    grad: Tensor, grad_probs: Tensor | None, _probs: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *inputs, mask, needs = rest
    return tuple(_eager.additive_vjp(inputs, mask, (grad, grad_probs), needs))


_transformable_backward = composable(
    torch.ops.pyalloc.additive_attention_backward,
    setup=_backward_setup,
    vjp=_backward_vjp,
    rule=_backward_rule,
    plain=_plain_backward,
)
_transformable = composable(
    torch.ops.pyalloc.additive_attention,
    setup=_setup,
    vjp=lambda ctx, grad, grad_probs: _vjp(ctx, grad, grad_probs, _transformable_backward),
    rule=_rule,
    plain=_eager.additive,
)
