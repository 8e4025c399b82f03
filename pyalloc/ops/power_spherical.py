"""Log-probabilities of PowerSpherical distributions without the product of samples and components."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyalloc.errors import OpError
from pyalloc.ops import _cuda, _power_spherical
from pyalloc.ops._check import broadcast, cast, compute_dtype, require_float
from pyalloc.ops._plans import keep, key_of_call
from pyalloc.ops._shapes import Axes, Steps, classify
from pyalloc.ops._sizes import holds
from pyalloc.ops._vmap import is_eager


def power_spherical_log_prob(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """Returns the log-density on the unit sphere in D dimensions, of every sample under every component.

    log p(x) = log C(kappa) + kappa log(1 + loc . x) (De Cao and Aziz 2020), in nats, where
    1 / C = 2^(a + b) pi^b Gamma(a) / Gamma(a + b) with b = (D - 1) / 2 and a = b + kappa;
    evaluated so that nothing large cancels: exact to float32 rounding for kappa from 0 to 1e7.

    Args:
        value: points on the sphere, (..., D).
        loc: unit mean directions, (..., D).
        scale: concentrations kappa >= 0, (...).

    Returns:
        A tensor of the three batch shapes broadcast as in torch, in the dtype that they promote to.

    Broadcasting dimensions that only value has against dimensions that only loc and scale have, such as
    (L, 1, T, D) against (M, T, D), costs no memory beyond the result, (L, M, T), whose strides may be
    those of a (T, L, M) tensor.

    The antipode gives -inf (the normaliser if kappa is 0), never NaN; gradients there are those
    one float32 step away from it.  float16 and bfloat16 are computed in float32.  Differentiable
    twice in every argument; the second derivative is plain torch and keeps (T, L, M) tensors.

    Raises:
        OpError: shapes do not broadcast, D is unequal or below 2, or dtypes or devices differ.
    """
    tensors = value, loc, scale
    key, layout = _find(tensors)
    if layout is not None:
        return layout.run(tensors)
    op = "power_spherical_log_prob"
    require_float(op, value=value, loc=loc, scale=scale)
    _require_same_dim(op, value, loc)
    params = broadcast(op, loc=loc.shape[:-1], scale=scale.shape)
    batch = broadcast(op, **{"loc with scale": params, "value": value.shape[:-1]})
    compute, result = compute_dtype(*tensors)
    key = key if all(x.dtype is compute for x in tensors) else None
    tensors = tuple(cast(x, compute) for x in tensors)
    if holds(math.prod(batch) == 0):
        return _empty_result(batch, *tensors).to(result)
    axes = classify(batch, value.shape[:-1], params, components=True)
    layout = _Layout(
        (
            axes.gathering(value.shape, axes.l, 1),
            axes.gathering(loc.shape, axes.m, 1),
            axes.gathering(scale.shape, axes.m, 0),
        ),
        axes.scattering(axes.l, axes.m),
        axes.t_first,
        key is not None and _cuda.is_direct("ps", value, loc),
    )
    if key is not None:
        keep(_known, key, layout)
    return cast(layout.run(tensors), result)


def power_spherical_mixture_log_prob(
    value: Tensor, loc: Tensor, scale: Tensor, log_weights: Tensor, *, dim: int = -1
) -> Tensor:
    """Returns the log-density of a mixture: logsumexp over components of log_weights + log-probability.

    Args:
        value: points on the sphere, (..., D).
        loc: unit mean directions, (..., K, D) for dim=-1.
        scale: concentrations, (..., K).
        log_weights: log mixture weights, (..., K); taken as they are, not normalised.
        dim: which batch dimension of the components (of the common shape of loc without D, scale
            and log_weights) is summed over.

    Returns:
        A tensor of the remaining component dimensions, broadcast with those of value without D.

    No tensor of samples times components is made, forward or backward: only the inputs and the
    result are kept.

    Raises:
        OpError: as in power_spherical_log_prob, or dim is out of range.
    """
    tensors = value, loc, scale, log_weights
    key, layout = _find(tensors, dim)
    if layout is not None:
        return layout.run(tensors)
    op = "power_spherical_mixture_log_prob"
    require_float(op, value=value, loc=loc, scale=scale, log_weights=log_weights)
    _require_same_dim(op, value, loc)
    params = broadcast(op, loc=loc.shape[:-1], scale=scale.shape, log_weights=log_weights.shape)
    if type(dim) is not int:
        try:
            dim = operator.index(dim)
        except TypeError:
            raise OpError(f"{op}: dim must be an integer, got {dim!r}") from None
    if not -len(params) <= dim < len(params):
        raise OpError(f"{op}: dim must be in the component shape {params}, got {dim}")
    # A number from here on, also for a compiler to which it is symbolic, since an earlier call had another.
    dim = next(k for k in range(len(params)) if k == dim % len(params))
    compute, result = compute_dtype(*tensors)
    key = key if all(x.dtype is compute for x in tensors) else None
    tensors = tuple(cast(x, compute) for x in tensors)
    n_components = params[dim]
    rest = params[:dim] + params[dim + 1 :]
    batch = broadcast(op, **{"what is left of loc": rest, "value": value.shape[:-1]})
    if holds(math.prod(batch) == 0) or holds(n_components == 0):
        empty = _empty_result(batch, *tensors)
        return (empty - math.inf if holds(n_components == 0) else empty).to(result)
    axes = classify(batch, value.shape[:-1], rest, components=False)
    layout = _Layout(
        (
            axes.gathering(value.shape, axes.l, 1),
            *(
                _components(axes, x.shape, [*params, *x.shape[x.dim() - n :]], dim, n)
                for x, n in ((loc, 1), (scale, 0), (log_weights, 0))
            ),
        ),
        axes.scattering(axes.l),
        axes.t_first,
        key is not None and _cuda.is_direct("ps", value, loc),
    )
    if key is not None:
        keep(_known, key, layout)
    return cast(layout.run(tensors), result)


@dataclass(frozen=True)
class _Layout:
    """How tensors get the shapes that _power_spherical.py takes, and its result the batch shape."""

    gathering: tuple[Steps, ...]
    scattering: Steps
    t_first: bool
    is_direct: bool  # as far as the tensors decide; is_eager() is asked each time

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        gathered = [s.apply(x) for s, x in zip(self.gathering, tensors, strict=True)]
        is_direct = self.is_direct and is_eager()
        run = _power_spherical.run_direct if is_direct else _power_spherical.run
        return self.scattering.apply(run(gathered, self.t_first))


_known: dict[Any, _Layout] = {}  # for tensors that are computed in their own dtype


def _find(tensors: tuple[Tensor, ...], dim: int = 0) -> tuple[Any, _Layout | None]:
    """The key for the layout of such tensors (None: it cannot be kept), and the layout, if it is known."""
    described = key_of_call(*tensors) if type(dim) is int else None
    if described is None:
        return None, None
    key = described, dim
    return key, _known.get(key)


def _components(
    axes: Axes, shape: Sequence[int], full: Sequence[int], dim: int, n_tail: int
) -> Steps:
    """Steps from a shape that broadcasts to full, (..., *tail) with components at dim, to (m, t, *tail)."""
    kept = [k for k in range(len(full)) if k != dim]
    order = [*kept[: len(kept) - n_tail], dim, *kept[len(kept) - n_tail :]]
    steps = Steps(shape).expand(full).permute(order)
    steps.then(axes.gathering([full[k] for k in order], None, 1 + n_tail))
    return steps.permute((1, 0, *range(2, 2 + n_tail)))


def _require_same_dim(op: str, value: Tensor, loc: Tensor) -> None:
    if value.dim() < 1 or loc.dim() < 1 or value.shape[-1] != loc.shape[-1]:
        raise OpError(
            f"{op}: value and loc must end in the same D, got value {tuple(value.shape)} "
            f"and loc {tuple(loc.shape)}"
        )
    if value.shape[-1] < 2:
        raise OpError(f"{op}: a sphere needs D >= 2, got D = {value.shape[-1]}")


def _empty_result(batch: tuple[int, ...], *inputs: Tensor) -> Tensor:
    """An empty tensor that depends on the inputs, so that their gradients are zeros."""
    zero = sum((x[..., None][..., :0].sum() for x in inputs), start=inputs[0].new_zeros(()))
    return zero.expand(batch).clone()
