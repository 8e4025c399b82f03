"""How far the peak falls where what is dropped is not all at the peak, or a variable holds it longer than its step."""

from __future__ import annotations

import pytest

from instrument.tools import MIB, Plan, written
from pyalloc import trace
from pyalloc.analysis.falling import LASTING, TRAINING, falls_by


@pytest.mark.parametrize(
    ("story", "alone", "together"),
    [
        ("+a40 +g50 -g +b40 forward. backward +c20 -c -b -a", 50, 80),
        ("+a40 +b40 forward. backward +c20 -c -b +g55 -g -a", 45, 80),
        ("+a40 +g20 +h30 -g -h +b40 forward. backward +c20 -c -b -a", 50, 80),
        ("+a40 +g30 -g +h50 -h +b40 forward. backward +c20 -c -b -a", 50, 80),  # not both at once
    ],
)
def test_what_goes_besides_is_not_in_the_way(
    plan: Plan, story: str, alone: int, together: int
) -> None:
    """Logits that are gone when the peak comes, for which an advice does as well."""
    found = trace.analyse(written(plan, f"step forward {story} backward."))
    dropped = [block for block in found.peak.blocks if block.bytes == 40 * MIB]
    others = [block for block in found.spans if block.bytes not in (40 * MIB, 20 * MIB)]
    assert falls_by(dropped, found, TRAINING) == alone * MIB
    assert falls_by(dropped, found, TRAINING, beside=others) == together * MIB


def test_a_variable_holds_others_in_the_next_step(plan: Plan) -> None:
    """Each step's logits are there until the next step has made its own."""
    story = " backward +c{} -c backward. optimizer +s50 -s optimizer."
    steps = ["step forward +a60 forward.", "step forward +b60 forward. -a"]
    found = trace.analyse(
        written(plan, f"{steps[0]}{story.format(80)} {steps[1]}{story.format(70)} -b")
    )
    dropped = [block for block in found.peak.blocks if block.bytes == 60 * MIB]
    assert found.totals["peak_bytes"] == 140 * MIB
    assert (
        falls_by(dropped, found, TRAINING) == 30 * MIB
    )  # the next optimizer's step is beside them
    assert falls_by(dropped, found, LASTING) == 60 * MIB
