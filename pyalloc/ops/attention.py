"""Scaled dot-product attention that keeps neither scores nor probabilities, with gradients of the bias."""
# mypy: disable-error-code="untyped-decorator, misc"
#   torch is not followed: what derives from it or is decorated by it has no type
# ruff: noqa: PLR0913, PLR0917  (a registered op has the arguments of its schema)

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from pyalloc.errors import OpError
from pyalloc.ops import _cuda, _eager
from pyalloc.ops._check import require_float
from pyalloc.ops._library import AttentionArgs, Heads, Scores, call, dtype_code, threads
from pyalloc.ops._vmap import fold, is_plain, unfold

_log = logging.getLogger("pyalloc.ops")

# Below this many queries the kernel's lanes are mostly empty and torch's own kernel is as fast.
_FEW_QUERIES = 8
_SMALL = 4_000_000  # multiply-adds of q k^T
_LARGEST_HEAD = 256


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    *,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, dict[str, str]]:
    """softmax(scale q k^T + bias) v without any Lq x Lk tensor but the bias's own gradient.

    Args:
        q: queries, (B, H, Lq, d); also (B, Lq, d) or (Lq, d).
        k: keys, (B, Hkv, Lk, d); H must be a multiple of Hkv (grouped-query attention).
        v: values, (B, Hkv, Lk, dv).
        bias: added to the scaled scores, broadcastable to (B, H, Lq, Lk); differentiable.
        mask: boolean, broadcastable likewise, True where a key takes part; a query that sees no key
            gets zeros.
        causal: query i sees keys 0 to i (from the top left, as torch's is_causal).
        scale: by default 1 / sqrt(d).
        dropout: probability of dropping a probability; drawn from torch's generator.
        return_info: also return {"path": "kernel" | "sdpa" | "eager", "reason": ...}.

    Returns:
        (B, H, Lq, dv), in the dtype of q.  Repeatable bit for bit with the same number of threads.

    torch's own kernels serve where they are faster and can do the case (half precision without a
    gradient of the bias); the path taken is logged at debug level to "pyalloc.ops".

    Raises:
        OpError: shapes, dtypes or devices that do not fit together, head sizes over 256, dropout
            outside [0, 1).
    """
    op = "scaled_attention"
    given = {"q": q, "k": k, "v": v} | ({} if bias is None else {"bias": bias})
    require_float(op, **given)
    q, k, v = _autocast(q, k, v)
    shape = q.shape
    q, k, v = (_four(op, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check_shapes(op, q, k, v, dropout)
    bias, mask = _scores(op, "bias", bias, q, k), _scores(op, "mask", mask, q, k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    path, reason = _choose(q, k, v, bias, mask, dropout)
    if not torch.compiler.is_compiling():
        _log.debug("scaled_attention: %s (%s)", path, reason)
    if path == "sdpa":
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if bias is None else bias.to(q.dtype),
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    elif path == "eager":
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    else:
        compute = torch.float64 if q.dtype == torch.float64 else torch.float32
        seed = torch.randint(1 << 62, (1,)) if dropout > 0 else None
        tensors = (q.to(compute), k.to(compute), v.to(compute))
        out = _run(
            *tensors, None if bias is None else bias.to(compute), mask, causal, scale, dropout, seed
        )
        out = out.to(q.dtype)
    out = out.reshape(*shape[:-1], v.shape[-1])
    return (out, {"path": path, "reason": reason}) if return_info else out


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype: autocast's where it is on, as for torch's attention, else the promoted one."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if torch.is_autocast_enabled(q.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _choose(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, dropout: float
) -> tuple[str, str]:
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "eager", "an empty input"
    grad = torch.is_grad_enabled()
    simple = (
        mask is None and dropout == 0 and not (grad and bias is not None and bias.requires_grad)
    )
    if simple and bias is None and q.dtype in (torch.float16, torch.bfloat16):
        return "sdpa", "half precision: torch's kernels use the matrix units"
    learns = grad and any(x.requires_grad for x in (q, k, v))
    if simple and bias is None and q.dtype == torch.float32 and not (learns or q.is_cuda):
        if q.shape[-2] < _FEW_QUERIES:
            return "sdpa", f"fewer than {_FEW_QUERIES} queries"
        if q.numel() * k.shape[2] < _SMALL:
            return "sdpa", "small: the call itself is what costs"
    return "kernel", "pyalloc's kernel"


def _four(op: str, name: str, x: Tensor) -> Tensor:
    if x.dim() not in (2, 3, 4):
        raise OpError(f"{op}: {name} must be (B, H, L, d), got {tuple(x.shape)}")
    if x.dim() == 2:
        return x[None, None]
    return x.unsqueeze(1) if x.dim() == 3 else x


def _check_shapes(op: str, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3] or k.shape[-1] != q.shape[-1]:
        raise OpError(
            f"{op}: k must be (B, Hkv, Lk, d) and v (B, Hkv, Lk, dv) with B and d of q, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise OpError(
            f"{op}: heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}"
        )
    if q.shape[-1] > _LARGEST_HEAD or v.shape[-1] > _LARGEST_HEAD:
        raise OpError(
            f"{op}: head sizes go up to {_LARGEST_HEAD}, got {q.shape[-1]} and {v.shape[-1]}"
        )
    if not 0 <= dropout < 1:
        raise OpError(f"{op}: dropout must be in [0, 1), got {dropout}")


def _scores(op: str, name: str, x: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias or mask with four dimensions, each either whole or 1."""
    if x is None:
        return None
    full = (*q.shape[:3], k.shape[2])
    if name == "mask" and x.dtype != torch.bool:
        raise OpError(f"{op}: mask must be bool (an additive mask is a bias), got {x.dtype}")
    if x.device != q.device:
        raise OpError(f"{op}: {name} must be on {q.device} as q is, got {x.device}")
    four = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if x.dim() < 4 else x
    if four.dim() != 4 or any(n not in (1, m) for n, m in zip(four.shape, full, strict=True)):
        raise OpError(f"{op}: {name} must broadcast to {full}, got {tuple(x.shape)}")
    return four


# --- kernels -------------------------------------------------------------------------------------


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _heads(x: Tensor | None) -> Heads:
    return Heads() if x is None else Heads(x.data_ptr(), *x.stride()[:3])


def _score_view(x: Tensor | None) -> Scores:
    if x is None:
        return Scores()
    return Scores(
        x.data_ptr(), *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
    )


Options = tuple[bool, float, float, Tensor | None]


def _args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    companions: tuple[Tensor | None, Tensor | None],
    options: Options,
) -> AttentionArgs:
    causal, scale, dropout, seed = options
    return AttentionArgs(
        n_b=q.shape[0],
        n_h=q.shape[1],
        n_kv=k.shape[1],
        n_q=q.shape[2],
        n_k=k.shape[2],
        dim=q.shape[3],
        dim_v=v.shape[3],
        q=_heads(q),
        k=_heads(k),
        v=_heads(v),
        bias=_score_view(companions[0]),
        mask=_score_view(companions[1]),
        scale=scale,
        dropout=dropout,
        seed=0 if seed is None else int(seed),
        causal=int(causal),
        dtype=dtype_code(q.dtype),
        n_threads=threads(q.numel() * k.shape[2]),
    )


def _forward_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    companions: tuple[Tensor | None, Tensor | None],
    options: Options,
) -> tuple[Tensor, Tensor]:
    q, k, v = (_dense_rows(x) for x in (q, k, v))
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3])
    args = _args(q, k, v, companions, options)
    args.out, args.lse = _heads(out), lse.data_ptr()
    if _cuda.on_device(q):
        _cuda.attention_forward(args, q)
    else:
        call("pya_ops_attention_forward", args)
    return out, lse


def _backward_kernel(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    options: Options,
    needs_bias: bool,
) -> list[Tensor]:
    out, lse, q, k, v, bias, mask = saved
    q, k, v, grad = (_dense_rows(x) for x in (q, k, v, grad))
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    args = _args(q, k, v, (bias, mask), options)
    args.out, args.lse, args.grad = _heads(out), lse.data_ptr(), _heads(grad)
    args.d_q, args.d_k, args.d_v = (_heads(x) for x in grads)
    d_bias = q.new_empty(0)
    if needs_bias and bias is not None:
        # a dimension of size 1 looks shared (its stride is 0) and is added to, never overwritten
        summed = options[0] or 1 in bias.shape or bias.shape != (*q.shape[:3], k.shape[2])
        d_bias = (torch.zeros if summed else torch.empty)(
            bias.shape, dtype=q.dtype, device=q.device
        )
        args.d_bias, args.d_bias_add = _score_view(d_bias), int(summed)
    if _cuda.on_device(q):
        _cuda.attention_backward(args, q)
    else:
        call("pya_ops_attention_backward", args)
    return [*grads, d_bias]


def _run(*args: Any) -> Tensor:
    """The registered op, or in plain eager mode on the CPU the same without the dispatcher's cost."""
    if is_plain(args) and args[0].device.type == "cpu":
        out: Tensor = _Direct.apply(*args)
    else:
        out, _ = torch.ops.pyalloc.scaled_attention(*args)
    return out


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, bias, mask, *options = args
        ctx.options = tuple(options)
        out, lse = _forward_kernel(q, k, v, (bias, mask), ctx.options)
        ctx.save_for_backward(out, lse, q, k, v, bias, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs_bias = bool(ctx.needs_input_grad[3])
        if (
            torch.is_grad_enabled()
        ):  # a second derivative may be asked for: the registered op has it
            grads = torch.ops.pyalloc.scaled_attention_backward(
                grad, *ctx.saved_tensors, *ctx.options, needs_bias
            )
        else:
            grads = _backward_kernel(grad, ctx.saved_tensors, ctx.options, needs_bias)
        return (*grads[:3], grads[3] if needs_bias else None, *(None,) * 5)


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
    if q.is_cuda and not _cuda.serves(q):
        _cuda.refuse_dropout(dropout)
        out = _eager.attention(q, k, v, bias, mask, causal, scale).contiguous()
        return out, q.new_empty(q.shape[:3])
    return _forward_kernel(q, k, v, (bias, mask), (causal, scale, dropout, seed))


@_attention.register_fake
def _(
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
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])


@torch.library.custom_op("pyalloc::scaled_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
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
) -> list[Tensor]:
    if q.is_cuda and not _cuda.serves(q):
        return _eager.attention_vjp((q, k, v, bias), grad, mask, (causal, scale), needs_bias)
    return _backward_kernel(
        grad, (out, lse, q, k, v, bias, mask), (causal, scale, dropout, seed), needs_bias
    )


@_attention_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
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
) -> list[Tensor]:
    d_bias = q.new_empty(bias.shape if needs_bias and bias is not None else (0,))
    return [*(x.new_empty(x.shape) for x in (q, k, v)), d_bias]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, mask, ctx.causal, ctx.scale, ctx.dropout, seed = inputs
    ctx.save_for_backward(*output, q, k, v, bias, mask, seed)
    ctx.set_materialize_grads(False)


def _vjp(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    *tensors, seed = ctx.saved_tensors
    needs_bias = bool(ctx.needs_input_grad[3])
    grads = torch.ops.pyalloc.scaled_attention_backward(
        grad, *tensors, ctx.causal, ctx.scale, ctx.dropout, seed, needs_bias
    )
    return (*grads[:3], grads[3] if needs_bias else None, None, None, None, None, None)


_attention.register_autograd(_vjp, setup_context=_setup)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    grad, _, _, q, k, v, bias, mask, *options, _, ctx.needs_bias = inputs
    ctx.causal, ctx.scale, ctx.dropout = options
    ctx.save_for_backward(grad, q, k, v, bias, mask)


def _backward_vjp(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    if ctx.dropout > 0:
        raise OpError("scaled_attention: there is no second derivative with dropout; set dropout=0")
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


@_attention.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    n = info.batch_size
    q, k, v, bias, mask, causal, scale, dropout, seed = args
    if dropout > 0:
        raise OpError("scaled_attention: vmap with dropout is not supported; set dropout=0")
    q, k, v = (fold(x, d, n, 0) for x, d in zip((q, k, v), in_dims[:3], strict=True))
    n_b = q.shape[0] // n
    bias, mask = (
        _fold_scores(x, d, n, n_b) for x, d in zip((bias, mask), in_dims[3:5], strict=True)
    )
    out, lse = torch.ops.pyalloc.scaled_attention(q, k, v, bias, mask, causal, scale, dropout, seed)
    return (unfold(out, n, 0), unfold(lse, n, 0)), (0, 0)
