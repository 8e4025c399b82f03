"""What, if anything, sees a call before the kernels; and vmap's dimension, folded into one that they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyalloc.ops import _flops
from pyalloc.ops._composed import is_batched, is_before_dispatch, is_transformed


def is_eager() -> bool:
    """Whether no compiler, tracer, transform or dispatch mode sees calls made now."""
    if _is_compiling() or _tracing_state() is not None or is_transformed():
        return False
    return not (is_before_dispatch() or _flops.register_where_modes_are())


def asks_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd must record a call with these."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def is_plain(args: Sequence[Any]) -> bool:
    """is_eager(), and no argument is of a subclass of Tensor, which might override the call."""
    if not is_eager():
        return False
    for x in args:  # noqa: SIM110  (a generator costs a microsecond)
        if type(x) not in _PLAIN and isinstance(x, Tensor):
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
# For C, which is_eager() would take too long for: functions, and what each returns where nothing sees a call.
QUIET = (
    (torch._C._are_functorch_transforms_active, False),
    (_tracing_state, None),
    (_flops.n_modes, 0),
    (is_before_dispatch, False),
)


def choose_backward(
    grads: Sequence[Tensor | None],
    transformable: Callable[..., Any],
    kernel: Callable[..., Any],
    registered: str,
) -> Callable[..., Any]:
    """The backward of an op whose forward bypassed the dispatcher; registered: its registered backward's name."""
    if _is_compiling():  # compiled autograd compiles only the backward
        return getattr(torch.ops.pyalloc, registered)  # type: ignore[no-any-return]
    # this form has second derivatives, and takes batches of gradients
    if torch.is_grad_enabled() or is_transformed() or any(map(is_batched, grads)):
        return transformable
    # a dispatch mode may be active in the backward only
    return kernel if is_plain(grads) else getattr(torch.ops.pyalloc, registered)


def fold(x: Tensor, in_dim: int | None, size: int, at: int) -> Tensor:
    """Views x with the vmapped dimension (expanded, if x has none) merged into dimension at, as its outer part."""
    batched = x.unsqueeze(0).expand(size, *x.shape) if in_dim is None else x.movedim(in_dim, 0)
    moved = batched.movedim(0, at)
    return moved.reshape(*moved.shape[:at], size * moved.shape[at + 1], *moved.shape[at + 2 :])


def unfold(x: Tensor, size: int, at: int) -> Tensor:
    """The inverse: splits the vmapped dimension off again, as dimension 0."""
    split = x.reshape(*x.shape[:at], size, x.shape[at] // size, *x.shape[at + 1 :])
    return split.movedim(at, 0)
