"""What hooks ask of a program's tensors, parameters and optimizers, which may be of any class."""

from __future__ import annotations

from collections.abc import Iterator, ValuesView
from typing import Any

_HOLDERS = (ValuesView, list, tuple)
DEPTH = 3  # nesting of dicts and lists in state or inputs, and of tensors made of others
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


def within(holder: Any, depth: int = 0) -> Iterator[Any]:
    """The values in an optimizer's state for a parameter, or in a module's inputs.

    Also those in nested dicts and lists, which may be cyclic.
    """
    values = holder.values() if isinstance(holder, dict) else holder
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


def has_history(inputs: Any, kind: type[Any]) -> bool:
    """Was a tensor (of this kind) among a module's inputs computed from what has a gradient?"""
    return any(isinstance(each, kind) and each.grad_fn is not None for each in within(inputs))


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
