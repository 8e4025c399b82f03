"""Attention on tensor cores, on the CPU emulation: against float64, for all that a call can request."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyalloc.ops import _cuda

from . import attention_cases as cases
from .test_cuda_emulated import agree


def gradients(tensors, grad, **options):
    return cases.results(cases.kernel, tensors, grad, **options)


def same(mine, others):
    return [torch.equal(a, b) for a, b in zip(mine, others, strict=True)]


# b, h, hkv, q, k, d, dv, bias: several tiles and one number beyond, both sizes of head, shared and own biases
SHAPES = [
    (1, 2, 2, 129, 130, 64, 64, None),
    (1, 2, 1, 65, 97, 128, 100, (1, 2, 65, 97)),
    (2, 4, 2, 66, 70, 33, 65, (4, 66, 70)),
    (1, 1, 1, 130, 66, 100, 20, (130, 66)),
    (2, 2, 2, 70, 33, 16, 7, (2, 1, 1, 33)),
    (2, 2, 1, 100, 65, 1, 4, (1, 2, 100, 1)),
    (1, 3, 3, 1, 200, 64, 64, (1,)),
    (2, 1, 1, 70, 1, 8, 8, None),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, causal, device):
    cases.compare(cases.problem(*shape), causal=causal)


@pytest.mark.parametrize("dim", [24, 72])
@pytest.mark.parametrize("of", [(2, 2, 70, 66), (1, 1, 1, 66), (2, 1, 70, 66)], ids=str)
def test_masks_and_queries_that_see_nothing(of, dim, device):
    tensors = cases.problem(2, 2, 1, 70, 66, dim, dim, (2, 2, 70, 66))
    mask = torch.rand(of) > 0.5
    if of[2] > 1:
        mask[..., 3:5, :] = False
    for causal in (False, True):
        cases.compare(tensors, mask=mask, causal=causal)
    mask[0] = False
    out, d_q, d_k, _, d_bias = gradients(tensors, torch.randn(2, 2, 70, dim), mask=mask)
    assert not any(x[0].any() for x in (out, d_q, d_k, d_bias))


# heads of at most 64 and of at most 128 numbers on tensor cores, the last on the plain kernels; a bias of which scores
# share nothing gets its gradient with that of the queries
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(
    ("dim", "heads", "bias"),
    [(8, 2, None), (8, 1, (2, 1, 33, 600)), (72, 2, (33, 600)), (136, 2, (600,))],
    ids=str,
)
def test_padding(dim, heads, bias, at_end, device):
    """Tiles of keys that it hides are not read: whatever they hold changes nothing."""
    tensors = cases.problem(2, heads, 1, 33, 600, dim, 8, bias)
    distance = torch.arange(600) if at_end else torch.arange(600).flip(0)
    lengths = torch.tensor([200, 5])
    mask = (distance < lengths[:, None])[:, None, None]
    cases.compare(tensors, mask=mask)
    if bias is None:
        cases.compare(tensors, mask=mask.transpose(0, 1), causal=True)  # a length for each head
        cases.compare(tensors, mask=mask & False)
    if bias == (2, 1, 33, 600):
        return
    grad = torch.randn(2, heads, 33, 8)
    right = gradients(tensors, grad, mask=mask)
    for i, n in enumerate((lengths + 64).tolist()):
        hidden = slice(n, None) if at_end else slice(0, 600 - n)
        for x in tensors[1:3]:
            x[i, :, hidden] = torch.nan
    assert all(same(right, gradients(tensors, grad, mask=mask)))


def test_biases_that_hide(device):
    """A bias of -1e37 or less acts as a mask; infinities do not affect their neighbours."""
    tensors = cases.problem(1, 1, 1, 70, 70, 64, 64)
    mask = torch.rand(1, 1, 70, 70) > 0.5
    mask[..., 7, :] = False
    grad = torch.randn(1, 1, 70, 64)
    right = gradients(tensors, grad, mask=mask)
    for hidden in (-1e37, -3e38, -torch.inf):
        bias = torch.zeros(1, 1, 70, 70).masked_fill(~mask, hidden)
        found = gradients(tensors, grad, bias=bias)
        assert all(same(right, found))


def test_large_scores(device):
    """Softmax subtracts the largest, so what is far below vanishes."""
    tensors = cases.problem(1, 2, 2, 70, 70, 64, 64)
    tensors[0] *= 40
    cases.compare(tensors)


@pytest.mark.parametrize("dim", [60, 128])
def test_rows_that_lie_oddly(dim, device):
    """No 16-byte copy takes them; a bias without contiguous neighbours is read one by one."""
    tensors = cases.problem(1, 2, 1, 70, 70, dim, dim, (1, 2, 70, 70))
    grad = torch.randn(1, 2, 70, dim)
    odd = [
        torch.nn.functional.pad(x, (1, 2))[..., 1 : x.shape[-1] + 1] for x in (*tensors[:3], grad)
    ]
    right = gradients(tensors, grad)
    assert all(same(right, gradients([*odd[:3], tensors[3]], odd[3])))
    across = tensors[3].mT.contiguous().mT
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3]]
    with torch.no_grad():
        assert torch.equal(right[0], cases.kernel(*heads, across))
    leaves = [x.detach().requires_grad_() for x in (*heads, across)]
    out = cases.kernel(*leaves)
    assert all(same(right[1:], torch.autograd.grad(out, leaves, grad)))


def test_the_same_bit_for_bit(device):
    """Blocks and warps take turns in a different order each time."""
    for bias in ((1, 2, 70, 90), (70, 90), (1, 1, 1, 90)):
        tensors = cases.problem(1, 2, 1, 70, 90, 40, 40, bias)
        grad = torch.randn(1, 2, 70, 40)
        assert all(same(gradients(tensors, grad), gradients(tensors, grad)))


@pytest.mark.parametrize("dim", [40, 96])
def test_dropout(dim, device, monkeypatch):
    """The random bits are those of the C kernels."""
    tensors = cases.problem(2, 2, 1, 70, 66, dim, dim, (70, 66))

    def function(*args):
        torch.manual_seed(4)
        return cases.kernel(*args, dropout=0.3, causal=True)

    agree(function, tensors, monkeypatch)


def test_not_a_number_and_infinity_are_not_lost(device):
    q, k, v = cases.problem(1, 1, 1, 70, 70, 64, 64)
    q[0, 0, 3, 5] = torch.nan
    v[0, 0, 9, 6] = torch.inf
    out, d_q, d_k, d_v = gradients((q, k, v), torch.randn(1, 1, 70, 64))
    assert out[..., 3, :].isnan().all() and d_q[..., 3, :].isnan().all()
    assert not out[..., 6].isfinite().any() and not out[..., 4, :6].isnan().any()
    assert d_k.isnan().all() and d_v.isnan().all()


def test_where_the_plain_kernels_serve(device, emulator):
    """Large heads, and cards with less shared memory; the last bits of the results differ."""
    calls = ctypes.CDLL(str(emulator))
    large = cases.problem(1, 1, 1, 20, 20, 129, 4)
    small = cases.problem(1, 1, 1, 20, 20, 128, 4)
    by_tensor = [cases.kernel(*x) for x in (large, small)]
    calls.emu_limit_shared(40 << 10)
    try:
        plain = [cases.kernel(*x) for x in (large, small)]
        cases.compare(small)
        cases.compare(cases.problem(2, 2, 1, 70, 90, 24, 40, (2, 1, 70, 90)), causal=True)
    finally:
        calls.emu_limit_shared(227 << 10)
    assert same(by_tensor, plain) == [True, False]
    cases.compare(large)


def test_heads_of_one_query_and_one_key_in_many_blocks(device):
    """Batches and heads are part of one index."""
    tensors = cases.problem(3, 4, 2, 1, 1, 4, 4)
    out = cases.kernel(*tensors)
    right = tensors[2].repeat_interleave(2, 1)
    torch.testing.assert_close(out, right, rtol=1e-6, atol=1e-6)
    assert _cuda.on_device(out)
