"""Each kernel of the ops on a card, small enough for compute-sanitizer, from addresses with and without alignment.

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so memcheck sees what goes beyond it.
Forward and backward are compared with the CPU's, and bit for bit with each other.

small_ops.py --each: every case in a process of its own, because after one that broke the device's context no other says
anything; small_ops.py CASE: one of them.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from test_ops import additive, attention, mixture, queries, spherical

from pyalloc.ops import (
    _cuda,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

LIMIT_S = 30


def cases() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """By the kernels that take them: a warp a pair, fp32 tiles, tensor cores whole and in parts, chunks of samples."""
    torch.manual_seed(0)
    return {
        "a pair for each t": (power_spherical_log_prob, spherical(1, 1, 37, 65)),
        "few dimensions": (power_spherical_log_prob, spherical(131, 5, 2, 17)),
        "many dimensions": (power_spherical_log_prob, spherical(130, 67, 2, 67)),
        "both sides": (power_spherical_log_prob, spherical(129, 131, 1, 130)),
        "many samples": (power_spherical_log_prob, spherical(2051, 6, 1, 66)),
        "mixture of few": (power_spherical_mixture_log_prob, mixture(2, 3, 19, 20)),
        "mixture of few dimensions": (power_spherical_mixture_log_prob, mixture(70, 66, 2, 33)),
        "mixture of many dimensions": (power_spherical_mixture_log_prob, mixture(70, 130, 2, 66)),
        "additive": (additive_attention, additive(3, 21, 130, 259)),
        "additive, several queries": (additive_attention, queries(2, 3, 19, 36, 40)),
        "additive, many keys": (additive_attention, additive(1, 1500, 12, 20)),
        "attention": (scaled_attention, attention(2, 3, 67, 70, 35)),
        "attention, a bias for each": (scaled_attention, attention(2, 2, 67, 70, 64, shared=False)),
        "attention, heads of 128": (scaled_attention, attention(2, 4, 67, 70, 100)),
        "attention, large heads": (scaled_attention, attention(1, 2, 35, 40, 130)),
        "causal": (functools.partial(scaled_attention, causal=True), attention(1, 2, 66, 66, 64)),
    }


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is no multiple of 8."""
    room = x.new_empty(x.numel() + 1, device="cuda")
    return room[1:].copy_(x.flatten()).view(x.shape)


def results(function: Callable[..., Any], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    grad = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape)
    return [out.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(out, leaves, grad))]


def is_right(name: str, function: Callable[..., Any], tensors: list[torch.Tensor]) -> bool:
    right = results(function, tensors)
    on_card = tensors[0].cuda()
    assert all(_cuda.serves(on_card, family) for family in _cuda.FAMILIES), (
        "the kernels could not be loaded"
    )
    ours = results(function, [x.cuda() for x in tensors])
    again = results(function, [shifted(x) for x in tensors])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, right, strict=True)]
    # additive attention sums in another order if rows do not begin at multiples of 16 bytes
    is_other = not name.startswith("additive") and not all(map(torch.equal, ours, again))
    errors += [float((a - b).norm() / b.norm()) for a, b in zip(again, right, strict=True)]
    print(f"{name}: {max(errors):.1e} from the CPU's, shifted {'OTHER' if is_other else 'too'}")
    return not is_other and max(errors) <= 2e-5


def is_right_alone(name: str) -> bool:
    """In a process of its own; its output follows."""
    try:
        done = subprocess.run([sys.executable, __file__, name], check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{name}: no end in {LIMIT_S} s", flush=True)
        return False
    if done.returncode != 0:
        print(f"{name}: exit code {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> int:
    if sys.argv[1:] == ["--each"]:
        return 0 if all([is_right_alone(name) for name in cases()]) else 1
    chosen = {name: case for name, case in cases().items() if name in (sys.argv[1:] or [name])}
    if not chosen:
        print("no such case; there are: " + ", ".join(cases()))
        return 2
    return 0 if all([is_right(name, *case) for name, case in chosen.items()]) else 1


if __name__ == "__main__":
    sys.exit(main())
