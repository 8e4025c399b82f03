"""PowerSpherical as a torch distribution: moments, samples, mixtures, KL, expansion."""

from __future__ import annotations

import copy
import math
import pickle

import mpmath
import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, kl_divergence

from pyalloc.distributions import HypersphericalUniform, PowerSpherical
from pyalloc.errors import OpError

from .reference import sphere, textbook


@pytest.mark.parametrize("dim", [2, 3, 5, 64])
@pytest.mark.parametrize("kappa", [0.0, 0.7, 40.0])
def test_samples_have_the_stated_moments(dim, kappa):
    loc = sphere(dim, dtype=torch.float64)
    p = PowerSpherical(loc, torch.tensor(kappa, dtype=torch.float64))
    x = p.sample((200_000,))
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(len(x), dtype=torch.float64))
    noise = 6 / math.sqrt(len(x))
    assert (x.mean(0) - p.mean).abs().max() < noise
    assert (x.var(0) - p.variance).abs().max() < noise
    assert abs(float(-p.log_prob(x).mean() - p.entropy())) < noise * (1 + math.sqrt(kappa) + dim)


@pytest.mark.parametrize("first", [1.0, -1.0, 0.0])
def test_samples_around_the_poles_of_the_reflection(first):
    loc = torch.tensor([first, math.sqrt(1 - first**2), 0.0])
    x = PowerSpherical(loc, torch.tensor(1e6)).sample((100,))
    assert (x @ loc).min() > 0.999


def test_gradient_of_samples_matches_the_gradient_of_the_mean():
    loc = sphere(4, dtype=torch.float64).requires_grad_()
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    p = PowerSpherical(loc, scale, validate_args=False)
    direction = torch.tensor([0.3, -1.0, 0.5, 0.2], dtype=torch.float64)
    # samples turn with loc as a rigid body: compare along the tangent of the sphere
    tangent = direction - (direction @ loc.detach()) * loc.detach()
    sampled = torch.autograd.grad((p.rsample((400_000,)) @ direction).mean(), (loc, scale))
    exact = torch.autograd.grad(p.mean @ direction, (loc, scale))
    assert abs(float(sampled[0] @ tangent - exact[0] @ tangent)) < 0.02
    assert abs(float(sampled[1] - exact[1])) < 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [2, 3, 10, 64])
def test_gradients_of_samples_around_a_large_concentration(dim, dtype):
    """The distance from the mode scales with 1 / kappa.  torch's Beta returned 0, twice that, or NaN in float32."""
    kappa = torch.tensor([1e5, 1e7, 1e10], dtype=dtype).repeat(500).requires_grad_()
    p = PowerSpherical(torch.eye(dim, dtype=dtype)[0], kappa)
    across = p.rsample()[:, 1:].square().sum(-1)
    (found,) = torch.autograd.grad(across.sum(), kappa)
    share = (found * kappa / across).detach()
    torch.testing.assert_close(share, torch.full_like(share, -1), rtol=2e-3, atol=0.0)


def test_entropy_and_kl():
    loc = sphere(6, 5, dtype=torch.float64)
    kappa = torch.tensor([0.0, 1e-3, 1.0, 10.0, 1e4, 1e7], dtype=torch.float64)
    p = PowerSpherical(loc, kappa)
    uniform = HypersphericalUniform(5, dtype=torch.float64)
    kl = kl_divergence(p, uniform)
    assert abs(float(kl[0])) < 1e-12 and (kl[1:] > kl[:-1]).all()
    torch.testing.assert_close(kl, uniform.entropy() - p.entropy())
    in_float = PowerSpherical(loc.float(), kappa.float()).entropy()
    torch.testing.assert_close(in_float.double(), p.entropy(), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="same sphere, got D = 5 and 4"):
        kl_divergence(p, HypersphericalUniform(4))


@pytest.mark.parametrize("kappa", [0.0, 3.0, 1e7, 1e10, 1e30])
@pytest.mark.parametrize("dim", [2, 5, 300])
def test_moments_and_entropy_keep_their_digits(kappa, dim):
    """The variance across loc was once a difference that could be negative, and the entropy one of two lgammas."""
    with mpmath.workdps(60):
        k, beta = mpmath.mpf(kappa), mpmath.mpf(dim - 1) / 2
        h = (
            mpmath.loggamma(k + 2 * beta)
            - mpmath.loggamma(k + beta)
            - beta * mpmath.log(4 * mpmath.pi)
        )
        slope = mpmath.digamma(k + 2 * beta) - mpmath.digamma(k + beta)
        entropy = float(k * slope - h)
        across = float(
            (k + beta) / beta * 4 * beta**2 / (k + 2 * beta) / (k + 2 * beta + 1) / (dim - 1)
        )
    loc = torch.zeros(dim, dtype=torch.float64)
    loc[0] = 1
    for dtype, bar in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        p = PowerSpherical(loc.to(dtype), torch.tensor(kappa, dtype=dtype))
        assert float(p.entropy()) == pytest.approx(entropy, rel=bar, abs=bar)
        assert p.variance[1:].tolist() == pytest.approx([across] * (dim - 1), rel=3 * bar)
        assert p.variance[0] >= 0 and float(p.mean[0]) == pytest.approx(kappa / (kappa + dim - 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    p = PowerSpherical(sphere(3, 6, dtype=dtype), torch.tensor([0.0, 3.0, 40.0], dtype=dtype))
    x = p.rsample((50,))
    assert x.dtype == dtype and p.log_prob(x).dtype == p.entropy().dtype == dtype
    assert ((x.float().norm(dim=-1) - 1).abs() < 0.02).all()


def test_copies_and_pickles():
    p = PowerSpherical(sphere(4, 3), torch.rand(4)).expand((2, 4))
    u = HypersphericalUniform(3, (4,))
    for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert torch.equal(again(p).log_prob(p.mode), p.log_prob(p.mode))
        assert torch.equal(again(u).entropy(), u.entropy())
        assert float(kl_divergence(again(p), u).sum()) == float(kl_divergence(p, u).sum())


def test_in_a_mixture_same_family():
    loc, kappa = sphere(3, 7, 6), torch.rand(3, 7) * 20
    logits = torch.randn(3, 7)
    mixture = MixtureSameFamily(Categorical(logits=logits), PowerSpherical(loc, kappa))
    x = mixture.sample((11,))
    assert x.shape == (11, 3, 6)
    each = textbook(x.double().unsqueeze(-2), loc.double(), kappa.double())
    right = torch.logsumexp(each + torch.log_softmax(logits.double(), -1), -1)
    torch.testing.assert_close(mixture.log_prob(x).double(), right, rtol=1e-5, atol=1e-5)
    assert mixture.mean.shape == (3, 6) and mixture.variance.shape == (3, 6)


@pytest.mark.parametrize("dim", [0, -3])
def test_a_sphere_has_dimensions(dim):
    with pytest.raises(ValueError, match=f"dim must be at least 1, got {dim}"):
        HypersphericalUniform(dim)


@pytest.mark.parametrize("dim", ["x", 2.5, None])
def test_the_dimension_of_a_sphere_is_a_whole_number(dim):
    with pytest.raises(ValueError, match=rf"dim must be a whole number, got {dim!r}"):
        HypersphericalUniform(dim)


def test_shapes_expand_and_mode():
    p = PowerSpherical(sphere(4, 1, 3), torch.rand(5))
    assert p.batch_shape == (4, 5) and p.event_shape == (3,)
    wide = p.expand((2, 4, 5))
    assert wide.batch_shape == (2, 4, 5) and wide.rsample((6,)).shape == (6, 2, 4, 5, 3)
    assert wide.mode.shape == wide.mean.shape == wide.variance.shape == (2, 4, 5, 3)
    assert wide.entropy().shape == wide.log_prob(p.mode).shape == (2, 4, 5)
    uniform = HypersphericalUniform(3).expand((2,))
    assert uniform.sample((4,)).shape == (4, 2, 3)
    torch.testing.assert_close(-uniform.log_prob(uniform.sample()), uniform.entropy())


def test_wrong_parameters_and_values_are_refused():
    with pytest.raises(ValueError, match="loc"):
        PowerSpherical(torch.ones(3), torch.tensor(1.0), validate_args=True)
    with pytest.raises(ValueError, match="scale"):
        PowerSpherical(sphere(3), torch.tensor(-1.0), validate_args=True)
    with pytest.raises(ValueError, match="support"):
        PowerSpherical(sphere(3), torch.tensor(1.0), validate_args=True).log_prob(torch.ones(3))
    for loc in (torch.tensor(1.0), torch.ones(4, 1)):
        with pytest.raises(ValueError, match=r"loc must be \(\.\.\., D\) with D >= 2, got \("):
            PowerSpherical(loc, torch.tensor(1.0))
    with pytest.raises(ValueError, match="loc must be a tensor, got list"):
        PowerSpherical([1.0, 0.0], 1.0)
    with pytest.raises(ValueError, match=r"scale must have a floating dtype, got torch.int64"):
        PowerSpherical(sphere(3), torch.tensor(1))
    with pytest.raises(ValueError, match=r"loc must have a floating dtype, got torch.bits8"):
        PowerSpherical(torch.empty(4, 3, dtype=torch.bits8), 1.0)
    for odd in (None, "x", [1.0, "y"]):
        with pytest.raises(ValueError, match="scale must be a tensor or a number, got"):
            PowerSpherical(sphere(3), odd)
    with pytest.raises(
        ValueError, match=r"scale must broadcast with loc without D, \(4,\), got \(2,\)"
    ):
        PowerSpherical(sphere(4, 3), torch.ones(2))
    poles = torch.tensor([[1, 0, 0], [0, -1, 0]])
    p = PowerSpherical(sphere(3), torch.tensor(1.0), validate_args=True)
    with pytest.raises(ValueError, match=r"value must be float32, .* got torch.int64"):
        p.log_prob(poles)
    uniform = HypersphericalUniform(3, dtype=torch.float64, validate_args=True)
    torch.testing.assert_close(uniform.log_prob(poles), -uniform.entropy().expand(2))
    assert PowerSpherical(sphere(3), 2).scale.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
def test_samples_compile_whatever_the_size():
    """Torch's own draw had no fake form for symbolic sizes, as from the second batch size on.

    Up to torch 2.11 the second sample was as far from loc as the first.
    """

    def draw_twice(loc, scale):
        p = PowerSpherical(loc, scale, validate_args=False)
        return p.rsample(), p.rsample()

    torch._dynamo.reset()
    compiled = torch.compile(draw_twice, fullgraph=True, backend="aot_eager")
    for n in (5, 7, 8):
        leaves = sphere(n, 4).requires_grad_(), torch.full((n,), 30.0, requires_grad=True)
        found = []
        for function in (draw_twice, compiled):
            torch.manual_seed(n)
            samples = function(*leaves)
            assert not torch.equal(*samples)
            weighed = sum((x * x.detach().cos()).sum() for x in samples)
            found.append((*samples, *torch.autograd.grad(weighed, leaves)))
        torch.testing.assert_close(*found)


def test_fake_forms_of_draws():
    alpha = torch.rand(3, 2).t() * 9 + 1
    parts = torch.ops.pyalloc.draw_beta(alpha, 1.5)
    slope = torch.ops.pyalloc.slope_of_beta(parts, alpha, 1.5)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(alpha)
        fake_parts = torch.ops.pyalloc.draw_beta(fake, 1.5)
        fake_slope = torch.ops.pyalloc.slope_of_beta(fake_parts, fake, 1.5)
    for real, told in ((parts, fake_parts), (slope, fake_slope)):
        assert real.shape == told.shape and real.stride() == told.stride()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_samples_under_transforms():
    """Reverse mode, forward mode and plain autograd agree on the same draw; what does not exist raises."""
    inputs = torch.tensor([1.0, 5.0, 3e4], dtype=torch.float64), sphere(3, 4, dtype=torch.float64)
    weights = torch.randn(5, 3, 4, dtype=torch.float64)
    along = tuple(torch.randn_like(x) for x in inputs)

    def total(scale, loc):
        torch.manual_seed(7)
        return (PowerSpherical(loc, scale, validate_args=False).rsample((5,)) * weights).sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    right = torch.autograd.grad(total(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(total, argnums=(0, 1))(*inputs), right)
    _, slope = torch.func.jvp(total, inputs, along)
    torch.testing.assert_close(slope, sum((g * a).sum() for g, a in zip(right, along, strict=True)))
    again = torch.func.grad(lambda scale: torch.func.grad(total)(scale, inputs[1]).sum())
    with pytest.raises(
        RuntimeError, match="derivative for aten::_dirichlet_grad is not implemented"
    ):
        again(inputs[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_within_forward_mode_of_samples():
    """By scale and scale it returned numbers without the outer derivative; by scale and loc it is right."""
    scale, loc = torch.tensor([1.0, 5.0], dtype=torch.float64), sphere(2, 4, dtype=torch.float64)
    jvp = torch.func.jvp

    def total(scale, loc):
        torch.manual_seed(7)
        return PowerSpherical(loc, scale, validate_args=False).rsample((5,)).sin().sum()

    def along_scale(scale, loc, step):
        return jvp(lambda x: total(x, loc), (scale,), (step,))[1]

    def along_loc(scale, loc):
        return jvp(lambda x: total(scale, x), (loc,), (loc,))[1]

    twice = (
        lambda: jvp(lambda x: along_scale(x, loc, scale), (scale,), (scale,)),
        lambda: jvp(lambda x: along_scale(scale, loc, x), (scale,), (scale,)),
        lambda: torch.func.jacfwd(torch.func.jacfwd(total, randomness="same"), randomness="same")(
            scale, loc
        ),
    )
    for call in twice:
        with pytest.raises(OpError, match="first derivatives with respect to scale only"):
            call()
    step = 1e-5 * loc  # along scale a draw need not be smooth
    right = (along_scale(scale, loc + step, scale) - along_scale(scale, loc - step, scale)) / 2e-5
    _, found = jvp(lambda x: along_loc(x, loc), (scale,), (scale,))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    _, found = jvp(lambda x: along_scale(scale, x, scale), (loc,), (loc,))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_samples_under_vmap():
    """Each gradient belongs to its own draw: the distance from the mode scales with 1 / kappa."""
    loc, kappa = torch.eye(6, dtype=torch.float64)[0], torch.full((40,), 1e5, dtype=torch.float64)

    def across(kappa):
        x = PowerSpherical(loc, kappa, validate_args=False).rsample()[1:].square().sum()
        return x, x

    found, value = torch.vmap(torch.func.grad(across, has_aux=True), randomness="different")(kappa)
    assert value.unique().numel() == 40
    torch.testing.assert_close(found * kappa / value, -torch.ones_like(kappa), rtol=2e-3, atol=0.0)
