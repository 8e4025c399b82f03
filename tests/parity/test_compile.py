"""torch.compile, plain and with CUDA graphs."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_forward_and_backward(mode: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    compiled = torch.compile(model, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        compiled(torch.zeros(16, 64, device="cuda")).sum().backward()
    assert model[0].weight.grad is not None
    torch._dynamo.reset()


def test_without_gradients() -> None:
    @torch.compile(mode="reduce-overhead")
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu()

    x = torch.zeros(1 << 16, device="cuda")
    for _ in range(4):
        result = function(x)
    assert result.shape == x.shape
    torch._dynamo.reset()
