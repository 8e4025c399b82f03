"""Scaled attention's plain calls, which C serves: a call for a few queries is over in microseconds."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyalloc._core import attention_plain
from pyalloc.ops import _attention, _second
from pyalloc.ops._library import WORK_OF_A_THREAD, address, has_vectors, threads
from pyalloc.ops._plans import autocasts, empty_cpu
from pyalloc.ops._vmap import QUIET

log = logging.getLogger("pyalloc.ops")
TAKEN = "scaled_attention: %s (%s)"
LARGEST_HEAD = 256
HAS_VECTORS = has_vectors()

# For so many queries of a single key, and heads so wide, torch's kernel is the faster one.
_ONE_KEY_QUERIES = 5
_ONE_KEY_HEAD = 96
# With less work too, if autograd or anything else sees the call and C is shown no tensors. Work is
# batch * heads * (_WORK_OF_HEAD + queries * keys * (head size + _WORK_OF_SCORE)). Found by
# `python -m benchmarks.ops.dispatch`.
_LITTLE_WORK = 160_000
_WORK_OF_HEAD = 4096
_WORK_OF_SCORE = 32

_BY_TORCH = {"path": "sdpa", "reason": "one key, or little to do"}
_BY_US = {"path": "kernel", "reason": "pyalloc's kernel"}
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Recorded(torch.autograd.Function):
    """The op as C calls it: the result is there already, and only the gradients may need Python."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        rest: tuple[Tensor, Tensor, bool, float],
    ) -> Tensor:
        out, stats, ctx.causal, ctx.scale = rest
        ctx.save_for_backward(out, stats, q, k, v, bias, mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved, causal, scale = ctx.saved_tensors, ctx.causal, ctx.scale
        needs_bias: bool = ctx.needs_input_grad[3]
        found = None
        if not _is_dynamo_compiling():
            found = _backward(grad, saved, causal, scale, needs_bias)
        if found is None:
            options = causal, scale, 0.0, None, needs_bias
            found = _attention.backward(grad, *saved, *options)
        return (*found, None, None)


_PARTS = (
    Tensor,
    torch.nn.Parameter,
    torch.float32,
    vars(torch.compiler),
    torch._C._are_functorch_transforms_active,
    torch.is_grad_enabled,
    torch._C._autograd._top_saved_tensors_default_hooks,
    torch.nn.functional.scaled_dot_product_attention,
    _second.offer,
    _second.HOOKS,
    _BY_TORCH,
    _BY_US,
    partial(log.debug, TAKEN, *_BY_US.values()),
    vars(forward_ad),
    (*QUIET, (autocasts, False)),
    empty_cpu if HAS_VECTORS else None,
    threads,
    partial(address, "pya_ops_attention_forward"),
    partial(address, "pya_ops_attention_backward"),
    super(torch.autograd.Function, _Recorded).apply,
)
_LIMITS = (
    _ONE_KEY_QUERIES,
    _ONE_KEY_HEAD,
    _LITTLE_WORK,
    _WORK_OF_HEAD,
    _WORK_OF_SCORE,
    LARGEST_HEAD,
    2 * WORK_OF_A_THREAD,
)
serve, _backward = attention_plain(_PARTS, _LIMITS)
