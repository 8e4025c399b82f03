"""The formulas of the ops in plain torch: differentiable to any order, memory-hungry.

Used for second derivatives and where no kernel can run; the tests compare the kernels with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_SHIFT = 12  # from here on the series below are exact in double
# A bias at or below this hides a key: -1e37 in the kernels, whose scores are in units of log 2.
_HIDES = -1e37 * math.log(2)


def _series(x: Tensor) -> Tensor:
    """Stirling's series of lgamma."""
    r = 1 / x
    q = r * r
    tail = 1 / 1680 - q * (1 / 1188 - q * (691 / 360360))
    return r * (1 / 12 - q * (1 / 360 - q * (1 / 1260 - q * tail)))


def _digamma_tail(x: Tensor) -> Tensor:
    """The asymptotic series of log(x) - digamma(x)."""
    r = 1 / x
    q = r * r
    tail = 1 / 240 - q * (1 / 132 - q * (691 / 32760))
    return 0.5 * r + q * (1 / 12 - q * (1 / 120 - q * (1 / 252 - q * tail)))


def normalizer(scale: Tensor, dim: int) -> Tensor:
    """Log C(kappa) + kappa log 2 (De Cao and Aziz 2020), the part that depends on kappa alone.

    A difference of two lgammas, written as in csrc/ops/special.c, so that nothing large cancels; computed in
    float64, differentiable to any order.
    """
    beta = (dim - 1) / 2
    low = scale.double() + beta
    steps = [-beta / (low + beta + i) for i in range(_SHIFT)]
    shifted = sum((torch.log1p(x) for x in steps), start=torch.zeros_like(low))
    a = low + _SHIFT
    b = a + beta
    stirling = (a - 0.5) * torch.log1p(beta / a) + beta * (torch.log(b) - 1)
    h = stirling + _series(b) - _series(a) + shifted - beta * math.log(4 * math.pi)
    return h.to(scale.dtype)


def normalizer_slope(scale: Tensor, dim: int) -> Tensor:
    """The derivative of normalizer(), a difference of two digammas."""
    beta = (dim - 1) / 2
    low = scale.double() + beta
    steps = [beta / ((low + i) * (low + beta + i)) for i in range(_SHIFT)]
    shifted = sum(steps, start=torch.zeros_like(low))
    a = low + _SHIFT
    slope = torch.log1p(beta / a) + _digamma_tail(a) - _digamma_tail(a + beta) + shifted
    return slope.to(scale.dtype)


def power_spherical(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """(l, t, D), (m, t, D), (m, t) to (t, l, m)."""
    u = value.transpose(0, 1) @ loc.permute(1, 2, 0)
    # As in the kernels, a cosine that rounding put above 1 has the gradient at 1, and one at the antipode
    # or beyond it has that of one rounding step away.
    behind, is_far = u <= -1, u < 0
    u = u + (u.clamp(torch.finfo(u.dtype).eps / 2 - 1, 1) - u).detach()
    kappa = scale.t()[:, None]
    lost = torch.where(behind & (kappa != 0), -torch.inf * kappa.detach(), 0.0)
    # kappa log((1 + u) / 2) with all digits at both ends
    powered = torch.special.xlog1py(kappa, torch.where(is_far, u, (u - 1) * 0.5))
    powered = powered - kappa * torch.where(is_far, u.new_full((), math.log(2)), 0.0)
    return normalizer(kappa, value.shape[-1]) + powered + lost


def power_spherical_mixture(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor
) -> Tensor:
    """(l, t, D), (m, t, D), (m, t), (m, t) to (l, t)."""
    return _log_sum(power_spherical(value, loc, scale) + log_weights.t()[:, None]).t()


def _log_sum(x: Tensor) -> Tensor:
    """torch.logsumexp() over the last dimension, but sums of nothing but -inf have derivatives of 0, as in the kernels.

    torch's are NaN beyond the first one, and in forward mode.
    """
    found = torch.logsumexp(x.detach(), -1, keepdim=True)
    is_none = found == -torch.inf
    shares = (x - found.masked_fill(is_none, 0)).exp()
    whole = shares.sum(-1, keepdim=True).masked_fill(is_none, 1)  # 1, but for its derivatives
    return (found + whole.log()).squeeze(-1)


def first_derivative(
    inputs: Sequence[Tensor], grad: Any, needs: Sequence[bool], forward: Callable[..., Any]
) -> list[Tensor]:
    """The gradients that are needed, empty tensors for the rest; themselves differentiable."""
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    if not wanted:
        return [x.new_empty(0) for x in inputs]

    def function(*leaves: Tensor) -> Any:
        given = iter(leaves)
        return forward(*(next(given) if n else x for x, n in zip(inputs, needs, strict=True)))

    _, pull = torch.func.vjp(function, *wanted)
    found = iter(pull(grad))
    return [next(found) if need else x.new_empty(0) for x, need in zip(inputs, needs, strict=True)]


def second_derivative(
    inputs: Sequence[Tensor],
    grad: Tensor,
    grad_grads: Sequence[Tensor | None],
    needs: Sequence[bool],
    forward: Callable[..., Tensor],
) -> list[Tensor | None]:
    """Gradients of <grad_grads, vjp(grad)> for grad and every input, by torch.func on the formula."""
    wanted = [need and g is not None for need, g in zip(needs, grad_grads, strict=True)]
    cotangents = tuple(g for g, want in zip(grad_grads, wanted, strict=True) if want)
    if not cotangents:
        return [None] * (1 + len(inputs))

    def first(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = first_derivative(inputs, grad, wanted, forward)
        return tuple(g for g, want in zip(found, wanted, strict=True) if want)

    _, pull = torch.func.vjp(first, grad, *inputs)
    return list(pull(cotangents))


def additive(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, Q, H), (B, S, H), (B, S, E), (H,) or (B, H), (B, S) to (B, Q, E) and (B, Q, S)."""
    v = v[:, None, :, None] if v.dim() == 2 else v[:, None]
    score = (torch.tanh(keys[:, None] + query[:, :, None]) @ v).squeeze(-1)
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
    """Gradients of query, keys, values and, for each batch entry, v; empty where not needed."""
    query, keys, values, v = inputs
    context, probs = grads
    if probs is None:
        probs = context.new_zeros(*query.shape[:2], keys.shape[1])
    each = (query, keys, values, v.expand(query.shape[0], *v.shape))
    wanted = [True, needs[1], needs[2], True]
    return first_derivative(
        each, (context, probs), wanted, lambda q, k, v, u: additive(q, k, v, u, mask)
    )


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
        mask = visible(mask, score, bias <= _HIDES)
    if causal:
        below = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).tril()
        mask = below if mask is None else mask & below
    return masked_softmax(score, mask) @ v


def visible(mask: Tensor | None, score: Tensor, hidden: Tensor) -> Tensor:
    """The mask without what the bias hides, so that a wholly hidden row is seen as such."""
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
    present = [x for x in inputs if x is not None]
    needs = [True, True, True, needs_bias][: len(present)]

    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return attention(q, k, v, bias, mask, *options)

    found = first_derivative(present, grad, needs, forward)
    return found if len(found) == 4 else [*found, grad.new_empty(0)]
