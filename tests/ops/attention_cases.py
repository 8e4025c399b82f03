"""Attention as published, problems for it, and scaled_attention measured against it."""

from __future__ import annotations

import torch

from pyalloc._core import attention_plain
from pyalloc.ops import _plain, scaled_attention

from .reference import within

# Without torch's table of functions (before 2.14), calls with little to do go to its kernel; without vectors most do.
SHOWS_TENSORS_TO_C = hasattr(torch.Tensor, "__dlpack_c_exchange_api__") and _plain.HAS_VECTORS
HAS_NO_TABLE = object  # a class in place of Tensor's


def serve_without_table():
    """What serves plain calls where C is shown no tensors."""
    return attention_plain((HAS_NO_TABLE, *_plain._PARTS[1:]), _plain._LIMITS)[0]


def probabilities(q, k, bias=None, mask=None, causal=False, scale=None):
    """The weight of each key for each query, with zeros where a query sees nothing."""
    score = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        score = score + bias
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    if causal:
        score = score.masked_fill(~torch.ones_like(score, dtype=torch.bool).tril(), -torch.inf)
    seen = ~torch.isneginf(score).all(-1, keepdim=True)
    return torch.softmax(score.masked_fill(~seen, 0), -1).masked_fill(~seen, 0)


def eager(q, k, v, bias=None, **options):
    """Attention as published."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return probabilities(q, k, bias, **options) @ v


def sizes_of_terms(tensors, grad, **options):
    """For the output and each gradient: the norm of its sums with every term made positive.

    Rounding is relative to these. Where terms cancel (one key, a bias constant over keys, a
    result of two numbers that happens to lie near zero) the result itself says nothing.
    """
    q, k, v, *bias = (x.double() for x in tensors)
    group = q.shape[1] // k.shape[1]
    p = probabilities(q, k.repeat_interleave(group, 1), *bias, **options)
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    q, k, v, grad = q.abs(), k.abs(), v.abs(), grad.abs()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    grad_p = grad @ v.transpose(-1, -2)
    grad_score = p * (grad_p + (p * grad_p).sum(-1, keepdim=True))

    def per_group(x):
        return x.unflatten(1, (-1, group)).sum(2)

    sums = [
        p @ v,
        grad_score @ k * scale,
        per_group(grad_score.transpose(-1, -2) @ q * scale),
        per_group(p.transpose(-1, -2) @ grad),
        *(grad_score.sum_to_size(x.shape) for x in bias),
    ]
    return [float(x.norm()) for x in sums]


def results(function, tensors, grad, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def compare(tensors, function=None, bar=1e-6, **options):
    function = function or kernel
    q, v = tensors[0], tensors[2]
    grad = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64)
    ours = results(function, tensors, grad, **options)
    torchs = results(eager, tensors, grad, **options)
    exact = results(eager, [x.double() for x in tensors], grad, **options)
    sizes = sizes_of_terms(tensors, grad, **options)
    for mine, other, right, size in zip(ours, torchs, exact, sizes, strict=True):
        within(mine, other, right, floor=max(0.1 * size, 1e-300), bar=bar)


def kernel(*args, **options):
    """Pyalloc's own kernel, even where torch's would serve."""
    return scaled_attention(*args, path="kernel", **options)


def problem(n_b, n_h, n_kv, n_q, n_k, dim, dim_v, bias=None):
    shapes = [(n_b, n_h, n_q, dim), (n_b, n_kv, n_k, dim), (n_b, n_kv, n_k, dim_v)]
    return [torch.randn(s) for s in shapes] + ([] if bias is None else [torch.randn(bias)])
