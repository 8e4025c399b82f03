"""Folding the dimension that vmap adds into a batch dimension the kernels already have."""

from __future__ import annotations

from torch import Tensor


def fold(x: Tensor, in_dim: int | None, size: int, at: int) -> Tensor:
    """x with the vmapped dimension (made, if there is none) merged in front of dimension at."""
    batched = x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)
    moved = batched.movedim(0, at)
    return moved.reshape(*moved.shape[:at], size * moved.shape[at + 1], *moved.shape[at + 2 :])


def unfold(x: Tensor, size: int, at: int) -> Tensor:
    """The inverse: the vmapped dimension comes back as dimension 0."""
    split = x.reshape(*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :])
    return split.movedim(at, 0)
