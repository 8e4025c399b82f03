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
def test_what_results_are_joined_to_goes_with_them(record: Record) -> None:
    """At the end of an evaluation, while the results of the one before are there, too."""
    program = EVALUATED.replace("KEEP", "found.append(model(batch())MORE)").replace(
        "evaluate(12)", "for epoch in range(2): joined = torch.cat(evaluate(12))"
    )
    before = record(program.replace("MORE", ""))
    found, peak = kinds(before)["collected"], trace.analyse(before).totals["peak_bytes"]
    assert "hold 176.0 MiB" in found.text and "Joined, they hold 384.0 MiB besides" in found.text
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


GENERATED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(16384, 256)
            self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
            self.head = nn.Linear(256, 16384)
        def forward(self, ids):
            hidden = self.layers(self.words(ids))
            return self.head(HIDDEN)
    net = Net().cuda()
    with torch.GRAD():
        ids = torch.zeros(8, FIRST, dtype=torch.long, device="cuda")
        for i in range(TOKENS):
            out = net(ids)
            ids = torch.zeros(8, NEXT, dtype=torch.long, device="cuda")
"""


@pytest.mark.torch
@pytest.mark.parametrize("grad", ["no_grad", "inference_mode"])
def test_logits_of_a_whole_prompt(record: Record, grad: str) -> None:
    """The others make one position each."""
    program = GENERATED.replace("GRAD", grad).replace("FIRST", "256").replace("NEXT", "1")
    program = program.replace("TOKENS", "8")
    before = record(program.replace("HIDDEN", "hidden"))
    found, peak = kinds(before)["prompt"], trace.analyse(before).totals["peak_bytes"]
    assert "128.0 MiB at the peak is what" in found.text and "program.py:13" in found.text
    after = record(program.replace("HIDDEN", "hidden[:, -1:]"))
    assert "prompt" not in kinds(after)
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    assert fell > peak / 2
    assert found.saved_bytes == pytest.approx(fell, rel=0.02)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("first", "following", "tokens"),
    [
        ("256", "32 + i % 2", "8"),  # sequences of different lengths
        ("256", "64", "8"),  # a quarter is no single position
        ("256", "1", "4"),  # only three
    ],
)
def test_results_that_are_no_prompts(
    record: Record, first: str, following: str, tokens: str
) -> None:
    program = GENERATED.replace("GRAD", "no_grad").replace("HIDDEN", "hidden")
    program = program.replace("FIRST", first).replace("NEXT", following).replace("TOKENS", tokens)
    assert "prompt" not in kinds(record(program))
