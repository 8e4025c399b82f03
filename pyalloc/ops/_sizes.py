"""Questions about sizes that a compiler may not know until the program runs, such as that of x[mask]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_is_compiling = torch.compiler.is_compiling


def holds(truth: Any) -> bool:
    """Whether a comparison of sizes is true; False if that is not known before the program runs.

    So ask only where what follows from False is right for every size.
    """
    if not _is_compiling():
        return bool(truth)
    # A large module, but already loaded when something is compiled.
    from torch.fx.experimental import symbolic_shapes

    if not hasattr(symbolic_shapes, "guard_or_false"):  # torch before 2.8 has no such sizes here
        return bool(truth)
    return symbolic_shapes.guard_or_false(truth)  # type: ignore[no-any-return]


def asker() -> Callable[[Any], bool]:
    """`holds`, cheaper where nothing is compiled."""
    return holds if _is_compiling() else bool


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether both have the same sizes; those not known before the program runs are checked then."""
    if not _is_compiling():
        return tuple(a) == tuple(b)
    if len(a) != len(b) or any(holds(m != n) for m, n in zip(a, b, strict=True)):
        return False
    for m, n in zip(a, b, strict=True):
        torch._check(m == n)
    return True


def broadcasts(shape: Sequence[Any], full: Sequence[Any]) -> bool:
    """Whether each size is 1 or the full one; one not known before the program runs must be the full one."""
    if len(shape) != len(full):
        return False
    pairs = zip(shape, full, strict=True)
    if not _is_compiling():
        return all(n in (1, m) for n, m in pairs)
    return all(holds(n == 1) or same((n,), (m,)) for n, m in pairs)


def is_empty(*tensors: Tensor) -> bool:
    """Whether a tensor has no elements; False if that is not known yet, so kernels ask again."""
    if _is_compiling():
        return any(holds(n == 0) for x in tensors for n in x.shape)
    for x in tensors:  # noqa: SIM110  (a generator costs a microsecond)
        if 0 in x.shape:
            return True
    return False
