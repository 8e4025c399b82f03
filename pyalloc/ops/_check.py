"""Argument checks whose messages name the argument, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyalloc.errors import OpError
from pyalloc.ops._sizes import asker, same

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def require_tensor(op: str, name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise OpError(f"{op}: {name} must be a tensor, got {type(given).__name__}")


def require_float(op: str, **tensors: Tensor) -> None:
    """Checks that every argument is a dense tensor of a supported floating dtype, all on one device.

    Makes no calls if all is well, because a whole op may take only microseconds.
    """
    device = None
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            require_tensor(op, name, x)
        if x.layout is not torch.strided or x.is_nested:
            given = "a nested tensor" if x.is_nested else x.layout
            raise OpError(f"{op}: {name} must be a dense tensor, got {given}")
        if x.dtype not in FLOATS:
            raise OpError(
                f"{op}: {name} must be float32, float64, float16 or bfloat16, got {x.dtype}"
            )
        if device is None:
            device = x.device
        elif x.device != device:
            first = next(iter(tensors))
            raise OpError(f"{op}: {name} must be on {device} as {first} is, got {x.device}")


def broadcast(op: str, **shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape; the error, if there is none, shows all shapes."""
    rank = max(len(shape) for shape in shapes.values())
    out = [1] * rank
    holds = asker()
    for name, shape in shapes.items():
        for k, size in enumerate(shape, start=rank - len(shape)):
            if holds(out[k] == 1):
                out[k] = size
            elif size is not out[k] and not holds(size == 1) and not same((size,), (out[k],)):
                parts = ", ".join(f"{n} {tuple(s)}" for n, s in shapes.items())
                raise OpError(
                    f"{op}: {name} does not broadcast with the rest: batch shapes {parts}"
                )
    return tuple(out)


def autocast_is_on(device: str) -> bool:
    """Whether autocast is on for that type of device; torch raises for "meta", which has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), without the call where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def compute_dtype(*tensors: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to compute in, dtype of the result) by torch's promotion.

    Half precision is computed in float32; under autocast everything but float64 is, and the result
    stays float32 as it does for torch's own log-probabilities.
    """
    result = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype is not result:
            result = torch.promote_types(result, tensor.dtype)
    device = "cpu" if tensors[0].is_cpu else tensors[0].device.type
    if autocast_is_on(device) and result != torch.float64:
        result = torch.float32
    return (torch.float64 if result == torch.float64 else torch.float32), result
