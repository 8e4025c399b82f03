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
        torch.lgamma(scale + 2 * beta)
        - torch.lgamma(scale + beta)
        - beta * math.log(4 * math.pi)
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
