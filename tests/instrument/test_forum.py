"""The forum thread: what holds the peak, and how little memory is enough?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dry_support import python_for

from instrument.tools import MIB, SEQ2SEQ, pyalloc
from pyalloc import trace

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_the_top_three_contributors(forum: Path) -> None:
    found = trace.analyse(forum)
    first, second, third = found.contributors(found.peak)[:3]
    # Logits, their log-softmax and both gradients have one size: 80 x 50 x 30000 floats.
    assert "decoder.output" in first.name and "gradient" in first.name
    assert first.bytes == first.blocks * 480_000_000 // 512 * 512
    assert "AdditiveAttention.forward" in second.name
    assert abs(second.bytes / MIB - 763.7) < 1
    assert "Adam" in third.name
    assert abs(third.bytes / MIB - 561) < 1


def test_the_peak_is_the_one_torch_told(forum: Path) -> None:
    totals = trace.analyse(forum).totals
    (told,) = json.loads(forum.with_suffix(".json").read_text())["devices"]
    assert totals["peak_reserved_bytes"] == told["peak_reserved_bytes"]
    assert totals["peak_bytes"] == pytest.approx(told["peak_requested_bytes"], rel=0.01)


def verdict(allocator: str, mib: int) -> str:
    out = pyalloc(
        "dryrun", "--memory", f"{mib}MiB", "--allocator", allocator,
        python_for(SEQ2SEQ.read_text(), dryrun=True), SEQ2SEQ, expect=None,
    )  # fmt: skip
    return next(line for line in out.splitlines() if "verdict" in line)


@pytest.mark.parametrize("allocator", ["native", "expandable", "pyalloc"])
def test_the_smallest_memory_is_enough_and_two_percent_less_is_not(
    forum: Path, allocator: str
) -> None:
    data = json.loads(pyalloc("replay", forum, "--policy", allocator, "--find-min", "--json", "-q"))
    least = data["find_min"][allocator]
    mib = -(-least["safe_bytes"] // MIB)
    assert " fits " in verdict(allocator, mib)
    assert "does not fit" in verdict(allocator, int(mib * 0.98))
