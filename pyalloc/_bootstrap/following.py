"""Whole numbers and masks that follow from those the program put on the device: lengths, offsets, labels that count.

No kernel has found them.  They are worked out on the host, of few numbers; nothing follows from what nobody put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import contents, sizes


def answer(torch: Any) -> None:
    """From now on: along dimensions, compared and combined.  Of all numbers at once truths.py tells."""
    aten = torch.ops.aten

    def follow(name: str, out: Any, *kinds: Any, into: tuple[str, ...] = ("out",)) -> None:
        on_host = getattr(torch, name.partition(".")[0])
        sizes.implement(torch, "CUDA", name, _followed(torch, on_host, out, kinds, into))

    def with_numbers(name: str) -> Callable[..., Any]:
        """Where two tensors are asked for, a number of the program's may come as it is."""
        operator = getattr(aten, name)

        def call(x: Any, other: Any, *, out: Any) -> Any:
            if not torch.is_tensor(x):  # of torch.bitwise_and() and bitwise_or() only
                x, other = other, x
            by = operator.Tensor_out if torch.is_tensor(other) else operator.Scalar_out
            return by(x, other, out=out)

        return call

    def same(x: Any, *_: Any) -> Any:
        return x.dtype

    def place(*_: Any) -> Any:
        return torch.int64

    def mask(*_: Any) -> Any:
        return torch.bool

    def whole(x: Any, *_: Any, dtype: Any = None) -> Any:
        is_counted = not (x.is_floating_point() or x.is_complex())
        return dtype or (torch.int64 if is_counted else x.dtype)

    follow("sum.dim_IntList", aten.sum.IntList_out, whole)
    follow("cumsum", aten.cumsum.out, whole)
    for name in ("amax", "amin"):
        follow(name, getattr(aten, name).out, same)
    for name in ("argmax", "argmin"):
        follow(name, getattr(aten, name).out, place)
    follow("max.dim", aten.max.dim_max, same, place, into=("max", "max_values"))
    follow("min.dim", aten.min.dim_min, same, place, into=("min", "min_indices"))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        follow(f"{name}.Scalar", getattr(aten, name).Scalar_out, mask)
        follow(f"{name}.Tensor", with_numbers(name), mask)
    follow("bitwise_not", aten.bitwise_not.out, same)
    for name in ("bitwise_and", "bitwise_or"):
        follow(f"{name}.Tensor", with_numbers(name), torch.result_type)
    for name in ("logical_not", "logical_and", "logical_or"):
        follow(name, getattr(aten, name).out, mask)
    sizes.implement(torch, "CUDA", "_to_copy", _converted(torch))


def _followed(
    torch: Any, on_host: Any, kernel: Any, kinds: tuple[Any, ...], into: tuple[str, ...]
) -> Callable[..., Any]:
    """The kernel, which puts its results into given tensors, and what it would have found."""

    def call(*args: Any, **kwargs: Any) -> Any:
        device = next(each.device for each in args if torch.is_tensor(each) and each.is_cuda)
        found = {
            name: torch.empty(0, dtype=kind(*args, **kwargs), device=device)
            for name, kind in zip(into, kinds, strict=True)
        }
        made = kernel(*args, **kwargs, **found)
        if any(each.nbytes > contents.MOST_BYTES for each in found.values()):
            return made
        known = []
        for each in args:
            if torch.is_tensor(each):
                there = contents.put(torch, each)
                if there is None:
                    return made
                known.append(there)
            else:
                known.append(each)
        try:
            told = on_host(*known, **kwargs)
        except NotImplementedError:  # there, of unsigned ones
            return made
        for each, value in zip(found.values(), told if len(into) > 1 else (told,), strict=True):
            contents.write(torch, each, value)
        return made

    return call


def _converted(torch: Any) -> Callable[..., Any]:
    """int(), long(), bool()."""
    convert = torch.ops.aten._to_copy.default
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def call(x: Any, **kwargs: Any) -> Any:
        made = convert._op_dk(generic, x, **kwargs)
        is_whole = not (made.is_floating_point() or made.is_complex())
        known = contents.put(torch, x) if is_whole and made.is_cuda else None
        if known is not None:
            contents.write(torch, made, known)
        return made

    return call
