"""Results of passes without a backward that pile up on the device are reported, with how much the peak would fall."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, kinds
from pyalloc import trace

EVALUATED = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch():
        return torch.ones(1024, 256, device="cuda")

    for step in range(3):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
    @torch.no_grad()
    def evaluate(n):
        found = []
        for i in range(n):
            KEEP
        return found
    evaluate(12)
"""
CAT = "found = torch.cat([found, model(batch())MORE]) if i else model(batch())MORE"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("found.append(model(batch())MORE)", "the results of 11 passes without backward"),
        (
            "found.append(model(batch()).softmax(-1)MORE)",
            "the results of 11 passes without backward",
        ),
        (CAT, "joins a tensor of 176.0 MiB and 16.0 MiB more"),
    ],
    ids=["list", "made of them", "cat"],
)
def test_results_that_pile_up(record: Record, keep: str, words: str) -> None:
    program = EVALUATED.replace("KEEP", keep)
    before = record(program.replace("MORE", ""))
    found, peak = kinds(before)["collected"], trace.analyse(before).totals["peak_bytes"]
    assert words in found.text and "program.py:19" in found.text
    after = record(program.replace("MORE", ".cpu()"))
    assert "collected" not in kinds(after)
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    assert found.saved_bytes is not None and 0.85 * fell <= found.saved_bytes <= 1.02 * fell


@pytest.mark.torch
@pytest.mark.parametrize(
    "loop",
    [
        # A cache of keys and values, by a module of its own and by the loop.
        "class Cache(nn.Module):\n"
        "        def forward(self, x):\n"
        "            self.kept = torch.cat([self.kept, x]) if hasattr(self, 'kept') else x\n"
        "            return x\n"
        "    cache = nn.Sequential(Cache(), Cache(), nn.Linear(256, 16)).cuda()\n"
        "    with torch.no_grad():\n"
        "        for i in range(12): cache(batch())",
        # What exists for two passes at most.
        "for i in range(40):\n        with torch.no_grad(): out = model(batch())",
        # Passes that a backward frees.
        "losses = [model(batch()).square().mean() for i in range(8)]\n    sum(losses).backward()",
    ],
    ids=["cache", "result", "training"],
)
def test_what_is_none(record: Record, loop: str) -> None:
    program = EVALUATED.replace("evaluate(12)", loop)
    path = record(program.replace("KEEP", "pass"))
    assert "collected" not in kinds(path)
    assert trace.analyse(path).totals["peak_bytes"] > 40 * MIB


@pytest.mark.torch
def test_of_transformers_trainer_its_own_switch(record: Record) -> None:
    """By the file's name: the library is not needed here."""
    found = kinds(record(EVALUATED.replace("KEEP", CAT.replace("MORE", "")).replace(
        "    evaluate(12)",
        "    there = compile('evaluate(12)', '/lib/transformers/trainer.py', 'exec')\n    exec(there)",
    )))["collected"]  # fmt: skip
    assert "eval_accumulation_steps=1" in found.text and ".cpu()" not in found.text
