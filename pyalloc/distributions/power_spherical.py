"""The PowerSpherical distribution (De Cao and Aziz 2020) and the uniform one it is compared with."""
# mypy: disable-error-code="untyped-decorator"
#   mypy does not follow torch: what it decorates has no type

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions.constraints import Constraint

from pyalloc.errors import OpError
from pyalloc.ops import power_spherical_log_prob
from pyalloc.ops._composed import is_pushed_twice
from pyalloc.ops._eager import normalizer, normalizer_slope


class _Sphere(Constraint):
    """Unit vectors in the last dimension, to the precision of the dtype's square root."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            value = value.double()  # log_prob itself checks the dtype
        tolerance = max(1e-4, torch.finfo(value.dtype).eps ** 0.5)
        return (torch.linalg.vector_norm(value, dim=-1) - 1).abs() < tolerance


_sphere = _Sphere()


def _draw_beta(alpha: Tensor, beta: float, _: Tensor | None = None) -> Tensor:
    pair = torch.stack([alpha, torch.full_like(alpha, beta)], -1)
    return torch._sample_dirichlet(pair).clamp_min(torch.finfo(alpha.dtype).tiny)


def _slope_of_beta(parts: Tensor, alpha: Tensor, beta: float) -> Tensor:
    pair = torch.stack([alpha, torch.full_like(alpha, beta)], -1)
    of_both = torch._dirichlet_grad(parts, pair, pair.sum(-1, keepdim=True).expand_as(pair))
    return of_both[..., 0].contiguous()


# Sampling and its derivative as operators for torch.compile: torch's own have no fake kernels for symbolic shapes.
# Two equal draws must not be merged into one.  torch up to 2.11 only sees that by an argument, so each gets an empty
# tensor of its own.
_compiled = "CompositeExplicitAutograd"
torch.library.define(
    "pyalloc::draw_beta",
    "(Tensor alpha, float beta, Tensor? apart=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
torch.library.impl("pyalloc::draw_beta", _compiled, _draw_beta)
torch.library.define("pyalloc::slope_of_beta", "(Tensor parts, Tensor alpha, float beta) -> Tensor")
torch.library.impl("pyalloc::slope_of_beta", _compiled, _slope_of_beta)


@torch.library.register_fake("pyalloc::draw_beta")
def _(alpha: Tensor, beta: float, _: Tensor | None = None) -> Tensor:
    return alpha.new_empty((*alpha.shape, 2))


@torch.library.register_fake("pyalloc::slope_of_beta")
def _(parts: Tensor, alpha: Tensor, beta: float) -> Tensor:
    return alpha.new_empty(alpha.shape)


class _Beta(torch.autograd.Function):
    """Samples z of Beta(alpha, beta), and 1 - z, so that no digits are lost at either end of the interval.

    Differentiable in alpha, implicitly and once, as torch's Beta is; also by torch.func.  For large alpha torch's own
    derivative is 0 or NaN in float32; there -log z falls as 1 / (alpha + (beta - 1) / 2), with an error of 1e-6.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(alpha: Tensor, beta: float) -> Tensor:
        if not torch.compiler.is_compiling():
            return _draw_beta(alpha, beta)
        apart = torch.empty(0, device=alpha.device)
        parts: Tensor = torch.ops.pyalloc.draw_beta(alpha, beta, apart)
        return parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        alpha, ctx.beta = inputs
        ctx.save_for_backward(output, alpha)
        ctx.save_for_forward(output, alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts, alpha = ctx.saved_tensors
        return _slope(parts, alpha, ctx.beta) * (grad[..., 0] - grad[..., 1]), None


class _BetaOfTangents(_Beta):
    """The same with forward mode, which torch.compile cannot trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        parts, alpha = ctx.saved_tensors
        step = _slope(parts, alpha, ctx.beta) * tangent
        return torch.stack([step, -step], -1)


def _slope(parts: Tensor, alpha: Tensor, beta: float) -> Tensor:
    """The derivative of z with respect to alpha."""
    z, rest = parts.unbind(-1)
    is_compiled = torch.compiler.is_compiling()
    slope_of = torch.ops.pyalloc.slope_of_beta if is_compiled else _slope_of_beta
    of_large = -z * torch.log1p(-rest) / (alpha + (beta - 1) / 2)
    is_large = alpha > 1000 * max(beta, 1)
    return torch.where(is_large, of_large, slope_of(parts, alpha, beta) * rest)


def _as_tensor(scale: Any, loc: Tensor) -> Tensor:
    try:
        return torch.as_tensor(scale, dtype=loc.dtype, device=loc.device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"PowerSpherical: scale must be a tensor or a number, got {scale!r}"
        ) from None


def _check_floating(name: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"PowerSpherical: {name} must have a floating dtype, got {x.dtype}")


class PowerSpherical(Distribution):
    """Density C(kappa) (1 + loc . x)^kappa on the unit sphere in D >= 2 dimensions.

    Args:
        loc: unit mean directions, (..., D).
        scale: concentrations kappa >= 0, (...), or a number; 0 is the uniform distribution.  Moved to loc's device.
        validate_args: check parameters and values; None for the default of torch's distributions.

    The batch shape is that of loc without D, broadcast with scale.  log_prob is the fused op: a batch
    of components against many samples, alone or in torch's MixtureSameFamily, makes no tensor with
    samples, components and D.

    Raises:
        ValueError: loc is not a floating-point tensor with D >= 2, or scale is neither a number nor a floating-point
            tensor that broadcasts with loc; with validate_args also if loc is not of unit length or scale is negative.
    """

    arg_constraints = {"loc": _sphere, "scale": constraints.nonnegative}  # noqa: RUF012
    support = _sphere
    has_rsample = True

    def __init__(
        self, loc: Tensor, scale: Tensor | float, validate_args: bool | None = None
    ) -> None:
        if not isinstance(loc, Tensor):
            raise ValueError(f"PowerSpherical: loc must be a tensor, got {type(loc).__name__}")
        if loc.dim() < 1 or loc.shape[-1] < 2:
            raise ValueError(
                f"PowerSpherical: loc must be (..., D) with D >= 2, got {tuple(loc.shape)}"
            )
        _check_floating("loc", loc)
        if not isinstance(scale, Tensor):
            scale = _as_tensor(scale, loc)
        _check_floating("scale", scale)
        scale = scale.to(loc.device)
        try:
            batch = torch.broadcast_shapes(loc.shape[:-1], scale.shape)
        except RuntimeError:
            raise ValueError(
                f"PowerSpherical: scale must broadcast with loc without D, {tuple(loc.shape[:-1])}, "
                f"got {tuple(scale.shape)}"
            ) from None
        self.loc = loc.expand(*batch, loc.shape[-1])
        self.scale = scale.expand(batch)
        super().__init__(batch, loc.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Size, _instance: Any = None) -> PowerSpherical:
        new: PowerSpherical = self._get_checked_instance(PowerSpherical, _instance)
        batch_shape = Size(batch_shape)
        new.loc = self.loc.expand(*batch_shape, *self.event_shape)
        new.scale = self.scale.expand(batch_shape)
        super(PowerSpherical, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """D, the dimension of the space around the sphere."""
        return int(self.event_shape[0])

    @property
    def _beta(self) -> float:
        return (self.dim - 1) / 2

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats by power_spherical_log_prob(): value is (..., D), broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        return power_spherical_log_prob(value, self.loc, self.scale)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Reparameterised samples, sample_shape + batch shape + (D,).

        The cosine to loc is a Beta variable, differentiated implicitly as torch's Beta is; the rest
        is uniform on the sphere around loc, rotated there by a reflection that is smooth for
        every loc.  First derivatives only, as for torch's Beta.  Half precision is computed in float32.
        """
        shape = self._extended_shape(torch.Size(sample_shape))
        dtype = torch.promote_types(self.loc.dtype, self.scale.dtype)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        loc = self.loc.to(compute).expand(shape)
        scale = self.scale.to(compute).expand(shape[:-1])
        beta = _Beta if torch.compiler.is_compiling() else _BetaOfTangents
        alpha = self._beta + scale
        if is_pushed_twice(alpha):  # torch would silently drop the outer level's part
            raise OpError(
                "PowerSpherical: samples have first derivatives with respect to scale only; jvp() and jacfwd() "
                "cannot be nested"
            )
        z, rest = beta.apply(alpha, self._beta).unbind(-1)
        cosine = (z - rest).unsqueeze(-1)
        tangent = torch.randn((*shape[:-1], self.dim - 1), dtype=loc.dtype, device=loc.device)
        tangent = torch.nn.functional.normalize(tangent, dim=-1)
        y = torch.cat([cosine, 2 * (z * rest).sqrt().unsqueeze(-1) * tangent], -1)
        first = loc[..., :1].detach()
        sign = torch.where(first >= 0, torch.ones_like(first), -torch.ones_like(first))
        normal = torch.cat([loc[..., :1] + sign, loc[..., 1:]], -1)
        along = (normal * y).sum(-1, keepdim=True) / (1 + sign * loc[..., :1])
        return (-sign * (y - normal * along)).to(dtype)

    def entropy(self) -> Tensor:
        """-log C - kappa E[log(1 + loc . x)] in nats, in closed form (De Cao and Aziz 2020)."""
        kappa = self.scale.double()
        slope = normalizer_slope(kappa, self.dim)
        return (kappa * slope - normalizer(kappa, self.dim)).to(self.scale.dtype)

    @property
    def _cosine_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of loc . x = 2 z - 1, z ~ Beta(kappa + beta, beta)."""
        alpha, total = self.scale + self._beta, self.scale + 2 * self._beta
        return self.scale / total, 4 * (alpha / total) * (self._beta / total) / (total + 1)

    @property
    def mean(self) -> Tensor:
        """E[x] = loc kappa / (kappa + D - 1); it lies inside the sphere."""
        return self.loc * self._cosine_moments[0].unsqueeze(-1)

    @property
    def mode(self) -> Tensor:
        """Where the density is largest; for kappa = 0 it is the same everywhere."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Of each coordinate: the diagonal of the covariance."""
        _, var = self._cosine_moments
        # Equals (1 - mean^2 - var) / (D - 1), whose terms would cancel for large kappa.
        total = self.scale + 2 * self._beta
        across = 2 * ((self.scale + self._beta) / total) / (total + 1)
        square = self.loc**2
        return square * var.unsqueeze(-1) + (1 - square) * across.unsqueeze(-1)


class HypersphericalUniform(Distribution):
    """The uniform distribution on the unit sphere in `dim` dimensions.

    Args:
        dim: D, at least 1.
        batch_shape: as of any torch distribution.
        validate_args: check values; None for the default of torch's distributions.
        dtype: of samples; torch's default dtype if not given.
        device: of samples.

    Raises:
        ValueError: dim is not a whole number, or below 1.
    """

    arg_constraints: dict[str, Constraint] = {}  # noqa: RUF012
    support = _sphere

    def __init__(
        self,
        dim: int,
        batch_shape: Any = (),
        validate_args: bool | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        try:
            dim = dim if isinstance(dim, torch.SymInt) else operator.index(dim)
        except TypeError:
            raise ValueError(
                f"HypersphericalUniform: dim must be a whole number, got {dim!r}"
            ) from None
        if dim < 1:
            raise ValueError(f"HypersphericalUniform: dim must be at least 1, got {dim}")
        self.dim = dim
        self._zero = torch.zeros((), dtype=dtype, device=device)
        super().__init__(Size(batch_shape), Size((dim,)), validate_args=validate_args)

    def expand(self, batch_shape: Size, _instance: Any = None) -> HypersphericalUniform:
        new: HypersphericalUniform = self._get_checked_instance(HypersphericalUniform, _instance)
        new.dim, new._zero = self.dim, self._zero
        super(HypersphericalUniform, new).__init__(
            Size(batch_shape), self.event_shape, validate_args=False
        )
        new._validate_args = self._validate_args
        return new

    @property
    def log_area(self) -> float:
        """The log of the sphere's surface area, 2 pi^(D/2) / Gamma(D/2)."""
        half = self.dim / 2
        return math.log(2) + half * math.log(math.pi) - math.lgamma(half)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        dtype = value.dtype if value.is_floating_point() else self._zero.dtype
        return torch.full(shape, -self.log_area, dtype=dtype, device=value.device)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        gauss = torch.randn(shape, dtype=self._zero.dtype, device=self._zero.device)
        return torch.nn.functional.normalize(gauss, dim=-1)

    def entropy(self) -> Tensor:
        return (self._zero + self.log_area).expand(self.batch_shape)

    @property
    def mean(self) -> Tensor:
        return self._zero.expand(self._extended_shape())

    @property
    def variance(self) -> Tensor:
        return (self._zero + 1 / self.dim).expand(self._extended_shape())


@register_kl(PowerSpherical, HypersphericalUniform)
def _kl_power_spherical_uniform(p: PowerSpherical, q: HypersphericalUniform) -> Tensor:
    if p.dim != q.dim:
        raise ValueError(f"KL: both must be on the same sphere, got D = {p.dim} and {q.dim}")
    shape = torch.broadcast_shapes(p.batch_shape, q.batch_shape)
    return (q.log_area - p.entropy()).expand(shape)
