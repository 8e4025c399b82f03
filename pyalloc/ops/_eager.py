"""The formulas of the ops in plain torch: differentiable to any order, memory-hungry.

Used for second derivatives and where no kernel can run; the tests compare the kernels with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LOG_2 = math.log(2)


def normalizer(scale: Tensor, dim: int) -> Tensor:
    """Log C(kappa) + kappa log 2 (De Cao and Aziz 2020), the part that depends on kappa alone."""
    beta = (dim - 1) / 2
    return (
        torch.lgamma(scale + 2 * beta) - torch.lgamma(scale + beta) - beta * math.log(4 * math.pi)
    )


def power_spherical(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """(l, t, D), (m, t, D), (m, t) to (t, l, m)."""
    u = value.transpose(0, 1) @ loc.permute(1, 2, 0)
    half = (u.clamp(-1, 1) - 1) * 0.5
    kappa = scale.t()[:, None]
    return normalizer(kappa, value.shape[-1]) + torch.special.xlog1py(kappa, half)


def power_spherical_mixture(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor
) -> Tensor:
    """(l, t, D), (m, t, D), (m, t), (m, t) to (l, t)."""
    joint = power_spherical(value, loc, scale) + log_weights.t()[:, None]
    return torch.logsumexp(joint, 2).t()


def first_derivative(
    inputs: Sequence[Tensor], grad: Tensor, needs: Sequence[bool], forward: Callable[..., Tensor]
) -> list[Tensor]:
    """The gradients that needs asks for, empty tensors for the rest."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(forward(*leaves), wanted, grad)) if wanted else iter(())
    return [next(found) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=True)]


def second_derivative(
    inputs: Sequence[Tensor],
    grad: Tensor,
    grad_grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    forward: Callable[..., Tensor],
) -> list[Tensor | None]:
    """Gradients of <grad_grads, vjp(grad)> for grad and every input, by autograd on the formula."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        g = grad.detach().requires_grad_()
        first = torch.autograd.grad(forward(*leaves), leaves, g, create_graph=True)
        pairs = [
            (a, b)
            for a, b, need in zip(first, grad_grads, needs, strict=True)
            if need and b is not None
        ]
        if not pairs:
            return [None] * (1 + len(leaves))
        return list(
            torch.autograd.grad(
                [a for a, _ in pairs], [g, *leaves], [b for _, b in pairs], allow_unused=True
            )
        )


def additive(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, Q, H), (B, S, H), (B, S, E), (H,), (B, S) to (B, Q, E) and (B, Q, S)."""
    score = torch.tanh(keys[:, None] + query[:, :, None]) @ v
    probs = masked_softmax(score, None if mask is None else mask[:, None])
    return probs @ values, probs


def masked_softmax(score: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the last dimension; rows without any True in mask are zeros."""
    if score.shape[-1] == 0:
        return score
    if mask is None:
        return torch.softmax(score, -1)
    probs = torch.softmax(score.masked_fill(~mask, -torch.inf), -1)
    return probs.masked_fill(~mask.any(-1, keepdim=True), 0)


def additive_vjp(
    inputs: Sequence[Tensor],
    mask: Tensor | None,
    grads: tuple[Tensor, Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Gradients of query, keys, values and v; the keys' and values' empty where not needed."""
    wanted = [True, needs[1], needs[2], True]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, wanted, strict=True)]
        query, keys, values, v = leaves
        context, probs = additive(query, keys, values, v, mask)
        total = (context * grads[0]).sum()
        if grads[1] is not None:
            total = total + (probs * grads[1]).sum()
        found = iter(torch.autograd.grad(total, [x for x in leaves if x.requires_grad]))
    return [next(found) if n else x.new_empty(0) for x, n in zip(inputs, wanted, strict=True)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """(B, H, Lq, d), (B, Hkv, Lk, d), (B, Hkv, Lk, dv) to (B, H, Lq, dv), keeping the scores."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = (q * scale) @ k.transpose(-1, -2)
    if bias is not None:
        score = score + bias
        mask = visible(mask, score, torch.isneginf(bias))
    if causal:
        below = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = below if mask is None else mask & below
    return masked_softmax(score, mask) @ v


def visible(mask: Tensor | None, score: Tensor, hidden: Tensor) -> Tensor:
    """The mask without what an infinite bias hides, so that a wholly hidden row is seen as such."""
    shown = (~hidden).expand(score.shape)
    return shown if mask is None else mask & shown


def attention_vjp(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    grad: Tensor,
    mask: Tensor | None,
    options: tuple[bool, float],
    needs_bias: bool,
) -> list[Tensor]:
    """Gradients of q, k, v and, where needed, the bias (else an empty tensor)."""
    q, k, v, bias = inputs
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        b = None if bias is None else bias.detach().requires_grad_(needs_bias)
        out = attention(leaves[0], leaves[1], leaves[2], b, mask, *options)
        wanted = [*leaves, b] if needs_bias and b is not None else leaves
        grads = list(torch.autograd.grad(out, wanted, grad))
    return grads if len(grads) == 4 else [*grads, q.new_empty(0)]
