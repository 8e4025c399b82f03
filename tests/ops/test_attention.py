"""scaled_attention against float64 eager attention: shapes, masks, biases, groups, dropout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from pyalloc.errors import OpError
from pyalloc.ops import _eager, scaled_attention, set_cpu_isa

from .attention_cases import compare, eager, kernel, problem, results
from .reference import relative

# b, h, hkv, q, k, d, dv, bias
SHAPES = [
    (2, 4, 2, 70, 130, 24, 40, None),
    (1, 2, 1, 65, 65, 64, 64, (1, 2, 65, 65)),
    (2, 2, 2, 17, 200, 7, 9, (2, 1, 1, 200)),
    (1, 1, 1, 300, 300, 33, 33, None),
    (2, 3, 3, 40, 50, 16, 16, (3, 40, 50)),
    (2, 3, 3, 40, 50, 16, 16, (2, 3, 40, 50)),
    (1, 1, 1, 1, 1, 1, 1, (1, 1)),
    (1, 1, 1, 129, 3, 256, 256, (129, 1)),
    (3, 6, 2, 5, 300, 8, 1, (300,)),
    (1, 2, 1, 300, 333, 72, 52, (300, 333)),  # for AMX, in both directions
    (2, 6, 2, 5, 150, 17, 40, (6, 5, 150)),  # few queries, more of a group than pass together
    (1, 2, 2, 12, 20, 64, 80, (12, 1)),
    (1, 2, 1, 20, 150, 90, 100, (20, 150)),  # few of wide heads
]


@pytest.mark.parametrize("shape", [(1, 1, 1, 300), (300,), (1, 1, 1, 1)], ids=str)
def test_gradient_of_a_bias_that_all_queries_of_one_head_share(shape, attention_isa):
    """More threads than heads, and one gradient that only one of them may add to."""
    tensors = (*(torch.randn(1, 1, n, 8) for n in (4096, 300, 300)), torch.randn(shape))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        compare(tensors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 8, 150, 160), (4, 1, 150, 160), (150, 160)], ids=str)
def test_gradient_of_a_bias_that_heads_share_has_one_order(shape):
    """Heads that add to the same numbers at once would lose some, or add them in another order."""
    bias = torch.randn(shape, requires_grad=True)
    out = kernel(*problem(4, 8, 8, 150, 160, 16, 16), bias).square().sum()
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 4, 4, 4):
            torch.set_num_threads(n)
            found += torch.autograd.grad(out, bias, retain_graph=True)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(shape, causal, attention_isa):
    compare(problem(*shape), causal=causal)


def test_blocks_of_queries_compute_together_what_they_do_alone(attention_isa):
    """Those of a head pass over keys and values together where these are larger than a near cache."""
    q, k, v = problem(2, 4, 4, 200, 1100, 128, 128)
    out = kernel(q, k, v)
    parts = [64, 64, 72]
    for alone, part in zip(q.split(parts, 2), out.split(parts, 2), strict=True):
        assert torch.equal(kernel(alone, k, v), part)
    causal = kernel(q, k, v, causal=True)
    assert torch.equal(kernel(q[:, :, :64], k, v, causal=True), causal[:, :, :64])
    right = eager(q.double(), k.double(), v.double(), causal=True)
    torch.testing.assert_close(causal.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_threads", [1, 4])
@pytest.mark.parametrize("n_q", [5, 12, 40])
def test_keys_that_no_query_sees_have_no_gradient(n_q, n_threads, attention_isa):
    """Few queries, so that each block of keys is written once it is computed, or without."""
    q, k, v = problem(1, 1, 1, n_q, 1300, 64, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        found = results(kernel, (q, k, v), torch.randn(q.shape), causal=True)
        compare((q, k, v), causal=True)
    finally:
        torch.set_num_threads(before)
    for grad in found[2:]:
        assert grad[:, :, :n_q].any() and not grad[:, :, n_q:].any()


@pytest.mark.parametrize("shape", [(9, 200, 256), (70, 400, 256), (170, 180, 64)], ids=str)
def test_large_scores_are_rounded_alike_in_both_directions(shape, attention_isa):
    """They were not where another kernel served backward: 1.1e-5, compared with torch's 9e-7."""
    n_q, n_k, dim = shape
    # such scores' own last digits: torch has some more of them where its library sums few rows in another order
    compare(problem(1, 1, 1, n_q, n_k, dim, dim), scale=1.0, bar=3e-6)


@pytest.mark.parametrize("shape", [(30, 200), (64, 30)], ids=str)
def test_scores_of_wide_heads_keep_their_digits(shape, attention_isa):
    """Once, their 256 products were summed one after another: 1.5e-6 and 2e-6 in these cases."""
    tensors = problem(4, 4, 4, *shape, 256, 256)
    exact = eager(*(x.double() for x in tensors), scale=1.0)
    assert relative(kernel(*tensors, scale=1.0), exact) < 1.2e-6


def test_long_sums_keep_their_digits(attention_isa):
    """Once, 1600 keys were summed one after another: 1.05e-6, compared with torch's 4e-7."""
    compare(problem(1, 1, 1, 64, 1587, 72, 72))
    compare(problem(1, 1, 1, 1587, 64, 72, 72))


def test_many_blocks_of_keys_keep_their_digits(attention_isa):
    """Once, each key multiplied the earlier sums by 1 + 1.2e-7: 7e-6 after 16000 keys, compared with torch's 4e-7."""
    compare(problem(1, 1, 1, 16, 16000, 8, 8))


@pytest.mark.parametrize("number", [-1e4, -1e6, -1e9, -1e30, 1e9])
def test_rows_whose_bias_is_one_large_number(number, attention_isa):
    """Their sum had no digits left: each gradient came out multiplied by the number of keys."""
    bias = torch.zeros(1, 2, 70, 90)
    bias[..., ::3, :] = number
    compare((*problem(1, 2, 2, 70, 90, 16, 16), bias))


@pytest.mark.parametrize("mask_shape", [(2, 1, 1, 90), (1, 1, 70, 90), (2, 2, 70, 90), (70, 1)])
def test_masks_and_wholly_masked_rows(mask_shape, attention_isa):
    mask = torch.rand(mask_shape) > 0.5
    mask[..., :1, :] = False
    tensors = problem(2, 2, 2, 70, 90, 20, 20, (1, 2, 70, 90))
    compare(tensors, mask=mask)
    out = scaled_attention(*tensors, mask=mask)
    assert not torch.isnan(out).any() and not out[:, :, 0].any()


@pytest.mark.parametrize("of", [(2, 4, 3, 140), (4, 1, 140), (2, 1, 3, 1), (3, 140)], ids=str)
def test_biases_and_masks_of_few_queries(of, attention_isa):
    """Which have a kernel of their own."""
    mask = torch.rand(of) > 0.3
    if 3 in of:
        mask[..., :1, :] = False
    compare((*problem(2, 4, 2, 3, 140, 20, 20), torch.randn(of)), mask=mask)


def test_infinite_bias_hides_keys(attention_isa):
    q, k, v = problem(1, 2, 2, 30, 40, 16, 16)
    bias = torch.zeros(30, 40)
    bias[3] = -torch.inf
    bias[:, 7] = -torch.inf
    compare([q, k, v, bias])


def test_a_bias_hides_the_same_in_the_plain_formula(attention_isa):
    """The kernels keep scores in units of log 2."""
    q, k, v = problem(1, 1, 1, 20, 20, 8, 8)
    for size in (-6e36, -8e36, -2e37):
        bias = torch.full((1, 1, 20, 20), size)
        right = _eager.attention(q, k, v, bias, None, False, 0.3)
        assert right.any() == (size > -7e36)
        torch.testing.assert_close(scaled_attention(q, k, v, bias, scale=0.3), right)


@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.parametrize("which", range(3))
def test_nan_stays(which, n_q, attention_isa):
    """Once, exp2 of AVX2 made 0 of one, and the query's result zeros."""
    tensors = problem(1, 4, 2, n_q, 50, 3, 5)
    tensors[which][0, 0, -1, 0] = torch.nan
    right = eager(*tensors).isnan()
    assert right.any() and torch.equal(kernel(*tensors).isnan(), right)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan, 1e30, 1e12, 1e-9])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("attention_isa", ["amx", "emulated amx"], indirect=True)
def test_numbers_that_tiles_cannot_take(which, number, attention_isa, request):
    """Infinite ones have no parts, and those of tiny ones are denormal: the kernel without tiles computes them."""
    q, k, v, bias = problem(1, 2, 1, 260, 270, 64, 64, (270,))
    grad = torch.randn(1, 2, 260, 64)
    changed = (q, k, v, grad)[which]
    if number == 1e-9:
        changed.mul_(number if which < 3 else 1e-25)
    else:
        changed[0, 0, 200, 5] = (
            number  # not among the first keys, whose gradients are there by then
        )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more would find it before there is any gradient of the bias
    try:
        found = results(kernel, (q, k, v, bias), grad)
        set_cpu_isa("scalar" if "emulated" in request.node.name else "avx512")
        expected = results(kernel, (q, k, v, bias), grad)
    finally:
        torch.set_num_threads(before)
    for mine, right in zip(found, expected, strict=True):
        size = float(right.nan_to_num(0, 0, 0).abs().max())
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6 * size, equal_nan=True)


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(1, 80),
    st.integers(1, 80),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_any_shape_agrees_with_double_precision(n_b, heads, n_q, n_k, dim, dim_v, causal, seed):
    torch.manual_seed(seed)
    q, k, v = problem(n_b, *heads, n_q, n_k, dim, dim_v)
    # A probability errs by its score's rounding, which a few large terms may carry into the result in full.
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * dim**-0.5
    compare([q, k, v], causal=causal, bar=1e-6 * max(1, largest))


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 40), (40, 1)])
def test_bias_gradient_where_a_length_is_one(n_q, n_k, attention_isa):
    """Once, it was added to memory that nobody had cleared."""
    torch.empty(n_q * n_k).fill_(1e30)
    tensors = [x.requires_grad_() for x in problem(1, 1, 1, n_q, n_k, 4, 4, (1, 1, n_q, n_k))]
    out = scaled_attention(*tensors)
    ours = torch.autograd.grad(out.sum(), tensors[3])
    right = torch.autograd.grad(eager(*tensors).sum(), tensors[3])
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


def test_dropout_is_the_same_in_both_directions_and_fair():
    q, k, v = problem(1, 2, 2, 200, 300, 8, 4)
    torch.manual_seed(5)
    one = scaled_attention(q, k, torch.ones_like(v), dropout=0.3)
    assert abs(float(one.mean()) - 1) < 0.01 and float(one.std()) > 0.01
    torch.manual_seed(5)
    assert torch.equal(one, scaled_attention(q, k, torch.ones_like(v), dropout=0.3))
    # linear in v: the vjp for v must be the transpose of the same dropped matrix
    torch.manual_seed(6)
    vs = v.clone().requires_grad_()
    out = scaled_attention(q, k, vs, dropout=0.3)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, vs, g)
    torch.testing.assert_close((dv * v).sum(), (out * g).sum(), rtol=1e-4, atol=1e-3)


def kept(n_b, n_h, n_q, n_k):
    """Which of equal probabilities dropout keeps: every key has a value of its own."""
    q, k = torch.zeros(n_b, n_h, n_q, 1), torch.zeros(n_b, n_h, n_k, 1)
    return kernel(q, k, torch.eye(n_k).expand(n_b, n_h, n_k, n_k), dropout=0.4) > 0


def test_dropout_draws_for_each_head_query_and_key(attention_isa):
    torch.manual_seed(4)
    found = kept(2, 3, 70, 150)
    for others in ((2, 3), (0, 1, 3), (0, 1, 2)):  # the share of each head, query, key
        share = found.double().mean(others)
        spread = (0.24 * share.numel() / found.numel()) ** 0.5
        assert (share - 0.6).abs().max() < 5 * spread
    strangers = [found.roll(1, dim) for dim in range(4)] + [kept(2, 3, 70, 150)]
    for other in strangers:  # independent ones agree with probability 0.6^2 + 0.4^2
        assert abs(float((found == other).double().mean()) - 0.52) < 0.01
    torch.manual_seed(4)
    set_cpu_isa("scalar")
    assert torch.equal(found, kept(2, 3, 70, 150))


def test_dropout_under_another_default_device():
    """The seed lives on the host, whatever torch.device() says of new tensors."""
    inputs = problem(1, 1, 1, 4, 5, 3, 3)
    torch.manual_seed(3)
    right = kernel(*inputs, dropout=0.5)
    torch.manual_seed(3)
    with torch.device("meta"):
        ours = kernel(*inputs, dropout=0.5)
    assert torch.equal(ours, right)


def test_dropout_gradients_by_differences():
    tensors = [x.double().requires_grad_() for x in problem(1, 1, 1, 5, 6, 3, 2, (5, 6))]

    def function(*args):
        torch.manual_seed(9)
        return scaled_attention(*args, dropout=0.4)

    assert gradcheck(function, tensors)


def test_repeats_bitwise_for_any_layout():
    q, k, v = problem(2, 3, 3, 100, 110, 32, 32)
    grad = torch.randn(2, 3, 100, 32)
    first = results(scaled_attention, (q, k, v), grad)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for again in (
        results(scaled_attention, (q, k, v), grad),
        results(scaled_attention, swapped, grad),
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_keys_give_zeros(n_q, n_k):
    tensors = [x.requires_grad_() for x in problem(2, 2, 2, n_q, n_k, 4, 4)]
    out = scaled_attention(*tensors)
    assert out.shape == (2, 2, n_q, 4) and not out.any()
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), tensors))


def test_empty_inputs_have_all_gradients_and_spread_nothing():
    q, k, v = problem(1, 2, 2, 3, 0, 4, 4)
    bias = torch.zeros(3, 0, requires_grad=True)
    q[0, 0, 0, 0] = torch.inf  # once 0 times this
    out = scaled_attention(q.requires_grad_(), k, v, bias)
    assert out.shape == (1, 2, 3, 4) and not out.any()
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, bias))] == [q.shape, bias.shape]
    assert scaled_attention(*problem(2, 0, 0, 3, 5, 4, 4)).shape == (2, 0, 3, 4)
    assert scaled_attention(*problem(2, 1, 1, 3, 5, 4, 0)).shape == (2, 1, 3, 0)
    with pytest.raises(OpError, match="head sizes go from 1 up to 256, got 0 and 4"):
        scaled_attention(*problem(1, 1, 1, 2, 2, 0, 4))
