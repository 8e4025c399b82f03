"""Programs with steps or losses of their own: what grows, and what is kept for backward."""

from __future__ import annotations

import pytest

from instrument.tools import MIB, Plan, kinds
from pyalloc import trace
from pyalloc.analysis import leaks
from pyalloc.report.text import rows
from pyalloc.traces.facts import Row


@pytest.mark.parametrize("grows", [False, True])
def test_a_leak_of_a_program_without_steps(plan: Plan, grows: bool) -> None:
    """It updates its parameters by hand: what is alive at the ends of backward is compared."""
    for i in range(7):
        plan.event("alloc", addr=(i + 1) << 30, bytes=4 * MIB, stack=plan.stack(7))
        plan.event("phase_begin", "backward")
        plan.event("phase_end", "backward")
        if not grows:
            plan.event("free_requested", addr=(i + 1) << 30)
    path = plan.done()
    verdict = leaks.verdict(trace.analyse(path))
    if grows:
        assert verdict.startswith(
            "leak: 4.00 MiB more at each backward pass, most at me/model.py:7 work"
        )
        assert "4.0 MiB more at each backward pass (" in kinds(path)["leak"].text
    else:
        assert verdict.startswith("no leak: nothing grows from backward pass to backward pass")


def test_what_a_loss_of_functions_keeps_is_an_activation(plan: Plan) -> None:
    """No module made it, and backward frees it."""
    for i in range(2):
        plan.event("alloc", addr=(i + 1) << 30, bytes=4 * MIB, stack=plan.stack(7 + i))
    plan.event("phase_begin", "backward")
    plan.event("free_requested", addr=1 << 30)
    plan.event("phase_end", "backward")
    plan.event("free_requested", addr=2 << 30)
    found = trace.analyse(plan.done())
    told = {row.name: row.bytes >> 20 for row in found.by_category(found.peak.blocks)}
    assert told == {"activations": 4, "other": 4}


def test_a_single_row_more_is_shown() -> None:
    found = [Row(f"line {i}", MIB, 1) for i in range(4)]
    assert "line 3" in rows("by line", found, 4 * MIB, 3)[-1]
    assert rows("by line", found, 4 * MIB, 2)[-1].endswith("and 2 more")


def test_the_verdict_is_the_same_whatever_else_is_looked_at(plan: Plan) -> None:
    """The page's slider has moments, `diff --steps` compares two steps: with these, nothing grew at each."""
    for step in range(100):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=plan.stack(step % 3))
    path = plan.done()
    found = [trace.analyse(path, moments=n) for n in (0, 24)]
    begins = [step[1] for step in found[0].steps]
    found.append(trace.analyse(path))
    found[2].moments.update(trace.moments_at(path, begins[10:20]))
    for each in found:
        assert leaks.verdict(each).startswith("leak: 1.00 MiB more at each step")


@pytest.mark.parametrize(
    ("held", "verdict"),
    [
        ([90, 90, 1, 2, 3, 4, 5, 6], "leak: 1.00 MiB more at each step"),  # two steps warm up
        ([9, 9, 1, 1.125, 1.25], "leak: 0.12 MiB more at each step"),  # the least of both
        ([9, 9, 1, 2], "leak unknown: a verdict needs five or more steps, and 4 steps began"),
        ([9, 9.01, 9.02, 9.03, 9.04, 9.05, 9.06, 9.07], "no leak: nothing grows from step to step"),
        ([1, 1, 1, 1, 9, 9, 9, 9], "no leak: nothing grows from step to step"),
        ([1, 1, 1, 5, 5, 5, 9, 9], "possible leak: nothing grows at every step"),
    ],
)
def test_what_is_called_a_leak(plan: Plan, held: list[float], verdict: str) -> None:
    """MiB that one line holds at the beginning of each step."""
    blocks: list[int] = []
    before = 0.0
    for step, now in enumerate(held):
        if now < before:
            for address in blocks:
                plan.event("free_requested", addr=address)
            blocks, before = [], 0
        if now > before:
            blocks.append((step + 1) << 30)
            n_bytes = int((now - before) * MIB)
            plan.event("alloc", addr=blocks[-1], bytes=n_bytes, stack=plan.stack(7))
        before = now
        plan.event("step", "step", arg=step)
    assert leaks.verdict(trace.analyse(plan.done())).startswith(verdict)


@pytest.mark.parametrize(
    ("held", "is_told"),
    [
        ([[1], [1, 0.5], [1, 0.5], [1, 0.5, 0.5]], True),  # the least
        ([[1], [1, 0.5], [1, 0.5], [1, 0.5, 0.4]], False),
        ([[1], [1, 2], [1, 2], [4], [4, 5]], False),  # fewer blocks in between
        ([[4], [4, 4], [1, 1, 1], [4, 4, 4, 4]], False),  # fewer bytes
        ([[4], [2, 2], [1, 1, 1, 1], [1, 1, 1, 1, 8]], False),  # more bytes only once
    ],
)
def test_what_may_be_a_leak(plan: Plan, held: list[list[float]], is_told: bool) -> None:
    """MiB of each block that one line holds at the beginning of each step, after two that warm up."""
    blocks: list[int] = []
    for step, sizes in enumerate([[9], [9], *held]):
        for address in blocks:
            plan.event("free_requested", addr=address)
        blocks = [(10 * step + i + 1) << 30 for i in range(len(sizes))]
        for address, n_mib in zip(blocks, sizes, strict=True):
            plan.event("alloc", addr=address, bytes=int(n_mib * MIB), stack=plan.stack(7))
        plan.event("step", "step", arg=step)
    verdict = leaks.verdict(trace.analyse(plan.done()))
    told = "possible leak: nothing grows at every step, but me/model.py:7 work came to hold 1.0 MiB"
    assert verdict.startswith(told if is_told else "no leak")


def test_a_leak_without_a_line_is_of_the_phase_that_grew_most(plan: Plan) -> None:
    """From the third step to the last: not what it held before, nor what grew most of late."""
    for step in range(8):
        plan.event("step", "step", arg=step)
        for i, (phase, kib) in enumerate(
            (("first", {0: 8192, 1: 0, 2: 6144}.get(step, 1024)), ("second", 1536 * (step > 1)))
        ):
            plan.event("phase_begin", phase)
            if kib:
                plan.event("alloc", addr=(2 * step + i + 1) << 30, bytes=kib << 10)
            plan.event("phase_end", phase)
    (found,) = leaks.growth(trace.analyse(plan.done()))
    assert (found.phase, found.bytes, found.more_blocks) == ("first", 17.5 * MIB, True)
