"""What a kernel's call needs but the places of its tensors, made once for all tensors alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyalloc._core import tensor_key

MOST = 4096  # that are kept: sizes may be others at every call

# what torch's own compiled programs call: half the time, where there is such
_empty_cpu = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
key_of = tensor_key(Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_autocasts = torch._C._is_any_autocast_enabled


def key_of_call(*tensors: Tensor | None) -> bytes | None:
    """As key_of, of what an op is called with: None also where a compiler sees the call, or autocast may cast."""
    return None if _is_compiling() or _autocasts() else key_of(*tensors)


class Plans:
    """Of one kernel.

    reads: for each tensor how the kernel reads it, as dense_rows, or None: as it is.
    make: a plan from the tensors and the options.
    """

    def __init__(
        self, reads: Iterable[Callable[[Tensor], Tensor] | None], make: Callable[..., Any]
    ) -> None:
        self._reads, self._make = tuple(reads), make
        self._made: dict[Any, Any] = {}

    def find(self, tensors: tuple[Tensor | None, ...], *options: Any) -> tuple[Any, Sequence[Any]]:
        """The plan, and the tensors as the kernel reads them."""
        key = key_of(*tensors), options, torch.get_num_threads()
        plan = self._made.get(key)
        if plan is not None:
            return plan, tensors
        read = [
            x if x is None or how is None else how(x)
            for x, how in zip(tensors, self._reads, strict=True)
        ]
        plan = self._make(*read, *options)
        if key[0] is not None and all(a is b for a, b in zip(tensors, read, strict=True)):
            keep(self._made, key, plan)
        return plan, read


def keep(made: dict[Any, Any], key: Any, plan: Any) -> None:
    if len(made) >= MOST:
        made.clear()
    made[key] = plan


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def nothing() -> None:
    """In a maker's place, of what a kernel does without."""


def maker(shape: Sequence[int], like: Tensor) -> Callable[[], Tensor]:
    """A function that makes such tensors, of like's dtype and on its device."""
    sizes, strides, dtype = tuple(shape), tuple(row_major(shape)), like.dtype
    if like.is_cpu and _empty_cpu is not None:
        return partial(_empty_cpu, sizes, strides, dtype)
    anywhere = partial(torch.empty_strided, sizes, strides, dtype=dtype, device=like.device)
    if not like.is_cuda or _empty_cuda is None:
        return anywhere
    index, here = like.get_device(), partial(_empty_cuda, sizes, strides, dtype)
    current = torch._C._cuda_getDevice
    return lambda: here() if current() == index else anywhere()
