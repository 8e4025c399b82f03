"""What the ops must return, in float64 torch, written from the formulas and not from the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sphere(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, dtype=torch.float64), dim=-1).to(dtype)


def textbook(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """The log-probability as published by De Cao and Aziz."""
    return textbook_from_cosine((value * loc).sum(-1), scale, value.shape[-1])


def pairwise(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """(L, T, D), (M, T, D), (M, T) to (L, M, T), as an einsum."""
    return textbook_from_cosine(torch.einsum("ltd,mtd->lmt", value, loc), scale, value.shape[-1])


def textbook_from_cosine(u: Tensor, scale: Tensor, dim: int) -> Tensor:
    beta = (dim - 1) / 2
    alpha = scale + beta
    log_c = -(
        (alpha + beta) * math.log(2)
        + torch.lgamma(alpha)
        - torch.lgamma(alpha + beta)
        + beta * math.log(math.pi)
    )
    return log_c + torch.special.xlog1py(scale, u.clamp(-1, 1))


def relative(a: Tensor, b: Tensor, floor: float = 1e-300) -> float:
    """Relative L2 error of a against b; floor: the size below which b is rounding noise."""
    b = b.double()
    return float((a.double() - b).norm() / b.norm().clamp_min(floor))


def within(
    ours: Tensor, theirs: Tensor, exact: Tensor, floor: float = 1e-300, bar: float = 1e-6
) -> None:
    """The project's bar: at most twice torch's own error, or 1e-6 relative."""
    mine, torchs = relative(ours, exact, floor), relative(theirs, exact, floor)
    assert mine <= max(2 * torchs, bar), f"error {mine:.2e}, torch {torchs:.2e}"
