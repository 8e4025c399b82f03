"""Plans: all that a kernel's call needs except the tensors' addresses, made once for tensors of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyalloc._core import tensor_key

MOST = 4096  # plans kept: sizes may differ at every call

# What torch's compiled programs call: takes half the time, but not every version has it.
empty_cpu = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None)
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
key_of = tensor_key(Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
autocasts = torch._C._is_any_autocast_enabled


def key_of_call(*tensors: Tensor | None) -> bytes | None:
    """key_of() an op's arguments; None also if a compiler traces the call, or autocast may cast them."""
    return None if _is_compiling() or autocasts() else key_of(*tensors)


class Plans:
    """The plans of one kernel.

    reads: for each tensor, a function to the form that the kernel reads, such as dense_rows; None: any form.
    make: makes a plan from these tensors and the options.
    """

    def __init__(
        self, reads: Iterable[Callable[[Tensor], Tensor] | None], make: Callable[..., Any]
    ) -> None:
        self._reads, self._make = tuple(reads), make
        self._made: dict[Any, Any] = {}

    def find(self, tensors: tuple[Tensor | None, ...], *options: Any) -> tuple[Any, Sequence[Any]]:
        """The plan, and the tensors in the form that the kernel reads."""
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
    """Takes the place of a maker if the kernel does not need that tensor."""


def maker(shape: Sequence[int], like: Tensor) -> Callable[[], Tensor]:
    """A function that allocates tensors of this shape, with like's dtype and device."""
    sizes, strides, dtype = tuple(shape), tuple(row_major(shape)), like.dtype
    if like.is_cpu and empty_cpu is not None:
        return partial(empty_cpu, sizes, strides, dtype)
    anywhere = partial(torch.empty_strided, sizes, strides, dtype=dtype, device=like.device)
    if not like.is_cuda or _empty_cuda is None:
        return anywhere
    index, here = like.get_device(), partial(_empty_cuda, sizes, strides, dtype)
    current = torch._C._cuda_getDevice
    return lambda: here() if current() == index else anywhere()
