"""Results and gradients of PowerSpherical against the formula on exactly the inputs where float32 is hardest.

`python -m tests.ops.accuracy --cases 5000` prints what lies above the project's bar, by kind of case; --isa: on another
instruction set; --emulated: of the CUDA kernels, in float32.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from pyalloc.ops import (
    cpu_isa,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    set_cpu_isa,
)
from pyalloc.ops._eager import normalizer, normalizer_slope, power_spherical

from .emulation import build, launching
from .fuzz_inputs import Draw
from .reference import pairwise, relative, textbook

BAR = 1e-6  # or twice torch's own error
DIMS = (2, 2, 3, 3, 4, 5, 16, 64, 128, 1000, 4096)
SIZES = (1, 1, 2, 3, 5, 9, 17)
MOST = 600_000  # multiplications of a case
DIRECTIONS = ("random", "mode", "at the mode", "antipode", "at the antipode", "mixed")
KAPPAS = ("zero", "one size", "every size", "large")


@dataclass
class Case:
    """value (L, T, D), loc (M, T, D), scale and log_weights (M, T), grad like the result."""

    kind: str
    mixture: bool
    inputs: list[Tensor]
    grad: Tensor
    dtype: torch.dtype


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def sizes(draw: Draw) -> tuple[int, int, int, int]:
    while True:
        n_l, n_m, n_t = (draw.choice(SIZES) for _ in range(3))
        if draw.chance(0.15):
            n_l = draw.randint(20, 300)
        if draw.chance(0.15):
            n_m = draw.randint(20, 150)
        dim = draw.choice(DIMS)
        if n_l * n_m * n_t * dim <= MOST:
            return n_l, n_m, n_t, dim


def directions(draw: Draw, loc: Tensor, n_l: int, how: str) -> Tensor:
    """Samples; those near a mode or antipode take turns among the components."""
    n_m, n_t, dim = loc.shape
    value = unit(torch.randn(n_l, n_t, dim, dtype=torch.float64))
    if how == "random":
        return value
    sign = -1.0 if "antipode" in how else 1.0
    angle = torch.zeros(()) if how.startswith("at") else 10.0 ** -(4 * torch.rand(n_l, n_t, 1))
    near = unit(sign * loc[torch.arange(n_l) % n_m] + angle * value)
    if how != "mixed":
        return near
    which = torch.randint(3, (n_l, n_t, 1))
    return torch.where(which == 0, value, torch.where(which == 1, near, -near))


def concentrations(draw: Draw, n_m: int, n_t: int, how: str) -> Tensor:
    power = torch.rand(n_m, n_t, dtype=torch.float64)
    if how == "zero":
        return torch.zeros(n_m, n_t, dtype=torch.float64)
    if how == "one size":
        return power * draw.choice((1e-3, 1.0, 50.0, 1e3, 1e5))
    return 10 ** (power * 10 - 3 if how == "every size" else 5 + power * 2)


def draw_case(seed: int) -> Case:
    draw = Draw(seed)
    n_l, n_m, n_t, dim = sizes(draw)
    where, size = draw.choice(DIRECTIONS), draw.choice(KAPPAS)
    mixture, cancelling = draw.chance(0.4), draw.chance(0.3)
    loc = unit(torch.randn(n_m, n_t, dim, dtype=torch.float64))
    dtype = draw.choices(
        (torch.float32, torch.float64, torch.float16, torch.bfloat16), (8, 2, 1, 1)
    )[0]
    loc = loc.to(dtype).double()
    value = directions(draw, loc, n_l, where)
    scale = concentrations(draw, n_m, n_t, size)
    if dtype == torch.float16:
        scale = scale.clamp(max=300)  # results and gradients must be finite
    weights = torch.log_softmax(torch.randn(n_m, n_t, dtype=torch.float64), 0)
    grad = torch.randn((n_l, n_t) if mixture else (n_l, n_m, n_t), dtype=torch.float64)
    if cancelling and n_l > 1:
        grad -= grad.mean(0) * 0.99
    inputs = [x.to(dtype) for x in (value, loc, scale, weights)][: 4 if mixture else 3]
    op = "mixture" if mixture else "log_prob"
    kind = f"{op}, {where}, kappa {size}{', cancelling' if cancelling else ''}"
    name = str(dtype).removeprefix("torch.")
    kind = f"{kind}, {name}, L{n_l} M{n_m} T{n_t} D{dim}"
    return Case(kind, mixture, inputs, grad.to(dtype), dtype)


def rounded_off(a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
    """What a * b loses in float64, exactly (Dekker)."""

    def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        big = x * 134217729.0
        high = big - (big - x)
        return high, x - high

    (a0, a1), (b0, b1) = halves(a), halves(b)
    return ((a0 * b0 - product) + a0 * b1 + a1 * b0) + a1 * b1


def gaps(value: Tensor, loc: Tensor) -> tuple[Tensor, Tensor]:
    """1 + u and 1 - u for the cosines u of the inputs, correctly rounded, and not below 0."""
    a, b = (x.double().numpy() for x in (value, loc))
    found = np.empty((2, a.shape[0], b.shape[0], a.shape[1]))
    for i, j, t in np.ndindex(found.shape[1:]):
        product = a[i, t] * b[j, t]
        terms = [*product.tolist(), *rounded_off(a[i, t], b[j, t], product).tolist()]
        found[:, i, j, t] = math.fsum([1, *terms]), -math.fsum([-1, *terms])
    low, high = torch.from_numpy(found.clip(min=0))
    return low, high


def exact(case: Case, low: Tensor, high: Tensor) -> list[Tensor]:
    """The result and the gradients of the inputs, in float64.

    At the antipode and behind it, where the formula has no gradient, the case's gradient is zero.
    """
    value, loc, scale, *weights = (x.double() for x in case.inputs)
    n, slope = (f(scale, value.shape[-1]) for f in (normalizer, normalizer_slope))
    safe = torch.where(low > 0, low, 1)
    log_y = torch.where(low < 1, (safe / 2).log(), torch.log1p(-high / 2))
    each = torch.where(low > 0, n + scale * log_y, torch.where(scale == 0, n, -torch.inf))
    g, result = case.grad.double(), each
    if case.mixture:
        joint = each + weights[0]
        result = torch.logsumexp(joint, 1)
        known = torch.where(result == -torch.inf, torch.inf, result)
        g = g[:, None] * (joint - known[:, None]).exp()
    w = torch.where(low > 0, g * scale / safe, 0)
    of_scale = (g * (torch.where(low > 0, log_y, 0) + slope)).sum(0)
    found = [torch.einsum("lmt,mtd->ltd", w, loc), torch.einsum("lmt,ltd->mtd", w, value), of_scale]
    return [result, *found, *([g.sum(0)] if case.mixture else [])]


def broadcasting(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return textbook(value[:, None], loc, scale)


def stable(value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    return power_spherical(value, loc, scale).permute(1, 2, 0)


def ours(*inputs: Tensor) -> Tensor:
    if len(inputs) == 4:
        return power_spherical_mixture_log_prob(*inputs, dim=0)
    return power_spherical_log_prob(inputs[0][:, None], *inputs[1:])


def mixed(each: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return torch.logsumexp(each(*inputs[:3]) + inputs[3], 1)


def run(function: Callable[..., Tensor], case: Case) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in case.inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, case.grad)]


def error(found: Tensor, right: Tensor) -> float:
    """Where the density is 0, both must say so.  Elsewhere the relative error, and infinity if it is not a number."""
    if not torch.isneginf(found[torch.isneginf(right)]).all():
        return float("inf")
    known = right.abs() <= torch.finfo(found.dtype).max
    measured = relative(found[known], right[known])
    return measured if measured == measured else float("inf")


def bar_of(dtype: torch.dtype, least: float = BAR) -> float:
    """The error that is allowed whatever torch's own is; half precision cannot be better than its rounding."""
    return max(least, torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0)


def check(seed: int, least: float = BAR) -> tuple[Case, list[tuple[str, float, float]]]:
    """What lies above the bar: result, its error, torch's error.  Errors up to `least` are allowed for any."""
    case = draw_case(seed)
    low, high = gaps(*case.inputs[:2])
    behind = low <= 0
    case.grad[(behind.any(1) if case.mixture else behind)] = 0
    right = exact(case, low, high)
    mine = run(ours, case)
    forms = [pairwise, broadcasting, stable]
    torchs = [run(partial(mixed, f) if case.mixture else f, case) for f in forms]
    bar = bar_of(case.dtype, least)
    missed = []
    for i, name in enumerate(("result", "value", "loc", "scale", "log_weights")[: len(right)]):
        best = min(error(t[i], right[i]) for t in torchs)
        e = error(mine[i], right[i])
        if e > max(bar, 2 * best if best < 1 else 0):
            missed.append((name, e, best))
    return case, missed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--isa", default=cpu_isa())
    args = parser.parse_args()
    set_cpu_isa(args.isa)
    kinds: Counter[str] = Counter()
    seeds = range(args.first, args.first + args.cases)
    where = cpu_isa()
    with ExitStack() as stack:
        if args.emulated:
            where = "CUDA kernels"
            seeds = [seed for seed in seeds if draw_case(seed).dtype != torch.float64]
            folder = stack.enter_context(TemporaryDirectory())
            stack.enter_context(launching(build(Path(folder))))
        report(seeds, kinds)
    print(
        f"accuracy: {len(seeds)} cases, {where}: {kinds.total()} results above the bar {dict(kinds)}"
    )
    return min(1, kinds.total())


def report(seeds: Iterable[int], kinds: Counter[str]) -> None:
    for seed in seeds:
        case, missed = check(seed)
        for name, e, best in missed:
            kinds[name] += 1
            print(f"{seed}: {name} {e:.1e}, torch {best:.1e}; {case.kind}")


if __name__ == "__main__":
    sys.exit(main())
