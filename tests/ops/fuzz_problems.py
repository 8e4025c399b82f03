"""The ops as the fuzzer sees them: random inputs, the formula in float64, and how far a result may be from it.

Every bound follows the roundings through the formula: a sum errs by the sum of its terms' sizes, a probability by its
score's error, a gradient near the antipode by that of 1 + u.  So a case of any shape and size has its own bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyalloc.ops import (
    _plain,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .fuzz_inputs import Draw
from .reference import sphere

Interval = tuple[Tensor, Tensor]
SLACK = 16  # roundings for each one counted
LARGEST = 4_000_000  # multiplications: there should be many cases, and tiles end below 140 rows
FLUSHED = 1e-37  # the least share of a component that counts as more than 0
HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Problem:
    """One call: ours(*tensors) against exact(*tensors in float64); both return tuples."""

    kind: str
    names: tuple[str, ...]
    tensors: list[Tensor]
    ours: Callable[..., tuple[Tensor, ...]]
    exact: Callable[..., tuple[Tensor, ...]]
    # (tensors, gradients of the outputs, eps), float64: the errors of the gradients, and the outputs' bounds
    errors: Callable[..., tuple[list[Interval], list[Tensor]]]
    result: torch.dtype
    eps: float
    masks: list[Tensor] = field(default_factory=list)
    note: str = ""
    is_kernel: bool = True  # not torch's own kernel, which promises less

    def with_tensors(self, tensors: Sequence[Tensor]) -> Problem:
        return Problem(**{**self.__dict__, "tensors": list(tensors)})

    def __str__(self) -> str:
        shapes = (
            f"{n} {tuple(x.shape)}/{x.stride()} {x.dtype}"
            for n, x in zip(self.names, self.tensors, strict=True)
        )
        return f"{self.kind}: {', '.join(shapes)} {self.note}"


def eps_of(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def around(exact: Tensor, error: Tensor) -> Interval:
    """An interval; if nothing is known of the error, it is everything."""
    known = torch.isfinite(error) & torch.isfinite(exact)
    low = torch.where(known, exact - error, -torch.inf)
    return low, torch.where(known, exact + error, torch.inf)


def in_dtypes(draw: Draw, tensors: Sequence[Tensor]) -> list[Tensor]:
    """All of one dtype, or each with its own; in any memory."""
    mixed, dtype = draw.chance(0.15), draw.dtype()
    return [draw.laid_out(x.to(draw.dtype() if mixed else dtype)) for x in tensors]


# --- PowerSpherical ------------------------------------------------------------------------------


def normalizer(scale: Tensor, dim: int) -> Tensor:
    beta = (dim - 1) / 2
    return (
        torch.lgamma(scale + 2 * beta) - torch.lgamma(scale + beta) - beta * math.log(4 * math.pi)
    )


def log_density(u: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Cosines that rounding puts beyond 1 count as 1, but have the gradient of their neighbours."""
    clamped = u + (u.clamp(-1, 1) - u).detach()
    return normalizer(scale, dim) + torch.special.xlog1py(scale, (clamped - 1) / 2)


def cosine_error(value: Tensor, loc: Tensor, eps: float) -> Tensor:
    dim = value.shape[-1]
    return SLACK / 2 * eps * (1 + math.log2(dim)) * (value * loc).abs().sum(-1)


def log_prob_bounds(value: Tensor, loc: Tensor, scale: Tensor, eps: float) -> Interval:
    dim = value.shape[-1]
    u, off = (value * loc).sum(-1), cosine_error(value, loc, eps)
    h = normalizer(scale, dim)
    large = torch.lgamma(scale + dim).abs()  # the reference's own error
    low, high = (log_density(x, scale, dim) for x in (u - off, u + off))
    terms = h.abs() + dim + torch.nan_to_num((high - h).abs(), posinf=0.0)
    slack = SLACK * (eps * terms + 2.3e-16 * large)
    return low - slack, high + slack


def weight_error(value: Tensor, loc: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """kappa / (1 + u) and its relative error; infinite if 1 + u is itself only rounding."""
    u, off = (value * loc).sum(-1).clamp(-1, 1), cosine_error(value, loc, eps)
    gap = 1 + u
    relative = torch.where(gap > 20 * off, 2 * off / gap + SLACK * eps, torch.inf)
    return scale / gap, relative


def spherical_errors(
    inputs: tuple[Tensor, ...], g: Tensor, uncertain: Tensor, eps: float
) -> list[Tensor]:
    """Errors of the gradients of value, loc and scale; g: the gradients of every log-probability."""
    value, loc, scale = inputs
    weight, relative = weight_error(value, loc, scale, eps)
    share = g.abs() * (relative + uncertain + SLACK * eps) + FLUSHED
    off = (share * weight).unsqueeze(-1)
    log_y = torch.log1p(((value * loc).sum(-1).clamp(-1, 1) - 1) / 2).abs()
    slope = log_y + 1 + math.log(value.shape[-1])
    of_scale = g.abs() * (slope * (SLACK * eps + uncertain) + relative)
    found = [off * loc.abs(), off * value.abs(), of_scale]
    return [x.sum_to_size(y.shape) for x, y in zip(found, inputs, strict=True)]


def spherical_inputs(
    draw: Draw, batch: tuple[int, ...], params: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    dim = draw.choice((2, 3, 4, 5, 16, 17, 24, 25, 26, 33, 64, draw.randint(2, 140)))
    value, loc = sphere(*batch, dim, dtype=torch.float64), sphere(*params, dim, dtype=torch.float64)
    if draw.chance(0.2):
        value = (
            loc[(0,) * len(params)].expand(value.shape) * draw.choice((1.0, -1.0)) + 0.01 * value
        )
        value = torch.nn.functional.normalize(value, dim=-1)
    most = draw.choice((0.0, 1e-3, 5.0, 50.0, 50.0, 1e4, 1e7))
    return value, loc, torch.rand(params, dtype=torch.float64) * most


def spherical_shapes(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of samples, locs and scales: pairwise with tails of tiles, or anything that broadcasts."""
    if draw.chance(0.4):
        n_t = draw.choice(((), (1,), (3,)))
        m = (draw.size(140), *n_t)
        return (draw.size(140 if n_t != (3,) else 40), 1, *n_t), m, m
    whole = draw.batch(4)
    return draw.narrowed(whole), draw.narrowed(whole), draw.narrowed(whole)


def log_prob(draw: Draw) -> Problem:
    of_value, of_loc, of_scale = spherical_shapes(draw)
    value, loc, _ = spherical_inputs(draw, of_value, of_loc)
    _, _, scale = spherical_inputs(draw, (), of_scale)
    tensors = in_dtypes(draw, (value, loc, scale))

    def exact(value: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return (log_density((value * loc).sum(-1), scale, value.shape[-1]),)

    def errors(inputs: Any, grads: Any, eps: float) -> tuple[list[Interval], list[Tensor]]:
        g = grads[0]
        return [log_prob_bounds(*inputs, eps)], spherical_errors(
            inputs, g, torch.zeros_like(g), eps
        )

    return Problem(
        "power_spherical_log_prob",
        ("value", "loc", "scale"),
        tensors,
        lambda *x: (power_spherical_log_prob(*x),),
        exact,
        errors,
        promoted(tensors),
        eps_of(promoted(tensors)),
    )


def mixture(draw: Draw) -> Problem:
    whole = draw.batch(2) if draw.chance(0.6) else (draw.size(140),)
    n_k = draw.size(140 if len(whole) < 2 else 9)
    rest = draw.narrowed(whole)
    dim = draw.randint(0, len(rest))
    params = (*rest[:dim], n_k, *rest[dim:])
    axis = dim if draw.chance(0.5) else dim - len(params)
    # samples may have more dimensions than the components have, or fewer
    value, loc, scale = spherical_inputs(draw, draw.narrowed(whole), params)
    weights = torch.randn(params, dtype=torch.float64) * draw.choice((1, 1, 30))
    if draw.chance(0.3):
        scale = scale.narrow(dim, 0, 1)
    tensors = in_dtypes(draw, (value, loc, scale, weights))

    def joint(value: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loc = loc.expand(*params, loc.shape[-1]).movedim(dim, -2)
        return value.unsqueeze(-2), loc, scale.expand(params).movedim(dim, -1)

    def exact(value: Tensor, loc: Tensor, scale: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        v, m, s = joint(value, loc, scale)
        each = log_density((v * m).sum(-1), s, value.shape[-1]) + weights.movedim(dim, -1)
        return (torch.logsumexp(each, -1),)

    def errors(inputs: Any, grads: Any, eps: float) -> tuple[list[Interval], list[Tensor]]:
        *three, weights = inputs
        v, m, s = joint(*three)
        w = weights.movedim(dim, -1)
        low, high = log_prob_bounds(v, m, s, eps)
        low, high = low + w, high + w
        slack = SLACK * eps * (1 + high.abs().amax(-1))
        bounds = torch.logsumexp(low, -1) - slack, torch.logsumexp(high, -1) + slack
        share = torch.softmax(high, -1)
        wide = high - low + (share * (high - low)).sum(-1, keepdim=True) + slack.unsqueeze(-1)
        uncertain = torch.where(wide < 1, torch.expm1(wide), torch.inf)
        g = (grads[0].unsqueeze(-1) * share).broadcast_to(torch.broadcast_shapes(share.shape))
        off = spherical_errors((v, m, s), g, uncertain, eps)
        back = [
            off[0].squeeze(-2),
            off[1].movedim(-2, dim),
            off[2].movedim(-1, dim),
            (g.abs() * (uncertain + SLACK * eps)).sum_to_size(w.shape).movedim(-1, dim),
        ]
        return [bounds], [x.sum_to_size(y.shape) for x, y in zip(back, inputs, strict=True)]

    return Problem(
        "power_spherical_mixture_log_prob",
        ("value", "loc", "scale", "log_weights"),
        tensors,
        lambda *x: (power_spherical_mixture_log_prob(*x, dim=axis),),
        exact,
        errors,
        promoted(tensors),
        eps_of(promoted(tensors)),
        note=f"dim={axis}",
    )


# --- attention -----------------------------------------------------------------------------------


def visible(score: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    seen = ~torch.isneginf(score)
    if mask is not None:
        seen = seen & mask
    if causal:
        seen = seen & torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    return seen


def shares(score: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Softmax; zeros where a query sees nothing."""
    seen = visible(score, mask, causal)
    any_seen = seen.any(-1, keepdim=True)
    score = score.masked_fill(~seen, -torch.inf).masked_fill(~any_seen, 0)
    return torch.softmax(score, -1) * any_seen


def attention_shapes(draw: Draw) -> tuple[list[tuple[int, ...]], int]:
    """Of q, k and v, with queries for each key head."""
    while True:
        n_b, n_kv = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
        group = draw.choice((1, 1, 2, 4))
        n_q, n_k = draw.size(150), draw.size(280)
        n_k = n_q if draw.chance(0.3) else n_k
        dim, dim_v = draw.size(80), draw.size(80)
        dim, dim_v = (dim, dim) if draw.chance(0.5) else (draw.choice((dim, 256)), dim_v)
        n_h = n_kv * group
        if n_b * n_h * n_q * n_k * (dim + dim_v) < LARGEST:
            shapes = [(n_b, n_h, n_q, dim), (n_b, n_kv, n_k, dim), (n_b, n_kv, n_k, dim_v)]
            return shapes, group


def attention(draw: Draw) -> Problem:
    shapes, group = attention_shapes(draw)
    full = (*shapes[0][:3], shapes[1][2])
    size = draw.choice((0.1, 1.0, 1.0, 3.0))
    tensors = in_dtypes(draw, [torch.randn(s, dtype=torch.float64) * size for s in shapes])
    names: tuple[str, ...] = ("q", "k", "v")
    mask = None
    result = promoted(tensors)
    if draw.chance(0.5):
        narrow = draw.narrowed(full)
        bias = torch.randn(narrow, dtype=torch.float64)
        bias[torch.rand(narrow) < draw.choice((0.0, 0.0, 0.3, 1.0))] = -torch.inf
        wide = draw.repeated(bias.to(draw.choice((result, draw.dtype()))), bias.shape)
        tensors.append(draw.laid_out(wide) if draw.chance(0.5) else wide)
        names = (*names, "bias")
    if draw.chance(0.4):
        mask = torch.rand(draw.narrowed(full)) > draw.choice((0.1, 0.5, 0.9, 1.0))
        mask = (
            draw.repeated(mask, full)
            if draw.chance(0.3) and mask.dim() == 4
            else draw.laid_out(mask)
        )
    causal = draw.chance(0.3)
    scale = draw.choice((None, None, 1.0, 0.02, -0.3, 0.0))
    path = draw.choice(("auto", "kernel"))
    factor = full[0] and (shapes[0][3] ** -0.5 if scale is None else scale)
    is_kernel = (
        path == "kernel"
        or len(tensors) > 3
        or mask is not None
        or (_plain.HAS_VECTORS and result == torch.float32 and math.prod(full) > 6000)
    )
    # torch's own kernel keeps its probabilities in half precision
    eps = eps_of(result) if is_kernel or result not in HALVES else torch.finfo(result).eps / 4

    def wide(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    def probabilities(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        score = q @ wide(k).transpose(-1, -2) * factor
        return shares(score if bias is None else score + bias, mask, causal)

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return (probabilities(q, k, bias) @ wide(v),)

    def errors(inputs: Any, grads: Any, eps: float) -> tuple[list[Interval], list[Tensor]]:
        q, k, v, *bias = inputs
        p = probabilities(q, k, *(bias or [None]))
        q, k, v, g = q.abs(), wide(k).abs(), wide(v).abs(), grads[0].abs()
        size = q @ k.transpose(-1, -2) * abs(factor)
        size = size + sum(torch.nan_to_num(b.abs(), posinf=0.0) for b in bias)
        off = SLACK * eps * (2 + size.masked_fill(p == 0, 0).amax(-1, keepdim=True))
        off = torch.where(off < 0.5, off, torch.inf)
        grad_p = g @ v.transpose(-1, -2)
        grad_score = off * p * (grad_p + (p * grad_p).sum(-1, keepdim=True))

        def grouped(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, group)).sum(2)

        back = [
            grad_score @ k * abs(factor),
            grouped(grad_score.transpose(-1, -2) @ q * abs(factor)),
            grouped((off * p).transpose(-1, -2) @ g),
            *(grad_score.sum_to_size(b.shape) for b in bias),
        ]
        return [around(exact(*inputs)[0], off * (p @ v))], back

    def ours(*x: Tensor, dropout: float = 0.0) -> tuple[Tensor, ...]:
        bias = x[3] if len(x) > 3 else None
        return (scaled_attention(*x[:3], bias, mask, causal, scale, dropout, path=path),)

    of_mask = "" if mask is None else f"mask {tuple(mask.shape)}/{mask.stride()} "
    return Problem(
        "scaled_attention",
        names,
        tensors,
        ours,
        exact,
        errors,
        result,
        eps,
        [] if mask is None else [mask],
        f"{of_mask}causal={causal} scale={scale} path={path}",
        is_kernel,
    )


def additive(draw: Draw) -> Problem:
    n_b, n_q, n_s = draw.choice((1, 2, 3, 8)), draw.size(6), draw.size(60)
    n_h, n_e = draw.size(130), draw.size(130)
    one_step = draw.chance(0.4)
    size = draw.choice((0.01, 1.0, 1.0, 10.0))
    of_query = (n_b, n_h) if one_step else (n_b, n_q, n_h)
    shapes = [of_query, (n_b, n_s, n_h), (n_b, n_s, n_e), (n_h,)]
    raw = [
        torch.randn(s, dtype=torch.float64) * x
        for s, x in zip(shapes, (size, size, 1, n_h**-0.5), strict=True)
    ]
    tensors = in_dtypes(draw, raw)
    mask = None
    if draw.chance(0.5):
        mask = torch.rand(n_b, n_s) > draw.choice((0.1, 0.5, 0.9, 1.0))
        mask = draw.repeated(mask[:1], (n_b, n_s)) if draw.chance(0.2) else draw.laid_out(mask)

    def parts(query: Tensor, keys: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        query = query.unsqueeze(1) if one_step else query
        t = torch.tanh(keys[:, None] + query[:, :, None])
        return t, shares(t @ v, None if mask is None else mask[:, None], False)

    def given(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.squeeze(1) if one_step else y for y in x)

    def exact(query: Tensor, keys: Tensor, values: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        p = parts(query, keys, v)[1]
        return given(p @ values, p)

    def errors(inputs: Any, grads: Any, eps: float) -> tuple[list[Interval], list[Tensor]]:
        query, keys, values, v = inputs
        t, p = parts(query, keys, v)
        g, g_p = (x.abs().unsqueeze(1) if one_step else x.abs() for x in grads)
        off = SLACK * eps * (2 + v.abs().sum())
        grad_p = g @ values.abs().transpose(-1, -2) + g_p
        grad_score = (p * (grad_p + (p * grad_p).sum(-1, keepdim=True))).unsqueeze(-1)
        slope = grad_score * v.abs() * (off * (1 - t * t) + SLACK * eps)
        of_query = slope.sum(2)
        back = [
            of_query.squeeze(1) if one_step else of_query,
            slope.sum(1),
            off * p.transpose(-1, -2) @ g,
            (grad_score * (off * t.abs() + SLACK * eps)).sum((0, 1, 2)),
        ]
        context, probs = exact(*inputs)
        sizes = given(p @ values.abs(), p)
        bounds = [around(x, off * s) for x, s in zip((context, probs), sizes, strict=True)]
        return bounds, back

    return Problem(
        "additive_attention",
        ("query", "keys", "values", "v"),
        tensors,
        lambda *x: additive_attention(*x, mask, return_weights=True),
        exact,
        errors,
        promoted(tensors),
        eps_of(promoted(tensors)),
        [] if mask is None else [mask],
        "" if mask is None else f"mask {tuple(mask.shape)}/{mask.stride()}",
    )


KINDS = {"log_prob": log_prob, "mixture": mixture, "attention": attention, "additive": additive}
