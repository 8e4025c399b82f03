"""power_spherical_log_prob and its mixture against float64, torch's own float32 and autograd."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peak_memory import forget_peak, peak_kib
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from pyalloc.errors import OpError
from pyalloc.ops import power_spherical_log_prob, power_spherical_mixture_log_prob
from pyalloc.ops._eager import normalizer_slope, power_spherical
from pyalloc.ops._shapes import classify

from .reference import pairwise, relative, sphere, textbook, textbook_from_cosine, within

# L, M, T, D: tails in every dimension, one sample, one component, one t, tiny and large D
SHAPES = [
    (5, 3, 7, 4),
    (130, 140, 3, 33),
    (1, 9, 4, 10),
    (9, 1, 4, 10),
    (1, 1, 40, 17),
    (300, 4, 1, 20),
    (4, 300, 1, 20),
    (17, 33, 2, 2),
    (7, 6, 2, 4096),
    (40, 33, 1, 300),
]


def problem(n_l: int, n_m: int, n_t: int, dim: int, kappa: float = 50.0):
    value = sphere(n_l, n_t, dim)
    loc = sphere(n_m, n_t, dim)
    scale = torch.rand(n_m, n_t) * kappa
    log_weights = torch.log_softmax(torch.randn(n_m, n_t), 0)
    return value, loc, scale, log_weights


def log_prob(value, loc, scale):
    return power_spherical_log_prob(value.unsqueeze(1), loc, scale)


def mixture(value, loc, scale, log_weights):
    return power_spherical_mixture_log_prob(value, loc, scale, log_weights, dim=0)


def mixture_reference(value, loc, scale, log_weights):
    return torch.logsumexp(pairwise(value, loc, scale) + log_weights, 1)


def results(function, inputs, grad):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_prob_and_gradients(shape, isa):
    inputs = problem(*shape)[:3]
    grad = torch.randn(shape[:3], dtype=torch.float64)
    exact = results(pairwise, [x.double() for x in inputs], grad)
    for mine, torchs, right in zip(
        results(log_prob, inputs, grad), results(pairwise, inputs, grad), exact, strict=True
    ):
        within(mine, torchs, right)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixture_and_gradients(shape, isa):
    inputs = problem(*shape)
    grad = torch.randn(shape[0], shape[2], dtype=torch.float64)
    exact = results(mixture_reference, [x.double() for x in inputs], grad)
    for mine, torchs, right in zip(
        results(mixture, inputs, grad), results(mixture_reference, inputs, grad), exact, strict=True
    ):
        within(mine, torchs, right)


def between(ours, low, high, kappa):
    """Elementwise, up to rounding of the terms of the result; -inf lies below everything."""
    slack = 1e-6 * (1 + kappa + high.abs())
    return bool(((ours <= high + slack) & (ours >= low - slack)).all())


@settings(max_examples=30)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5)),
    st.integers(2, 70),
    st.floats(0, 200),
    st.integers(0, 2**31),
)
def test_any_shape_agrees_with_double_precision(batch, dim, kappa, seed):
    torch.manual_seed(seed)
    inputs = problem(*batch, dim, kappa)
    value, loc, scale, weights = (x.double() for x in inputs)
    u = torch.einsum("ltd,mtd->lmt", value, loc)
    # A float32 cosine is known up to dim roundings, so the right value lies between these two.  At the antipode the
    # lower one is -inf, and there nothing sharper can be required.
    low, high = (textbook_from_cosine(u + sign * dim * 2**-23, scale, dim) for sign in (-1, 1))
    ours, mixed = log_prob(*inputs[:3]), mixture(*inputs)
    assert between(ours, low, high, kappa)
    assert between(mixed, *(torch.logsumexp(x + weights, 1) for x in (low, high)), kappa)
    # Elsewhere, the project's bar.  A single result may be near zero by chance, so errors are measured against the
    # terms that it is made of and its derivative by the cosine.
    far = 1 + u > 1e-3
    exact, torchs = pairwise(value, loc, scale), pairwise(*inputs[:3])
    terms = max(1, float((exact.abs() + kappa + 1 + scale / (1 + u))[far].norm()))
    within(ours[far], torchs[far], exact[far], terms)
    rows = far.all(1)
    exact, torchs = mixture_reference(value, loc, scale, weights), mixture_reference(*inputs)
    within(mixed[rows], torchs[rows], exact[rows], terms)
    error = log_prob(value, loc, scale)[far] - pairwise(value, loc, scale)[far]
    assert float(error.norm()) <= 1e-12 * terms


@pytest.mark.parametrize("dim", [2, 3, 128, 4096])
def test_mode_is_exact_up_to_large_kappa(dim, isa):
    kappa = torch.tensor([0.0, 1e-3, 1.0, 1e2, 1e4, 1e6, 1e7])
    loc = sphere(len(kappa), dim)
    loc[:] = 0
    loc[:, 0] = 1
    ours = power_spherical_log_prob(loc[:1], loc, kappa)
    right = textbook(loc[:1].double(), loc.double(), kappa.double())
    torch.testing.assert_close(ours.double(), right, rtol=2e-7, atol=3.5e-5)


@pytest.mark.parametrize("kappa", [0.0, 1e-3, 1e4, 1e7])
@pytest.mark.parametrize("dim", [2, 64, 4096])
def test_gradients_keep_their_digits_from_no_to_large_kappa(dim, kappa, isa):
    loc = sphere(3, 2, dim)
    across = torch.nn.functional.normalize(sphere(5, 2, dim) - loc[:1], dim=-1)
    value = torch.nn.functional.normalize(loc[:1] + across, dim=-1)
    inputs = [value, loc[:1], torch.full((1, 2), kappa)]
    grad = torch.rand(5, 1, 2, dtype=torch.float64)
    exact = results(pairwise, [x.double() for x in inputs], grad)
    for mine, torchs, right in zip(
        results(log_prob, inputs, grad), results(pairwise, inputs, grad), exact, strict=True
    ):
        within(mine, torchs, right)


def test_near_the_mode_each_component_is_judged_by_its_own_kappa(isa):
    """More components than a vector has, with a small one among them; and one component alone."""
    loc = sphere(40, 64)
    kappa = torch.ones(40).index_fill(0, torch.arange(16, 40), 1e6)
    unit = torch.nn.functional.normalize
    near = unit(loc + 1e-3 * torch.randn(40, 64), dim=-1)
    pairs = power_spherical_log_prob(near[:, None], loc, kappa).diagonal()
    right = textbook(near.double(), loc.double(), kappa.double())
    assert relative(pairs, right) < 1e-6
    near = unit(loc[20] + 1e-3 * torch.randn(2000, 64), dim=-1)  # too many for doubles
    alone = power_spherical_log_prob(near, loc[20], kappa[20])
    assert relative(alone, textbook(near.double(), loc[20].double(), kappa[20].double())) < 1e-6


def test_antipode_is_minus_infinity_or_uniform(isa):
    loc = torch.zeros(40, 5)
    loc[:, 2] = 1
    kappa = torch.linspace(0, 30, 40)
    ours = power_spherical_log_prob(-loc, loc, kappa)
    assert ours[0] == pytest.approx(float(textbook(-loc, loc, kappa)[0]), rel=1e-6)
    assert torch.isneginf(ours[1:]).all()
    many = power_spherical_log_prob(-loc[:, None], loc, kappa)
    assert torch.isneginf(many[:, 1:]).all() and torch.isfinite(many[:, 0]).all()
    inputs = [x.clone().requires_grad_() for x in (-loc, loc, kappa)]
    grads = torch.autograd.grad(power_spherical_log_prob(*inputs)[0], inputs)
    assert all(torch.isfinite(g).all() for g in grads)
    weights = torch.zeros(39)
    mix = [x.clone().requires_grad_() for x in (-loc, loc[1:], kappa[1:], weights)]
    out = power_spherical_mixture_log_prob(*mix)
    assert torch.isneginf(out).all()
    for g in torch.autograd.grad(out, mix, torch.ones_like(out)):
        assert torch.isfinite(g).all()


def test_the_formula_in_plain_torch_at_the_antipode():
    """There are devices without kernels."""
    loc = torch.eye(5)[2].expand(4, 5)
    kappa = torch.linspace(0, 30, 4)
    found = power_spherical(-loc[:, None], loc[:, None], kappa[:, None])[0]
    torch.testing.assert_close(found, power_spherical_log_prob(-loc[:, None], loc, kappa))
    assert torch.isneginf(found[:, 1:]).all()


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which torch's forward mode uses
@pytest.mark.parametrize("why", ["antipode", "weights"])
def test_a_sample_that_a_mixture_excludes_has_derivatives_of_zero(why):
    """They were NaN beyond the first and in forward mode, and so were those of the components that samples share."""
    loc = torch.eye(5, dtype=torch.float64)[2].expand(3, 5)
    value = torch.cat([-loc[:1], sphere(1, 5, dtype=torch.float64)])
    weights = torch.zeros(2, 3, dtype=torch.float64)
    if why == "weights":
        value[0], weights[0] = sphere(5, dtype=torch.float64), -math.inf
    kappa = torch.linspace(1, 30, 3, dtype=torch.float64)
    tensors = value, loc.repeat(2, 1, 1), kappa.repeat(2, 1), weights

    def gradients(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = power_spherical_mixture_log_prob(*leaves)
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        found = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
        tangents = torch.func.jvp(
            power_spherical_mixture_log_prob, inputs, tuple(torch.ones_like(x) for x in inputs)
        )
        return out, *tangents, *first, *found

    both, alone = gradients(*tensors), gradients(*(x[1:] for x in tensors))
    assert torch.isneginf(both[0][0]) and torch.isneginf(both[1][0])
    for x, right in zip(both, alone, strict=True):
        torch.testing.assert_close(x[1:], right)
    assert not any(x[0].any() for x in both[2:])


@pytest.mark.parametrize(
    ("value", "loc"),
    [
        ((6, 3), (1, 3)),
        ((6, 3), (3,)),
        ((6, 3), ()),
        ((3, 6), (3, 1)),
        ((1, 3), (6, 3)),
        ((), (6, 3)),
        ((3, 1), (3, 6)),
    ],
    ids=str,
)
def test_result_is_contiguous_unless_tiles_are_written(value, loc):
    """Samples alone or components alone keep the order of the caller's dimensions."""
    out = power_spherical_log_prob(torch.randn(*value, 4), torch.randn(*loc, 4), torch.ones(loc))
    assert out.is_contiguous()


@pytest.mark.parametrize("n", [1, 40])  # one of each, and tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_at_the_antipode_are_those_one_step_away(n, dtype, isa):
    loc = torch.zeros(n, 5, dtype=dtype)
    loc[:, 2] = 1
    kappa = torch.linspace(1, 30, n, dtype=dtype)
    value = -loc[:1]
    inputs = [x.clone().requires_grad_() for x in (value, loc, kappa)]
    d_value, d_loc, d_kappa = torch.autograd.grad(power_spherical_log_prob(*inputs).sum(), inputs)
    step = torch.finfo(dtype).eps / 2
    slope = normalizer_slope(kappa, 5)
    torch.testing.assert_close(d_kappa, slope + math.log(step / 2), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(d_loc, value * (kappa / step)[:, None], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(d_value[0], loc[0] * kappa.sum() / step, rtol=1e-6, atol=0.0)


def test_nan_stays(isa):
    value, loc, scale, weights = problem(20, 20, 2, 8)
    value[3, 1, 2] = float("nan")
    scale[5, 0] = float("nan")
    ours = log_prob(value, loc, scale)
    bad = torch.isnan(ours)
    assert bad[3, :, 1].all() and bad[:, 5, 0].all() and bad.sum() == 20 + 20
    assert torch.isnan(mixture(value, loc, scale, weights)).sum() == 1 + 20
    scale[:] = 0  # once the uniform distribution was returned for a NaN sample too
    assert torch.isnan(log_prob(value, loc, scale)).sum() == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [5, 33])
def test_scale_below_any_concentration_gives_nan(dim, dtype, isa):
    """Once, a loop went up from there in steps of 1, and from -1e30 for ever: a thread of its own may hang."""
    value = sphere(3, 4, dim, dtype=dtype).requires_grad_()
    scale = torch.tensor([-1e30, -1e9, -dim / 2], dtype=dtype)[:, None].expand(3, 4)
    found = []

    def run():
        out = log_prob(value, value, scale)
        found.append(out.detach())
        found.append(mixture(value, value, scale, scale).detach())
        found.append(torch.autograd.grad(out.sum(), value)[0])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(600)
    assert len(found) == 3 and all(x.isnan().all() for x in found[:2])


def test_gradients_in_float64_near_the_antipode():
    """Once, 1 + u was kept above the rounding of float32 there as well."""
    angle = torch.tensor([1e-3, 1e-5, 1e-6], dtype=torch.float64)
    value = torch.stack([-angle.cos(), angle.sin()], -1).requires_grad_()
    loc = torch.tensor([1.0, 0.0], dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(power_spherical_log_prob(value, loc, scale).sum(), (value, scale))
    right = torch.autograd.grad(textbook(value, loc, scale).sum(), (value, scale))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=0.0)


def test_gradients_to_second_order():
    for vs, ls, ss in [
        ((3, 1, 2, 4), (5, 2, 4), (5, 2)),
        ((6, 4), (6, 4), (6,)),
        ((3, 1, 4), (6, 4), (6,)),
        ((4,), (4,), ()),
        ((2, 1, 3, 4), (5, 1, 4), (2, 5, 3)),
    ]:
        double = torch.float64
        inputs = [
            sphere(*vs, dtype=double),
            sphere(*ls, dtype=double),
            torch.rand(ss).double() + 0.5,
        ]
        inputs = [x.requires_grad_() for x in inputs]
        torch.testing.assert_close(power_spherical_log_prob(*inputs), textbook(*inputs))
        assert gradcheck(power_spherical_log_prob, inputs)
        assert gradgradcheck(power_spherical_log_prob, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("vs", "ps", "dim"),
    [
        ((3, 2, 4), (5, 2), 0),
        ((6, 4), (3,), -1),
        ((7, 6, 4), (6, 3), -1),
        ((4,), (2,), 0),
        ((5, 1, 4), (6, 3), 1),
    ],
)
def test_mixture_gradients_to_second_order(vs, ps, dim):
    double = torch.float64
    inputs = [
        sphere(*vs, dtype=double),
        sphere(*ps, 4, dtype=double),
        torch.rand(ps, dtype=double) + 0.5,
        torch.randn(ps, dtype=double),
    ]
    inputs = [x.requires_grad_() for x in inputs]

    def function(*args):
        return power_spherical_mixture_log_prob(*args, dim=dim)

    axis = dim % len(ps) - len(ps)
    each = textbook(inputs[0].unsqueeze(axis - 1), *inputs[1:3])
    torch.testing.assert_close(function(*inputs), torch.logsumexp(each + inputs[3], axis))
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs, fast_mode=True)


class Copies(TorchDispatchMode):
    """Elements that torch's own operators wrote, by operator."""

    def __init__(self):
        super().__init__()
        self.written: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        viewed = any(a.alias_info is not None for a in func._schema.arguments)
        is_new = isinstance(out, torch.Tensor) and not viewed and "empty" not in func.name()
        if is_new and func.namespace == "aten":
            self.written[func.name()] = max(self.written.get(func.name(), 0), out.numel())
        return out


@pytest.mark.parametrize("op", ["log_prob", "mixture"])
def test_gradients_are_not_copied_on_their_way_back(op):
    """Once, an index [0] made zeros of the size of loc and copied its gradient there."""
    function, inputs = {"log_prob": (log_prob, 3), "mixture": (mixture, 4)}[op]
    leaves = [x.requires_grad_() for x in problem(5, 3, 7, 40)][:inputs]
    out = function(*leaves)
    with Copies() as seen:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert max(seen.written.values(), default=0) <= out.numel(), seen.written


def test_repeats_bitwise_and_any_strides():
    inputs = problem(70, 50, 9, 40)[:3]
    grad = torch.randn(70, 50, 9)
    first = results(log_prob, inputs, grad)
    strided = [
        inputs[0].permute(2, 1, 0).contiguous().permute(2, 1, 0),
        inputs[1].transpose(0, 1).contiguous().transpose(0, 1),
        inputs[2].t().contiguous().t(),
    ]
    spread = torch.stack([grad, grad], -1)[..., 0]
    for again in (results(log_prob, inputs, grad), results(log_prob, strided, spread)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_of_a_shared_scale_have_the_same_bits_for_any_strides():
    """Nine components share it: torch sums their gradients in the order in which they lie in memory."""
    value, loc = sphere(5, 2, 16), sphere(5, 9, 2, 16)
    scale, log_weights = torch.rand(5, 1, 2) * 30, torch.randn(5, 9, 2)

    def gradient(of):
        leaf = of.detach().requires_grad_()
        out = power_spherical_mixture_log_prob(value, loc, leaf, log_weights, dim=1)
        return torch.autograd.grad(out.sum(), leaf)[0]

    turned = scale.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(gradient(scale), gradient(turned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("samples", "components", "times"), [(37, 9, 70), (130, 150, 67), (400, 300, 40)]
)
def test_gradients_of_several_t_that_lie_apart_are_read_together(dtype, samples, components, times):
    """As many as fit: 16 of the first, 5 of the third in float32, and what is left of each thread's share."""
    inputs = [x.to(dtype) for x in problem(samples, components, times, 5)[:3]]
    apart = torch.randn(samples, components, times, dtype=dtype)
    dense = apart.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            expected = results(log_prob, inputs, dense)
            found = results(log_prob, inputs, apart)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    inputs = [x.to(dtype) for x in problem(9, 8, 3, 64)[:3]]
    ours = log_prob(*inputs)
    assert ours.dtype == dtype
    right = pairwise(*(x.double() for x in inputs)).to(dtype)
    torch.testing.assert_close(ours, right, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_empty_inputs_give_empty_results_and_zero_gradients(zero):
    sizes = [3, 4, 5]
    sizes[zero] = 0
    inputs = [x.requires_grad_() for x in problem(*sizes, 6)]
    out = log_prob(*inputs[:3])
    assert out.shape == tuple(sizes)
    for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs[:3]), strict=False):
        assert g.shape == x.shape and not g.any()
    mixed = mixture(*inputs)
    assert mixed.shape == (sizes[0], sizes[2])
    assert torch.isneginf(mixed).all()  # if there are any: of no component


def test_which_dimensions_are_of_samples_of_components_and_of_both():
    """No tensor that broadcasting would make exists, unless a dimension counts as one of both."""

    def kinds(value, params, components=True):
        axes = classify(torch.broadcast_shapes(value, params), value, params, components=components)
        return axes.l, axes.m, axes.t

    assert kinds((5, 1, 3), (7, 3)) == ((0,), (1,), (2,))
    assert kinds((6,), ()) == ((0,), (), ())
    assert kinds((), (6,)) == ((), (0,), ())
    assert kinds((1, 4), (1, 4)) == ((), (), (1,))
    assert kinds((5, 1, 3), (7, 3), components=False) == ((0,), (), (1, 2))


def test_no_samples_under_a_single_distribution():
    value, loc, scale = torch.zeros(0, 3), torch.eye(3)[0], torch.tensor(2.0)
    inputs = [x.requires_grad_() for x in (value, loc, scale)]
    out = power_spherical_log_prob(*inputs)
    assert out.shape == (0,)
    for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert g.shape == x.shape and not g.any()


def test_errors_name_argument_expected_and_given():
    value, loc, scale, weights = problem(3, 4, 5, 6)
    with pytest.raises(
        OpError, match=r"value and loc must end in the same D.*\(3, 5, 6\).*\(4, 5, 5\)"
    ):
        power_spherical_log_prob(value, loc[..., :5], scale)
    with pytest.raises(OpError, match="scale does not broadcast"):
        power_spherical_log_prob(value[:, None], loc, scale[:, :3])
    with pytest.raises(
        OpError, match=r"value does not broadcast.*loc with scale \(4, 5\), value \(2, 5\)"
    ):
        power_spherical_log_prob(value[:2], loc, scale)
    with pytest.raises(OpError, match=r"scale must be float32.*torch.int64"):
        power_spherical_log_prob(value[:, None], loc, scale.long())
    with pytest.raises(OpError, match="loc must be a tensor, got list"):
        power_spherical_log_prob(value, [1.0], scale)
    with pytest.raises(OpError, match="scale must be on cpu as value is, got meta"):
        power_spherical_log_prob(value[:, None], loc, scale.to("meta"))
    with pytest.raises(OpError, match="D >= 2"):
        power_spherical_log_prob(value[..., :1], loc[..., :1], scale)
    with pytest.raises(OpError, match=r"dim must be in .*\(4, 5\).*got 2"):
        power_spherical_mixture_log_prob(value, loc, scale, weights, dim=2)
    with pytest.raises(OpError, match=r"dim must be an integer, got 1\.0"):
        power_spherical_mixture_log_prob(value, loc, scale, weights, dim=1.0)


def test_pairwise_result_needs_no_product():
    """T = 2048 with L = M = 128, D = 128 would take 16 GiB as a product; the log-probabilities take 128 MiB."""
    value, loc, scale, weights = problem(128, 128, 2048, 128)
    forget_peak()
    before = peak_kib()
    out = mixture(value, loc, scale, weights)
    grown = peak_kib() - before
    assert out.shape == (128, 2048) and math.isfinite(float(out.sum()))
    assert grown < 64 << 10, f"{grown} KiB"
