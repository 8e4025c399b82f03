"""A model beside the one that is trained, whose forward pass keeps what no backward pass asks for."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, kinds
from pyalloc import trace

DISTILLED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    def layers(n):
        return nn.Sequential(*[m for i in range(n) for m in (nn.Linear(512, 512), nn.ReLU())]).cuda()
    teacher, student = layers(12), layers(4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    def train():
        x = torch.randn(8192, 512, device="cuda")
        optimizer.zero_grad()
        CALLS
        F.mse_loss(out, of_teacher.detach()).backward()
        optimizer.step()
    for step in range(4):
        TRAIN
"""
CALLS = {
    "first": "of_teacher = teacher(x); out = student(x)",
    "last": "out = student(x); of_teacher = teacher(x)",
}


@pytest.mark.torch
@pytest.mark.parametrize("order", list(CALLS))
@pytest.mark.parametrize("is_function", [True, False])
def test_a_teachers_pass_once_in_each_step(record: Record, is_function: bool, order: str) -> None:
    """Dropped when the function returns, or when the next step's takes its place."""
    calls = CALLS[order]
    text = (
        DISTILLED
        if is_function
        else DISTILLED.replace("    def train():", "    for step in range(4):")
    )
    said, peaks = [], []
    for each in calls, calls.replace("teacher(x)", "torch.no_grad()(teacher)(x)"):
        path = record(
            text.replace("CALLS", each).replace("TRAIN", "train()" if is_function else "break")
        )
        said.append(kinds(path).get("no_grad"))
        peaks.append(trace.analyse(path).totals["peak_bytes"])
    fell = peaks[0] - peaks[1]
    assert fell > 0.2 * peaks[0]
    assert said[0] is not None and said[1] is None
    assert 0.75 * fell <= said[0].saved_bytes <= 1.05 * fell, (
        said[0].saved_bytes / MIB,
        fell / MIB,
    )


@pytest.mark.torch
def test_a_model_whose_results_are_held_is_trained_all_the_same(record: Record) -> None:
    """Backward frees none of what its function returned, but makes gradients."""
    program = DISTILLED.replace(
        "CALLS", "held = teacher(x); of_teacher, out = held[-1], student(x)"
    ).replace("TRAIN", "train()")
    program = program.replace("layers(12)", "Net()").replace(
        "    teacher,",
        """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512).cuda() for _ in range(12))
        def forward(self, x):
            held = [x]
            for layer in self.layers:
                held.append(layer(held[-1]).relu_())
            return held
    teacher,""",
    )
    found = kinds(record(program))
    assert "no_grad" in found
    trained = program.replace(".detach()", "").replace(
        "student.parameters()", "teacher.parameters()"
    )
    assert "no_grad" not in kinds(record(trained))
