"""Where torch's attention kernel is faster than pyalloc's: finds the rules of pyalloc.ops.attention.

``python -m benchmarks.ops.dispatch`` times forward and backward of both kernels on random small shapes, pyalloc's
called from C, and as where C is shown no tensors.  For the former and for each candidate of a rule for the latter it
prints how many shapes would be slower than 0.95x torch, and how many wins of over 1.15x a rule would miss.  Uses one
thread and processor time, so that a busy machine does not matter; run it again after kernel changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.helping import HelpFormatter
from benchmarks.ops.attention import sdpa, sweep_shape
from benchmarks.ops.measure import both, least_ratio
from pyalloc import ops
from pyalloc.ops import _plain as rule

_MOST_PRODUCTS = 3_000_000  # with more there is no question


@dataclass(frozen=True)
class Shape:
    """One measured shape; a ratio is torch's time over pyalloc's."""

    heads: int
    queries: int
    keys: int
    dim: int
    from_c: float
    from_python: float


def measure(rng: random.Random) -> Shape:
    n_b, n_h, n_q, n_k, d = sweep_shape(rng)
    while n_b * n_h * n_q * n_k * d > _MOST_PRODUCTS:
        n_b, n_h, n_q, n_k, d = sweep_shape(rng)
    q, grad = torch.randn(2, n_b, n_h, n_q, d)
    k, v = torch.randn(2, n_b, n_h, n_k, d)
    torchs = both(sdpa, (q, k, v), grad)
    from_python = partial(ops.scaled_attention, path="kernel")
    ratios = (
        least_ratio(both(ours, (q, k, v), grad), torchs)
        for ours in (ops.scaled_attention, from_python)
    )
    return Shape(n_b * n_h, n_q, n_k, d, *ratios)


def slowest(ratios: list[float]) -> dict[str, object]:
    return {
        "kernel": len(ratios),
        "slower_than_0_95": sum(r < 0.95 for r in ratios),
        "slowest": round(min(ratios, default=1.0), 3),
    }


def judge(shapes: list[Shape], little: int, head: int, score: int) -> dict[str, object]:
    """Counts the shapes that a rule would make slower, and the wins it would miss."""

    def has_one_key(s: Shape) -> bool:
        return s.keys == 1 and s.queries >= rule._ONE_KEY_QUERIES and s.dim >= rule._ONE_KEY_HEAD

    def is_ours(s: Shape) -> bool:
        work = s.heads * (head + s.queries * s.keys * (s.dim + score))
        return not has_one_key(s) and work >= little

    ours = [s.from_python for s in shapes if is_ours(s)]
    wins = sum(s.from_python > 1.15 for s in shapes)
    return {
        "called": "from Python",
        "little_work": little,
        "work_of_head": head,
        "work_of_score": score,
        "is_used": (little, head, score)
        == (rule._LITTLE_WORK, rule._WORK_OF_HEAD, rule._WORK_OF_SCORE),
        **slowest(ours),
        "wins_given_away": wins - sum(r > 1.15 for r in ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--shapes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    shapes = [measure(rng) for _ in range(args.shapes)]
    print(json.dumps({"called": "from C", **slowest([s.from_c for s in shapes])}))
    candidates = (64_000, 112_000, 160_000, 224_000), (2048, 4096), (16, 32)
    for candidate in itertools.product(*candidates):
        print(json.dumps(judge(shapes, *candidate)), flush=True)


if __name__ == "__main__":
    main()
