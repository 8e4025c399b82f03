"""Faults planted in programs are found and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import Plan, pyalloc
from pyalloc import trace
from pyalloc.advice import advise
from pyalloc.analysis import Advice

MIB = 2**20
LOOP = """
    import torch
    from torch import nn
    torch.backends.cudnn.enabled = False
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss
"""


def kinds(path: Path) -> dict[str, Advice]:
    return {item.kind: item for item in advise(trace.analyse(path))}


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
    assert found.leak_verdict.startswith("no leak")


@pytest.mark.torch
def test_leak(record: Record) -> None:
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


@pytest.mark.torch
def test_forgotten_no_grad(record: Record) -> None:
    program = LOOP + """
    for step in range(3):
        train_step(torch.randn(1024, 512, device="cuda"))
    for step in range(4):
        GUARD
            out = model(torch.randn(1024, 512, device="cuda"))
    """  # fmt: skip
    found = kinds(record(program.replace("GUARD", "if True:")))["no_grad"]
    assert "4 forward passes" in found.text and "no_grad" in found.text
    assert found.saved_bytes is not None and found.saved_bytes > 10 * MIB
    assert "no_grad" not in kinds(record(program.replace("GUARD", "with torch.no_grad():")))


def test_forgotten_no_grad_in_a_phase_of_the_programs_own(plan: Plan) -> None:
    for i in range(4):
        outer = "eval" if i < 3 else "backward"  # the last forward is a checkpoint's
        for name in (outer, "forward"):
            plan.event("phase_begin", name)
        for j in range(3):
            plan.event("alloc", addr=(10 * i + j + 1) << 24, bytes=MIB, stack=plan.stack(7))
        for name in ("forward", outer):
            plan.event("phase_end", name)
    # The last of a run may be that of the step whose backward follows.
    assert "2 forward passes" in kinds(plan.done())["no_grad"].text


@pytest.mark.torch
def test_broadcast_product(record: Record) -> None:
    program = """
    import torch
    a = torch.randn(256, 1, 512, device="cuda")
    b = torch.randn(1, 256, 512, device="cuda")
    scores = EXPRESSION
    """
    found = kinds(record(program.replace("EXPRESSION", "(a * b).sum(-1)")))["broadcast_product"]
    assert "program.py:5" in found.text and "128.0 MiB" in found.text and "einsum" in found.text
    path = record(program.replace("EXPRESSION", 'torch.einsum("iak,ajk->ij", a, b)'))
    assert "broadcast_product" not in kinds(path)


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


def test_fragmentation(plan: Plan) -> None:
    line = plan.stack(7)
    plan.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    for i in range(32):
        plan.event("alloc", addr=(1 << 30) + 2 * i * MIB, bytes=2 * MIB, stack=line)
    for i in range(0, 32, 2):
        plan.event("free_requested", addr=(1 << 30) + 2 * i * MIB)
    plan.event("oom", bytes=16 * MIB, arg=0, stack=line)
    path = plan.done()
    found = kinds(path)["fragmentation"]
    assert "out of memory for 16.0 MiB while 32.0 MiB were reserved but idle" in found.text
    assert "16 pieces of at most 2.0 MiB" in found.text
    assert "Cause: fragmentation" in pyalloc("report", path)


@pytest.mark.torch
def test_fragmentation_of_the_real_allocator(record: Record) -> None:
    path = record("""
    import torch
    MIB = 2**20
    # One segment of 20 MiB each: every second block stays, so that no hole takes 12 MiB.
    blocks = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del blocks[::2]
    big = [torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(24)]
    """)  # fmt: skip
    assert "fragmentation" in kinds(path)


@pytest.mark.torch
def test_out_of_memory_is_explained_at_once(record: Record) -> None:
    path = record("""
    import torch
    def greedy():
        return torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    kept = greedy()
    try:
        greedy()
    except torch.OutOfMemoryError:
        print("caught")
    """)  # fmt: skip
    text = path.with_name("out.oom.txt").read_text()
    assert "3.00 GiB were asked for" in text and "greedy" in text
    assert "Cause: the program really needs more" in text and "next: pyalloc report" in text
    assert json.loads(pyalloc("report", path, "--json", "-q"))["ooms"]


def test_outputs_of_the_step_before(plan: Plan) -> None:
    """Four steps whose outputs live until the next ones are assigned."""
    for step in range(4):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event(
            "alloc", addr=(step % 2 + 1) << 30, bytes=100 * MIB, stack=plan.stack(30, "outputs")
        )
        plan.event("alloc", addr=5 << 30, bytes=300 * MIB, stack=plan.stack(40))
        plan.event("phase_end", "forward")
        if step:
            plan.event("free_requested", addr=((step - 1) % 2 + 1) << 30)
        plan.event("free_requested", addr=5 << 30)
    found = kinds(plan.done())["stale"]
    assert found.text.startswith("100.0 MiB at the peak were made in an earlier step")
    assert "model.py:30 outputs" in found.text and found.saved_bytes == 100 * MIB
