"""The tests for a card, as far as they go without one: kernels compute nothing here."""

from __future__ import annotations

import sys

import pytest
from dry_support import dry_environment, run_checked


@pytest.mark.torch
@pytest.mark.slow
def test_programs_for_a_card_run_on_either_allocator() -> None:
    """Those of them that look at nothing a kernel computed but to compare the two allocators."""
    tests = ["tests/gpu/test_allocator.py", "-k", "out_of_memory or graphs"]
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:nvml"]
    done = run_checked(
        [sys.executable, "-m", "pytest", *options, *tests], env=dry_environment(memory="4GB")
    )
    assert "2 passed" in done.stdout
