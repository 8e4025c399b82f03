"""Scaled attention against torch's own: two shapes in all variants, masks, and sweeps of many."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.measure import Bench, Run, both, check, checked, forward, least_ratio
from pyalloc import ops


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def our_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.scaled_attention(q, k, v, bias)


def floor(b: Bench, n_products: int, shape: tuple[int, ...], *, biases: int) -> float | None:
    """The least time on a card: products of queries and keys, and a bias that is moved so many times."""
    if b.device == "cpu":
        return None
    n_b, n_h, n, d = shape
    scores = n_b * n_h * n * n
    return b.floor_ms(4 * scores * biases, 2 * scores * d * n_products)


def attention(b: Bench) -> None:
    for n_b, n_h, n, d in ((2, 8, 1024, 64), (1, 8, 2048, 128)):
        small = [torch.randn(1, 2, 200, d, device=b.device) for _ in "qkv"]
        small.append(torch.randn(1, 2, 200, 200, device=b.device))
        error = check("attention", *checked(our_attention, sdpa, small, (1, 2, 200, d)))
        q, k, v = (torch.randn(n_b, n_h, n, d, device=b.device) for _ in "qkv")
        bias = torch.randn(n_b, n_h, n, n, device=b.device)
        grad = torch.randn(n_b, n_h, n, d, device=b.device)
        case = f"B{n_b} H{n_h} L{n} d{d} fp32"
        cpu = b.device == "cpu"

        def given(f: Callable[..., Tensor], bias: Tensor = bias) -> Callable[..., Tensor]:
            return lambda *qkv: f(*qkv, bias)

        for name, target, work, ours, peer in (
            ("forward", 1.6, (2, 0), forward(our_attention, (q, k, v)), forward(sdpa, (q, k, v))),
            (
                "forward with bias",
                1.5,
                (2, 1),
                forward(our_attention, (q, k, v, bias)),
                forward(sdpa, (q, k, v, bias)),
            ),
            (
                "forward+backward",
                1.7,
                (7, 0),
                both(our_attention, (q, k, v), grad),
                both(sdpa, (q, k, v), grad),
            ),
            (
                "forward+backward with bias",
                None,
                (7, 2),
                both(given(our_attention), (q, k, v), grad),
                both(given(sdpa), (q, k, v), grad),
            ),
            (
                "forward+backward with bias gradient",
                2.0,
                (7, 3),
                both(our_attention, (q, k, v, bias), grad),
                both(sdpa, (q, k, v, bias), grad),
            ),
        ):
            b.compare(
                f"attention {name}",
                ours,
                {"sdpa": peer},
                target=target if cpu else None,
                case=case,
                floor_ms=floor(b, work[0], (n_b, n_h, n, d), biases=work[1]),
                error=error,
            )


def masks(b: Bench) -> None:
    """Masks as programs have them.  No target was set for these; torch's kernel computes what a mask hides, too."""
    n_b, n_h, n, d = 8, 8, 512, 64
    place = torch.arange(n, device=b.device)
    lengths = torch.arange(1, n_b + 1, device=b.device) * n // n_b
    padded = (place < lengths[:, None])[:, None, None]
    for name, mask in (
        ("padding at the end", padded),
        ("padding at the start", padded.flip(-1)),
        ("causal", place[:, None] >= place),
        ("four documents", place[:, None] // (n // 4) == place // (n // 4)),
        ("three of ten scores hidden", torch.rand(n_b, 1, n, n, device=b.device) > 0.3),
    ):
        ours, peer = partial(ops.scaled_attention, mask=mask), partial(sdpa, bias=mask)
        q, k, v, grad = (torch.randn(n_b, n_h, n, d, device=b.device) for _ in range(4))
        error = check("attention", *checked(ours, peer, [q, k, v], q.shape))
        for what, run in (("forward", forward), ("forward+backward", partial(both, grad=grad))):
            b.compare(
                f"masked attention {what}",
                run(ours, (q, k, v)),
                {"sdpa": run(peer, (q, k, v))},
                target=None,
                case=f"B{n_b} H{n_h} L{n} d{d} fp32, {name}",
                error=error,
            )


def sweep_shape(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Random batch, heads, lengths and head size, log-uniform, for at most 1.5 GFLOP."""
    while True:
        n_b, n_h = rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 2, 4, 6, 8, 12, 16))
        n_q, n_k = (max(1, round(2 ** rng.uniform(0, 11))) for _ in "qk")
        n_k = n_q if rng.random() < 0.6 else n_k
        d = rng.choice((1, 7, 16, 24, 32, 33, 40, 64, 64, 72, 80, 96, 100, 128, 128, 160, 200, 256))
        if n_b * n_h * n_q * n_k * d * 4 < 1.5e9:
            return n_b, n_h, n_q, n_k, d


def halves(b: Bench) -> None:
    """Half precision, by whichever kernel the op chooses.  No target was set for it."""
    for dtype in (torch.bfloat16, torch.float16):
        sweep(b, 60, dtype)


def sweep(b: Bench, count: int = 200, dtype: torch.dtype = torch.float32) -> None:
    """Forward and forward+backward of `count` shapes against SDPA; the slowest are listed."""
    rng = random.Random(b.seed)
    ratios: dict[str, list[tuple[float, str]]] = {"forward": [], "forward+backward": []}
    worst = 0.0
    for _ in range(count):
        n_b, n_h, n_q, n_k, d = sweep_shape(rng)
        q = torch.randn(n_b, n_h, n_q, d, device=b.device, dtype=dtype)
        k, v = (torch.randn(n_b, n_h, n_k, d, device=b.device, dtype=dtype) for _ in "kv")
        grad = torch.randn(q.shape, device=b.device, dtype=dtype)
        case = f"B{n_b} H{n_h} Lq{n_q} Lk{n_k} d{d}"
        first = [x[:1, :1] for x in (q, k, v)]
        exact = sdpa(*(x.double() for x in first))
        worst = max(worst, check(case, [our_attention(*first)], [sdpa(*first)], [exact]))
        for name, ours, peer in (
            ("forward", forward(our_attention, (q, k, v)), forward(sdpa, (q, k, v))),
            ("forward+backward", both(our_attention, (q, k, v), grad), both(sdpa, (q, k, v), grad)),
        ):
            ratios[name].append((sweep_ratio(b, ours, peer), case))
    for name, found in ratios.items():
        found.sort()
        b.row(
            f"attention sweep {name}" + ("" if dtype == torch.float32 else f", {dtype}"),
            shapes=count,
            clock="least processor time, one thread" if b.device == "cpu" else "median wall time",
            slower_than_0_9=sum(r < 0.9 for r, _ in found),
            met=found[0][0] >= 0.9 if dtype == torch.float32 else None,
            geometric_mean=round(statistics.geometric_mean(r for r, _ in found), 3),
            slowest=[(round(r, 3), case) for r, case in found[:8]],
            error=worst,
        )


def sweep_ratio(b: Bench, ours: Run, peer: Run) -> float:
    """The peer's time over ours: processor time on the CPU; on a device, medians of alternating calls for 20 ms."""
    if b.device == "cpu":
        return least_ratio(ours, peer)
    ours(), peer()
    taken: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(taken[0]) < 7 or time.perf_counter() - begin < 0.02:
        taken[0].append(b.seconds(ours))
        taken[1].append(b.seconds(peer))
    return statistics.median(taken[1]) / statistics.median(taken[0])
