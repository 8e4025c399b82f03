"""Follows in-place changes to numbers and masks on the device: filling, assigning, counting, combining.

The operator runs on the device as usual.  If all its arguments are known, it runs again on the host, on the same
memory.  Otherwise torch's count of in-place changes (its version) shows that the tensor is no longer known.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import contents, sizes

_FILLING = ("fill_.Scalar", "fill_.Tensor", "copy_", "zero_")  # independent of the old contents
_MOVING = (
    *("masked_fill_.Scalar", "masked_fill_.Tensor", "masked_scatter_", "index_put_", "index_copy_"),
    *("index_fill_.int_Scalar", "index_fill_.int_Tensor", "scatter_.src", "scatter_.value"),
    *("tril_", "triu_", "index_add_", "scatter_add_"),
)
_COUNTING = (
    *(f"logical_{name}_" for name in ("and", "or", "xor", "not")),
    *("bitwise_not_", "clamp_", "clamp_min_", "clamp_max_", "cumsum_", "neg_"),
)
_COMBINING = tuple(
    f"{name}_.Tensor"
    for name in ("add", "sub", "mul", "div", "bitwise_and", "bitwise_or", "bitwise_xor")
)
_GIVEN = ("cumsum.out", "cat.out", "gather.out", "index_select.out")
_TOGETHER = {  # optimizers' step counters; NAdam's products
    "_foreach_add_.Scalar": "add_",
    "_foreach_mul_.ScalarList": "mul_",
}
_KINDS = {
    *("torch.bool", "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64"),
    *("torch.uint16", "torch.uint32", "torch.uint64"),
    *("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"),
    *("torch.complex64", "torch.complex128"),
}
_MOST_COUNTED = 8  # bytes of a floating-point tensor: a single counter


def answer(torch: Any) -> None:
    """Follows changes from now on, except to tensors that C++ makes in inference mode: those have no version."""
    contents.changes_are_followed = sizes.has_kernels(torch)
    for names, most in (
        (_FILLING, contents.MOST_FRACTIONS),
        (_MOVING, contents.MOST_FRACTIONS),
        (_COUNTING, _MOST_COUNTED),
    ):
        for name in names:
            _above(torch, "AutogradCUDA", name, functools.partial(_performed, torch, name, most))
    for name in _GIVEN:
        _above(torch, "AutogradCUDA", name, functools.partial(_written, torch, name))
    for name in _COMBINING:
        sizes.implement(torch, "CUDA", name, _combined(torch, name))
    for name in _TOGETHER:
        sizes.implement(torch, "CUDA", name, _counted_together(torch, name))
    _above(torch, "FuncTorchDynamicLayerFrontMode", "copy_", functools.partial(_of_tensors, torch))


def _above(torch: Any, key: str, name: str, made: Callable[[Any], Callable[..., Any]]) -> None:
    """Replaces torch's kernel with what `made` makes of it; does nothing if torch does not hand its kernel out."""
    kernel = sizes.kernel(torch, sizes.operator(torch, name), key)
    if kernel is not None:
        sizes.implement(torch, key, name, made(kernel), with_keyset=True)


def _performed(torch: Any, name: str, most_fractions: int, kernel: Any) -> Callable[..., Any]:
    """Follows an operator that the program calls, not those that other operators call on tensors of their own."""
    operator = sizes.operator(torch, name)
    follow = _following(torch, operator, most_fractions, name in _FILLING)
    below, without_modes = (
        torch._C._AutoDispatchBelowADInplaceOrView,
        torch._C._DisableTorchDispatch,
    )
    is_copy = name == "copy_"
    takes_tensor = [str(each.type) for each in operator._schema.arguments[1:2]] == ["Tensor"]

    def call(keyset: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if takes_tensor and not torch.is_tensor(args[0]):  # a number arrives as a Python number
            args = torch.tensor(args[0], device="cpu"), *args[1:]
        finish = None
        if x.is_cuda and contents.is_plain(torch, x):
            with below(), without_modes():
                finish = follow(x, args)
        kernel.call_boxed(keyset, x, *args, **kwargs)
        if finish is not None:
            with below(), without_modes():
                finish(x._version, kwargs)
        elif is_copy and args[0].is_cuda and not x.is_cuda:
            with below(), without_modes():
                contents.note_brought(torch, args[0], x)
        return x

    return call


def _written(torch: Any, name: str, kernel: Any) -> Callable[..., Any]:
    """Follows an operator whose result goes into a tensor that the program passes as `out`."""
    operator = sizes.operator(torch, name)

    def on_host(there: Any, *args: Any, **kwargs: Any) -> None:
        operator(*args, out=there, **kwargs)

    follow = _following(torch, on_host, contents.MOST_FRACTIONS, True)
    below, without_modes = (
        torch._C._AutoDispatchBelowADInplaceOrView,
        torch._C._DisableTorchDispatch,
    )

    def call(keyset: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
        finish = None
        if out.is_cuda and contents.is_plain(torch, out):
            with below(), without_modes():
                finish = follow(out, args)
        kernel.call_boxed(keyset, *args, out=out, **kwargs)
        if finish is not None:
            with below(), without_modes():
                finish(out._version, kwargs)
        return out

    return call


def _of_tensors(torch: Any, kernel: Any) -> Callable[..., Any]:
    """copy_() with a number as source: torch.func would wrap it into something that cannot be passed to Python."""

    def call(keyset: Any, x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        other = other if torch.is_tensor(other) else torch.tensor(other, device="cpu")
        kernel.call_boxed(keyset, x, other, *args, **kwargs)
        return x

    return call


def _combined(torch: Any, name: str) -> Callable[..., Any]:
    """Follows it at the CUDA key: at higher keys torch.func wraps numbers in a way that cannot be passed to Python."""
    operator = sizes.operator(torch, name)
    follow = _following(torch, operator, _MOST_COUNTED, False)
    generic = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional

    def call(x: Any, other: Any, **kwargs: Any) -> Any:
        if not torch.is_tensor(other):
            other = torch.tensor(other, device="cpu").to(torch.result_type(x, other))
        finish = follow(x, (other,))
        operator._op_dk(generic, x, other, **kwargs)
        if finish is not None:
            finish(x._version + 1, kwargs)  # the version is raised above this key
        return x

    return call


def _counted_together(torch: Any, name: str) -> Callable[..., Any]:
    """Follows an optimizer's counters, one per parameter; they are on the device if that is the default device."""
    kernel = sizes.kernel(torch, sizes.operator(torch, name), "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    count = _TOGETHER[name]

    def call(xs: Any, by: Any) -> None:
        if kernel is not None and any(x.nbytes > _MOST_COUNTED for x in xs):
            kernel.call_boxed(keys, xs, by)
            return
        numbers = by if isinstance(by, (list, tuple)) else itertools.repeat(by)
        for x, number in zip(xs, numbers, strict=False):
            getattr(x, count)(number)

    return call


def _following(
    torch: Any, operator: Any, most_fractions: int, is_fill: bool
) -> Callable[[Any, Any], Callable[[int, Any], None] | None]:
    """A function to call before the change; it returns the function to call after it, or None."""
    is_zero = operator is torch.ops.aten.zero_.default

    def is_here(x: Any) -> bool:
        if torch._C._get_tracing_state() is not None:  # jit.trace() would record our operators
            return False
        is_real = x.is_cuda and contents.is_plain(torch, x) and not x.is_nested
        return is_real and x.layout is torch.strided

    def is_few(x: Any) -> bool:
        is_whole = not (x.is_floating_point() or x.is_complex())
        most = contents.MOST_BYTES if is_whole else most_fractions
        return bool(x.nbytes <= most)

    def follow(x: Any, args: Any) -> Any:
        def count(version: int, _: Any) -> None:
            contents.note_count(x, version)

        if not is_here(x) or contents.is_gradient(torch, x):
            return None
        if contents.is_repeated(torch):
            contents.note_repeated(x)
            return None
        if x.is_inference():  # it has no version
            contents.forget(x, False)
            return None
        was_followed = contents.is_followed(x)

        def give_up(*_: Any) -> None:
            contents.forget(x, was_followed)

        is_empty = x.numel() == 0
        if is_empty or not is_few(x) or not _are_plain(torch, (x, *args)):
            return count if is_empty and contents.is_current(x) else give_up
        is_all = is_fill and x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
        there = contents.on_host(torch, x) if is_all else contents.put(torch, x, True)
        is_sure = there is not None
        there = there if is_sure else contents.blank(torch, x)
        is_whole = not (x.is_floating_point() or x.is_complex())
        is_next = there is None and is_fill and is_whole and contents.comes_next(x)
        there = contents.on_host(torch, x) if is_next else there
        given = None if there is None else contents.operands(torch, args, True, is_sure)
        depth = contents.depth(torch, args if is_all else (x, *args))
        if given is None or depth > contents.MOST_DEPTH:
            return give_up

        def finish(version: int, kwargs: Any) -> None:
            try:
                operator(there, *given, **kwargs)
            except (IndexError, RuntimeError):  # on a device such an error shows up later
                give_up()
                return
            if is_zero and is_all:
                contents.note_blank(x, version)
            elif is_next:
                contents.note_filled(x, version, depth)
            else:
                contents.note_change(x, version, is_all, depth)

        return finish

    return follow


def _are_plain(torch: Any, args: Any) -> bool:
    """Are all device tensors among args plain strided memory, of a dtype that the host has too?"""
    for each in args:
        if isinstance(each, (list, tuple)):
            if not _are_plain(torch, each):
                return False
        elif torch.is_tensor(each) and each.is_cuda:
            if each.is_nested or each.layout is not torch.strided or each.is_quantized:
                return False
            if each.is_conj() or each.is_neg() or str(each.dtype) not in _KINDS:
                return False
    return True
