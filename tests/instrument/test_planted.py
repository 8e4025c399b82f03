"""Faults planted in programs are found and named: leaks, products that are reduced, outputs of earlier steps."""

from __future__ import annotations

import re

import pytest

from instrument.conftest import Record
from instrument.tools import LOOP, MIB, Plan, kinds, pyalloc
from pyalloc import trace
from pyalloc.analysis import leaks
from pyalloc.analysis.advice import advise


@pytest.mark.torch
def test_a_clean_loop_gets_no_such_advice(record: Record) -> None:
    found = trace.analyse(record(LOOP + """
    for step in range(12):
        train_step(torch.randn(1024, 512, device="cuda"))
    """))  # fmt: skip
    assert not {item.kind for item in advise(found)} & {
        "leak",
        "no_grad",
        "broadcast_product",
        "zero_grad",
    }
    assert leaks.verdict(found).startswith("no leak")


@pytest.mark.torch
def test_a_leak_is_found_with_its_line(record: Record) -> None:
    path = record(LOOP + """
    history = []
    for step in range(12):
        x = torch.randn(1024, 512, device="cuda")
        train_step(x)
        history.append(x * 2)  # planted
    """)  # fmt: skip
    found = kinds(path)["leak"]
    assert "program.py:19" in found.text and "2.00 MiB more at each step" in found.text.replace(
        "2.0 MiB", "2.00 MiB"
    )
    out = pyalloc("diff", path, expect=1)
    assert "verdict: leak: 2.00 MiB more at each step, most at" in out and "program.py:19" in out


def test_gradients_that_are_kept_are_of_backward(plan: Plan) -> None:
    """By a hook, say: autograd's thread has no line of Python, and others without one do not grow."""
    plan.event("alloc", addr=1 << 30, bytes=64 * MIB)
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=(step + 2) << 30, bytes=2 * MIB)
        plan.event("phase_end", "backward")
    path = plan.done()
    told = leaks.verdict(trace.analyse(path))
    assert told == "leak: 2.00 MiB more at each step, most at backward (no Python stack)"
    text = kinds(path)["leak"].text
    assert text.startswith("backward (no Python stack) holds 2.0 MiB more at each step")
    assert "register_full_backward_hook()" in text and "losses" not in text


@pytest.mark.parametrize("is_retained", [True, False])
def test_a_graph_that_is_kept_on_purpose_is_told_with_what_grows(
    plan: Plan, is_retained: bool
) -> None:
    """As for a running mean of losses, whose graph no backward pass frees."""
    if is_retained:
        plan.event("user", "retain_graph=True")
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 2) << 30, bytes=2 * MIB, stack=plan.stack(7))
    text = kinds(plan.done())["leak"].text
    assert "a list or sum of losses" in text
    assert ("backward(retain_graph=True)" in text) == is_retained


def test_an_optimizers_history_that_fills_up_is_no_list_of_losses(plan: Plan) -> None:
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 2) << 30, bytes=2 * MIB, stack=plan.stack(7))
        plan.event("category", "optimizer state", addr=(step + 2) << 30)
    text = kinds(plan.done())["leak"].text
    assert "history_size" in text and "losses" not in text


def test_three_lines_that_grow_are_enough_to_be_told_of(plan: Plan) -> None:
    """Each with the module that it is in, if any."""
    for step in range(8):
        plan.event("step", "step", arg=step)
        for line in range(1, 5):
            address = (4 * step + line) << 30
            plan.event("phase_begin", f"module:layers.{step}.mlp") if line == 4 else None
            plan.event("alloc", addr=address, bytes=line * MIB, stack=plan.stack(line))
            plan.event("phase_end", f"module:layers.{step}.mlp") if line == 4 else None
    found = [each for each in advise(trace.analyse(plan.done())) if each.kind == "leak"]
    named = [re.findall(r"model\.py:(\d) work( \(in .*?\))? holds", each.text) for each in found]
    assert named == [[("4", " (in layers.*.mlp)")], [("3", "")], [("2", "")]]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("planted", "instead", "n"),
    [
        ("(a * b).sum(-1)", 'torch.einsum("iak,ajk->ij", a, b)', 1),
        ("(a - b).square().sum(-1)", "torch.cdist(a[:, 0], b[0])", 2),
    ],
)
def test_broadcast_product(record: Record, planted: str, instead: str, n: int) -> None:
    program = """
    import torch
    a = torch.randn(256, 1, 512, device="cuda")
    b = torch.randn(1, 256, 512, device="cuda")
    scores = EXPRESSION
    """
    before = record(program.replace("EXPRESSION", planted))
    found, peak = kinds(before)["broadcast_product"], trace.analyse(before).totals["peak_bytes"]
    assert "program.py:5" in found.text and "128.0 MiB" in found.text and "einsum" in found.text
    after = record(program.replace("EXPRESSION", instead))
    assert "broadcast_product" not in kinds(after)
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    workspace = (found.saved_bytes or 0) - fell  # torch's, about what is done instead
    assert 0 <= workspace < 34 * MIB and fell > (128 * n - 34) * MIB


@pytest.mark.parametrize(
    ("before", "left", "between", "expected"),
    [
        (100, 8, 0, True),
        (100, 9, 0, False),  # more than an eighth of it
        (100, 0, 0, False),  # nothing is made from it
        (247, 8, 0, True),
        (248, 8, 0, False),  # no more than a fifth of the peak
        (100, 8, 10, True),
        (100, 8, 11, False),  # not reduced at once
    ],
)
def test_only_what_is_reduced_at_once_to_much_less_is_a_broadcast_product(
    plan: Plan, before: int, left: int, between: int, expected: bool
) -> None:
    line = plan.stack(5)
    plan.event("alloc", addr=1 << 30, bytes=before * MIB, stack=plan.stack(4))
    plan.event("alloc", addr=2 << 30, bytes=64 * MIB, stack=line)
    if left:
        plan.event("alloc", addr=3 << 30, bytes=left * MIB, stack=line)
    for _ in range(between):
        plan.event("category", "activations", addr=1 << 30)
    plan.event("free_requested", addr=2 << 30)
    found = kinds(plan.done())
    assert ("broadcast_product" in found) == expected
    if expected:
        assert found["broadcast_product"].saved_bytes == (64 - left) * MIB
        assert "temporary of 64.0 MiB and immediately reduces it to 8.0 MiB" in " ".join(
            found["broadcast_product"].text.split()
        )


@pytest.mark.torch
@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(logits, target)",
        "torch.nn.CrossEntropyLoss()(logits, target)",
        "torch.log_softmax(logits, -1).sum()",
    ],
)
def test_a_loss_is_no_product_to_be_reduced(record: Record, loss: str) -> None:
    found = kinds(record(f"""
    import torch, torch.nn.functional as F
    logits = torch.randn(1024, 32000, device="cuda")
    target = torch.zeros(1024, dtype=torch.long, device="cuda")
    with torch.no_grad():
        loss = {loss}
    """))  # fmt: skip
    assert "broadcast_product" not in found


@pytest.mark.parametrize("category", ["activations", "gradients"])
def test_outputs_of_the_step_before(plan: Plan, category: str) -> None:
    """Four steps whose outputs live until the next ones are assigned.  Gradients may be accumulated."""
    for step in range(4):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event(
            "alloc", addr=(step % 2 + 1) << 30, bytes=100 * MIB, stack=plan.stack(30, "outputs")
        )
        plan.event("category", category, addr=(step % 2 + 1) << 30)
        plan.event("alloc", addr=5 << 30, bytes=300 * MIB, stack=plan.stack(40))
        plan.event("phase_end", "forward")
        if step:
            plan.event("free_requested", addr=((step - 1) % 2 + 1) << 30)
        plan.event("free_requested", addr=5 << 30)
    found = kinds(plan.done()).get("stale")
    assert (found is None) == (category == "gradients")
    if found is None:
        return
    assert found.text.startswith("100.0 MiB at the peak were made in an earlier step")
    assert "model.py:30 outputs" in found.text and found.saved_bytes == 100 * MIB
