"""Results and gradients of both attentions against float64, over the fuzzer's shapes, dtypes, masks and biases.

`python -m tests.ops.accuracy_attention --cases 2000` prints what lies above the project's bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .accuracy import bar_of
from .fuzz_inputs import Draw
from .fuzz_problems import KINDS, SLACK, Problem
from .reference import relative

NAMES = ("attention", "additive")
LEAST = 0.1  # relative to the size of a sum's terms: a smaller result is only what they happened to leave


def run(call: Callable[..., Any], tensors: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs = call(*leaves)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, list(gs))]


def sizes(p: Problem, exact: Sequence[Tensor], gs: Sequence[Tensor]) -> list[float]:
    """For each result and gradient: the norm of its sums with every term made positive."""
    bounds, off = p.errors(exact, gs, p.eps)
    each = [*((high - low) / 2 for low, high in bounds), *off]
    return [float(torch.nan_to_num(x, posinf=0).norm()) / (SLACK * p.eps) for x in each]


def check(kind: str, seed: int) -> tuple[Problem, list[tuple[str, float, float]]]:
    """What lies above the bar: the result, its error, and that of torch's formula in the same dtype."""
    p = KINDS[kind](Draw(seed))
    exact = [x.double() for x in p.tensors]
    gs = [torch.randn(x.shape).to(p.result) for x in p.exact(*exact)]
    wide = [g.double() for g in gs]
    right = run(p.exact, exact, wide)
    mine = run(p.ours, p.tensors, gs)

    def formula(*x: Tensor) -> tuple[Tensor, ...]:
        return tuple(out.to(p.result) for out in p.exact(*x))

    torchs = run(formula, [x.to(p.result) for x in p.tensors], gs)
    names = (*(f"result {i}" for i in range(len(gs))), *p.names)
    missed = []
    for name, a, b, c, size in zip(names, mine, torchs, right, sizes(p, exact, wide), strict=True):
        floor = max(LEAST * size, 1e-300)
        error, best = relative(a, c, floor), relative(b, c, floor)
        if not error <= max(bar_of(a.dtype), 2 * best):
            missed.append((name, error, best))
    return p, missed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    total = 0
    for kind in NAMES:
        found = 0
        for seed in range(args.first, args.first + args.cases):
            p, missed = check(kind, seed)
            found += len(missed)
            for name, error, best in missed:
                print(f"{seed}: {name} {error:.1e}, torch {best:.1e}; {p}")
        print(f"accuracy: {args.cases} cases of {kind}, {found} results above the bar")
        total += found
    return min(1, total)


if __name__ == "__main__":
    sys.exit(main())
