"""Scaled dot-product attention that keeps neither scores nor probabilities, with gradients of the bias."""
# ruff: noqa: PLR0913  (a registered op has the arguments of its schema)

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from pyalloc.errors import OpError
from pyalloc.ops import _attention, _cuda, _plain, _second
from pyalloc.ops._check import autocast_is_on, require_float, require_tensor
from pyalloc.ops._composed import (
    has_gradient,
    has_tangent,
    needs_more_than_once,
)
from pyalloc.ops._library import has_matrix_units
from pyalloc.ops._plans import keep, key_of_call
from pyalloc.ops._sizes import broadcasts, holds, is_empty, same
from pyalloc.ops._vmap import is_eager

# On CUDA the kernels for tensor cores take what is worth their call, and of wide heads what fills a card: by the sweep
# on an H100 (docs/card.md) SDPA is the faster one elsewhere. (A call then cost 30 us more than torch's.)
_LEAST_WORK_ON_CUDA = 1 << 29  # operations, as if the last block of queries were full
_WIDE_HEAD = 64
_BLOCKS_OF_WIDE_HEADS = 132
_QUERIES_OF_A_BLOCK = 64

# On the CPU pyalloc's kernels compute half precision in float32. That is the faster way where torch has no matrix
# units, if each number that is copied for it has a part in so many products, and these take longer than a call.
# (Torch's gradients of float16 take up to ten times as long.)
_PRODUCTS_OF_A_COPY = {torch.bfloat16: 32, torch.float16: 16}
_LEAST_PRODUCTS_OF_HALVES = 200_000

_OP = "scaled_attention"
_LARGEST_TENSOR_HEAD = 128
_TENSOR_KERNEL = b"pya_attention_forward_64_tensor"  # that for wide heads is there if this is
_PATHS = ("auto", "kernel")
_MISREAD = "kernel", "torch's kernel misreads rows that overlap"
_NUMBERS = (float, int, type(None))
_sdpa = torch.nn.functional.scaled_dot_product_attention
_is_compiling = torch.compiler.is_compiling
_transforms = torch._C._are_functorch_transforms_active
_is_efficient_enabled = torch._C._get_mem_efficient_sdp_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


@overload
def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    dropout: float = ...,
    *,
    path: str = ...,
    return_info: Literal[False] = ...,
) -> Tensor: ...


@overload
def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    dropout: float = ...,
    *,
    path: str = ...,
    return_info: Literal[True],
) -> tuple[Tensor, dict[str, str]]: ...


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
    path: str = "auto",
    return_info: bool = False,
) -> Tensor | tuple[Tensor, dict[str, str]]:
    """Computes softmax(scale q k^T + bias) v without any Lq x Lk tensor, except the bias's own gradient.

    Scaled dot-product attention (Vaswani et al. 2017), block by block with a running softmax (Dao et al. 2022).

    Args:
        q: queries, (B, H, Lq, d); also (B, Lq, d) or (Lq, d).
        k: keys, (B, Hkv, Lk, d); H must be a multiple of Hkv (grouped-query attention).
        v: values, (B, Hkv, Lk, dv).
        bias: added to the scaled scores, broadcastable to (B, H, Lq, Lk), for q of three dimensions also (B, Lq, Lk);
            differentiable.  A value of -7e36 or less hides the key, as mask does.
        mask: boolean, broadcastable in the same way, True where a key takes part; a query that sees no
            key gets zeros.
        causal: query i sees keys 0 to i (from the top left, as torch's is_causal).
        scale: by default 1 / sqrt(d).  Under torch.compile, a scale given as a tensor multiplies the queries, which
            where torch's kernels serve rounds them to their dtype.
        dropout: probability of dropping an attention weight; drawn from torch's CPU generator (torch.manual_seed()),
            on CUDA too.
        path: "auto", or "kernel" for pyalloc's own kernel whatever the size.
        return_info: also return {"path": "kernel" | "sdpa" | "eager", "reason": ...}.

    Returns:
        (B, H, Lq, dv), in the dtype that q, k and v promote to, or autocast's if that is on.  Repeatable bit for
        bit with the same number of threads.

    torch's own kernels serve the cases that they can do and do faster: half precision, on the CPU with AMX or where
    there is little to do for each number or a transform or tracer sees the call; float64 on the CPU, and
    float32 where pyalloc has no vector kernels (arm64), unless a transform or tracer sees the call; float32 on CUDA
    if pyalloc's kernels use no tensor cores (heads over 128, or a card other than compute capability 8.0, 9.x and
    10.x) or there is little to do; and float32 on the CPU with one key, or with little to do if a transform, tracer
    or mode sees the call or torch is older than 2.14; all without bias, mask and dropout. (On CUDA their gradients
    are repeatable only under torch.use_deterministic_algorithms.) If a backward through them is to be differentiated
    (create_graph), pyalloc's kernel recomputes its gradients, since torch's are differentiable only once. Second
    derivatives, and forward-mode ones, are plain torch and keep the scores. The path taken is logged to "pyalloc.ops"
    at debug level, unless it is torch's for little to do.

    Raises:
        OpError: shapes, dtypes or devices do not fit together, head sizes are over 256, or dropout is
            outside [0, 1).
    """
    factor = None  # of the queries
    if scale is not None and type(scale) is not float:
        if isinstance(scale, Tensor) and _is_compiling():
            # a number that is not known until it runs
            factor, scale = _as_factor(scale), 1.0
        else:
            scale = _as_number(scale)
    causal = causal if type(causal) is bool else _as_truth(causal)
    if not _is_dynamo_compiling():
        # Before all checks, since a call for a few queries is over in microseconds; what does not fit is
        # explained below.
        served = _plain.serve(q, k, v, bias, mask, causal, scale, dropout, path, bool(return_info))
        if served is not None:
            return served
    is_turned = causal and scale is not None and not scale > 0
    given = q, k, v, bias, mask
    key = _key(given, causal, scale, dropout, path)
    known = None if key is None else _known.get(key)
    if known is not None and is_eager():
        return _run_known(known, given, causal, dropout, return_info)
    _check_arguments(given, path, dropout)
    q, k, v = _autocast(q, k, v)
    factor = None if factor is None else factor.to(q.device)
    if not q.dim() == k.dim() == v.dim() == 4:
        options = (bias, mask, causal, scale if factor is None else factor, dropout)
        return _with_fewer_dimensions((q, k, v), options, path, return_info)
    _check_shapes(q, k, v)
    bias, mask = _scores("bias", bias, q, k), _scores("mask", mask, q, k)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    taken, reason = _choose(q, k, v, (bias, mask, dropout, is_turned), path)
    if not _is_compiling():
        _plain.log.debug(_plain.TAKEN, taken, reason)
    if key is not None and is_eager() and all(map(operator.is_, given, (q, k, v, bias, mask))):
        _learn(key, _Known(taken, reason, scale), given)
    if taken == "sdpa":
        out = _by_torch(q if factor is None else q * factor, k, v, causal, scale)
    elif taken == "eager":
        out = _no_keys(q, k, v, bias)
    else:
        rest = (mask, causal, scale, dropout, _seed(dropout))
        out = _in_compute_dtype(q, k, v, bias, *rest, factor=factor)
    return (out, {"path": taken, "reason": reason}) if return_info else out


class _Known(NamedTuple):
    """The outcome of calls with the same kind of tensors and options: arguments need no more checks or casts."""

    taken: str
    reason: str
    scale: float


_known: dict[Any, _Known] = {}


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, bias, mask


def _key(tensors: _Tensors, causal: bool, scale: float | None, dropout: float, path: str) -> Any:
    """A key of all that decides, except numbers and what else sees the call; None if an argument is not plain."""
    described = key_of_call(*tensors)
    if described is None or type(scale) not in _NUMBERS or type(dropout) not in _NUMBERS:
        return None
    if type(path) is not str:
        return None
    return described, causal, scale, dropout, path, _is_efficient_enabled()


def _run_known(
    known: _Known,
    tensors: _Tensors,
    causal: bool,
    dropout: float,
    return_info: bool,
) -> Tensor | tuple[Tensor, dict[str, str]]:
    taken, reason, scale = known
    _plain.log.debug(_plain.TAKEN, taken, reason)
    if taken == "sdpa":
        out = _by_torch(*tensors[:3], causal, scale)
    else:
        out = _attention.run_direct(*tensors, causal, scale, dropout, _seed(dropout))
    return (out, {"path": taken, "reason": reason}) if return_info else out


def _learn(key: Any, found: _Known, tensors: _Tensors) -> None:
    if tensors[0].is_cuda and _cuda.is_captured(tensors[0].device):
        return  # a later call may have kernels that cannot be loaded now
    if found.taken == "sdpa" or (found.taken == "kernel" and _is_direct(*tensors)):
        keep(_known, key, found)


def _is_direct(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: Any) -> bool:
    """Whether pyalloc's kernels take the tensors as they are."""
    is_computed = q.dtype in (torch.float32, torch.float64)
    has_its_dtype = bias is None or bias.dtype == q.dtype
    return is_computed and has_its_dtype and _attention.is_direct(q, k, v)


def _seed(dropout: float) -> Tensor | None:
    return torch.randint(1 << 62, (1,), device="cpu") if dropout > 0 else None


def _by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    # a branch, because under dynamic shapes the comparison is symbolic, and torch takes only a bool
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    out: Tensor = _sdpa(q, k, v, None, 0.0, causal, scale=scale, **groups)
    if out.requires_grad and not _transforms() and not _is_compiling():
        _second.offer(out, q, k, v)
    return out


def _as_number(scale: Any) -> float:
    """The scale as a number; also of a tensor, unless it needs a derivative."""
    if isinstance(scale, Tensor):
        _refuse_derivative(scale)
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError):
        is_tensor = isinstance(scale, Tensor)
        given = f"a tensor {tuple(scale.shape)}" if is_tensor else repr(scale)
        raise OpError(f"{_OP}: scale must be a number, got {given}") from None


def _as_truth(causal: Any) -> bool:
    """Causal as a bool; accepts 0 and 1 of other types, such as NumPy's, and comparisons of sizes during an export."""
    try:
        if isinstance(causal, torch.SymBool):  # does not compare equal to 0 or 1
            return bool(causal)
        if causal in (0, 1):  # not a set: tensors hash by identity
            return bool(causal)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise OpError(f"{_OP}: causal must be True or False, got {causal!r}")


def _as_factor(scale: Tensor) -> Tensor:
    """The scale as a tensor without dimensions, which does not change a dtype."""
    _refuse_derivative(scale)
    if scale.numel() != 1:
        raise OpError(f"{_OP}: scale must be a number, got a tensor {tuple(scale.shape)}")
    return scale.reshape(())


def _refuse_derivative(scale: Tensor) -> None:
    """A scale that is read as a number would get no gradient, and pass on no tangent."""
    if has_gradient(scale):
        raise OpError(
            f"{_OP}: scale must be a number, got a tensor that requires a gradient; multiply q by it"
        )
    if has_tangent(scale):
        raise OpError(
            f"{_OP}: scale must be a number, got a tensor with a tangent; multiply q by it"
        )


def _no_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Zeros that depend on the inputs, so that their gradients are zeros."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for x in (q, k, v, bias):
        if x is not None:
            out = out + x[..., :0].sum()
    return out


def _with_fewer_dimensions(
    qkv: Sequence[Tensor], options: tuple[Any, ...], path: str, return_info: bool
) -> Tensor | tuple[Tensor, dict[str, str]]:
    q, k, v = (_four(name, x) for name, x in zip("qkv", qkv, strict=True))
    bias, mask, *rest = options
    if qkv[0].dim() == 3:  # without heads, bias and mask have none either
        bias, mask = (x.unsqueeze(1) if x is not None and x.dim() == 3 else x for x in (bias, mask))
    out, info = scaled_attention(q, k, v, bias, mask, *rest, path=path, return_info=True)
    out = out.reshape(*qkv[0].shape[:-1], v.shape[-1])
    return (out, info) if return_info else out


def _check_arguments(tensors: _Tensors, path: str, dropout: float) -> None:
    q, k, v, bias, mask = tensors
    if path not in _PATHS:
        raise OpError(f"{_OP}: path must be one of {_PATHS}, got {path!r}")
    try:
        is_probability = bool(0 <= dropout < 1)
    except (TypeError, ValueError, RuntimeError):
        is_probability = False
    if not is_probability:
        raise OpError(f"{_OP}: dropout must be in [0, 1), got {dropout!r}")
    if bias is not None:
        if getattr(bias, "dtype", None) is torch.bool:
            raise OpError(
                f"{_OP}: bias must be floating, got torch.bool; a boolean mask is given as mask="
            )
        require_float(_OP, q=q, k=k, v=v, bias=bias)
    else:
        require_float(_OP, q=q, k=k, v=v)
    if mask is not None:
        require_tensor(_OP, "mask", mask)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts to one dtype: autocast's if it is on, as for torch's attention, else the promoted one."""
    device = "cpu" if q.is_cpu else q.device.type
    cast = autocast_is_on(device)
    if q.dtype is k.dtype is v.dtype and not cast:
        return q, k, v
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    if cast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _in_compute_dtype(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, factor: Tensor | None
) -> Tensor:
    """Computes half precision in float32 and casts the result back; factor: multiplies the queries."""
    dtype = q.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if bias is not None and bias.dtype not in (dtype, compute):
        bias = bias.to(compute)
    if dtype == compute:
        q = q if factor is None else q * factor
        return _attention.run(q, k, v, bias, *rest)
    if factor is None:
        return _attention.run_halves(q, k, v, bias, *rest)
    return _attention.run_halves(q.to(compute) * factor, k, v, bias, *rest).to(dtype)


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: tuple[Tensor | None, Tensor | None, float, bool],
    path: str,
) -> tuple[str, str]:
    if is_empty(q, k, v):
        return "eager", "an empty input"
    bias, mask, dropout, is_turned = extras
    if path == "kernel":
        return "kernel", "asked for"
    if is_turned:
        return "kernel", "torch's kernels scale what causal hides by -inf"
    if bias is None is mask and dropout == 0:
        return _choose_for_bare(q, k, v)
    return "kernel", "pyalloc's kernel"


def _choose_for_bare(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    if q.dtype in (torch.float16, torch.bfloat16):
        return _choose_for_halves(q, k, v)
    if q.is_cpu and _has_no_vectors(q.dtype) and is_eager():  # transforms know ours
        return _choose_without_vectors(q, k, v)
    if q.is_cuda and q.dtype == torch.float32:
        return _choose_for_floats_on_cuda(q, k, v)
    return "kernel", "pyalloc's kernel"


def _choose_for_halves(*qkv: Tensor) -> tuple[str, str]:
    if needs_more_than_once():
        return "kernel", "torch's kernels have one derivative, in reverse mode"
    if qkv[0].is_cpu and any(map(_overlaps, qkv)):
        return _MISREAD
    if qkv[0].is_cpu and is_eager() and _is_worth_copies(*qkv):
        return "kernel", "half precision: torch has no matrix units here"
    return "sdpa", "half precision: torch's kernels use the matrix units"


def _is_worth_copies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if not _plain.HAS_VECTORS or has_matrix_units():
        return False
    n_b, n_h, n_q, dim = q.shape
    scores, dim_v = n_b * n_h * n_q * k.shape[2], v.shape[3]
    products = scores * (dim + dim_v)
    copied = q.numel() + k.numel() + v.numel() + n_b * n_h * n_q * dim_v
    least = max(_LEAST_PRODUCTS_OF_HALVES, copied * _PRODUCTS_OF_A_COPY[q.dtype])
    return bool(products >= least)


def _choose_without_vectors(*qkv: Tensor) -> tuple[str, str]:
    if any(map(_overlaps, qkv)):
        return _MISREAD
    return "sdpa", "torch's kernel uses vectors, pyalloc's would not"


def _has_no_vectors(dtype: torch.dtype) -> bool:
    return dtype == torch.float64 or not _plain.HAS_VECTORS


def _choose_for_floats_on_cuda(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    """Pyalloc's if it uses tensor cores, else torch's memory-efficient kernel; never torch's that keeps scores."""
    if needs_more_than_once() or _is_compiling() or q.shape[1] != k.shape[1]:
        return "kernel", "pyalloc's kernel"
    if _uses_tensor_cores(q, k, v):
        return "kernel", "pyalloc's kernel uses the tensor cores"
    cuda = torch.backends.cuda
    try:
        params = cuda.SDPAParams(q, k, v, None, 0.0, False, False)
        serves = cuda.mem_efficient_sdp_enabled() and cuda.can_use_efficient_attention(params)
    except (AttributeError, TypeError, RuntimeError):  # a torch with other arguments
        serves = False
    return ("sdpa", "torch's is faster on CUDA") if serves else ("kernel", "pyalloc's kernel")


def _uses_tensor_cores(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether pyalloc's kernel would, and is faster; False if unknown: fake tensors, a first call in a capture."""
    size = max(q.shape[3], v.shape[3])
    is_known = not isinstance(q, FakeTensor)
    if size > _LARGEST_TENSOR_HEAD or not is_known or not _is_worth_a_launch(q, k, v):
        return False
    try:
        return _cuda.has_kernel(q.get_device(), "attention", _TENSOR_KERNEL)
    except OpError:
        return False


def _is_worth_a_launch(q: Tensor, k: Tensor, v: Tensor) -> bool:
    n_b, n_h, n_q, dim = q.shape
    size = max(dim, v.shape[3])
    n_blocks = n_b * n_h * -(-n_q // _QUERIES_OF_A_BLOCK)
    work = 4 * n_blocks * _QUERIES_OF_A_BLOCK * k.shape[2] * size
    is_wide = size > _WIDE_HEAD
    return bool(work >= _LEAST_WORK_ON_CUDA and (not is_wide or n_blocks >= _BLOCKS_OF_WIDE_HEADS))


def _overlaps(x: Tensor) -> bool:
    """Whether these are windows of a sequence, as of unfold(); C finds those with little to do (_plain.serve)."""
    row, lane = x.stride()[2:]
    is_window = holds(lane == 1) and holds(row > 0) and holds(row < x.shape[3])
    return is_window and not holds(x.shape[2] <= 1)


def _four(name: str, x: Tensor) -> Tensor:
    if x.dim() not in (2, 3, 4):
        raise OpError(f"{_OP}: {name} must be (B, H, L, d), got {tuple(x.shape)}")
    if x.dim() == 2:
        return x[None, None]
    return x.unsqueeze(1) if x.dim() == 3 else x


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    (n_b, n_h, _, d), of_k, of_v = q.shape, k.shape, v.shape
    if _is_compiling():
        fits = same((of_k[0], of_k[3], *of_v[:3]), (n_b, d, *of_k[:3]))
    else:
        fits = of_k[0] == n_b and of_v[:3] == of_k[:3] and of_k[3] == d
    if not fits:
        raise OpError(
            f"{_OP}: k must be (B, Hkv, Lk, d) and v (B, Hkv, Lk, dv) with B and d of q, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if n_h % of_k[1] if of_k[1] else n_h:
        raise OpError(
            f"{_OP}: heads of q must be a multiple of those of k, got {n_h} and {of_k[1]}"
        )
    if not 1 <= d <= _plain.LARGEST_HEAD or of_v[3] > _plain.LARGEST_HEAD:
        raise OpError(
            f"{_OP}: head sizes go from 1 up to {_plain.LARGEST_HEAD}, got {d} and {of_v[3]}"
        )


def _scores(name: str, x: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias or mask with four dimensions, each of full size or 1."""
    if x is None:
        return None
    full = (*q.shape[:3], k.shape[2])
    if name == "mask" and x.dtype != torch.bool:
        raise OpError(f"{_OP}: mask must be bool (an additive mask is a bias), got {x.dtype}")
    if x.device != q.device:
        raise OpError(f"{_OP}: {name} must be on {q.device} as q is, got {x.device}")
    if not _is_compiling() and x.shape == full:
        return x
    four = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if x.dim() < 4 else x
    if not broadcasts(four.shape, full):
        raise OpError(f"{_OP}: {name} must broadcast to {full}, got {tuple(x.shape)}")
    return four
