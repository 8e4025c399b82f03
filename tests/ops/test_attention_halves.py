"""Scaled attention of half precision: which kernel serves it, and what is kept for its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from pyalloc.ops import _plain, attention, scaled_attention

from .attention_cases import kernel, problem


@pytest.mark.skipif(not _plain.HAS_VECTORS, reason="pyalloc's kernels have no vectors here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_which_kernel_serves_half_precision(dtype, monkeypatch):
    """Copies in float32 are worth their time where much is computed with them, and torch has no matrix units."""

    def path(*sizes, **options):
        tensors = [x.to(dtype) for x in problem(1, 4, 4, *sizes, 64, 64)]
        return scaled_attention(*tensors, **options, return_info=True)[1]["path"]

    monkeypatch.setattr(attention, "has_matrix_units", lambda: False)
    assert path(100, 100) == path(100, 100, causal=True) == "kernel"
    assert path(1, 4000) == path(4000, 1) == path(8, 8) == "sdpa"
    assert path(25, 100) == ("kernel" if dtype == torch.float16 else "sdpa")
    monkeypatch.setattr(attention, "has_matrix_units", lambda: True)
    assert path(100, 100) == "sdpa"


@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32], ids=str)
def test_half_precision_is_kept_as_it_was_given(of_bias):
    """Not as copies in float32, which took twice the memory; the gradients are those of the copies."""
    given = [x.bfloat16() for x in problem(2, 2, 1, 70, 90, 16, 8)]
    leaves = [x.requires_grad_() for x in (*given, torch.randn(1, 2, 70, 90).to(of_bias))]
    grad = torch.randn(2, 2, 70, 8).bfloat16()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = kernel(*leaves)
    own = {x.untyped_storage().data_ptr() for x in leaves}
    more = [x for x in kept if x.untyped_storage().data_ptr() not in own]
    assert sorted(x.shape for x in more) == sorted([out.shape, (2, 2, 2, 70)])  # and statistics
    found = torch.autograd.grad(out, leaves, grad)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    wide = [x.detach().float().requires_grad_() for x in leaves]
    right = torch.autograd.grad(kernel(*wide), wide, grad.float())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, right, strict=True))


def test_half_precision_changed_in_place_is_refused():
    q, k, v = (x.bfloat16() for x in problem(1, 1, 1, 70, 90, 16, 8))
    out = kernel(q.requires_grad_(), k, v)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_half_precision_in_a_checkpoint():
    """It hands out each kept tensor once."""
    leaves = [x.bfloat16().requires_grad_() for x in problem(1, 2, 2, 70, 90, 16, 8)]
    grad = torch.randn(1, 2, 70, 8).bfloat16()
    out = torch.utils.checkpoint.checkpoint(kernel, *leaves, use_reentrant=False)
    right = torch.autograd.grad(kernel(*leaves), leaves, grad)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad), right))
