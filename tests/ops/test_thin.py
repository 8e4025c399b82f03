"""Few pairs of a sample and a component for each t, in calls too large for the double precision of small ones."""

from __future__ import annotations

import pytest
import torch

from pyalloc.ops._eager import normalizer, normalizer_slope

from .reference import pairwise, relative, within
from .test_power_spherical import log_prob, mixture, mixture_reference, problem, results

# L, M, T, D
SHAPES = [
    (1, 1, 1500, 2),
    (1, 1, 1100, 40),
    (1, 1, 1031, 130),
    (3, 2, 400, 7),
    (1, 10, 150, 16),
    (32, 1, 60, 64),
    (4, 8, 70, 33),
    (1, 40, 60, 20),
    (150, 1, 20, 12),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(shape, isa):
    inputs = problem(*shape)
    for ours, plain, given, size in (
        (log_prob, pairwise, inputs[:3], shape[:3]),
        (mixture, mixture_reference, inputs, shape[:1] + shape[2:3]),
    ):
        grad = torch.randn(size, dtype=torch.float64)
        exact = results(plain, [x.double() for x in given], grad)
        mine, torchs = (results(f, given, grad) for f in (ours, plain))
        for found, other, right in zip(mine, torchs, exact, strict=True):
            within(found, other, right)


@pytest.mark.parametrize("shape", [(1, 1, 1300, 5), (3, 2, 300, 24), (1, 10, 160, 40)], ids=str)
def test_a_pair_does_not_depend_on_its_neighbours(shape, isa):
    """Whether or not a neighbour's cosine is too coarse, for any number of threads and wherever a row begins."""
    n_l, n_m, n_t, _ = shape
    value, loc, scale, weights = problem(*shape, kappa=1e5)
    value[:, ::7] = -loc[0, ::7]
    value[:, 3::7] = torch.nn.functional.normalize(value[:, 3::7] + 1e3 * loc[0, 3::7], dim=-1)
    scale[:, ::2] *= 1e-4
    for function, inputs in (
        (log_prob, (value, loc, scale)),
        (mixture, (value, loc, scale, weights)),
    ):
        grad = torch.randn((n_l, n_m, n_t) if len(inputs) == 3 else (n_l, n_t))
        whole = results(function, inputs, grad)
        begin = n_t // 11
        part = results(function, [x[:, begin:] for x in inputs], grad[..., begin:])
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            again = results(function, inputs, grad)
        finally:
            torch.set_num_threads(threads)
        at = [x.shape.index(n_t) for x in whole]
        for x, y, z, k in zip(whole, part, again, at, strict=True):
            assert torch.equal(x, z)
            assert torch.equal(x.narrow(k, begin, n_t - begin), y)


def test_shares_of_components_in_many_dimensions(isa):
    """Normalizers in the thousands, rounded by 1e-4, once passed that on to every gradient of a mixture."""
    inputs = problem(2, 9, 40, 1000)
    grad = torch.randn(1, 40, dtype=torch.float64) * torch.tensor([[1.0], [-1.0]])
    mine = results(mixture, inputs, grad)
    exact = results(mixture_reference, [x.double() for x in inputs], grad)
    for found, right in zip(mine, exact, strict=True):
        assert relative(found, right) < 5e-6


@pytest.mark.parametrize("dim", [*range(2, 9), 15, 23, 24, 25, 40])
def test_normalizer_of_many_components(dim, isa):
    """At the mode, the log-probability is the normalizer alone."""
    kappa = torch.cat((torch.zeros(1), torch.logspace(-4, 7, 1500), torch.tensor([1e30, -0.25])))
    loc = torch.eye(dim)[:1].expand(len(kappa), dim)
    out, _, _, slope = results(
        lambda *x: log_prob(x[0][None], x[1][None], x[2][None])[0, 0],
        (loc, loc, kappa),
        torch.ones(len(kappa)),
    )
    wide = kappa.double()
    torch.testing.assert_close(out, normalizer(wide, dim).float(), rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(slope, normalizer_slope(wide, dim).float(), rtol=3e-7, atol=0.0)
    below = log_prob(loc[None], loc[None], torch.full_like(kappa, -dim)[None])
    assert below.isnan().all()
