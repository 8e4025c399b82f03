"""Compiled programs with sizes that nobody knows before they run: what a mask chose, possibly nothing."""

from __future__ import annotations

import pytest
import torch

from pyalloc.ops import (
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .reference import sphere

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KEPT = {
    "some": torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]).bool(),
    "all": torch.ones(8).bool(),
    "one": torch.arange(8) == 3,
    "none": torch.zeros(8).bool(),
}


def heads(n, length):
    return torch.randn(n, 2, length, 8)


CASES = {
    "attention": (
        lambda m, q, k, v, bias: scaled_attention(q[m], k[m], v[m], bias[m], path="kernel"),
        lambda: (heads(8, 6), heads(8, 5), heads(8, 5), torch.randn(8, 1, 6, 5)),
    ),
    "attention's keys": (
        lambda m, q, k, v: scaled_attention(q, k[:, :, m], v[:, :, m]),
        lambda: (heads(2, 6), heads(2, 8), heads(2, 8)),
    ),
    "additive": (
        lambda m, query, keys, values, v: additive_attention(query[m], keys[m], values[m], v),
        lambda: (torch.randn(8, 6), torch.randn(8, 5, 6), torch.randn(8, 5, 3), torch.randn(6)),
    ),
    "additive's keys": (
        lambda m, query, keys, values, v: additive_attention(query, keys[:, m], values[:, m], v),
        lambda: (torch.randn(2, 6), torch.randn(2, 8, 6), torch.randn(2, 8, 3), torch.randn(6)),
    ),
    "samples": (
        lambda m, x, loc, scale: power_spherical_log_prob(x[m][:, None], loc, scale),
        lambda: (sphere(8, 5), sphere(3, 5), torch.rand(3)),
    ),
    "components": (
        lambda m, x, loc, scale: power_spherical_log_prob(x[:, None], loc[m], scale[m]),
        lambda: (sphere(4, 5), sphere(8, 5), torch.rand(8)),
    ),
    "both": (
        lambda m, x, loc, scale: power_spherical_log_prob(x[m], loc[m], scale[m]),
        lambda: (sphere(8, 5), sphere(8, 5), torch.rand(8)),
    ),
    "mixture": (
        lambda m, x, *parameters: power_spherical_mixture_log_prob(x[m], *parameters),
        lambda: (sphere(8, 5), sphere(3, 5), torch.rand(3), torch.randn(3)),
    ),
    "mixture's components": (
        lambda m, x, *parameters: power_spherical_mixture_log_prob(x, *(p[m] for p in parameters)),
        lambda: (sphere(4, 5), sphere(8, 5), torch.rand(8), torch.randn(8)),
    ),
}


@pytest.fixture(autouse=True)
def _sizes_may_depend_on_data():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("name", CASES)
def test_compiles_in_one_graph(name):
    function, make = CASES[name]
    in_one_graph = compiled(function)
    for kept in KEPT.values():
        inputs = [x.requires_grad_() for x in make()]
        right, found = function(kept, *inputs), in_one_graph(kept, *inputs)
        torch.testing.assert_close(found, right)
        grad = torch.randn_like(right)
        torch.testing.assert_close(
            torch.autograd.grad(found, inputs, grad), torch.autograd.grad(right, inputs, grad)
        )


TWO = {
    "attention": lambda m, n: scaled_attention(heads(8, 6)[m], heads(8, 5)[n], heads(8, 5)[n]),
    "bias": lambda m, n: scaled_attention(
        heads(8, 6)[m], heads(8, 5)[m], heads(8, 5)[m], torch.zeros(8, 1, 6, 5)[n]
    ),
    "additive": lambda m, n: additive_attention(
        torch.randn(8, 6)[m], torch.randn(8, 5, 6)[n], torch.randn(8, 5, 3)[n], torch.randn(6)
    ),
    "log_prob": lambda m, n: power_spherical_log_prob(
        torch.randn(8, 5)[m], torch.randn(8, 5)[n], torch.rand(8)[n]
    ),
}


@pytest.mark.parametrize("name", TWO)
def test_sizes_that_do_not_fit_are_refused_when_they_show(name):
    """And not read beyond the smaller one's end."""
    in_one_graph = compiled(TWO[name])
    in_one_graph(KEPT["some"], KEPT["some"].roll(1))
    for m, n in (("some", "all"), ("all", "some")):
        with pytest.raises(RuntimeError, match=r"Eq\(u"):
            in_one_graph(KEPT[m], KEPT[n])
