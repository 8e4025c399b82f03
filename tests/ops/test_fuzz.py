"""A short run of the fuzzer of the ops; `python tests/ops/fuzz_ops.py --seconds 600 --compiled` is the long one."""

from __future__ import annotations

import pytest

from .fuzz_ops import run_case

N_CASES = 48
FIRST = 7_000_000  # not the numbers that a long run takes


@pytest.mark.parametrize("part", range(4))
def test_any_call_of_an_op(part):
    for seed in range(FIRST + part, FIRST + N_CASES, 4):
        run_case(seed)
