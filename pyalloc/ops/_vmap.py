"""Whether torch is transforming a call, and folding vmap's dimension into one the kernels have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyalloc.ops import _flops
from pyalloc.ops._composed import is_batched, is_before_dispatch, is_transformed


def is_plain(args: Sequence[Any]) -> bool:
    """No compiler, tracer, transform, dispatch mode or tensor subclass looks at this call."""
    if _is_compiling() or _tracing_state() is not None or _transforms():
        return False
    if _flops.register_where_modes_are():
        return False
    return not is_before_dispatch() and all(
        type(x) in _PLAIN for x in args if isinstance(x, Tensor)
    )


_PLAIN = (Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_transforms = torch._C._are_functorch_transforms_active


def choose_backward(
    grads: Sequence[Tensor | None],
    transformable: Callable[..., Any],
    kernel: Callable[..., Any],
    registered: str,
) -> Callable[..., Any]:
    """Of an op whose forward went past the dispatcher; registered: the name of its backward there."""
    if _is_compiling():  # the backward alone, as compiled autograd does
        return getattr(torch.ops.pyalloc, registered)  # type: ignore[no-any-return]
    # where a second derivative may be asked for, or many at once, that form has it
    if torch.is_grad_enabled() or is_transformed() or any(map(is_batched, grads)):
        return transformable
    # a mode may be around the backward only
    return kernel if is_plain(grads) else getattr(torch.ops.pyalloc, registered)


def fold(x: Tensor, in_dim: int | None, size: int, at: int) -> Tensor:
    """View x with the vmapped dimension (made, if there is none) merged in front of dimension at."""
    batched = x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)
    moved = batched.movedim(0, at)
    return moved.reshape(*moved.shape[:at], size * moved.shape[at + 1], *moved.shape[at + 2 :])


def unfold(x: Tensor, size: int, at: int) -> Tensor:
    """The inverse: the vmapped dimension comes back as dimension 0."""
    split = x.reshape(*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :])
    return split.movedim(at, 0)
