"""Gradients that nobody needs any more, and such as are being accumulated."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, kinds


@pytest.mark.torch
def test_gradients_kept_through_the_forward_pass(record: Record) -> None:
    program = """
    import torch
    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (1024, 1024, 32768):
        CLEAR
        y = model(torch.randn(batch, 4096, device="cuda"))
        if batch == 1024:
            y.sum().backward()
            optimizer.step()
    """
    found = kinds(record(program.replace("CLEAR", "optimizer.zero_grad(set_to_none=False)")))
    assert "64.0 MiB of old gradients" in found["zero_grad"].text
    assert "zero_grad" not in kinds(record(program.replace("CLEAR", "optimizer.zero_grad()")))


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_are_being_accumulated_are_not_called_old(
    plan: Plan, accumulates: bool
) -> None:
    for i in range(4):
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=(i + 1) * 8 * MIB, stack=plan.stack(7))
        plan.event("phase_end", "forward")
        plan.event("phase_begin", "backward")
        if i == 0:
            plan.event("alloc", addr=2 << 30, bytes=16 * MIB)
        plan.event("free_requested", addr=1 << 30)
        plan.event("phase_end", "backward")
        if i == 3 or not accumulates:
            plan.event("phase_begin", "optimizer")
            plan.event("phase_end", "optimizer")
    assert ("zero_grad" in kinds(plan.done())) != accumulates


@pytest.mark.parametrize("peak", ["forward", "backward"])
@pytest.mark.parametrize("order", ["together", "in turns", "zeroed late"])
def test_gradients_that_one_optimizer_adds_up_while_another_steps(
    plan: Plan, order: str, peak: str
) -> None:
    def phase(name: str, n_bytes: int = 0) -> None:
        plan.event("phase_begin", name)
        if n_bytes:
            plan.event("alloc", addr=9 << 30, bytes=n_bytes, stack=plan.stack(7))
            plan.event("free_requested", addr=9 << 30)
        plan.event("phase_end", name)

    for i in range(8):
        if i % 4 == 0 and order == "in turns":
            plan.event("step", "step", arg=i // 4)
        phase("forward", (i + 1) * 16 * MIB if peak == "forward" else 0)
        if i % 4 == 0:
            if i and order == "zeroed late":
                plan.event("free_requested", addr=1 << 30)
            plan.event("alloc", addr=1 << 30, bytes=16 * MIB)
            plan.event("category", "gradients", addr=1 << 30)
        phase("backward", (i + 1) * 16 * MIB if peak == "backward" else 0)
        if i % 4 == 3:
            phase("optimizer")  # of these gradients
            if order != "zeroed late":
                plan.event("free_requested", addr=1 << 30)
        if order == "in turns":
            phase("backward")
        phase("optimizer")
        if order == "zeroed late" and i == 4:
            break
    is_sure = order == "zeroed late" and peak == "forward"
    assert ("zero_grad" in kinds(plan.done())) == is_sure


@pytest.mark.parametrize("planted", ["kept", "given back", "accumulated"])
def test_old_gradients_at_a_peak_in_backward(plan: Plan, planted: str) -> None:
    for i in range(2):
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=8 * MIB, stack=plan.stack(7))
        plan.event("phase_end", "forward")
        plan.event("phase_begin", "backward")
        if i == 0 or planted == "given back":
            plan.event("alloc", addr=(i + 2) << 30, bytes=16 * MIB)
        plan.event("alloc", addr=9 << 30, bytes=(i + 1) * 16 * MIB)  # of the parameter's own size
        plan.event("free_requested", addr=9 << 30)
        plan.event("free_requested", addr=1 << 30)
        plan.event("phase_end", "backward")
        plan.event("category", "gradients", addr=(i + 2) << 30)
        if i == 1 or planted != "accumulated":
            plan.event("phase_begin", "optimizer")
            plan.event("phase_end", "optimizer")
        if planted == "given back":
            plan.event("free_requested", addr=(i + 2) << 30)
    found = kinds(plan.done())
    assert ("zero_grad" in found) == (planted == "kept")
    if planted == "kept":
        assert found["zero_grad"].text.startswith("16.0 MiB of old gradients")
