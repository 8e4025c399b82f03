"""Second derivatives where torch's own attention kernel served, which has first ones only.

Whether they are wanted shows only when the first backward runs, with create_graph. Until then nothing may be
kept or computed for them, and little time spent: a call for a few queries and its backward are over in 60
microseconds. So the result carries one hook, which in the usual case looks at the grad mode and returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ONCE_DIFFERENTIABLE = frozenset(
    f"ScaledDotProduct{kind}AttentionBackward0"
    for kind in ("Flash", "Efficient", "Cudnn", "FusedAttentionOverrideable")
) | {"ScaledDotProductFlashAttentionForCpuBackward0"}


def offer(out: Tensor) -> None:
    """Makes the gradients of an attention that torch computed differentiable, should they be asked for."""
    # register_hook() in its parts, without the handle nobody needs: 4 microseconds where it takes 10
    out._backward_hooks = {-1: _before}
    out.grad_fn._register_hook_dict(out)
    out._backward_hooks = None  # the node has it now; the user's own hooks start afresh


def _before(grad: Tensor) -> None:
    """Runs before torch's backward: where that is to be differentiated, has its result replaced."""
    if not torch.is_grad_enabled():
        return
    node: Any = torch._C._current_autograd_node()
    if type(node).__name__ not in _ONCE_DIFFERENTIABLE:
        return

    def after(given: tuple[Tensor | None, ...], grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
        handle.remove()
        try:
            inputs = (node._saved_query, node._saved_key, node._saved_value)
        except RuntimeError:  # torch.utils.checkpoint hands them out once, and torch has had them
            return given
        return _gradients(node, inputs, given, grads[0])

    handle = node.register_hook(after)


def _gradients(
    node: Any, inputs: tuple[Tensor, ...], given: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Those of query, key and value by pyalloc's kernel, whose backward is differentiable."""
    dtype = inputs[0].dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (x.to(compute) for x in inputs)
    scale = node._saved_scale
    options = (
        None,
        None,
        node._saved_is_causal,
        q.shape[-1] ** -0.5 if scale is None else scale,
        0.0,
        None,
    )
    with torch.no_grad():
        out, lse = torch.ops.pyalloc.scaled_attention(q, k, v, *options)
    ours = torch.ops.pyalloc.scaled_attention_backward(
        grad.to(compute), out, lse, q, k, v, *options, False
    )
    found = (
        None if old is None else new.to(dtype) for old, new in zip(given[:3], ours[:3], strict=True)
    )
    return (*found, *given[3:])
