"""Scaled attention's kernels: how they are called, and what torch knows of them."""
# mypy: disable-error-code="untyped-decorator, misc"
#   torch is not followed: what derives from it or is decorated by it has no type
# ruff: noqa: PLR0913, PLR0917  (a registered op has the arguments of its schema)

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyalloc.errors import OpError
from pyalloc.ops import _cuda, _eager, _sharded
from pyalloc.ops._composed import composable, is_transformed
from pyalloc.ops._library import AttentionArgs, call, dense_rows, dtype_code, packer, threads
from pyalloc.ops._sizes import is_empty
from pyalloc.ops._vmap import choose_backward, fold, is_plain, unfold

_pack = packer(AttentionArgs)
_NO_HEADS = (0, 0, 0, 0)
_NO_SCORES = (0, 0, 0, 0, 0)
_DIMS = range(4)


def _heads(x: Tensor) -> tuple[int, ...]:
    """Struct pya_ops_heads: where the rows of each head are."""
    stride = x.stride()
    return x.data_ptr(), stride[0], stride[1], stride[2]


def _scores(x: Tensor | None) -> tuple[int, ...]:
    """Struct pya_ops_scores: a dimension of size 1 is shared."""
    if x is None:
        return _NO_SCORES
    n, s = x.shape, x.stride()
    b, h, q, k = (s[i] if n[i] != 1 else 0 for i in _DIMS) if 1 in n else s
    return x.data_ptr(), b, h, q, k


def _stats_shape(q: Tensor) -> tuple[int, ...]:
    """Of each row the largest score and the inverse of the sum, which beside a large score would lose its digits."""
    return (*q.shape[:2], 2, q.shape[2])


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    n_b, n_h, n_q, dim = q.shape
    _, n_kv, n_k, dim_v = v.shape
    return n_b, n_h, n_kv, n_q, n_k, dim, dim_v


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
    wants_stats: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The result and, for the backward, what each row's softmax needs, which CUDA's kernel makes in any case."""
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    bias = None if bias is None else bias.resolve_neg()
    sizes = _sizes(q, k, v)
    n_b, n_h, _, n_q, n_k, dim, dim_v = sizes
    out = q.new_empty((n_b, n_h, n_q, dim_v))
    on_device = _cuda.on_device(q)
    stats = q.new_empty(_stats_shape(q)) if wants_stats or on_device else None
    args = _pack(
        *sizes,
        *_heads(q),
        *_heads(k),
        *_heads(v),
        *_heads(out),
        0 if stats is None else stats.data_ptr(),
        *_scores(bias),
        *_scores(mask),
        scale,
        dropout,
        0 if seed is None else int(seed),
        *(4 * _NO_HEADS),  # no gradients
        *_NO_SCORES,
        0,
        0,
        causal,
        dtype_code(q.dtype),
        threads(n_b * n_h * n_q * n_k * dim),
    )
    if on_device:
        _cuda.refuse_captured_dropout(dropout, q)
        _cuda.attention_forward(args, q)
    else:
        call("pya_ops_attention_forward", args)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, grad = dense_rows(q), dense_rows(k), dense_rows(v), dense_rows(grad)
    bias = None if bias is None else bias.resolve_neg()
    # These are as made, but for what vmap's folding does to them.
    out, stats = dense_rows(out), stats.contiguous()
    sizes = _sizes(q, k, v)
    n_b, n_h, _, n_q, n_k, dim, _ = sizes
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    d_bias, summed = None, False
    if needs_bias and bias is not None:
        # a dimension of size 1 looks shared (its stride is 0) and is added to, never overwritten
        summed = causal or 1 in bias.shape or bias.shape != (n_b, n_h, n_q, n_k)
        empty = torch.zeros if summed else torch.empty
        d_bias = empty(bias.shape, dtype=q.dtype, device=q.device)
    on_device = _cuda.on_device(q)
    workspace = q.new_empty((n_b, n_h, n_q)) if on_device else None
    args = _pack(
        *sizes,
        *_heads(q),
        *_heads(k),
        *_heads(v),
        *_heads(out),
        stats.data_ptr(),
        *_scores(bias),
        *_scores(mask),
        scale,
        dropout,
        0 if seed is None else int(seed),
        *_heads(grad),
        *_heads(d_q),
        *_heads(d_k),
        *_heads(d_v),
        *_scores(d_bias),
        0 if workspace is None else workspace.data_ptr(),
        summed,
        causal,
        dtype_code(q.dtype),
        threads(n_b * n_h * n_q * n_k * dim),
    )
    if on_device:
        _cuda.attention_backward(args, q)
    else:
        call("pya_ops_attention_backward", args)
    return d_q, d_k, d_v, q.new_empty(0) if d_bias is None else d_bias


def run(*args: Any) -> Tensor:
    """The registered op, or in plain eager mode the same without the dispatcher's cost.

    q, k, v, bias, mask, causal, scale, dropout, seed.
    """
    if is_transformed():
        return _transformable(*args)[0]
    if not (is_plain(args) and _cuda.is_direct("attention", *args[:3])):
        if _sharded.is_sharded(args):
            return _sharded.attention(*args)
        return torch.ops.pyalloc.scaled_attention(*args)[0]
    if torch.is_grad_enabled() and any(x.requires_grad for x in args[:4] if x is not None):
        out: Tensor = _Direct.apply(*args)
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
    return _backward_kernel(
        grad, out, stats, q, k, v, bias, mask, causal, scale, dropout, seed, needs_bias
    )


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
    """Of the nine arguments."""
    if grad is None:
        return (None,) * 9
    *tensors, seed = ctx.saved_tensors
    needs_bias = bool(ctx.needs_input_grad[3])
    d_q, d_k, d_v, d_bias = backward(
        grad, *tensors, ctx.causal, ctx.scale, ctx.dropout, seed, needs_bias
    )
    return d_q, d_k, d_v, d_bias if needs_bias else None, None, None, None, None, None


def _vjp(ctx: Any, grad: Tensor | None, grad_stats: Tensor | None) -> tuple[Any, ...]:
    return _gradients(ctx, torch.ops.pyalloc.scaled_attention_backward, grad)


_attention.register_autograd(_vjp, setup_context=_setup)


class _Direct(torch.autograd.Function):
    """The same, called without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        out, stats = _forward_kernel(*args)
        _setup(ctx, args, (out, stats))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        forms = _transformable_backward, _backward_kernel, "scaled_attention_backward"
        backward = choose_backward((grad,), *forms)
        return _gradients(ctx, backward, grad)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, _, _, q, k, v, bias, mask, *options, _, ctx.needs_bias = inputs
    ctx.causal, ctx.scale, ctx.dropout = options
    ctx.save_for_backward(grad, q, k, v, bias, mask)


def _refuse_derivative(dropout: float) -> None:
    if dropout > 0:
        raise OpError(
            "scaled_attention: with dropout there are first derivatives in reverse mode only; set dropout=0"
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
    """A bias or mask for n times the batch; one that is shared by all stays as it is."""
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
    if needs_bias and bias is not None:  # one for each, even where all share the bias
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
    """What is kept of the rows is nobody's to differentiate."""
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
