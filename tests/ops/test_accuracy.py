"""A part of the sweeps in accuracy.py and accuracy_attention.py, which run longer as modules."""

from __future__ import annotations

import os

import pytest
import torch

from . import accuracy_attention
from .accuracy import BAR, Case, check, draw_case, exact, gaps, ours, run
from .reference import relative, sphere

N_CASES = int(os.environ.get("PYALLOC_ACCURACY_CASES", "60"))
FIRST = 9_000_000


@pytest.mark.parametrize("part", range(4))
def test_power_spherical_lies_within_the_bar(part, isa):
    for seed in range(FIRST + part, FIRST + N_CASES, 4):
        # sums over samples may cancel by chance; how far depends on the instruction set, for torch too
        case, missed = check(seed, 3 * BAR)
        assert not missed, f"case {seed}: {case.kind}: {missed}"


@pytest.mark.parametrize("seed", [30159, 30304, 30334])
def test_sums_that_cancel_by_chance(seed, isa):
    """Once 2.4 to 17 times 1e-6: gradients of scale and of log_weights."""
    case, missed = check(seed, 1.5 * BAR)
    assert not missed, f"{case.kind}: {missed}"


CANCELLING = [60118, 30792]  # shares and sums of samples; logarithms near log 2


@pytest.mark.parametrize("seed", CANCELLING)
def test_tiles_whose_sums_cancel(seed, isa):
    """Once 4.6e-6 and 5.4e-6: terms of a mixture against its rounded result, sums over 16 rows in float32."""
    case, missed = check(seed)
    assert not missed, f"{case.kind}: {missed}"


@pytest.mark.parametrize("seed", [30508, 60118])
def test_tiles_whose_sums_cancel_on_cuda(seed, device):
    """Once 7.6e-6 and 6.2e-6: sums over 32 and 64 rows in float32."""
    case, missed = check(seed)
    assert not missed, f"{case.kind}: {missed}"


def outweighed() -> Case:
    """A mixture with more components than a block has, one of which holds nearly all of it."""
    torch.manual_seed(3)
    inputs = [sphere(40, 1, 300), sphere(140, 1, 300), 50 * torch.rand(140, 1)]
    weights = torch.full((140, 1), -40.0)
    weights[77] = 0
    return Case("", True, [*inputs, weights], torch.randn(40, 1), torch.float32)


def test_one_component_that_outweighs_all(isa):
    """Its share is 1, though the result is rounded by more than 1e-6 of it."""
    case = outweighed()
    found, right = run(ours, case), exact(case, *gaps(*case.inputs[:2]))
    for k in (1, 2, 4):
        assert relative(found[k], right[k]) < BAR


def test_one_component_that_outweighs_all_on_cuda(device):
    test_one_component_that_outweighs_all("")


@pytest.mark.parametrize("part", range(3))
def test_cuda_kernels_lie_within_the_bar(part, device):
    for seed in range(FIRST + part, FIRST + N_CASES // 6, 3):
        if draw_case(seed).dtype == torch.float64:
            continue  # plain torch on a device
        case, missed = check(seed, 3 * BAR)
        assert not missed, f"case {seed}: {case.kind}: {missed}"


@pytest.mark.parametrize("seed", [30006, 31022, 30304, 30616, 30623, 30837])
def test_few_pairs_on_cuda(seed, device):
    """Once 1.3 to 4.9 times 1e-6, in sums that cancel: 1 to 222 pairs a t, some in many dimensions."""
    case, missed = check(seed)
    assert not missed, f"{case.kind}: {missed}"


def test_scale_in_many_dimensions_on_cuda(device):
    """In a tile.  The slope, log y minus nearly log 2, lost what the two have in common."""
    torch.manual_seed(1)
    value, loc, scale = sphere(280, 1, 1024), sphere(1, 1, 1024), torch.rand(1, 1)
    case = Case("", False, [value, loc, scale], torch.randn(280, 1, 1), torch.float32)
    d_scale = run(ours, case)[3]
    assert relative(d_scale, exact(case, *gaps(value, loc))[3]) < BAR


@pytest.mark.parametrize("kind", accuracy_attention.NAMES)
def test_attention_lies_within_the_bar(kind, attention_isa):
    for seed in range(FIRST, FIRST + N_CASES // 2):
        p, missed = accuracy_attention.check(kind, seed)
        assert not missed, f"case {seed}: {p}: {missed}"
