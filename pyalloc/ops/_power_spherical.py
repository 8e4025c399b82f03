"""PowerSpherical's kernels: how they are called, and how they are registered with torch."""
# mypy: disable-error-code="untyped-decorator"
#   mypy does not follow torch: what it decorates has no type

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyalloc.ops import _cuda, _eager, _sharded
from pyalloc.ops._composed import composable, is_transformed
from pyalloc.ops._library import (
    SOMEWHERE,
    Call,
    PowerSphericalArgs,
    dense_rows,
    dtype_code,
    packer,
    places,
    resolved,
    threads,
)
from pyalloc.ops._plans import Plans, maker, nothing, row_major
from pyalloc.ops._sizes import is_empty
from pyalloc.ops._vmap import asks_gradient, choose_backward, fold, is_plain, unfold

# The kernels' view of the problem, here and in csrc/ops: value (l, t, D), loc (m, t, D),
# scale and log_weights (m, t); the log-probability is (t, l, m) if t_first, else (l, m, t).

_pack = packer(PowerSphericalArgs)
_NAMES = ("value", "loc", "scale", "log_weights")
_FORWARD_PLACES = places(PowerSphericalArgs, *_NAMES, "out")
_BACKWARD_PLACES = places(
    PowerSphericalArgs, *_NAMES, "out", "grad", *(f"d_{name}" for name in _NAMES), "workspace"
)
_NO_VIEW = (0, 0, 0)
_NO_RESULT = (0, 0, 0, 0)


def _view(x: Tensor | None) -> tuple[int, ...]:
    """Struct pya_ops_view."""
    return _NO_VIEW if x is None else (SOMEWHERE, *x.stride()[:2])


def _result(stride: Sequence[int], t_first: bool) -> tuple[int, ...]:
    """Pointer to a result or its gradient, and its strides of l, m and t."""
    if len(stride) == 2:
        a, c = stride
        return (SOMEWHERE, c, 0, a) if t_first else (SOMEWHERE, a, 0, c)
    a, b, c = stride
    return (SOMEWHERE, b, c, a) if t_first else (SOMEWHERE, a, b, c)


def _args(
    sources: Sequence[Tensor | None],
    out: tuple[int, ...],
    grad: tuple[int, ...],
    gradients: Sequence[Tensor | None],
) -> bytes:
    """The packed structure; sources and gradients are of value, loc, scale and log_weights."""
    value, loc, *_ = sources
    assert value is not None
    assert loc is not None
    n_l, n_t, dim = value.shape
    n_m = loc.shape[0]
    return _pack(
        n_l,
        n_m,
        n_t,
        dim,
        *(number for x in sources for number in _view(x)),
        *out,
        *grad,
        *(number for x in gradients for number in _view(x)),
        0,
        dtype_code(value.dtype),
        threads(value.numel() * n_m),
    )


def _log_prob_shape(value: Tensor, loc: Tensor, t_first: bool) -> tuple[int, int, int]:
    n_l, n_t, _ = value.shape
    n_m = loc.shape[0]
    return (n_t, n_l, n_m) if t_first else (n_l, n_m, n_t)


def _mixture_shape(value: Tensor, t_first: bool) -> tuple[int, int]:
    n_l, n_t, _ = value.shape
    return (n_t, n_l) if t_first else (n_l, n_t)


class _Forward(NamedTuple):
    call: Call
    out: Callable[[], Tensor]


def _plan_forward(
    value: Tensor,
    loc: Tensor,
    scale: Tensor,
    log_weights: Tensor | None,
    t_first: bool,
    on_device: bool,
) -> _Forward:
    is_mixture = log_weights is not None
    shape = _mixture_shape(value, t_first) if is_mixture else _log_prob_shape(value, loc, t_first)
    out = _result(row_major(shape), t_first)
    args = _args((value, loc, scale, log_weights), out, _NO_RESULT, (None,) * 4)
    what = "mixture_forward" if is_mixture and not on_device else "forward"
    call = Call.of("ps", what, args, _FORWARD_PLACES, on_device=on_device)
    return _Forward(call, maker(shape, value))


class _Backward(NamedTuple):
    call: Call
    workspace: Callable[[], Tensor | None]


def _plan_backward(
    value: Tensor,
    loc: Tensor,
    scale: Tensor,
    log_weights: Tensor | None,
    out: Tensor | None,
    grad: Tensor,
    *rest: Any,
) -> _Backward:
    """The rest: gradients (None: not wanted), t_first, on_device."""
    *gradients, t_first, on_device = rest
    of_out = _NO_RESULT if out is None else _result(out.stride(), t_first)
    of_grad = _result(grad.stride(), t_first)
    args = _args((value, loc, scale, log_weights), of_out, of_grad, gradients)
    what = "backward" if log_weights is None or on_device else "mixture_backward"
    return _Backward(
        Call.of("ps", what, args, _BACKWARD_PLACES, on_device=on_device),
        maker((_cuda.room("ps", args),), value) if on_device else nothing,
    )


_READS = (dense_rows, dense_rows, resolved, resolved)
_forward_plans = Plans(_READS, _plan_forward)
_backward_plans = Plans((*_READS, None, resolved, None, None, None, None), _plan_backward)


def _forward_kernel(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor | None, t_first: bool
) -> Tensor:
    on_device = _cuda.on_device(value)
    plan, tensors = _forward_plans.find((value, loc, scale, log_weights), t_first, on_device)
    out: Tensor = plan.out()
    _cuda.perform(plan.call, value, *tensors, out)
    return out


def _like(x: Tensor) -> Tensor:
    """An uninitialised gradient of x.

    Rows of numbers have x's own layout unless that has gaps. Others are small and do not: torch sums those of an
    expanded x in the order of their layout, and that should give the same bits for any x.
    """
    out = torch.empty_like(x) if x.dim() == 3 else None
    return x.new_empty(x.shape) if out is None or out.stride(-1) != 1 else out


def _backward_kernel(
    grad: Tensor,
    out: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    t_first: bool,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients that are needed, None for the others."""
    on_device = _cuda.on_device(grad)
    grads = [_like(x) if need else None for x, need in zip(inputs, needs, strict=False)]
    places = (*inputs, out, grad, *grads, *(None,) * (4 - len(grads)))
    plan, tensors = _backward_plans.find(places, t_first, on_device)
    _cuda.perform(plan.call, grad, *tensors, plan.workspace())
    return grads


def _plain_gradients(
    inputs: Sequence[Tensor], grad: Tensor, needs: list[bool], formula: Callable[..., Tensor]
) -> list[Tensor]:
    """Gradients by plain torch, in the memory layout that the registered op promises."""
    found = _eager.first_derivative(inputs, grad, needs, formula)
    return [
        _like(x).copy_(g) if need else g for x, g, need in zip(inputs, found, needs, strict=True)
    ]


def run_direct(tensors: Sequence[Tensor], t_first: bool) -> Tensor:
    """Like run(), for calls that only autograd sees and that the kernels can serve."""
    call: Callable[..., Tensor] = _Direct.apply if asks_gradient(tensors) else _forward_kernel
    out = call(*tensors[:3], tensors[3] if len(tensors) == 4 else None, t_first)
    return out


def run(tensors: Sequence[Tensor], t_first: bool) -> Tensor:
    """Calls the registered op; in plain eager mode does the same without the dispatcher's cost.

    Takes value, loc, scale and, for a mixture, log_weights.
    """
    is_mixture = len(tensors) == 4
    call = torch.ops.pyalloc.power_spherical_log_prob
    if is_transformed():
        call = _transformable_mixture if is_mixture else _transformable
    elif is_plain(tensors) and _cuda.is_direct("ps", *tensors[:2]):
        return run_direct(tensors, t_first)
    elif _sharded.is_sharded(tensors):
        call = _sharded.spherical
    elif is_mixture:
        call = torch.ops.pyalloc.power_spherical_mixture_log_prob
    out: Tensor = call(*tensors, t_first)
    return out


@torch.library.custom_op("pyalloc::power_spherical_log_prob", mutates_args=())
def _log_prob(value: Tensor, loc: Tensor, scale: Tensor, t_first: bool) -> Tensor:
    if _cuda.declines(value, "ps") or is_empty(value, loc):
        out = _eager.power_spherical(value, loc, scale)
        return (out if t_first else out.permute(1, 2, 0)).contiguous()
    return _forward_kernel(value, loc, scale, None, t_first)


@_log_prob.register_fake
def _(value: Tensor, loc: Tensor, scale: Tensor, t_first: bool) -> Tensor:
    return value.new_empty(_log_prob_shape(value, loc, t_first))


@torch.library.custom_op("pyalloc::power_spherical_log_prob_backward", mutates_args=())
def _log_prob_backward(
    grad: Tensor, value: Tensor, loc: Tensor, scale: Tensor, t_first: bool, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    if _cuda.declines(value, "ps") or is_empty(value, loc):
        g = grad if t_first else grad.permute(2, 0, 1)
        inputs = (value, loc, scale)
        d_value, d_loc, d_scale = _plain_gradients(inputs, g, needs, _eager.power_spherical)
    else:
        inputs_of_either = (value, loc, scale, None)
        found = _backward_kernel(grad, None, inputs_of_either, t_first, needs)
        d_value, d_loc, d_scale = (grad.new_empty(0) if g is None else g for g in found)
    return d_value, d_loc, d_scale


@_log_prob_backward.register_fake
def _(
    grad: Tensor, value: Tensor, loc: Tensor, scale: Tensor, t_first: bool, needs: list[bool]
) -> tuple[Tensor, ...]:
    return tuple(
        _like(x) if need else x.new_empty(0)
        for x, need in zip((value, loc, scale), needs, strict=True)
    )


@torch.library.custom_op("pyalloc::power_spherical_mixture_log_prob", mutates_args=())
def _mixture(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, t_first: bool
) -> Tensor:
    if _cuda.declines(value, "ps") or is_empty(value, loc):
        out = _eager.power_spherical_mixture(value, loc, scale, log_weights)
        return (out.t() if t_first else out).contiguous()
    return _forward_kernel(value, loc, scale, log_weights, t_first)


@_mixture.register_fake
def _(value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, t_first: bool) -> Tensor:
    return value.new_empty(_mixture_shape(value, t_first))


@torch.library.custom_op("pyalloc::power_spherical_mixture_log_prob_backward", mutates_args=())
def _mixture_backward(
    grad: Tensor,
    out: Tensor,
    value: Tensor,
    loc: Tensor,
    scale: Tensor,
    log_weights: Tensor,
    t_first: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (value, loc, scale, log_weights)
    if _cuda.declines(value, "ps") or is_empty(value, loc):
        g = grad.t() if t_first else grad
        grads = _plain_gradients(inputs, g, needs, _eager.power_spherical_mixture)
    else:
        found = _backward_kernel(grad, out, inputs, t_first, needs)
        grads = [grad.new_empty(0) if g is None else g for g in found]
    d_value, d_loc, d_scale, d_log_weights = grads
    return d_value, d_loc, d_scale, d_log_weights


@_mixture_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    value: Tensor,
    loc: Tensor,
    scale: Tensor,
    log_weights: Tensor,
    t_first: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    sources = (value, loc, scale, log_weights)
    return tuple(
        _like(x) if need else x.new_empty(0) for x, need in zip(sources, needs, strict=True)
    )


def _optional(grads: Sequence[Tensor], needs: list[bool]) -> list[Tensor | None]:
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _log_prob_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.t_first = inputs
    ctx.save_for_backward(*tensors)


def _log_prob_vjp(ctx: Any, grad: Tensor, backward: Any = None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    backward = backward or torch.ops.pyalloc.power_spherical_log_prob_backward
    grads = backward(grad, *ctx.saved_tensors, ctx.t_first, needs)
    return (*_optional(grads, needs), None)


_log_prob.register_autograd(_log_prob_vjp, setup_context=_log_prob_setup)


def _log_prob_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.t_first, ctx.needs = inputs
    ctx.save_for_backward(*tensors)


def _log_prob_backward_vjp(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    grad, *inputs = ctx.saved_tensors
    formula = partial(_plain, t_first=ctx.t_first)
    return (*_eager.second_derivative(inputs, grad, grads, ctx.needs, formula), None, None)


_log_prob_backward.register_autograd(_log_prob_backward_vjp, setup_context=_log_prob_backward_setup)


def _mixture_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.t_first = inputs
    ctx.save_for_backward(output, *tensors)


def _mixture_vjp(ctx: Any, grad: Tensor, backward: Any = None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:4])
    backward = backward or torch.ops.pyalloc.power_spherical_mixture_log_prob_backward
    grads = backward(grad, *ctx.saved_tensors, ctx.t_first, needs)
    return (*_optional(grads, needs), None)


_mixture.register_autograd(_mixture_vjp, setup_context=_mixture_setup)


def _mixture_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad, _, *tensors, ctx.t_first, ctx.needs = inputs
    ctx.save_for_backward(grad, *tensors)


def _mixture_backward_vjp(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    grad, *inputs = ctx.saved_tensors
    formula = partial(_plain_mixture, t_first=ctx.t_first)
    # out is a function of the inputs, so what its gradient would be is already part of theirs.
    g, *rest = _eager.second_derivative(inputs, grad, grads, ctx.needs, formula)
    return (g, None, *rest, None, None)


_mixture_backward.register_autograd(_mixture_backward_vjp, setup_context=_mixture_backward_setup)


class _Direct(torch.autograd.Function):
    """Either registered op, called without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        loc: Tensor,
        scale: Tensor,
        log_weights: Tensor | None,
        t_first: bool,
    ) -> Tensor:
        out = _forward_kernel(value, loc, scale, log_weights, t_first)
        ctx.t_first = t_first
        ctx.save_for_backward(None if log_weights is None else out, value, loc, scale, log_weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        out, *inputs = ctx.saved_tensors
        # a mixture saved its result and log_weights, otherwise both are None
        needs = list(ctx.needs_input_grad[: 3 if out is None else 4])
        transformable = _transformable_mixture_backward
        name = "power_spherical_mixture_log_prob_backward"
        if out is None:
            transformable, name = _transformable_backward, "power_spherical_log_prob_backward"
        backward = choose_backward((grad,), transformable, _backward_kernel, name)
        if backward is _backward_kernel:
            grads = backward(grad, out, tuple(inputs), ctx.t_first, needs)
        elif out is None:
            grads = backward(grad, *inputs[:3], ctx.t_first, needs)
        else:
            grads = backward(grad, out, *inputs, ctx.t_first, needs)
        return (*_optional(grads, needs), *(None,) * (5 - len(needs)))


def _plain(value: Tensor, loc: Tensor, scale: Tensor, t_first: bool) -> Tensor:
    out = _eager.power_spherical(value, loc, scale)
    return out if t_first else out.permute(1, 2, 0)


def _plain_mixture(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, t_first: bool
) -> Tensor:
    out = _eager.power_spherical_mixture(value, loc, scale, log_weights)
    return out.t() if t_first else out


def _plain_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, t_first, needs = rest
    return tuple(_eager.first_derivative(inputs, grad, needs, partial(_plain, t_first=t_first)))


def _plain_mixture_backward(grad: Tensor, _out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *inputs, t_first, needs = rest
    formula = partial(_plain_mixture, t_first=t_first)
    return tuple(_eager.first_derivative(inputs, grad, needs, formula))


def _rule(call: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """Makes vmap's dimension a part of t, for either op."""
    n = info.batch_size
    *tensors, t_first = args
    out = call(*(fold(x, d, n, 1) for x, d in zip(tensors, in_dims[:-1], strict=True)), t_first)
    return unfold(out, n, 0 if t_first else out.dim() - 1), 0


def _backward_rule(
    call: Any, info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """For either op: takes the gradient (and the mixture's result), the inputs, t_first, needs."""
    n = info.batch_size
    *tensors, t_first, needs = args
    # results are (t, l, m) or (l, m, t) with three inputs, (t, l) or (l, t) with the mixture's four
    t_of_result = 0 if t_first else {3: 2, 4: 1}[len(needs)]
    at = [t_of_result] * (len(tensors) - len(needs)) + [1] * len(needs)
    folded = [fold(x, d, n, k) for x, d, k in zip(tensors, in_dims[:-2], at, strict=True)]
    found = call(*folded, t_first, needs)
    dims = tuple(0 if need else None for need in needs)
    return tuple(unfold(x, n, 1) if need else x for x, need in zip(found, needs, strict=True)), dims


_log_prob.register_vmap(partial(_rule, torch.ops.pyalloc.power_spherical_log_prob))
_mixture.register_vmap(partial(_rule, torch.ops.pyalloc.power_spherical_mixture_log_prob))
_log_prob_backward.register_vmap(
    partial(_backward_rule, torch.ops.pyalloc.power_spherical_log_prob_backward)
)
_mixture_backward.register_vmap(
    partial(_backward_rule, torch.ops.pyalloc.power_spherical_mixture_log_prob_backward)
)

_transformable_backward = composable(
    torch.ops.pyalloc.power_spherical_log_prob_backward,
    setup=_log_prob_backward_setup,
    vjp=_log_prob_backward_vjp,
    rule=_backward_rule,
    plain=_plain_backward,
)
_transformable = composable(
    torch.ops.pyalloc.power_spherical_log_prob,
    setup=_log_prob_setup,
    vjp=lambda ctx, grad: _log_prob_vjp(ctx, grad, _transformable_backward),
    rule=_rule,
    plain=_plain,
)
_transformable_mixture_backward = composable(
    torch.ops.pyalloc.power_spherical_mixture_log_prob_backward,
    setup=_mixture_backward_setup,
    vjp=_mixture_backward_vjp,
    rule=_backward_rule,
    plain=_plain_mixture_backward,
)
_transformable_mixture = composable(
    torch.ops.pyalloc.power_spherical_mixture_log_prob,
    setup=_mixture_setup,
    vjp=lambda ctx, grad: _mixture_vjp(ctx, grad, _transformable_mixture_backward),
    rule=_rule,
    plain=_plain_mixture,
)
