"""Integers and masks that follow from what the program put on the device: lengths, offsets, counted labels.

No kernel computes them in a dry run, so they are computed on the host, as long as they are few.  Nothing follows from
unknown values, with one exception: positions of the largest, and drawn positions, are spread evenly.  So experts share
the tokens, and clusters share the points.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyalloc._bootstrap import contents, sizes, truths

# With these, blank zeros count as zeros beside a known argument.  Elsewhere unseen kernels may have filled them in.
_JOINING = {
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "logical_and", "logical_or", "logical_xor"),
    *("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"),
    *("cat", "where.self", "scatter.src", "scatter.value", "scatter.reduce", "scatter_add"),
    *("scatter.value_reduce", "scatter_reduce.two", "index_add", "index_copy", "index_put"),
    *("index_fill.int_Scalar", "index_fill.int_Tensor", "select_scatter", "slice_scatter"),
}
# Copies of the first argument with a part changed: _CHANGING by kernels that write to `out`, _CHANGING_CLONES by
# kernels that work in place on a clone.
_CHANGING = (
    *("scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add"),
    *("scatter_reduce.two", "index_add", "index_copy", "index_reduce"),
)
_CHANGING_CLONES = (
    *("masked_fill.Tensor", "masked_scatter", "index_put", "put", "select_scatter"),
    *("index_fill.int_Scalar", "index_fill.int_Tensor", "slice_scatter", "diagonal_scatter"),
    *("as_strided_scatter", "diag_embed"),
)

_OF_ONE = ("neg", "bitwise_not", "sign", "ceil", "floor", "round", "trunc")


@dataclass(frozen=True)
class _How:
    """How an operator is followed.

    takes_blank: see contents.operands().
    takes_floats: follows a floating-point first argument of up to this many bytes.
    among: (n, dim): the last result holds positions out of n, which differ along dim.  If nothing is known, they are
        spread evenly.
    orders: the name of the comparison, if the operator compares two numbers by order.
    is_part: the result is a part of the first argument.
    is_change: the result is a copy of the first argument with a part changed.
    is_copy: the result is the first argument, once or several times.
    is_inverse: it inverts a mask: a blank mask gives True, for as long as contents.is_still_false() holds.
    """

    takes_blank: bool = False
    takes_floats: int = 0
    among: Callable[..., tuple[int, int]] | None = None
    orders: str = ""
    is_part: bool = False
    is_change: bool = False
    is_copy: bool = False
    is_inverse: bool = False


class _Kinds:
    """The dtypes of results, by the arguments."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def same(self, x: Any, *_: Any, **_names: Any) -> Any:
        return x.dtype

    def real(self, x: Any) -> Any:
        return x.dtype.to_real()

    def place(self, *_: Any, **_names: Any) -> Any:
        return self.torch.int64

    def mask(self, *_: Any, **_names: Any) -> Any:
        return self.torch.bool

    def common(self, *args: Any, **_names: Any) -> Any:
        """The common dtype of the last two arguments: torch.where() takes a mask before them."""
        return self.torch.result_type(*args[-2:])

    def quotient(self, x: Any, other: Any) -> Any:
        kind = self.torch.result_type(x, other)
        is_whole = not (kind.is_floating_point or kind.is_complex)
        return self.torch.get_default_dtype() if is_whole else kind

    def rounded(self, x: Any, other: Any, rounding_mode: Any = None) -> Any:
        return self.quotient(x, other) if rounding_mode is None else self.common(x, other)

    def joined(self, parts: Any, _dim: int = 0) -> Any:
        return functools.reduce(self.torch.promote_types, (each.dtype for each in parts))

    def places(self, *_: Any, out_int32: bool = False, **_names: Any) -> Any:
        return self.torch.int32 if out_int32 else self.torch.int64

    def whole(self, x: Any, *_: Any, dtype: Any = None) -> Any:
        is_counted = not (x.is_floating_point() or x.is_complex())
        return dtype or (self.torch.int64 if is_counted else x.dtype)

    def given(self, x: Any, *_: Any, dtype: Any = None) -> Any:
        return dtype or x.dtype

    def limited(self, x: Any, *limits: Any) -> Any:
        kinds = [self.torch.result_type(x, each) for each in limits if each is not None]
        return functools.reduce(self.torch.promote_types, kinds, x.dtype)


def answer(torch: Any) -> None:
    """Follows these operators from now on.  Reductions over a whole tensor are in truths.py."""
    aten, kinds = torch.ops.aten, _Kinds(torch)
    same, mask, common = kinds.same, kinds.mask, kinds.common

    follow = functools.partial(_follow, torch)
    few: dict[str, Any] = {"takes_floats": contents.FEW_FRACTIONS}
    _answer_along(torch, kinds)
    all_of: dict[str, Any] = {"takes_floats": contents.MOST_BYTES}
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        orders = name if name not in ("eq", "ne") else ""
        follow(f"{name}.Scalar", getattr(aten, name).Scalar_out, mask, orders=orders, **all_of)
        follow(f"{name}.Tensor", _of_numbers(torch, name), mask, orders=orders, **all_of)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        follow(f"{name}.Tensor", _of_numbers(torch, name), common)
    for name in ("logical_not", "logical_and", "logical_or", "logical_xor"):
        follow(name, getattr(aten, name).out, mask, is_inverse=name == "logical_not")
    _answer_arithmetic(torch, kinds)
    follow("gather", aten.gather.out, same, **few)
    follow("cat", aten.cat.out, kinds.joined, is_copy=True)
    isin = aten.isin
    follow("isin.Tensor_Tensor", isin.Tensor_Tensor_out, mask, on_host=isin.Tensor_Tensor)
    follow("isin.Tensor_Scalar", isin.Tensor_Scalar_out, mask, on_host=isin.Tensor_Scalar)
    sizes.implement(torch, "CUDA", "isin.Scalar_Tensor", _one_is_in(torch))
    for name in ("roll", "prod"):
        own = _own(torch, getattr(aten, name).default)
        if own is not None:
            follow(name, own)
    for name in ("searchsorted", "bucketize"):
        follow(f"{name}.Tensor", getattr(aten, name).Tensor_out, kinds.places)
    follow("flip", lambda x, _dims: torch.empty_like(x))  # as its kernel does here
    index = {"on_host": aten.index.Tensor, "is_part": True}
    follow("index.Tensor", aten.index.Tensor_out, same, **index)
    for name in ("index_select", "masked_select", "take"):
        follow(name, getattr(aten, name).out, same)
    for name in ("tril", "triu"):
        follow(name, getattr(aten, name).out, same, **all_of)
    _answer_copies(torch, same)
    sizes.implement(torch, "CUDA", "_to_copy", _converted(torch))


def _answer_along(torch: Any, kinds: _Kinds) -> None:
    """Operators along a dimension: sums, the largest elements and their positions."""
    aten, same, place = torch.ops.aten, kinds.same, kinds.place

    follow = functools.partial(_follow, torch)
    few: dict[str, Any] = {"takes_floats": contents.FEW_FRACTIONS}
    follow("sum.dim_IntList", aten.sum.IntList_out, kinds.whole, **few)
    follow("mean.dim", aten.mean.out, kinds.given, **few)
    follow("prod.dim_int", aten.prod.int_out, kinds.whole)
    follow("cumsum", aten.cumsum.out, kinds.whole, **few)
    for name, kernel in (("any.dim", aten.any.out), ("any.dims", aten.any.dims_out)):
        follow(name, kernel, functools.partial(truths.kind, torch))
    for name in ("amax", "amin"):
        follow(name, getattr(aten, name).out, same, **few)
    choose: dict[str, Any] = {"among": _along, **few}
    for name in ("argmax", "argmin"):
        follow(name, getattr(aten, name).out, place, **choose)
    follow("max.dim", aten.max.dim_max, same, place, into=("max", "max_values"), **choose)
    follow("min.dim", aten.min.dim_min, same, place, into=("min", "min_indices"), **choose)
    pair: dict[str, Any] = {"into": ("values", "indices"), **few}
    follow(
        "topk",
        aten.topk.values,
        same,
        place,
        **pair,
        among=lambda x, _, dim=-1, *_rest: (_along(x, dim)[0], dim),
    )
    follow(
        "sort.stable",
        aten.sort.values_stable,
        same,
        place,
        **pair,
        on_host=aten.sort.stable,
        among=lambda x, dim=-1, **_: (_along(x, dim)[0], dim),
    )
    follow("multinomial", aten.multinomial.out, place, among=lambda x, *_, **_names: _along(x, -1))


def _answer_arithmetic(torch: Any, kinds: _Kinds) -> None:
    aten, same, common = torch.ops.aten, kinds.same, kinds.common

    def combine(name: str, kernel: Any, operator: Any, kind: Any = common, **how: Any) -> None:
        on_host = _of_tensors(torch, operator)
        _follow(torch, name, _of_tensors(torch, kernel), kind, on_host=on_host, **how)

    for name in ("add", "sub", "mul"):
        combine(f"{name}.Tensor", getattr(aten, name).out, getattr(aten, name).Tensor)
    combine("div.Tensor", aten.div.out, aten.div.Tensor, kinds.quotient)
    combine("where.self", aten.where.self_out, torch.where)
    for name, kernel, operator, result in (
        ("remainder.Tensor", aten.remainder.Tensor_out, aten.remainder.Tensor, common),
        ("fmod.Tensor", aten.fmod.Tensor_out, aten.fmod.Tensor, common),
        ("floor_divide", aten.floor_divide.out, aten.floor_divide.default, common),
        ("div.Tensor_mode", aten.div.out_mode, aten.div.Tensor_mode, kinds.rounded),
    ):
        combine(name, kernel, _of_divisors(operator), result)
    for name in ("maximum", "minimum"):
        combine(name, getattr(aten, name).out, getattr(aten, name).default)
    for name, kernel, kind in (
        ("clamp", aten.clamp.out, kinds.limited),
        ("clamp.Tensor", aten.clamp.Tensor_out, kinds.limited),
        ("abs", aten.abs.out, kinds.real),
        *((name, getattr(aten, name).out, same) for name in _OF_ONE),
    ):
        _follow(torch, name, kernel, kind, is_inverse=name == "bitwise_not")


def _answer_copies(torch: Any, same: Callable[..., Any]) -> None:
    """Operators that return a copy of the first argument, some with a part changed."""
    changes: dict[str, Any] = {"is_change": True, "takes_floats": contents.FEW_FRACTIONS}
    for name in _CHANGING:
        packet, _, overload = name.partition(".")
        out = getattr(getattr(torch.ops.aten, packet), f"{overload}_out".lstrip("_"))
        _follow(torch, name, out, same, on_host=sizes.operator(torch, name), **changes)
    for names, how in (
        (_CHANGING_CLONES, changes),
        (("masked_fill.Scalar", "block_diag"), {"is_change": True}),
        (("clone", "repeat", "constant_pad_nd"), {"is_copy": True}),
    ):
        for name in names:
            operator = sizes.operator(torch, name)
            _follow(torch, name, sizes.generic(torch, operator), on_host=operator, **how)


def _follow(torch: Any, name: str, kernel: Any, *of: Any, **how: Any) -> None:
    """Follows one operator.  of: the dtypes of the results that the kernel writes to, named by how["into"]."""
    on_host = how.pop("on_host", None) or getattr(torch, name.partition(".")[0])
    kinds = dict(zip(how.pop("into", ("out",)), of, strict=False))
    found = _followed(torch, on_host, kernel, kinds, _How(name in _JOINING, **how))
    sizes.implement(torch, "CUDA", name, found)


def _one_is_in(torch: Any) -> Callable[..., Any]:
    """isin() of a number: torch would put it on the device wrapped in a way that cannot be passed to Python."""

    def call(number: Any, others: Any, **how: Any) -> Any:
        kind = torch.tensor(number, device="cpu").dtype
        number = torch.scalar_tensor(number, dtype=kind, device=others.device)
        return torch.ops.aten.isin.Tensor_Tensor(number, others, **how)

    return call


def _own(torch: Any, operator: Any) -> Callable[..., Any] | None:
    """The CUDA kernel of torch, for operators without an `out` variant; None where torch does not hand it out."""
    kernel = sizes.kernel(torch, operator, "CUDA")
    if kernel is None:
        return None
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return functools.partial(kernel.call_boxed, keys)


def _of_numbers(torch: Any, name: str) -> Callable[..., Any]:
    """A kernel for two tensors, of which one may arrive as a Python number."""
    operator = getattr(torch.ops.aten, name)

    def call(x: Any, other: Any, *, out: Any) -> Any:
        if not torch.is_tensor(x):  # only torch.bitwise_and() and the like
            x, other = other, x
        by = operator.Tensor_out if torch.is_tensor(other) else operator.Scalar_out
        return by(x, other, out=out)

    return call


def _of_tensors(torch: Any, operator: Any) -> Callable[..., Any]:
    """The same for operators that have no variant for numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not all(map(torch.is_tensor, args)):
            kind = torch.result_type(*args[-2:])
            args = tuple(
                each if torch.is_tensor(each) else torch.tensor(each, device="cpu").to(kind)
                for each in args
            )
        return operator(*args, **kwargs)

    return call


def _of_divisors(operator: Any) -> Callable[..., Any]:
    """Integer division: a device divides by 0 as well, with an undefined result."""

    def call(x: Any, by: Any, **mode: Any) -> Any:
        if not (by != 0).all():
            raise NotImplementedError
        return operator(x, by, **mode)

    return call


def _followed(
    torch: Any, on_host: Any, kernel: Any, kinds: dict[str, Callable[..., Any]], how: _How
) -> Callable[..., Any]:
    """Calls the kernel, then writes what it would have computed into its results, if that is known.

    kinds: the dtypes of the tensors that the kernel writes to; empty if it allocates its result itself.
    """
    takes_floats, among = how.takes_floats, how.among
    follows_floats = takes_floats > 0 or how.is_part or among is not None

    def tell(results: Any, args: Any, kwargs: Any) -> bool:
        """Writes the results if they are known; says whether they are."""
        are_masks = not follows_floats and _has_fractions(torch, args)
        if are_masks and not _may_be_masks(torch, args):
            return False
        if any(each.nbytes > contents.MOST_BYTES for each in results):
            return False
        is_few = takes_floats > 0 and args[0].nbytes <= takes_floats
        there = contents.operands(torch, args, is_few or are_masks, takes_blank=how.takes_blank)
        is_mask = how.is_inverse and args[0].dtype == torch.bool
        if there is None and is_mask and contents.is_still_false(args[0]):
            there = [contents.blank(torch, args[0])]
        if there is not None and not (are_masks and _have_others(torch, args, there)):
            try:
                told = on_host(*there, **kwargs)
            except (IndexError, RuntimeError):  # unsigned on the host, division by 0, wrong guess
                return False
            depth = contents.depth(torch, args)
            for each, value in zip(results, told if len(results) > 1 else (told,), strict=True):
                contents.write(torch, each, value, depth=depth)
            return depth <= contents.MOST_DEPTH
        if among is not None and args[0].is_floating_point():
            n, dim = among(*args, **kwargs)
            last = results[-1].movedim(dim, -1) if results[-1].dim() > 0 else results[-1]
            # From the middle on, because the tokens that end or pad a text are among the first or the last.
            places = (torch.arange(last.numel(), device="cpu") + n // 2) % max(n, 1)
            contents.write(torch, last, places.view(last.shape), depth=1)
        elif how.orders and _is_within(torch, how.orders, *args):
            contents.write(torch, results[0], True)
        elif how.is_part:
            contents.note_share(results[0], contents.share(args[0]))
        return False

    def call(*args: Any, **kwargs: Any) -> Any:
        found = {}
        if kinds:
            device = _device(torch, args)
            found = {
                name: torch.empty(0, dtype=kind(*args, **kwargs), device=device)
                for name, kind in kinds.items()
            }
        made = kernel(*args, **kwargs, **found)
        results = tuple(found.values()) or (made,)
        if how.is_change and made.is_floating_point():
            # A shortcut: mostly nothing was ever known about floating-point tensors.
            are_noted = [contents.is_noted(each) for each in args if _is_fraction(torch, each)]
            if not any(are_noted) and not contents.is_noted(made):
                return made
            is_told = all(are_noted) and tell(results, args, kwargs)
        else:
            is_told = tell(results, args, kwargs)
        if not is_told and (how.is_change or (how.is_copy and _is_changed(args[0]))):
            contents.doubt(torch, results[0])
        return made

    return call


def _is_within(torch: Any, order: str, x: Any, other: Any) -> bool:
    """Is one side infinite, so that the comparison holds for any number?  A first loss is compared with inf."""
    low, high = (x, other) if order in ("lt", "le") else (other, x)
    return bool(_one_there(torch, low) == -math.inf or _one_there(torch, high) == math.inf)


def _one_there(torch: Any, x: Any) -> Any:
    """The single number that the program put there; None if it is unknown or there are several."""
    if not torch.is_tensor(x):
        return x
    if x.numel() != 1 or not contents.is_plain(torch, x):
        return None
    there = contents.put(torch, x, True)
    return None if there is None else there.item()


def _is_fraction(torch: Any, x: Any) -> bool:
    return bool(torch.is_tensor(x) and x.is_cuda and x.is_floating_point())


def _is_changed(x: Any) -> bool:
    """Was it changed in place by something that was not followed?  Of a list: was one, or do their dtypes differ?

    Tensors of several dtypes are joined by copying one after the other.  Lists of floating-point tensors are skipped.
    """
    if not isinstance(x, list):
        return not contents.is_current(x)
    if len(x) > 1 and x[0].is_floating_point():
        return False
    return any(each.dtype != x[0].dtype or not contents.is_current(each) for each in x)


def _has_fractions(torch: Any, args: Any) -> bool:
    """Is a floating-point device tensor among them?  Only masks are followed then.  Looks at a list's first element."""
    for each in args:
        one = each[0] if isinstance(each, (list, tuple)) and each else each
        if torch.is_tensor(one) and one.is_cuda and one.is_floating_point():
            return True
    return False


def _may_be_masks(torch: Any, args: Any) -> bool:
    """Are the floating-point tensors all small and known?  Programs multiply, repeat and invert masks as floats too."""
    for each in args:
        if isinstance(each, (list, tuple)):
            if not _may_be_masks(torch, each):
                return False
        elif torch.is_tensor(each) and each.is_cuda and each.is_floating_point():
            is_few = each.nbytes <= contents.FEW_FRACTIONS and contents.is_plain(torch, each)
            if not is_few or not contents.is_known(each):
                return False
    return True


def _have_others(torch: Any, args: Any, there: Any) -> bool:
    """Does a large floating-point tensor hold values other than -2 to 2, which masks are made of?"""
    for each, found in zip(args, there, strict=True):
        if isinstance(each, (list, tuple)):
            is_other = _have_others(torch, each, found)
        elif torch.is_tensor(each) and each.is_cuda and each.is_floating_point():
            is_many = each.numel() > contents.FEW_NUMBERS
            is_other = is_many and not sum(found == n for n in range(-2, 3)).all()  # of float8, too
        else:
            is_other = False
        if is_other:
            return True
    return False


def _along(x: Any, dim: int | None = None, *_: Any, **_names: Any) -> tuple[int, int]:
    """The number of positions, and the dimension along which several results lie."""
    return int(x.numel() if dim is None or x.dim() == 0 else x.shape[dim]), -1


def _device(torch: Any, args: Any) -> Any:
    """The device of the first device tensor."""
    for each in args:
        if isinstance(each, (list, tuple)):
            found = _device(torch, each)
            if found is not None:
                return found
        elif torch.is_tensor(each) and each.is_cuda:
            return each.device
    return None


def _converted(torch: Any) -> Callable[..., Any]:
    """int(), long(), bool(), float()."""
    convert = torch.ops.aten._to_copy.default
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def is_small(x: Any, made: Any) -> bool:
        is_few = made.nbytes <= contents.FEW_FRACTIONS and x.element_size() > 1
        return is_few and x.numel() > 0 and contents.is_plain(torch, x)

    def call(x: Any, **kwargs: Any) -> Any:
        made = convert._op_dk(generic, x, **kwargs)
        is_whole = not (made.is_floating_point() or made.is_complex())
        if x.is_cuda and not made.is_cuda:
            contents.note_brought(torch, x, made)
        # What a program copies to the device is known, zeros too.  But only small floating-point tensors are looked at,
        # and one of all zeros may be there to be filled in, like zeros that are made on the device.
        is_sure = is_whole or x.is_cuda or x.numel() == 1
        is_few = made.is_cuda and not is_sure and is_small(x, made)
        is_blank = is_few and not x.any()
        if is_blank and contents.put(torch, x) is not None and not contents.is_repeated(torch):
            contents.note_blank(made, 0)
        is_of_use = made.is_cuda and (is_sure or (is_few and not is_blank))
        takes_floats = is_whole or (x.is_cuda and _may_be_masks(torch, (x,)))
        known = contents.put(torch, x, takes_floats) if is_of_use else None
        if known is not None and not is_whole and _have_others(torch, (x,), (known,)):
            known = None
        if known is not None:
            contents.write(torch, made, known, depth=contents.depth(torch, (x,)))
        elif made.is_cuda and x.is_cuda:
            if made.dtype == x.dtype and _is_changed(x):
                contents.doubt(torch, made)
        elif is_of_use and contents.is_old(torch, x):
            contents.note_random(torch, made)
        return made

    return call
