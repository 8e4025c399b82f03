"""A model that an attempt left behind when it ran out of memory, or a training that ended, and what is none."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, kinds, pyalloc
from pyalloc import trace
from pyalloc.analysis.advice import advise
from pyalloc.inside import uses


def _model(plan: Plan, addr: int, line: int) -> None:
    """Parameters of one line, and a gradient for each."""
    for i in range(2):
        plan.event("alloc", addr=addr + 2 * i * MIB, bytes=MIB, stack=plan.stack(line))
        plan.event("category", "parameters", addr=addr + 2 * i * MIB)
        plan.event("alloc", addr=addr + (2 * i + 1) * MIB, bytes=MIB)
        plan.event("category", "gradients", addr=addr + (2 * i + 1) * MIB)


def test_a_model_made_again_is_told_from_others(plan: Plan) -> None:
    """A teacher is older than the error, but was made by another line, and once."""
    plan.event("alloc", addr=1 << 30, bytes=64 * MIB, stack=plan.stack(1))
    plan.event("category", "parameters", addr=1 << 30)
    _model(plan, 2 << 30, line=2)
    plan.event("oom", bytes=MIB)
    _model(plan, 3 << 30, line=2)
    text = kinds(plan.done())["retried"].text
    assert text.startswith("2.0 MiB of parameters, 2.0 MiB of gradients were made before"), text
    assert "after me/model.py:2 work had" in text
    assert text.endswith("That held 4.0 MiB at the peak.")


def test_where_most_of_the_old_model_is_held(plan: Plan) -> None:
    """Memory runs out again before the peak, by which time half of the old model is gone."""
    _model(plan, 2 << 30, line=2)
    plan.event("oom", bytes=MIB)
    _model(plan, 3 << 30, line=2)
    plan.event("oom", bytes=MIB)
    for i in range(2):
        plan.event("free_requested", addr=(2 << 30) + i * MIB)
        plan.event("free_completed", addr=(2 << 30) + i * MIB)
    plan.event("alloc", addr=4 << 30, bytes=32 * MIB, stack=plan.stack(3))
    text = kinds(plan.done())["retried"].text
    assert text.startswith("2.0 MiB of parameters, 2.0 MiB of gradients were made before"), text
    assert text.endswith("That held 4.0 MiB when memory ran out again.")


def test_the_same_model_with_a_smaller_batch(plan: Plan) -> None:
    _model(plan, 2 << 30, line=2)
    for _ in range(2):
        plan.event("oom", bytes=MIB)
        plan.event("alloc", addr=3 << 30, bytes=MIB, stack=plan.stack(3))
        plan.event("free_requested", addr=3 << 30)
        plan.event("free_completed", addr=3 << 30)
    assert "retried" not in kinds(plan.done())


@pytest.mark.torch
def test_an_attempt_whose_model_is_in_a_cycle(record: Record) -> None:
    """Only a collection frees it.  Memory runs out again, and what is said of that names it."""
    path = record("""
    import gc
    import torch
    gc.disable()
    torch.cuda.set_per_process_memory_fraction(0.118)

    def attempt(n):
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(n)]).cuda()
        model.me = [model]
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 2048, device="cuda")).sum().backward()
        optimizer.step()

    for n in (10, 4):
        try:
            attempt(n)
        except torch.OutOfMemoryError:
            pass
    """, "--memory", "4000MB")  # fmt: skip
    held = "160.0 MiB of parameters, 160.0 MiB of gradients were made before"
    text = kinds(path)["retried"].text
    assert text.startswith(held) and "program.py:8 attempt had" in text
    assert held in " ".join(pyalloc("report", path, "--oom", "last").split())


TRAININGS = """
    import gc, torch
    from torch import nn
    gc.disable()
    kept = []
    def train(n):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(n)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        for step in range(4):
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
        KEEP
    for _ in range(3):
        train(4)
"""


@pytest.mark.torch
def test_models_of_trainings_that_ended(record: Record) -> None:
    """In a list, or in a cycle with their optimizers, whose steps then no longer are the program's."""
    after = trace.analyse(record(TRAININGS.replace("KEEP", "del model, optimizer")))
    assert "left_over" not in {item.kind for item in advise(after)}
    for keep, n_each in ("kept.append(model)", 2), ("model.me = [model, optimizer]", 3):
        before = trace.analyse(record(TRAININGS.replace("KEEP", keep)))
        [told] = [item for item in advise(before) if item.kind == "left_over"]
        assert told.text.startswith("2 models were trained (Sequential)")
        assert told.saved_bytes == 2 * n_each * 16 * MIB
        fell = before.totals["peak_bytes"] - after.totals["peak_bytes"]
        assert told.saved_bytes == pytest.approx(fell, rel=0.02)
        # Of 12: one passes before the first optimizer is known to rest.
        assert len(before.steps) >= 11


@pytest.mark.parametrize(
    ("calls", "n_left"),
    [
        ("aaaabbbb", 1),
        ("aaaab", 0),  # b may be one that takes turns with it
        ("abcabcabc", 0),  # as members of an ensemble do
        ("aaaabbbba", 0),  # it was only waiting
        ("aaaaBBBB", 0),  # of other modules
    ],
)
def test_which_models_are_left_over(calls: str, n_left: int) -> None:
    """Each is called once, and a step of its optimizer follows."""
    seen = uses.Uses()
    models: dict[str, _Model] = {}
    for name in calls:
        if name not in models:
            models[name] = _Other() if name.isupper() else _Model()
            seen.begin(models[name])
        seen.call(models[name])
        seen.n_steps += 1
    assert len(seen.left_over(models.values())) == n_left


class _Model:
    def modules(self) -> list[object]:
        return [self]


class _Other(_Model):
    pass
