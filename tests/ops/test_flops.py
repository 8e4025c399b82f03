"""torch's FlopCounterMode over the ops: the same count as in plain torch, plus what a backward computes again."""

from __future__ import annotations

import pytest
import torch
from dry_support import run_checked, torch_python
from torch.utils.flop_counter import FlopCounterMode

from pyalloc.ops import (
    _eager,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .reference import sphere

PAIRS = 6 * 3 * 4 * 5 * 2


def attention(q, k, v):
    return scaled_attention(q, k, v, path="kernel", scale=0.3)


# ours, the same with products that torch counts, inputs, what the backward computes again
CASES = {
    "attention": (
        attention,
        lambda q, k, v: _eager.attention(q, k, v, None, None, False, 0.3),
        lambda: (torch.randn(2, 4, 9, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)),
        2 * 2 * 4 * 9 * 7 * 8,
    ),
    "additive": (
        additive_attention,
        lambda *inputs: _eager.additive(*inputs, None)[0],
        lambda: (
            torch.randn(2, 3, 8),
            torch.randn(2, 5, 8),
            torch.randn(2, 5, 6),
            torch.randn(8),
        ),
        0,
    ),
    "log_prob": (
        lambda value, loc, scale: power_spherical_log_prob(value[:, None], loc, scale),
        _eager.power_spherical,
        lambda: (sphere(6, 4, 5), sphere(3, 4, 5), torch.rand(3, 4)),
        PAIRS,
    ),
    "mixture": (
        lambda *inputs: power_spherical_mixture_log_prob(*inputs, dim=0),
        _eager.power_spherical_mixture,
        lambda: (sphere(6, 4, 5), sphere(3, 4, 5), torch.rand(3, 4), torch.randn(3, 4)),
        PAIRS,
    ),
}


def counted(function, inputs, gradients_of):
    """Of the forward and of the backward."""
    leaves = [x.clone().requires_grad_(i in gradients_of) for i, x in enumerate(inputs)]
    with FlopCounterMode(display=False) as forward:
        out = function(*leaves).sum()
    with FlopCounterMode(display=False) as backward:
        out.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_as_many_as_plain_torch(name):
    ours, plain, make, again = CASES[name]
    inputs = make()
    everything = range(len(inputs))
    forward, backward = counted(plain, inputs, everything)
    assert forward > 0
    assert counted(ours, inputs, everything) == (forward, backward + again)


def test_as_many_as_torchs_own_attention():
    inputs = [torch.randn(2, 4, 64, 32) for _ in range(3)]
    torchs = torch.nn.functional.scaled_dot_product_attention
    theirs = counted(torchs, inputs, range(3))
    if theirs == (0, 0):
        pytest.skip("this torch counts nothing for its own attention on the CPU")
    assert counted(attention, inputs, range(3)) == theirs


@pytest.mark.parametrize("name", ["log_prob", "mixture"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_gradients_that_are_asked_for(name, which):
    ours, plain, make, again = CASES[name]
    inputs = make()
    forward, backward = counted(plain, inputs, [which])
    assert counted(ours, inputs, [which]) == (forward, backward + again)


def test_values_without_gradient():
    ours, plain, make, _ = CASES["additive"]
    inputs = make()
    assert counted(ours, inputs, [0, 1, 3]) == counted(plain, inputs, [0, 1, 3])


def test_a_counter_made_before_sees_a_transformed_call():
    """They reach the registered op in another way."""
    program = """
import torch
import pyalloc.ops
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(3, 1, 1, 40, 16)
with FlopCounterMode(display=False) as counter:
    torch.vmap(lambda q: pyalloc.ops.scaled_attention(q, q, q, path="kernel"))(q)
print(counter.get_total_flops())
"""
    python, env = torch_python()
    done = run_checked([python, "-c", program], env=env)
    assert done.stdout.split() == [str(3 * 4 * 40 * 40 * 16)]


@pytest.mark.parametrize("first", ["pyalloc.ops", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    program = f"""
import sys, torch
assert "torch.utils.flop_counter" not in sys.modules
import {first}
from torch.utils.flop_counter import FlopCounterMode
counter = FlopCounterMode(display=False)
from pyalloc.ops import scaled_attention
q = torch.randn(1, 1, 40, 16)
with counter:
    scaled_attention(q, q, q, path="kernel")
print(counter.get_total_flops())
"""
    python, env = torch_python()
    done = run_checked([python, "-c", program], env=env)
    assert done.stdout.split() == [str(4 * 40 * 40 * 16)]
