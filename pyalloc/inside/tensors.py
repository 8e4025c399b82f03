"""What hooks ask of a program's tensors, parameters and optimizers, which may be of any class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, ValuesView
from typing import Any

_HOLDERS = (ValuesView, list, tuple)
DEPTH = 3  # nesting of dicts and lists in an optimizer's state, and of tensors made of others
# What torch raises for tensors without an address: sparse, fake, wrapped and uninitialized.
_NO_ADDRESS = (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError)


def gradient(parameter: Any) -> Any:
    """A parameter's gradient.  None for a non-leaf that functional_call() put there: torch warns about its .grad."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def n_changes(tensor: Any) -> int:
    """The tensor's version: its number of in-place changes."""
    return 0 if tensor.is_inference() else int(tensor._version)


def parameters(optimizer: Any) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def state(optimizer: Any) -> Iterator[Any]:
    """The values in an optimizer's state, for all of its parameters."""
    for of_one in list(optimizer.state.values()):
        yield from within(of_one)


def within(state: Any, depth: int = 0) -> Iterator[Any]:
    """The values in an optimizer's state for a parameter, also in nested dicts and lists, which may be cyclic."""
    values = state.values() if isinstance(state, dict) else state
    for value in list(values) if isinstance(values, _HOLDERS) else ():
        if not isinstance(value, dict | list | tuple):
            yield value
        elif depth < DEPTH:
            yield from within(value, depth + 1)


def is_alike(one: Any, other: Any) -> bool:
    """Are two optimizers of one class, and the parameters of one all among those of the other?"""
    if type(one) is not type(other):
        return False
    a, b = parameters(one), parameters(other)
    return a <= b or b <= a


def has_history(values: Iterable[Any], kind: type[Any], depth: int = 0) -> bool:
    """Was a tensor (of this kind) among these, or in their lists and tuples, computed from what has a gradient?"""
    for value in values:
        if isinstance(value, kind):
            found = value.grad_fn is not None
        else:
            is_nest = isinstance(value, list | tuple) and depth < DEPTH
            found = is_nest and has_history(value, kind, depth + 1)
        if found:
            return True
    return False


def memory(tensor: Any) -> tuple[Any, int]:
    """A tensor's storage and its address, which is 0 if the tensor has no memory of its own."""
    try:
        storage = tensor.untyped_storage()
        return storage, int(storage.data_ptr())
    except _NO_ADDRESS:
        return None, 0


def parts(tensor: Any) -> list[Any]:
    """The tensors that a subclass without memory of its own is made of, as it declares them to torch.compile."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    try:
        return [getattr(tensor, name) for name in flatten(tensor)[0]] if flatten else []
    except _NO_ADDRESS:
        return []
