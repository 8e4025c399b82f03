"""One of four processes: every op over DTensors of a 2 x 2 mesh against the same over whole tensors.

Run by test_sharded.py: python -m ops.sharded RANK FILE; prints "ok CASE PLACEMENTS" lines.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from pyalloc.errors import OpError
from pyalloc.ops import (
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .reference import sphere

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)


def attention(n_kv=4, n_b=4):
    return torch.randn(n_b, 4, 9, 8), torch.randn(n_b, n_kv, 7, 8), torch.randn(n_b, n_kv, 7, 6)


def with_bias(*shape):
    return *attention(), torch.randn(shape)


def additive():
    return torch.randn(4, 3, 8), torch.randn(4, 5, 8), torch.randn(4, 5, 6), torch.randn(8)


def one_step():
    query, *rest = additive()
    return query[:, 0], *rest


def pairs():
    return sphere(4, 1, 6, 5), sphere(4, 6, 5), torch.rand(4, 6) * 9


def mixture():
    return sphere(4, 6, 5), sphere(6, 4, 5), torch.rand(6, 4) * 9, torch.randn(6, 4)


def kernel(*args, **kwargs):
    return scaled_attention(*args, path="kernel", **kwargs)


def causal(*args):
    return kernel(*args, causal=True)


def samples_last(value, loc, scale):
    return power_spherical_log_prob(value, loc, scale).sum((0, 1))


torch.manual_seed(0)  # each process makes the same

# function, inputs, placements of each input
CASES = {
    "batch and heads": (kernel, attention(), [(S0, S1)] * 3),
    "heads and batch": (causal, attention(), [(S1, S0)] * 3),
    "heads twice": (kernel, attention(), [(S1, S1)] * 3),
    "groups that fit": (kernel, attention(2), [(S1, R)] * 3),
    "groups that do not": (kernel, attention(2), [(S1, S1)] * 3),
    "an uneven batch": (kernel, attention(4, 3), [(S0, R)] * 3),
    "a process without entries": (kernel, attention(4, 1), [(S0, S1)] * 3),
    "queries only": (kernel, attention(), [(S0, S1), (R, R), (R, R)]),
    "values only": (kernel, attention(), [(R, R), (R, R), (S0, S1)]),
    "features": (kernel, attention(), [(S3, S2)] * 3),
    "nothing sharded": (kernel, attention(), [(R, R)] * 3),
    "a bias of each head": (kernel, with_bias(4, 9, 7), [(S0, S1)] * 3 + [(R, R)]),
    "a bias of each entry": (kernel, with_bias(4, 1, 9, 7), [(S0, S1)] * 3 + [(S0, R)]),
    "a bias of all": (causal, with_bias(9, 7), [(S0, S1)] * 3 + [(R, R)]),
    "additive": (additive_attention, additive(), [(S0, S0)] * 3 + [(R, R)]),
    "additive, queries": (additive_attention, additive(), [(S0, S1), (S0, R), (S0, R), (R, R)]),
    "additive, keys": (additive_attention, additive(), [(R, R), (S1, R), (S1, R), (R, R)]),
    "additive, one step": (additive_attention, one_step(), [(S0, R)] * 3 + [(R, R)]),
    "pairs": (power_spherical_log_prob, pairs(), [(S0, R), (R, S0), (R, S0)]),
    "pairs of a place": (power_spherical_log_prob, pairs(), [(S2, R), (S1, R), (S1, R)]),
    "samples by place": (power_spherical_log_prob, pairs(), [(S0, S2), (R, S1), (R, S1)]),
    "summed": (samples_last, pairs(), [(S0, R), (R, S0), (R, S0)]),
    "mixture": (power_spherical_mixture_log_prob, mixture(), [(S0, S1), *[(R, S0)] * 3]),
    "its components": (power_spherical_mixture_log_prob, mixture(), [(R, R), *[(S1, S1)] * 3]),
}


def agree(name, mesh):
    function, made, placements = CASES[name]
    inputs = [x.clone().requires_grad_() for x in made]
    leaves = [
        distribute_tensor(x, mesh, p).detach().requires_grad_()
        for x, p in zip(made, placements, strict=True)
    ]
    right, found = function(*inputs), function(*leaves)
    torch.testing.assert_close(found.full_tensor(), right)
    grad = torch.randn_like(right)
    torch.autograd.backward(right, grad)
    torch.autograd.backward(found, distribute_tensor(grad, mesh, [R, R]))
    for x, leaf in zip(inputs, leaves, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), x.grad, rtol=1e-4, atol=1e-5)
    return found.placements


def refused(mesh):
    q, k, v = (distribute_tensor(x, mesh, [S0, S1]) for x in attention())
    for call in (
        lambda: kernel(q, k, torch.randn(4, 4, 7, 6)),
        lambda: kernel(q, k, v, dropout=0.5),
    ):
        try:
            call()
        except OpError as error:
            print("refused:", error)


def main():
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    for name in CASES:
        places = ("P(sum)" if p == Partial() else p for p in agree(name, mesh))  # 2.9.1 says "P"
        print("ok", name, *places, flush=True)
    refused(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
