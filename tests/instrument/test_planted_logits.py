"""The logits of a model and their loss, which could be computed for a part of the rows at a time."""

from __future__ import annotations

import pytest

from instrument.tools import MIB, Plan, kinds

FUNCTIONAL = "/venv/lib/python3.11/site-packages/torch/nn/functional.py"

GRAPH = "/venv/lib/python3.11/site-packages/torch/autograd/graph.py"


@pytest.mark.parametrize(("unpacks", "expected"), [("unpack_from_cpu", True), ("other", False)])
def test_logits_that_were_on_the_host_are_told(plan: Plan, unpacks: str, expected: bool) -> None:
    """Under save_on_cpu(), the peak has only what backward brings back, and its gradients."""
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=1 << 30, bytes=100 * MIB, stack=plan.stack(7))
    plan.event("phase_end", "forward")
    log_softmax = plan.stack(3000, "cross_entropy", FUNCTIONAL)
    plan.event("alloc", addr=2 << 30, bytes=100 * MIB, stack=log_softmax)
    plan.event("free_requested", addr=2 << 30)
    plan.event("free_requested", addr=1 << 30)
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=3 << 30, bytes=100 * MIB)
    plan.event("alloc", addr=4 << 30, bytes=100 * MIB, stack=plan.stack(425, unpacks, GRAPH))
    plan.event("alloc", addr=5 << 30, bytes=100 * MIB)
    for address in (3, 4, 5):
        plan.event("free_requested", addr=address << 30)
    plan.event("phase_end", "backward")
    found = kinds(plan.done()).get("logits")
    assert (found is not None) == expected
    if found is not None:
        assert found.text.startswith(
            "3 tensors of 100.0 MiB or half that hold 300.0 MiB at the peak: the logits of nn/functional.py:3000 "
            "cross_entropy, their log-softmax, and the gradients of both."
        )
        assert found.saved_bytes == 300 * MIB * 7 // 8  # all but one of eight parts


@pytest.mark.parametrize("n_kept", [0, 1])
def test_parts_of_logits_have_the_last_layers_gradient_beside_them(plan: Plan, n_kept: int) -> None:
    """A variable may hold the logits of the whole, too, which parts need no more.  Earlier gradients are not new."""
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    for i in range(n_kept):
        plan.event("alloc", addr=(10 + i) << 30, bytes=100 * MIB, stack=plan.stack(7))
    plan.event("phase_end", "forward")
    plan.event(
        "alloc", addr=2 << 30, bytes=100 * MIB, stack=plan.stack(3, "cross_entropy", FUNCTIONAL)
    )
    plan.event("phase_begin", "backward")
    for address in (3, 4):
        plan.event("alloc", addr=address << 30, bytes=100 * MIB)
    for address in (2, 3):
        plan.event("free_requested", addr=address << 30)
    for address, size in ((5, 20), (6, 10)):  # of the last layer, and of another
        plan.event("alloc", addr=address << 30, bytes=size * MIB)
    plan.event("free_requested", addr=4 << 30)
    plan.event("phase_end", "backward")
    for address in (5, 6):
        plan.event("category", "gradients", addr=address << 30)
    for address in (5, 6, *(10 + i for i in range(n_kept))):
        plan.event("free_requested", addr=address << 30)
    saved = kinds(plan.done())["logits"].saved_bytes
    assert saved == (300 + 100 * n_kept) * MIB - 3 * 100 * MIB // 8 - 20 * MIB


def test_kept_results_of_an_evaluation_are_not_the_losss_logits(plan: Plan) -> None:
    loss = plan.stack(3000, "cross_entropy", FUNCTIONAL)
    for i in range(4):
        plan.event("phase_begin", "inference")
        plan.event("alloc", addr=(10 + i) << 30, bytes=100 * MIB, stack=plan.stack(9))
        plan.event("phase_end", "inference")
    plan.event("alloc", addr=2 << 30, bytes=100 * MIB, stack=loss)
    plan.event("phase_begin", "backward")
    for address in (3, 4):
        plan.event("alloc", addr=address << 30, bytes=100 * MIB)
    for address in (2, 3, 4):
        plan.event("free_requested", addr=address << 30)
    plan.event("phase_end", "backward")
    assert kinds(plan.done())["logits"].text.startswith("3 tensors of 100.0 MiB or half that hold")


@pytest.mark.parametrize("loss", ["ctc_loss", "nll_loss"])
def test_what_ctc_goes_through_is_told_by_sequences(plan: Plan, loss: str) -> None:
    """It has no rows of its own, and no cross-entropy."""
    plan.event(
        "alloc", addr=1 << 30, bytes=100 * MIB, stack=plan.stack(3, "log_softmax", FUNCTIONAL)
    )
    plan.event("alloc", addr=2 << 30, bytes=MIB, stack=plan.stack(4, loss, FUNCTIONAL))
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=3 << 30, bytes=100 * MIB)
    for address in (1, 2, 3):
        plan.event("free_requested", addr=address << 30)
    plan.event("phase_end", "backward")
    told = kinds(plan.done())["logits"].text
    assert ("some of the sequences at a time" in told) == (loss == "ctc_loss")
    assert ("linear_cross_entropy" in told) == (loss != "ctc_loss")
