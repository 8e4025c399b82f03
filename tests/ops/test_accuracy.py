"""A part of the sweeps in accuracy.py and accuracy_attention.py; run as modules they have a long form."""

from __future__ import annotations

import os

import pytest
import torch

from . import accuracy_attention
from .accuracy import BAR, check, draw_case

N_CASES = int(os.environ.get("PYALLOC_ACCURACY_CASES", "60"))
FIRST = 9_000_000


@pytest.mark.parametrize("part", range(4))
def test_power_spherical_lies_within_the_bar(part, isa):
    for seed in range(FIRST + part, FIRST + N_CASES, 4):
        # sums over samples may cancel by chance; how far differs by instruction set, torch's too
        case, missed = check(seed, 3 * BAR)
        assert not missed, f"case {seed}: {case.kind}: {missed}"


@pytest.mark.parametrize("seed", [30159, 30304, 30334])
def test_sums_that_cancel_by_chance(seed, isa):
    """Once 2.4 to 17 times 1e-6: gradients of scale and of log_weights."""
    case, missed = check(seed, 1.5 * BAR)
    assert not missed, f"{case.kind}: {missed}"


@pytest.mark.parametrize("part", range(3))
def test_cuda_kernels_lie_within_the_bar(part, device):
    for seed in range(FIRST + part, FIRST + N_CASES // 6, 3):
        if draw_case(seed).dtype == torch.float64:
            continue  # plain torch on a device
        case, missed = check(seed, 3 * BAR)
        assert not missed, f"case {seed}: {case.kind}: {missed}"


@pytest.mark.parametrize("kind", accuracy_attention.NAMES)
def test_attention_lies_within_the_bar(kind, isa):
    for seed in range(FIRST, FIRST + N_CASES // 2):
        p, missed = accuracy_attention.check(kind, seed)
        assert not missed, f"case {seed}: {p}: {missed}"
