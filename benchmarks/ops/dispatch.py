"""Where torch's attention kernel is faster than pyalloc's: finds the rule of pyalloc.ops.attention.

``python -m benchmarks.ops.dispatch`` times both kernels on random shapes, forward and forward+backward.  For every
candidate rule it prints how many shapes would be slower than 0.95x torch, and how many wins of over 1.15x it would
miss.  Uses one thread and processor time, so that a busy machine does not matter; run it again after kernel changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.helping import HelpFormatter
from benchmarks.ops.attention import sdpa, sweep_shape
from benchmarks.ops.measure import both, forward, least_ratio
from pyalloc import ops
from pyalloc.ops import attention as rule


@dataclass(frozen=True)
class Shape:
    """One measured shape; the ratios are torch's time over pyalloc's."""

    scores: int
    queries: int
    keys: int
    forward: float
    both: float


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.scaled_attention(q, k, v, path="kernel")


def measure(rng: random.Random) -> Shape:
    n_b, n_h, n_q, n_k, d = sweep_shape(rng)
    q, grad = torch.randn(2, n_b, n_h, n_q, d)
    k, v = torch.randn(2, n_b, n_h, n_k, d)
    return Shape(
        scores=n_b * n_h * n_q * n_k,
        queries=n_q,
        keys=n_k,
        forward=least_ratio(forward(kernel, (q, k, v)), forward(sdpa, (q, k, v))),
        both=least_ratio(both(kernel, (q, k, v), grad), both(sdpa, (q, k, v), grad)),
    )


def judge(shapes: list[Shape], scores: int, queries: int, keys: int) -> dict[str, object]:
    """Counts the shapes that a rule would make slower, and the wins it would miss."""
    row: dict[str, object] = {"few_scores": scores, "few_queries": queries, "few_keys": keys}
    used = rule._FEW_SCORES, rule._FEW_QUERIES, rule._FEW_KEYS
    for name in ("forward", "both"):
        ours = [
            getattr(s, name)
            for s in shapes
            if s.scores >= scores and s.queries >= queries and s.keys >= keys
        ]
        wins = sum(getattr(s, name) > 1.15 for s in shapes)
        row[name] = {
            "is_used": (scores, queries, keys) == used,
            "kernel": len(ours),
            "slower_than_0_95": sum(r < 0.95 for r in ours),
            "slowest": round(min(ours, default=1.0), 3),
            "wins_given_away": wins - sum(r > 1.15 for r in ours),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--shapes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    shapes = [measure(rng) for _ in range(args.shapes)]
    for candidate in itertools.product((1000, 2000, 4000, 6000, 10000), (4, 8, 10, 16), (1, 3)):
        print(json.dumps(judge(shapes, *candidate)), flush=True)


if __name__ == "__main__":
    main()
