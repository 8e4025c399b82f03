"""Second derivatives of attention computed by torch's own kernels, which have only first ones.

Whether they are needed shows only when the first backward runs with create_graph. Until then nothing may be kept or
computed for them, and hardly any time spent: a call for a few queries and its backward take 60 microseconds. So the
result carries one hook, which usually looks at the grad mode and returns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyalloc.ops._composed import is_checkpointed

_ONCE_DIFFERENTIABLE = frozenset(
    f"ScaledDotProduct{kind}AttentionBackward0"
    for kind in ("Flash", "Efficient", "Cudnn", "FusedAttentionOverrideable")
) | {"ScaledDotProductFlashAttentionForCpuBackward0"}


_is_grad_enabled = torch.is_grad_enabled


class _Keep(torch.autograd.Function):
    """Saves its inputs and returns nothing of use: its node is a second place to get them from."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return None, None, None


def offer(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Makes the gradients of an attention that torch computed differentiable, if create_graph asks for that."""
    if is_checkpointed():
        # A checkpoint hands out each saved tensor once, to torch's kernel: save the inputs a second time.
        before: Any = partial(_before, kept=_Keep.apply(q, k, v))
    else:
        before = _before
    node: Any = out.grad_fn
    if type(node).__name__ == "SliceBackward0":  # on CUDA head sizes are padded to multiples of 8
        node.next_functions[0][0].register_prehook(lambda grads: before(grads[0]))
        return
    # register_hook() in its parts, without the handle nobody needs: 4 microseconds where it takes 10
    # (csrc/module_attention.c does the same for little to do)
    out._backward_hooks = {-1: before}
    node._register_hook_dict(out)
    out._backward_hooks = None  # the node has it now; the user's own hooks start afresh


def _before(grad: Tensor, kept: Tensor | None = None) -> None:
    """Runs before torch's backward; if that is to be differentiated, has its result replaced."""
    # read even if not needed: until then the checkpoint holds on to them
    inputs = None if kept is None else kept.grad_fn.saved_tensors
    if not _is_grad_enabled():
        return
    node: Any = torch._C._current_autograd_node()
    if type(node).__name__ not in _ONCE_DIFFERENTIABLE:
        return

    def after(given: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
        handle.remove()
        saved = inputs or (node._saved_query, node._saved_key, node._saved_value)
        return _gradients(node, saved, given, grads[0])

    handle = node.register_hook(after)


def _gradients(
    node: Any, inputs: tuple[Tensor, ...], given: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value by pyalloc's kernel, whose backward is differentiable."""
    dtype = inputs[0].dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    missing = grad.shape[-1] - inputs[2].shape[-1]  # by torch, if we kept unpadded tensors
    q, k, v = (
        torch.nn.functional.pad(x.to(compute), (0, missing)) if missing else x.to(compute)
        for x in inputs
    )
    scale = node._saved_scale
    options = (
        None,
        None,
        node._saved_is_causal,
        inputs[0].shape[-1] ** -0.5 if scale is None else scale,
        0.0,
        None,
    )
    with torch.no_grad():
        out, stats = torch.ops.pyalloc.scaled_attention(q, k, v, *options)
    ours = torch.ops.pyalloc.scaled_attention_backward(
        grad.to(compute), out, stats, q, k, v, *options, False
    )
    found = (
        None if old is None else new.to(dtype) for old, new in zip(given[:3], ours[:3], strict=True)
    )
    return (*found, *given[3:])


HOOKS = {-1: _before}  # what a result has where nothing looks at what is saved
