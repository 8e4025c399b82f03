"""Scaled attention's kernels: how they are called, and how they are registered with torch."""
# mypy: disable-error-code="untyped-decorator"
#   mypy does not follow torch: what it decorates has no type
# ruff: noqa: PLR0913, PLR0917  (a registered op has the arguments of its schema)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyalloc.errors import OpError
from pyalloc.ops import _cuda, _eager, _sharded
from pyalloc.ops._composed import composable, is_transformed
from pyalloc.ops._library import (
    SOMEWHERE,
    AttentionArgs,
    Call,
    dense_rows,
    dtype_code,
    packer,
    places,
    resolved,
    threads,
)
from pyalloc.ops._plans import Plans, maker, nothing, row_major
from pyalloc.ops._sizes import is_empty
from pyalloc.ops._vmap import asks_gradient, choose_backward, fold, is_plain, unfold

_pack = packer(AttentionArgs)
_SOURCES = "q k v out stats bias mask seed"
_FORWARD_PLACES = places(AttentionArgs, *_SOURCES.split())
_BACKWARD_PLACES = places(AttentionArgs, *f"{_SOURCES} grad d_q d_k d_v d_bias workspace".split())
_NO_HEADS = (0, 0, 0, 0)
_NO_SCORES = (0, 0, 0, 0, 0)
_DIMS = range(4)
_HALVES = (torch.float16, torch.bfloat16)


def _heads(stride: Sequence[int]) -> tuple[int, ...]:
    """Struct pya_ops_heads: where the rows of each head are."""
    return SOMEWHERE, *stride[:3]


def _scores(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Struct pya_ops_scores: a dimension of size 1 is shared."""
    return SOMEWHERE, *(stride[i] if shape[i] != 1 else 0 for i in _DIMS)


def _scores_of(x: Tensor | None) -> tuple[int, ...]:
    return _NO_SCORES if x is None else _scores(x.shape, x.stride())


def _stats_shape(q: Tensor) -> tuple[int, ...]:
    """Per row the largest score, and the inverse of the sum; as one number, the latter would lose its digits."""
    return (*q.shape[:2], 2, q.shape[2])


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, n_out: Sequence[int]
) -> tuple[int, ...]:
    """The structure's fields from the sizes to the mask."""
    n_b, n_h, n_q, dim = q.shape
    _, n_kv, n_k, dim_v = v.shape
    sizes = n_b, n_h, n_kv, n_q, n_k, dim, dim_v
    heads = (*_heads(q.stride()), *_heads(k.stride()), *_heads(v.stride()), *_heads(n_out))
    return (*sizes, *heads, 0, *_scores_of(bias), *_scores_of(mask))


def _options(q: Tensor, k: Tensor, causal: bool) -> tuple[int, ...]:
    """The structure's last fields."""
    return causal, dtype_code(q.dtype), threads(q.numel() * k.shape[2]), 0


class _Forward(NamedTuple):
    call: Call
    out: Callable[[], Tensor]
    stats: Callable[[], Tensor]


def _plan_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    on_device: bool,
) -> _Forward:
    shape = (*q.shape[:3], v.shape[3])
    args = _pack(
        *_inputs(q, k, v, bias, mask, row_major(shape)),
        scale,
        dropout,
        0,
        *(4 * _NO_HEADS),  # no gradients
        *_NO_SCORES,
        0,
        0,
        *_options(q, k, causal),
    )
    call = Call.of("attention", "forward", args, _FORWARD_PLACES, on_device=on_device)
    return _Forward(call, maker(shape, q), maker(_stats_shape(q), q))


class _Backward(NamedTuple):
    call: Call
    gradients: tuple[Callable[[], Tensor], ...]  # of q, k and v
    bias: Callable[[], Tensor] | None
    is_summed: bool  # the kernel adds to the bias's, which must start as zeros
    workspace: Callable[[], Tensor | None]


def _plan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    grad: Tensor,
    out: Tensor,
    _stats: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    needs_bias: bool,
    on_device: bool,
) -> _Backward:
    d_bias: tuple[int, ...] = _NO_SCORES
    make_bias, is_summed = None, False
    if needs_bias and bias is not None:
        # a dimension of size 1 looks shared (its stride is 0) and is added to, never overwritten
        is_summed = causal or 1 in bias.shape or bias.shape != (*q.shape[:3], k.shape[2])
        d_bias, make_bias = _scores(bias.shape, row_major(bias.shape)), maker(bias.shape, q)
    args = _pack(
        *_inputs(q, k, v, bias, mask, out.stride()),
        scale,
        dropout,
        0,
        *_heads(grad.stride()),
        *(number for x in (q, k, v) for number in _heads(row_major(x.shape))),
        *d_bias,
        0,
        is_summed,
        *_options(q, k, causal),
    )
    return _Backward(
        Call.of("attention", "backward", args, _BACKWARD_PLACES, on_device=on_device),
        tuple(maker(x.shape, x) for x in (q, k, v)),
        make_bias,
        is_summed,
        maker(q.shape[:3], q) if on_device else nothing,
    )


_READS = (dense_rows, dense_rows, dense_rows, resolved, None)
_forward_plans = Plans(_READS, _plan_forward)
# The results are as the forward made them, unless vmap folded them.
_backward_plans = Plans((*_READS, dense_rows, dense_rows, Tensor.contiguous), _plan_backward)


def _forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    *,
    wants_stats: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The result and, for the backward, the statistics of each row's softmax, which CUDA's kernel always writes."""
    on_device = _cuda.on_device(q)
    options = causal, scale, dropout, on_device
    plan, tensors = _forward_plans.find((q, k, v, bias, mask), *options)
    q, k, v, bias, mask = tensors
    out = plan.out()
    stats = plan.stats() if wants_stats or on_device else None
    drops = None if seed is None else int(seed)
    if dropout > 0:
        _cuda.refuse_captured_dropout(dropout, q)
    _cuda.perform(plan.call, q, q, k, v, out, stats, bias, mask, drops)
    return out, stats


def _backward_kernel(
    grad: Tensor,
    out: Tensor,
    stats: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    on_device = _cuda.on_device(q)
    options = causal, scale, dropout, needs_bias, on_device
    plan, tensors = _backward_plans.find((q, k, v, bias, mask, grad, out, stats), *options)
    q, k, v, bias, mask, grad, out, stats = tensors
    d_q, d_k, d_v = (make() for make in plan.gradients)
    d_bias = None if plan.bias is None else plan.bias()
    if d_bias is not None and plan.is_summed:
        d_bias.zero_()
    drops = None if seed is None else int(seed)
    sources = q, k, v, out, stats, bias, mask, drops
    _cuda.perform(plan.call, q, *sources, grad, d_q, d_k, d_v, d_bias, plan.workspace())
    return d_q, d_k, d_v, d_bias


def run(*args: Any) -> Tensor:
    """Calls the registered op; in plain eager mode does the same without the dispatcher's cost.

    Takes q, k, v, bias, mask, causal, scale, dropout, seed.
    """
    if is_transformed():
        return _transformable(*args)[0]
    if not (is_plain(args) and is_direct(*args[:3])):
        if _sharded.is_sharded(args):
            return _sharded.attention(*args)
        return torch.ops.pyalloc.scaled_attention(*args)[0]
    return run_direct(*args)


def is_direct(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call with such tensors can bypass the dispatcher."""
    return _cuda.is_direct("attention", q, k, v)


def run_direct(*args: Any) -> Tensor:
    """Like run(), for calls that only autograd sees and that the kernels can serve."""
    if asks_gradient(args[:4]):
        out: Tensor = record(*args)
        return out
    return _forward_kernel(*args, wants_stats=False)[0]


@torch.library.custom_op("pyalloc::scaled_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if is_empty(q, k, v):
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros(_stats_shape(q))
    if _cuda.declines(q, "attention"):
        _cuda.refuse_dropout(dropout)
        out = _eager.attention(q, k, v, bias, mask, causal, scale).contiguous()
        return out, q.new_zeros(_stats_shape(q))  # nobody reads it
    out, stats = _forward_kernel(q, k, v, bias, mask, causal, scale, dropout, seed)
    assert stats is not None
    return out, stats


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(_stats_shape(q))


@torch.library.custom_op("pyalloc::scaled_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    out: Tensor,
    stats: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    seed: Tensor | None,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if is_empty(q, k, v):
        d_bias = q.new_zeros(bias.shape if needs_bias and bias is not None else (0,))
        return q.new_zeros(q.shape), q.new_zeros(k.shape), q.new_zeros(v.shape), d_bias
    if _cuda.declines(q, "attention"):
        found = _eager.attention_vjp((q, k, v, bias), grad, mask, (causal, scale), needs_bias)
        d_q, d_k, d_v, d_bias = (x.contiguous() for x in found)
        return d_q, d_k, d_v, d_bias
    *found, d_bias = _backward_kernel(
        grad, out, stats, q, k, v, bias, mask, causal, scale, dropout, seed, needs_bias
    )
    d_q, d_k, d_v = found
    return d_q, d_k, d_v, q.new_empty(0) if d_bias is None else d_bias


@_attention_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    _, _, _, q, k, v, bias, *_, needs_bias = args
    d_bias = q.new_empty(bias.shape if needs_bias and bias is not None else (0,))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), d_bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, mask, ctx.causal, ctx.scale, ctx.dropout, seed = inputs
    ctx.save_for_backward(*output, q, k, v, bias, mask, seed)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, backward: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the nine arguments."""
    if grad is None:
        return (None,) * 9
    *tensors, seed = ctx.saved_tensors
    needs_bias = bool(ctx.needs_input_grad[3])
    d_q, d_k, d_v, d_bias = backward(
        grad, *tensors, ctx.causal, ctx.scale, ctx.dropout, seed, needs_bias
    )
    return d_q, d_k, d_v, d_bias if needs_bias else None, None, None, None, None, None


def backward(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and bias of a call that bypassed the dispatcher, whatever sees this one."""
    forms = _transformable_backward, _backward_kernel, "scaled_attention_backward"
    *found, d_bias = choose_backward((grad,), *forms)(grad, *args)
    return (*found, d_bias if args[-1] else None)


def _vjp(ctx: Any, grad: Tensor | None, grad_stats: Tensor | None) -> tuple[Any, ...]:
    return _gradients(ctx, torch.ops.pyalloc.scaled_attention_backward, grad)


_attention.register_autograd(_vjp, setup_context=_setup)


class _Direct(torch.autograd.Function):
    """The registered op, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, stats = _forward_kernel(*args)
        _setup(ctx, args, (out, stats))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        return _gradients(ctx, backward, grad)


record = _Direct.apply


class _Halves(torch.autograd.Function):
    """Half precision, computed in float32: keeps the tensors as given, and copies them again for the backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, stats = _forward_kernel(*map(_widened, args))
        _setup(ctx, args, (out, stats))
        ctx.dtypes = [None if x is None else x.dtype for x in args[:4]]
        return out.to(args[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        def widely(*args: Any) -> tuple[Tensor | None, ...]:
            return backward(*map(_widened, args))

        found = _gradients(ctx, widely, grad)
        narrow = (
            None if x is None else x.to(dtype)
            for x, dtype in zip(found[:4], ctx.dtypes, strict=True)
        )
        return (*narrow, *found[4:])


def _widened(x: Any) -> Any:
    """Tensors of half precision in float32, all else as it is."""
    return x.float() if isinstance(x, Tensor) and x.dtype in _HALVES else x


def run_halves(*args: Any) -> Tensor:
    """Like run() for q, k and v of half precision, which are not empty; the bias may have another dtype."""
    q, k, v, bias, *_ = args
    serves = q.is_cpu or _cuda.has_kernels(q, "attention")
    if serves and is_plain(args) and asks_gradient((q, k, v, bias)):
        out: Tensor = _Halves.apply(*args)
        return out
    return run(*map(_widened, args)).to(q.dtype)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, _, _, q, k, v, bias, mask, *options, _, ctx.needs_bias = inputs
    ctx.causal, ctx.scale, ctx.dropout = options
    ctx.save_for_backward(grad, q, k, v, bias, mask)


def _refuse_derivative(dropout: float) -> None:
    if dropout > 0:
        raise OpError(
            "scaled_attention: with dropout only first derivatives in reverse mode exist; set dropout=0"
        )


def _backward_vjp(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    _refuse_derivative(ctx.dropout)
    grad, q, k, v, bias, mask = ctx.saved_tensors
    inputs = (q, k, v) if bias is None else (q, k, v, bias)

    def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return _eager.attention(q, k, v, bias, mask, ctx.causal, ctx.scale)

    needs = [True, True, True, ctx.needs_bias][: len(inputs)]
    g, *rest = _eager.second_derivative(inputs, grad, grads[: len(inputs)], needs, formula)
    d_bias = rest[3] if bias is not None else None
    return (g, None, None, *rest[:3], d_bias, None, None, None, None, None, None)


_attention_backward.register_autograd(_backward_vjp, setup_context=_backward_setup)


def _fold_scores(x: Tensor | None, in_dim: int | None, n: int, n_b: int) -> Tensor | None:
    """A bias or mask for n times the batch; one that all share stays as it is."""
    if x is None or (in_dim is None and x.shape[0] == 1):
        return x
    batched = x.unsqueeze(0).expand(n, *x.shape) if in_dim is None else x.movedim(in_dim, 0)
    return batched.expand(n, n_b, *batched.shape[2:]).reshape(n * n_b, *batched.shape[2:])


def _rule(
    call: Any, info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    n = info.batch_size
    q, k, v, bias, mask, causal, scale, dropout, seed = args
    _refuse_dropout(dropout)
    q, k, v = (fold(x, d, n, 0) for x, d in zip((q, k, v), in_dims[:3], strict=True))
    n_b = q.shape[0] // n
    bias, mask = (
        _fold_scores(x, d, n, n_b) for x, d in zip((bias, mask), in_dims[3:5], strict=True)
    )
    out, stats = call(q, k, v, bias, mask, causal, scale, dropout, seed)
    return (unfold(out, n, 0), unfold(stats, n, 0)), (0, 0)


def _refuse_dropout(dropout: float) -> None:
    if dropout > 0:
        raise OpError("scaled_attention: vmap with dropout is not supported; set dropout=0")


def _backward_rule(
    call: Any, info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    n = info.batch_size
    *six, bias, mask, causal, scale, dropout, seed, needs_bias = args
    _refuse_dropout(dropout)
    six = [fold(x, d, n, 0) for x, d in zip(six, in_dims[:6], strict=True)]
    n_b = six[0].shape[0] // n
    whole, mask = (
        _fold_scores(x, d, n, n_b) for x, d in zip((bias, mask), in_dims[6:8], strict=True)
    )
    shared_by = 1
    if needs_bias and bias is not None:  # a gradient for each, even if all share the bias
        own = bias.shape[0] if in_dims[6] is None else bias.movedim(in_dims[6], 0).shape[1]
        shared_by = n_b // own
        whole = None if whole is None else whole.expand(n * n_b, *whole.shape[1:])
    *found, d_bias = call(*six, whole, mask, causal, scale, dropout, seed, needs_bias)
    found = [unfold(x, n, 0) for x in found]
    if not needs_bias:
        return (*found, d_bias), (0, 0, 0, None)
    d_bias = unfold(d_bias, n, 0)
    if shared_by > 1:
        d_bias = d_bias.sum(1, keepdim=True)
    return (*found, d_bias), (0, 0, 0, 0)


_attention.register_vmap(partial(_rule, torch.ops.pyalloc.scaled_attention))
_attention_backward.register_vmap(
    partial(_backward_rule, torch.ops.pyalloc.scaled_attention_backward)
)


def _plain(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The result, and zeros for the statistics of the rows, which have no derivatives."""
    bias, mask, causal, scale, dropout, _ = rest
    _refuse_derivative(dropout)
    return _eager.attention(q, k, v, bias, mask, causal, scale), q.new_zeros(_stats_shape(q))


def _plain_backward(grad: Tensor, _out: Tensor, _stats: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, bias, mask, causal, scale, dropout, _, needs_bias = rest
    _refuse_derivative(dropout)
    return tuple(_eager.attention_vjp((q, k, v, bias), grad, mask, (causal, scale), needs_bias))


_transformable_backward = composable(
    torch.ops.pyalloc.scaled_attention_backward,
    setup=_backward_setup,
    vjp=_backward_vjp,
    rule=_backward_rule,
    plain=_plain_backward,
)
_transformable = composable(
    torch.ops.pyalloc.scaled_attention,
    setup=_setup,
    vjp=lambda ctx, grad, _: _gradients(ctx, _transformable_backward, grad),
    rule=_rule,
    plain=_plain,
)
