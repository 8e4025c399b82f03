"""scaled_attention against float64 eager attention: shapes, masks, biases, groups, dropout."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from pyalloc._core import attention_rule
from pyalloc.errors import OpError
from pyalloc.ops import attention as attention_module
from pyalloc.ops import scaled_attention, set_cpu_isa

from .reference import relative, within


def probabilities(q, k, bias=None, mask=None, causal=False, scale=None):
    """What each query gives each key, with zeros where a query sees nothing."""
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
    """Attention as printed."""
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
    """Pyalloc's own kernel, also where torch's would serve."""
    return scaled_attention(*args, path="kernel", **options)


def problem(n_b, n_h, n_kv, n_q, n_k, dim, dim_v, bias=None):
    shapes = [(n_b, n_h, n_q, dim), (n_b, n_kv, n_k, dim), (n_b, n_kv, n_k, dim_v)]
    return [torch.randn(s) for s in shapes] + ([] if bias is None else [torch.randn(bias)])


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
]


@pytest.mark.parametrize("shape", [(1, 1, 1, 300), (300,), (1, 1, 1, 1)], ids=str)
def test_gradient_of_a_bias_that_all_queries_of_one_head_share(shape, isa):
    """More threads than heads, and one gradient that none but one of them may add to."""
    tensors = (*(torch.randn(1, 1, n, 8) for n in (4096, 300, 300)), torch.randn(shape))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        compare(tensors)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 8, 150, 160), (4, 1, 150, 160), (150, 160)], ids=str)
def test_gradient_of_a_bias_that_heads_share_has_one_order(shape):
    """Heads that add to the same numbers at once would lose some, or sum them in another order."""
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
def test_forward_and_gradients(shape, causal, isa):
    compare(problem(*shape), causal=causal)


def test_long_sums_keep_their_digits(isa):
    """1600 keys once summed one after another: 1.05e-6 where torch has 4e-7."""
    compare(problem(1, 1, 1, 64, 1587, 72, 72))
    compare(problem(1, 1, 1, 1587, 64, 72, 72))


def test_many_blocks_of_keys_keep_their_digits(isa):
    """Each once multiplied the sums before it by 1 + 1.2e-7: 7e-6 after 16000 keys, where torch has 4e-7."""
    compare(problem(1, 1, 1, 16, 16000, 8, 8))


@pytest.mark.parametrize("number", [-1e4, -1e6, -1e9, -1e30, 1e9])
def test_rows_whose_bias_is_one_large_number(number, isa):
    """Their sum had no digits beside it: each gradient came out as many times as there are keys."""
    bias = torch.zeros(1, 2, 70, 90)
    bias[..., ::3, :] = number
    compare((*problem(1, 2, 2, 70, 90, 16, 16), bias))


@pytest.mark.parametrize("mask_shape", [(2, 1, 1, 90), (1, 1, 70, 90), (2, 2, 70, 90), (70, 1)])
def test_masks_and_wholly_masked_rows(mask_shape, isa):
    mask = torch.rand(mask_shape) > 0.5
    mask[..., :1, :] = False
    tensors = problem(2, 2, 2, 70, 90, 20, 20, (1, 2, 70, 90))
    compare(tensors, mask=mask)
    out = scaled_attention(*tensors, mask=mask)
    assert not torch.isnan(out).any() and not out[:, :, 0].any()


def test_infinite_bias_hides_keys(isa):
    q, k, v = problem(1, 2, 2, 30, 40, 16, 16)
    bias = torch.zeros(30, 40)
    bias[3] = -torch.inf
    bias[:, 7] = -torch.inf
    compare([q, k, v, bias])


@pytest.mark.parametrize("n_q", [1, 20])
@pytest.mark.parametrize("which", range(3))
def test_nan_stays(which, n_q, isa):
    """Once exp2 of AVX2 made 0 of one, and the query's result zeros."""
    tensors = problem(1, 4, 2, n_q, 50, 3, 5)
    tensors[which][0, 0, -1, 0] = torch.nan
    right = eager(*tensors).isnan()
    assert right.any() and torch.equal(kernel(*tensors).isnan(), right)


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
    # A probability errs by its score's rounding, which few large terms may carry into the result undiminished.
    largest = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * dim**-0.5
    compare([q, k, v], causal=causal, bar=1e-6 * max(1, largest))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_q", [1, 9, 10, 40])
def test_either_path_gives_the_same(n_q, causal):
    """The rule that chooses between them lies between these."""
    for n_k in (1, 2, 3, 40):
        compare(problem(2, 6, 6, n_q, n_k, 8, 8), scaled_attention, causal=causal, scale=0.3)


@pytest.mark.parametrize("bias", [None, (1, 2, 4, 5), (5,)])
def test_gradients_to_second_order(bias):
    tensors = [x.double().requires_grad_() for x in problem(2, 2, 1, 4, 5, 3, 2, bias)]
    assert gradcheck(scaled_attention, tensors)
    assert gradgradcheck(scaled_attention, tensors)


def second_order(function, inputs, grad, weights):
    """First derivatives, and those of their weighted sum."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    g = grad.to(leaves[0].dtype).requires_grad_()
    first = torch.autograd.grad(function(*leaves), leaves, g, create_graph=True)
    total = sum((a * w.to(a.dtype)).sum() for a, w in zip(first, weights, strict=True))
    return [*(x.detach() for x in first), *torch.autograd.grad(total, [*leaves, g])]


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 4, 20, 30, 8, 8), (1, 4, 2, 5, 9, 8, 8)], ids=str)
def test_second_derivatives_where_torchs_kernel_serves(shape, options, dtype, bar):
    """Torch's kernel has none: create_graph makes pyalloc's compute the gradients again."""
    inputs = [x.to(dtype) for x in problem(*shape)]
    grad, weights = torch.randn(*shape[:2], shape[3], 8), [torch.randn(x.shape) for x in inputs]
    if dtype != torch.float32 or shape[1] == shape[2]:
        assert scaled_attention(*inputs, **options, return_info=True)[1]["path"] == "sdpa"

    def right(*args):
        return eager(*args, **options)

    ours = second_order(lambda *a: scaled_attention(*a, **options), inputs, grad.to(dtype), weights)
    exact = second_order(right, [x.double() for x in inputs], grad.to(dtype), weights)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype and relative(a, b) < bar


def test_graph_of_a_backward_can_be_made_again_and_left():
    inputs = [x.requires_grad_() for x in problem(1, 2, 2, 4, 5, 4, 4)]
    out = scaled_attention(*inputs)
    heard = []
    out.register_hook(lambda g: heard.append(g.shape))  # the caller's hooks are theirs alone
    plain = torch.autograd.grad(out.sin().sum(), inputs, retain_graph=True)
    assert all(not g.requires_grad for g in plain)
    for _ in range(2):
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-6)
        torch.autograd.grad(first[0].square().sum(), inputs, retain_graph=True)
    assert heard == [out.shape] * 3 + [out.shape] * 2  # second derivatives go through out too
    again = torch.autograd.grad(out.sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))


def test_hessian_of_a_small_input():
    q, k, v = problem(1, 1, 1, 3, 4, 2, 2)

    def energy(attend):
        return lambda x: attend(x, k, v).sin().sum()

    right = torch.autograd.functional.hessian(energy(eager), q)
    for vectorize in (False, True):
        ours = torch.autograd.functional.hessian(energy(scaled_attention), q, vectorize=vectorize)
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_where_torchs_kernel_serves(dtype, early_stop):
    """A checkpoint hands its tensors out once: torch's kernel needs them, and so do second derivatives."""
    inputs = [x.to(dtype).requires_grad_() for x in problem(1, 2, 2, 4, 5, 4, 4)]
    assert scaled_attention(*inputs, return_info=True)[1]["path"] == "sdpa"

    def attend(*qkv):
        return scaled_attention(*(2 * x for x in qkv), scale=0.125).sin()

    def checkpointed(*qkv):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            return checkpoint(attend, *qkv, use_reentrant=False)

    out = checkpointed(*inputs)
    bar = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 1e-2}
    for kwargs in ({"retain_graph": True}, {"create_graph": True}):
        ours = torch.autograd.grad(out.sum(), inputs, **kwargs)
        torch.testing.assert_close(ours, torch.autograd.grad(attend(*inputs).sum(), inputs), **bar)
    grad, weights = torch.randn(1, 2, 4, 4), [torch.randn(x.shape) for x in inputs]
    leaves = [x.detach() for x in inputs]
    found = second_order(checkpointed, leaves, grad.to(dtype), weights)
    plain = second_order(attend, leaves, grad.to(dtype), weights)
    torch.testing.assert_close(found, plain, **bar)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_second_derivatives_where_torch_pads_heads(is_checkpointed, monkeypatch):
    """As on CUDA for head sizes that are no multiple of 8: the kernel's node is behind a slice."""
    plain = torch.nn.functional.scaled_dot_product_attention
    called = []

    def padded(q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None):
        called.append(q.shape)
        size = q.shape[-1]
        q, k, v = (torch.nn.functional.pad(x, (0, -size % 8)) for x in (q, k, v))
        scale = size**-0.5 if scale is None else scale
        return plain(q, k, v, mask, dropout, causal, scale=scale)[..., :size]

    def attend(*qkv):
        if is_checkpointed:
            return checkpoint(scaled_attention, *qkv, use_reentrant=False)
        return scaled_attention(*qkv)

    monkeypatch.setattr(attention_module, "_sdpa", padded)
    inputs = problem(1, 2, 2, 4, 5, 5, 5)
    grad, weights = torch.randn(1, 2, 4, 5), [torch.randn(x.shape) for x in inputs]
    ours = second_order(attend, inputs, grad, weights)
    assert called
    exact = second_order(eager, [x.double() for x in inputs], grad, weights)
    for a, b in zip(ours, exact, strict=True):
        assert relative(a, b) < 2e-6


def test_checkpoint_lets_go_of_its_tensors():
    """What is kept in case of a second derivative must not outlive a first."""
    q, k, v = problem(1, 2, 2, 4, 5, 4, 4)
    alive = []

    def attend(q, k, v):
        doubled = 2 * q
        alive.append(weakref.ref(doubled.untyped_storage()))
        return scaled_attention(doubled, k, v)

    out = checkpoint(attend, q.requires_grad_(), k, v, use_reentrant=False)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert len(alive) == 2
    assert [x() for x in alive] == [None, None]


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (1, 40), (40, 1)])
def test_bias_gradient_where_a_length_is_one(n_q, n_k, isa):
    """Once added to memory that nobody had cleared."""
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
    # linear in v: the vjp for v must be the transpose of the very same dropped matrix
    torch.manual_seed(6)
    vs = v.clone().requires_grad_()
    out = scaled_attention(q, k, vs, dropout=0.3)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, vs, g)
    torch.testing.assert_close((dv * v).sum(), (out * g).sum(), rtol=1e-4, atol=1e-3)


def kept(n_b, n_h, n_q, n_k):
    """Which of equal probabilities dropout leaves: every key has a value of its own."""
    q, k = torch.zeros(n_b, n_h, n_q, 1), torch.zeros(n_b, n_h, n_k, 1)
    return kernel(q, k, torch.eye(n_k).expand(n_b, n_h, n_k, n_k), dropout=0.4) > 0


def test_dropout_draws_for_each_head_query_and_key(isa):
    torch.manual_seed(4)
    found = kept(2, 3, 70, 150)
    for others in ((2, 3), (0, 1, 3), (0, 1, 2)):  # the share of each head, query, key
        share = found.double().mean(others)
        spread = (0.24 * share.numel() / found.numel()) ** 0.5
        assert (share - 0.6).abs().max() < 5 * spread
    strangers = [found.roll(1, dim) for dim in range(4)] + [kept(2, 3, 70, 150)]
    for other in strangers:  # independent ones agree in 0.6^2 + 0.4^2
        assert abs(float((found == other).double().mean()) - 0.52) < 0.01
    torch.manual_seed(4)
    set_cpu_isa("scalar")
    assert torch.equal(found, kept(2, 3, 70, 150))


def test_dropout_under_another_default_device():
    """The seed is the host's, whatever torch.device() says of new tensors."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_causal_with_a_scale_that_is_not_positive(scale, dtype):
    """Torch's kernels hide by -inf first and scale then: NaN, or what is to come instead of what was."""
    for n in (5, 40):
        q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for _ in range(3))
        out, info = scaled_attention(q, k, v, causal=True, scale=scale, return_info=True)
        right = eager(q.double(), k.double(), v.double(), causal=True, scale=scale)
        assert info["path"] == "kernel" and relative(out, right) < torch.finfo(dtype).eps


def test_path_is_reported():
    def path(*args, **options):
        return scaled_attention(*args, return_info=True, **options)[1]["path"]

    q, k, v = problem(1, 2, 2, 20, 20, 16, 16)
    learned = q.clone().requires_grad_()
    assert path(q, k, v) == path(learned, k, v) == path(q[:, :, :1], k, v) == "sdpa"
    assert path(q, k, v, path="kernel") == path(q, k, v, dropout=0.1) == "kernel"
    assert path(q, k, v, torch.zeros(20)) == path(q, k, v, mask=torch.ones(20) > 0) == "kernel"
    assert path(q.double(), k.double(), v.double()) == "kernel"
    large = problem(1, 2, 2, 64, 64, 16, 16)
    assert path(*large) == path(large[0].requires_grad_(), *large[1:]) == "kernel"
    assert path(q, k[:, :, :0], v[:, :, :0]) == "eager"
    half = [x.bfloat16() for x in (q, k, v)]
    out, info = scaled_attention(*half, return_info=True)
    assert info["path"] == "sdpa" and out.dtype == torch.bfloat16
    learned = torch.zeros(20, 20, requires_grad=True)
    out, info = scaled_attention(*half, learned, return_info=True)
    assert info["path"] == "kernel" and out.dtype == torch.bfloat16
    right = eager(*(x.double() for x in half))
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize("mark", [False, True], ids=["tensors", "a subclass"])
def test_rule_for_torchs_kernel(mark):
    """Tensors are looked at through C where torch lets us, what derives from them by attributes."""
    rule = attention_rule((torch.Tensor, torch.nn.Parameter), torch.float32, 100, 2, 3, 8)

    def applies(*tensors):
        return rule(*(x.as_subclass(Marked) if mark else x for x in tensors))

    def shaped(n_b=1, n_h=2, n_q=5, n_k=6, dim=4, **options):
        q = torch.randn(n_b, n_h, n_q, dim, **options)
        k, v = torch.randn(2, n_b, n_h, n_k, dim, **options)
        return q, k, v

    assert applies(*shaped()) and applies(*(x.requires_grad_() for x in shaped()))
    assert rule(*(torch.nn.Parameter(x) for x in shaped()))
    assert applies(*shaped(n_q=1, n_k=1000)) and applies(*shaped(n_q=1000, n_k=2))
    assert applies(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in shaped()))
    assert applies(*(x.as_strided(x.shape, (1 << 40, *x.stride()[1:])) for x in shaped()))
    windows = torch.randn(1, 2, 14).unfold(2, 4, 2)[:, :, :5]
    assert not applies(windows, *shaped()[1:]) and applies(windows.contiguous(), *shaped()[1:])
    assert not applies(*shaped(n_q=10, n_k=10)) and not applies(*shaped(dim=9))
    assert not applies(*shaped(n_q=0)) and not applies(*shaped(n_k=0))
    assert not applies(*shaped(dtype=torch.float64)) and not applies(*shaped(dtype=torch.bfloat16))
    assert not applies(*shaped(device="meta"))
    q, k, v = shaped()
    assert not applies(q[0], k[0], v[0])
    for wrong in (k[:, :1], k[:, :, 1:], k[..., 1:]):
        assert not applies(q, k, wrong) and not applies(q, wrong, v)
    assert not rule(q, k) and not rule(q, k, None) and not rule(1, 2, 3)
    with pytest.raises(TypeError):
        attention_rule(torch.Tensor, torch.float32, 1, 2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("step", [1, 0])
def test_windows_of_a_sequence(which, dtype, step):
    """Rows that overlap, which torch's kernel reads as if they did not, unless all are one."""
    tensors = [torch.randn(2, 3, 5, 8, dtype=dtype) for _ in "qkv"]
    windows = torch.randn(2, 3, 12, dtype=dtype).unfold(2, 8, 1)
    tensors[which] = windows if step else windows[:, :, :1].expand(windows.shape)
    grad = torch.randn(2, 3, 5, 8, dtype=dtype)
    dense = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]  # a clone would not overlap
    out = scaled_attention(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for a, b in zip(found, results(scaled_attention, dense, grad), strict=True):
        bar = 1e-5 if dtype == torch.float32 else 2e-2
        assert (a - b).norm() <= bar * (
            b.norm() + 1
        )  # of one key there is no gradient of the query


@pytest.mark.parametrize("n", [3, 50])
def test_scale_is_a_number(n):
    """Of a tensor with many queries the gradient was dropped without an error, with few it was a TypeError."""
    q = torch.randn(1, 2, n, 8)
    right = scaled_attention(q, q, q, causal=True, scale=0.5)
    assert torch.equal(scaled_attention(q, q, q, causal=True, scale=torch.tensor(0.5)), right)
    for scale, what in (
        (torch.tensor(0.5, requires_grad=True), "a tensor that requires a gradient; multiply q"),
        (torch.ones(2), "Tensor"),
        ("half", "str"),
    ):
        with pytest.raises(OpError, match=f"scale must be a number, got {what}"):
            scaled_attention(q, q, q, causal=True, scale=scale)
    with torch.no_grad():
        learned = torch.nn.Parameter(torch.tensor(0.5))
        assert torch.equal(scaled_attention(q, q, q, causal=True, scale=learned), right)


@pytest.mark.parametrize("dim", [4, 3])
def test_a_compiled_scale_is_not_rounded_to_bfloat16_with_the_queries(dim):
    """Scores of up to a thousand, of which a rounding of the queries changes the largest."""
    q, k, v = ((torch.randn(1, 2, 40, 16) * 8).bfloat16() for _ in range(3))
    q, k, v = (x if dim == 4 else x[0] for x in (q, k, v))
    bias = torch.randn(40, 40)

    def function(scale):
        return scaled_attention(q, k, v, bias, scale=scale)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    # one step of bfloat16, into which sums in another order may fall
    found, right = compiled(torch.tensor(0.3)), function(0.3)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-3)


def test_fewer_dimensions():
    q, k, v = (x[0] for x in problem(1, 3, 3, 20, 30, 8, 8))
    right = eager(q[None].transpose(0, 1), k[None].transpose(0, 1), v[None].transpose(0, 1))[:, 0]
    torch.testing.assert_close(scaled_attention(q, k, v), right)
    torch.testing.assert_close(scaled_attention(q[0], k[0], v[0]), right[0])


def test_without_heads_a_bias_and_a_mask_have_none_either():
    q, k, v = (x[:, 0] for x in problem(3, 1, 1, 5, 6, 8, 8))
    bias = torch.randn(3, 5, 6)
    mask = torch.rand(3, 5, 6) > 0.3
    expected = scaled_attention(q[:, None], k[:, None], v[:, None], bias[:, None], mask[:, None])
    assert torch.equal(scaled_attention(q, k, v, bias, mask), expected[:, 0])
    assert torch.equal(
        scaled_attention(q, k, v, mask=mask[:1]),
        scaled_attention(q[:, None], k[:, None], v[:, None], mask=mask[:1, None])[:, 0],
    )


def test_wrong_arguments_are_named_with_what_was_given():
    q, k, v = problem(1, 4, 2, 5, 6, 8, 8)
    with pytest.raises(OpError, match=r"multiple of those of k, got 3 and 2"):
        scaled_attention(q[:, :3], k, v)
    with pytest.raises(OpError, match=r"multiple of those of k, got 4 and 0"):
        scaled_attention(q, k[:, :0], v[:, :0])
    with pytest.raises(OpError, match=r"k must be \(B, Hkv, Lk, d\).*\(1, 2, 6, 7\)"):
        scaled_attention(q, k[..., :7], v)
    with pytest.raises(OpError, match=r"bias must broadcast to \(1, 4, 5, 6\), got \(5, 5\)"):
        scaled_attention(q, k, v, torch.zeros(5, 5))
    with pytest.raises(OpError, match=r"bias must be floating, got torch.bool; .* mask="):
        scaled_attention(q, k, v, torch.ones(5, 6, dtype=torch.bool))  # torch's order of arguments
    with pytest.raises(OpError, match=r"mask must be bool.*float32"):
        scaled_attention(q, k, v, mask=torch.zeros(5, 6))
    for few in ((q, k, v), (q[:, 0], k[:, 0], v[:, 0])):
        with pytest.raises(OpError, match="mask must be a tensor, got list"):
            scaled_attention(*few, mask=[[True] * 6] * 5)
    for name, value in (("dropout", "a"), ("causal", "no"), ("causal", None), ("dropout", None)):
        for inputs in ((q, k, v), (q[:, :, :2], k, v)):
            with pytest.raises(OpError, match=rf"{name} must be .*, got {value!r}"):
                scaled_attention(*inputs, **{name: value})
    with pytest.raises(OpError, match=r"dropout must be in \[0, 1\), got 1"):
        scaled_attention(q, k, v, dropout=1.0)
    with pytest.raises(OpError, match="head sizes go from 1 up to 256, got 300"):
        scaled_attention(*problem(1, 1, 1, 2, 2, 300, 4))
