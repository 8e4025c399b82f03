"""PowerSpherical log-probabilities and mixtures: time, and memory in a fresh process."""

from __future__ import annotations

import math
import subprocess
import sys

import torch
from torch import Tensor

from benchmarks.ops.measure import Bench, both, check, checked, forward
from benchmarks.torch_replay import ROOT
from pyalloc import ops


def unit(*shape: int, device: str) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1)


def from_cosine(u: Tensor, kappa: Tensor, dim: int) -> Tensor:
    beta = (dim - 1) / 2
    alpha = kappa + beta
    log_c = -(
        (alpha + beta) * math.log(2)
        + torch.lgamma(alpha)
        - torch.lgamma(alpha + beta)
        + beta * math.log(math.pi)
    )
    return log_c + kappa * torch.log1p(u)


def by_bmm(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    """(T, L, M) by one batched product: the fastest eager form that we found."""
    u = torch.bmm(value.transpose(0, 1), loc.permute(1, 2, 0))
    return from_cosine(u, kappa.t()[:, None], value.shape[-1])


def by_einsum(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return from_cosine(torch.einsum("ltd,mtd->lmt", value, loc), kappa, value.shape[-1])


def by_product(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return from_cosine((value[:, None] * loc).sum(-1), kappa, value.shape[-1])


def mixture_bmm(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(by_bmm(value, loc, kappa) + weights.t()[:, None], 2).t()


def mixture_einsum(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(by_einsum(value, loc, kappa) + weights, 1)


def our_log_prob(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return ops.power_spherical_log_prob(value[:, None], loc, kappa)


def our_mixture(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return ops.power_spherical_mixture_log_prob(value, loc, kappa, weights, dim=0)


def spherical_inputs(n_l: int, n_m: int, n_t: int, dim: int, device: str) -> list[Tensor]:
    kappa = torch.rand(n_m, n_t, device=device) * 50
    weights = torch.log_softmax(torch.randn(n_m, n_t, device=device), 0)
    return [unit(n_l, n_t, dim, device=device), unit(n_m, n_t, dim, device=device), kappa, weights]


def floors(b: Bench, n_l: int, n_m: int, n_t: int, dim: int) -> dict[str, float | None]:
    """The least time on a card: inputs read, results written and products computed once."""
    if b.device == "cpu":
        return dict.fromkeys(("log_prob", "log_prob_both", "mixture", "mixture_both"))
    rows = 4 * (n_l + n_m) * n_t * dim
    product = 2 * n_l * n_m * n_t * dim
    found: dict[str, float | None] = {}
    for name, out in (("log_prob", 4 * n_l * n_m * n_t), ("mixture", 4 * n_l * n_t)):
        forward_ms = b.floor_ms(rows + out, product)
        backward_ms = b.floor_ms(2 * rows + out, 3 * product)
        found[name] = forward_ms
        if forward_ms is None or backward_ms is None:
            found[f"{name}_both"] = None
        else:
            found[f"{name}_both"] = forward_ms + backward_ms
    return found


def spherical(b: Bench) -> None:
    n_l, n_m, n_t, dim = 128, 128, 512, 128
    small = spherical_inputs(n_l, n_m, 4, dim, b.device)
    error = check("log_prob", *checked(our_log_prob, by_einsum, small[:3], (n_l, n_m, 4)))
    mixed = check("mixture", *checked(our_mixture, mixture_einsum, small, (n_l, 4)))
    inputs = spherical_inputs(n_l, n_m, n_t, dim, b.device)
    case = f"L{n_l} M{n_m} T{n_t} D{dim} fp32"
    floor = floors(b, n_l, n_m, n_t, dim)
    cpu = b.device == "cpu"
    peers = b.compiled({"bmm": by_bmm, "einsum": by_einsum})
    mixtures = b.compiled({"bmm": mixture_bmm, "einsum": mixture_einsum})
    lean = inputs[:3]
    product = {} if cpu else {"product": forward(by_product, lean)}
    b.compare(
        "power_spherical forward",
        forward(our_log_prob, lean),
        {**{k: forward(f, lean) for k, f in peers.items()}, **product},
        target=2.5 if cpu else None,
        case=case,
        floor_ms=floor["log_prob"],
        error=error,
    )
    grad = torch.randn(n_t, n_l, n_m, device=b.device)
    transposed = {
        k: both(f, lean, grad if "bmm" in k else grad.permute(1, 2, 0)) for k, f in peers.items()
    }
    b.compare(
        "power_spherical forward+backward",
        both(our_log_prob, lean, grad.permute(1, 2, 0)),
        transposed,
        target=None,
        case=case,
        floor_ms=floor["log_prob_both"],
        error=error,
    )
    b.compare(
        "mixture forward",
        forward(our_mixture, inputs),
        {k: forward(f, inputs) for k, f in mixtures.items()},
        target=4.0 if cpu else None,
        case=case,
        floor_ms=floor["mixture"],
        error=mixed,
    )
    grad = torch.randn(n_l, n_t, device=b.device)
    b.compare(
        "mixture forward+backward",
        both(our_mixture, inputs, grad),
        {k: both(f, inputs, grad) for k, f in mixtures.items()},
        target=3.5 if cpu else None,
        case=case,
        floor_ms=floor["mixture_both"],
        error=mixed,
    )


def spherical_shapes(b: Bench) -> None:
    """Shapes that fill no tile, on a card: the latents of a batch, and a data set under few components."""
    latents = spherical_inputs(1, 1, 4096, 64, b.device)
    lean = latents[:3]
    peers = b.compiled({"einsum": by_einsum})
    grad = torch.randn(1, 1, 4096, device=b.device)
    error = check("latents", *checked(our_log_prob, by_einsum, lean, tuple(grad.shape)))
    b.compare(
        "power_spherical forward+backward, latents",
        both(our_log_prob, lean, grad),
        {k: both(f, lean, grad) for k, f in peers.items()},
        target=None,
        case="L1 M1 T4096 D64 fp32",
        error=error,
    )
    data = spherical_inputs(100_000, 16, 1, 64, b.device)
    mixtures = b.compiled({"einsum": mixture_einsum})
    few = [data[0][:3000], *data[1:]]
    error = check("data", *checked(our_mixture, mixture_einsum, few, (3000, 1)))
    grad = torch.randn(100_000, 1, device=b.device)
    b.compare(
        "mixture forward+backward, a data set",
        both(our_mixture, data, grad),
        {k: both(f, data, grad) for k, f in mixtures.items()},
        target=None,
        case="L100000 M16 T1 D64 fp32",
        error=error,
    )


def spherical_memory(b: Bench) -> None:
    """Growth of the resident set in a fresh process, compared with the size of the result."""
    for op, n_t in (("log_prob", 512), ("mixture", 512), ("log_prob", 8192), ("mixture", 8192)):
        source = f"""
import resource, torch
from benchmarks.ops import spherical as bench
inputs = [torch.randn(128, {n_t}, 128) for _ in "ab"]
inputs = [x.div_(x.norm(dim=-1, keepdim=True)) for x in inputs]
inputs += [torch.rand(128, {n_t}) * 50, torch.zeros(128, {n_t})]
run = bench.our_{op}
args = inputs[:3] if "{op}" == "log_prob" else inputs
run(*[x[:, :2].contiguous() for x in args])
# the high-water mark of making the inputs must not hide the op's growth
open("/proc/self/clear_refs", "w").write("5")
import re
def mark(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = mark("VmRSS")
out = run(*args)
print(mark("VmHWM") - before, out.numel() * 4)
"""
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True
        )
        grown, size = map(int, done.stdout.split())
        b.row(
            f"{op} memory",
            case=f"L128 M128 T{n_t} D128 fp32",
            grown_bytes=grown,
            result_bytes=size,
            product_bytes=128 * 128 * n_t * 128 * 4,
            ratio=round(grown / size, 3),
            # scratch does not grow with T, so it only matters beside the mixture's small results
            target="<= 1.05" if op == "log_prob" else None,
            met=grown <= 1.05 * size if op == "log_prob" else None,
        )
