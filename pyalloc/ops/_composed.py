"""The registered ops in a form that torch.func can transform, to any order and in any nesting.

Autograd formulas registered with torch.library serve plain autograd and the compiler, but they refuse `grad` and
silently ignore `jvp`. So while a transform is active, each op is called as an autograd.Function made here, whose
backward calls another one. Derivatives beyond the kernels' forward and backward come from the formulas in `_eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyalloc.ops import _flops

Rule = Callable[..., tuple[Any, Any]]

try:
    _default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
except AttributeError:
    raise ImportError(
        f"pyalloc.ops needs PyTorch 2.8 or newer; this is {torch.__version__}"
    ) from None
_Kind = torch._C._functorch.TransformType
_is_included = torch._C._dispatch_tls_is_dispatch_key_included


# Whether make_fx(pre_dispatch=True) traces this call; its mode is on a stack of its own.
is_before_dispatch: Callable[[], bool] = partial(_is_included, torch._C.DispatchKey.PreDispatch)


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation applies to calls made now."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether x has a tangent in a forward-mode differentiation."""
    return forward_ad._current_level >= 0 and _at_any_level(x, _has_own_tangent)


def tangent_depth(x: Tensor) -> int:
    """How many nested forward-mode transforms of torch.func have a tangent for x, or for its tangent."""
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    if innermost is None:
        return 0
    tangent = forward_ad.unpack_dual(x).tangent if innermost.key() == _Kind.Jvp else None
    level = innermost.level()
    outside = [
        functorch.get_unwrapped(y) if functorch.maybe_get_level(y) == level else y
        for y in (x, tangent)
        if y is not None
    ]
    popped = functorch.pop_dynamic_layer_stack()
    try:
        return (tangent is not None) + max(map(tangent_depth, outside))
    finally:
        functorch.push_dynamic_layer_stack(popped)


def has_gradient(x: Tensor) -> bool:
    """Whether a reverse-mode differentiation asks for x's gradient."""
    return torch.is_grad_enabled() and _at_any_level(x, lambda x: bool(x.requires_grad))


def _has_own_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def _at_any_level(x: Tensor, holds: Callable[[Tensor], bool]) -> bool:
    """Whether it holds for x as any active transform sees it: to an inner one, an outer's variable is a constant."""
    if holds(x):
        return True
    functorch = torch._C._functorch
    innermost = None if torch.compiler.is_compiling() else functorch.peek_interpreter_stack()
    if innermost is None:
        return False
    outside = functorch.get_unwrapped(x) if functorch.maybe_get_level(x) == innermost.level() else x
    popped = functorch.pop_dynamic_layer_stack()
    try:
        return _at_any_level(outside, holds)
    finally:
        functorch.push_dynamic_layer_stack(popped)


def _kinds_at_work() -> list[Any]:
    """The kinds of the torch.func transforms around this call, innermost last."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def is_pushed_twice(x: Tensor) -> bool:
    """Whether nested forward modes ask for more than a first derivative with respect to x."""
    if torch.compiler.is_compiling() or _kinds_at_work().count(_Kind.Jvp) < 2:
        return False
    return tangent_depth(x) > 1


def needs_more_than_once() -> bool:
    """Whether, as far as can be seen, transforms will ask for anything but one reverse-mode derivative."""
    if torch.compiler.is_compiling():
        return False
    kinds = _kinds_at_work()
    return forward_ad._current_level >= 0 or _Kind.Jvp in kinds or kinds.count(_Kind.Grad) > 1


def is_batched(grad: Tensor | None) -> bool:
    """Whether a backward runs for a batch of gradients: is_grads_batched, which is no torch.func transform."""
    return grad is not None and bool(torch._C._functorch.is_legacy_batchedtensor(grad))


def is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint handles what is saved for backward now: its forward, or its recomputation."""
    hooks = _default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def composable(
    op: Callable[..., Any],
    *,
    setup: Callable[..., None],
    vjp: Callable[..., Any],
    rule: Rule,
    plain: Callable[..., Any],
) -> Callable[..., Any]:
    """An op's form for transforms, returning a tensor or a tuple of tensors.

    Args:
        op: the registered op, run below all transforms.
        setup: as for torch.library's register_autograd.
        vjp: (ctx, *grads), must call composable forms itself.
        rule: (call, info, in_dims, *args) as for register_vmap; calls the op through call.
        plain: the same outputs in differentiable torch, for forward-mode.
    """

    class Composed(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup(ctx, inputs, output)
            ctx.constants = [None if isinstance(x, Tensor) else (x,) for x in inputs]
            ctx.save_for_forward(*(x for x in inputs if isinstance(x, Tensor)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return vjp(ctx, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
            return rule(call, info, in_dims, *args)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            tensors = iter(ctx.saved_tensors)
            args = [next(tensors) if x is None else x[0] for x in ctx.constants]
            moving = [i for i, t in enumerate(tangents) if t is not None]
            pulled = _pull(plain, args, moving)
            return _push(pulled, [args[i] for i in moving], [tangents[i] for i in moving])

    def call(*args: Any) -> Any:
        # Neither torch's compiler (2.15 gives wrong second derivatives, older versions none) nor make_fx
        # before dispatch can follow a Function through transforms; plain torch they can follow.
        if torch.compiler.is_compiling() or is_before_dispatch():
            return plain(*args)
        _flops.register_where_modes_are()
        kinds = _kinds_at_work()
        # torch switches forward mode off while it runs a Function's jvp: an outer jvp would see no tangents.
        if kinds.count(_Kind.Jvp) > 1:
            return plain(*args)
        if _Kind.Functionalize not in kinds:
            return Composed.apply(*args)
        # functionalize() has no rule for a Function, and the registered op would lose the derivatives.
        derives = forward_ad._current_level >= 0 or _Kind.Jvp in kinds or _Kind.Grad in kinds
        return plain(*args) if derives else op(*args)

    return call


def _pull(
    plain: Callable[..., Any], args: Sequence[Any], moving: Sequence[int]
) -> Callable[..., Any]:
    """The formula as a function of only the arguments that have tangents."""

    def function(*xs: Tensor) -> Any:
        given = list(args)
        for i, x in zip(moving, xs, strict=True):
            given[i] = x
        return plain(*given)

    return function


def _push(
    function: Callable[..., Any], primals: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> Any:
    """The Jacobian J times the tangents, as the derivative of u -> u J: forward mode itself does not nest."""
    out, pull = torch.func.vjp(function, *primals)
    anywhere = torch.utils._pytree.tree_map(torch.zeros_like, out)
    _, pull_again = torch.func.vjp(pull, anywhere)
    return pull_again(tuple(tangents))[0]
