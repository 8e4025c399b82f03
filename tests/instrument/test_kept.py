"""What the program keeps although nothing needs it any more is told apart from what it needs."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan
from pyalloc import trace
from pyalloc.analysis import leaks
from pyalloc.analysis.advice import advise
from pyalloc.report import text

LAYERS = """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.torch
def test_what_a_hook_collects_is_not_for_a_checkpoint(record: Record) -> None:
    """It is named after the module whose output it is; a checkpoint gives back what one step keeps, and no more."""
    found = trace.analyse(record(LAYERS + """
    seen = []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for step in range(10):
        optimizer.zero_grad()
        model(torch.ones(1024, 256, device="cuda")).square().mean().backward()
        optimizer.step()
    """))  # fmt: skip
    told = {item.kind: item for item in advise(found)}
    assert "(in layers.*.up) holds 16.0 MiB more at each step" in told["leak"].text
    checkpoint = told.get("checkpoint")
    assert checkpoint is None or (checkpoint.saved_bytes or 0) < 80 * MIB
    assert advise(found)[0].kind == "leak"


@pytest.mark.torch
@pytest.mark.parametrize("retained", [True, False])
def test_a_graph_that_backward_keeps_is_no_evaluation(record: Record, retained: bool) -> None:
    """The same passes, with and without: only retain_graph keeps what the graph of earlier steps needs."""
    found = trace.analyse(record(LAYERS + f"""
    state = torch.ones(1024, 256, device="cuda")
    for step in range(3):
        for i in range(4):
            state = model(state)
        state.square().mean().backward(retain_graph={retained})
        state = state if {retained} else state.detach()
        """))  # fmt: skip
    told = {item.kind: item for item in advise(found)}
    assert "no_grad" not in told
    assert ("retain_graph" in told) is retained
    if retained:
        assert "passes in a row keep" in told["retain_graph"].text
        assert (told["retain_graph"].saved_bytes or 0) > 100 * MIB


@pytest.mark.torch
def test_a_batch_size_that_is_searched_by_out_of_memory_is_no_evaluation(record: Record) -> None:
    """Those passes have no backward because they, or the loss after them, ran out of memory."""
    found = trace.analyse(record(LAYERS + """
    def train(n):
        output = model(torch.ones(n, 256, device="cuda"))
        lost = [torch.empty(2**30, device="cuda") for _ in range(n // 2**14)]
        output.square().mean().backward()

    n = 2**18
    while True:
        try:
            for step in range(2):
                train(n)
            break
        except torch.OutOfMemoryError:
            n //= 2
    """))  # fmt: skip
    assert len(found.ooms) >= 4
    assert "no_grad" not in {item.kind for item in advise(found)}
    assert f"\nout of memory (the first of {len(found.ooms)} times): " in text.summary(found)


@pytest.mark.torch
@pytest.mark.parametrize("kept", [True, False])
def test_optimizers_that_are_made_anew(record: Record, kept: bool) -> None:
    """Each holds state as long as it lives, and the steps of the last one count on."""
    found = trace.analyse(record(LAYERS + f"""
    made = []
    for epoch in range(3):
        optimizer = torch.optim.AdamW(model.parameters())
        made.append(optimizer if {kept} else 0)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(8, 256, device="cuda")).square().mean().backward()
            optimizer.step()
    """))  # fmt: skip
    assert len(found.steps) == 13 - 2 * kept  # each new one counts once it has stepped twice
    told = [item for item in advise(found) if item.kind == "optimizer_state"]
    assert bool(told) is kept
    if kept:
        state = 2 * sum(b.bytes for b in found.peak.blocks if b.category == "parameters")
        assert told[0].text.startswith("3 optimizers hold state for the same parameters, 32.1 MiB")
        assert told[0].saved_bytes == pytest.approx(2 * state, rel=0.01)


@pytest.mark.torch
def test_optimizers_that_take_turns_at_the_same_parameters(record: Record) -> None:
    """One ends a step each time; neither has state."""
    found = trace.analyse(record(LAYERS + """
    others = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    for step in range(4):
        for each in (optimizer, others):
            each.zero_grad()
            model(torch.ones(8, 256, device="cuda")).square().mean().backward()
            each.step()
    """))  # fmt: skip
    assert len(found.steps) == 5
    assert "optimizer_state" not in {item.kind for item in advise(found)}


@pytest.mark.torch
def test_state_that_optimizers_are_meant_to_hold(record: Record) -> None:
    """One within another, two that share a part of the model, and two with one state: nothing counts twice."""
    found = trace.analyse(record(LAYERS + """
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()
            self.inner.step()

    head = nn.Linear(256, 256).cuda()
    twins = [torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    twins[1].state = twins[0].state
    every = [
        Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
        torch.optim.AdamW(model.layers[:3].parameters()),
        torch.optim.AdamW(model.layers[1:].parameters()),
        *twins,
    ]
    for step in range(3):
        head(model(torch.ones(8, 256, device="cuda"))).square().mean().backward()
        for each in every:
            each.step()
    """))  # fmt: skip
    assert "doubled_state" not in found.notes


@pytest.mark.torch
def test_state_that_is_doubled_after_the_peak(record: Record) -> None:
    found = trace.analyse(record(LAYERS + """
    every = [torch.optim.AdamW(model.parameters()) for _ in range(2)]
    for n, each in zip((2048, 8), every):
        model(torch.ones(n, 256, device="cuda")).square().mean().backward()
        each.step()
        model.zero_grad()
        model(torch.ones(n, 256, device="cuda")).square().mean().backward()
        each.step()
    """))  # fmt: skip
    assert "doubled_state" in found.notes
    assert "optimizer_state" not in {item.kind for item in advise(found)}


@pytest.mark.torch
def test_an_optimizer_that_no_set_takes(record: Record) -> None:
    """A class that defines equality, and so has no hash, steps beside another one as usual."""
    found = trace.analyse(record(LAYERS + """
    class Own(torch.optim.SGD):
        def __eq__(self, other):
            return self is other

    other = Own(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(8, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        other.step()
    """))  # fmt: skip
    assert len(found.steps) == 4


@pytest.mark.parametrize(
    ("every", "replaced"), [(3, False), (3, True), (1, False), (1, True), (20, False)]
)
def test_what_grows_now_and_then(plan: Plan, every: int, replaced: bool) -> None:
    """An evaluation keeps its outputs; a variable that holds one of them, each larger than the last, is no leak."""
    for step in range(10):
        plan.event("step", "step", arg=step)
        if step % every == 0:
            addr = (1 if replaced else step + 1) << 30
            plan.event("free_requested", addr=addr)
            plan.event("free_completed", addr=addr)
            plan.event("alloc", addr=addr, bytes=(step + 2) * MIB, stack=plan.stack(7, "keep"))
    found = trace.analyse(plan.done())
    verdict = leaks.verdict(found)
    if every == 1:
        assert verdict.startswith("leak: ") and ("as many blocks as before" in verdict) == replaced
        (told,) = (item.text for item in advise(found) if item.kind == "leak")
        assert ("Inputs that grow" in told) == replaced
    elif every == 3 and not replaced:
        assert verdict.startswith("possible leak") and "model.py:7 keep came to hold" in verdict
    else:
        assert verdict.startswith("no leak: nothing grows from step to step")
