"""What blocks hold, according to recordings of models and optimizers whose tensors are not torch's plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan
from pyalloc import trace

pytestmark = pytest.mark.torch


def told(path: Path, n_bytes: int) -> list[str]:
    """The categories of blocks of one size at the end."""
    found = trace.analyse(path)
    end = found.moments[max(found.moments)].blocks
    return sorted(block.category for block in end if block.bytes == n_bytes)


def test_tensors_made_of_others_are_parameters_gradients_and_state(record: Record) -> None:
    """FSDP2's are DTensors, torchao's have codes and scales: subclasses without memory of their own."""
    path = record("""
    import torch
    import torch.distributed
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
    """)  # fmt: skip
    twice = ["gradients", "optimizer state", "parameters"]
    assert told(path, 2 * MIB) == sorted(2 * twice)


def test_what_transformers_loads_to_the_device_is_parameters(plan: Plan) -> None:
    """Of a reference model, say, that is first called later."""
    file = "/x/site-packages/transformers/core_model_loading.py"
    texts = [plan.writer.string(text) for text in ("_materialize_copy", file)]
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=plan.writer.stack(0, *texts, 1465))
    found = trace.analyse(plan.done())
    assert [found.category(block) for block in found.peak.blocks] == ["parameters"]


def test_what_distributed_data_parallel_makes_itself_is_buckets(plan: Plan) -> None:
    """It makes them again in the second forward pass; there it also copies outputs, in other functions."""
    file = "/x/site-packages/torch/nn/parallel/distributed.py"
    plan.event("phase_begin", "forward")
    for i, name in enumerate(("_pre_forward", "forward"), 1):
        stack = plan.stack(1776, name, file)
        plan.event("alloc", addr=i << 30, bytes=MIB, stack=stack)
    plan.event("phase_end", "forward")
    found = trace.analyse(plan.done())
    kinds = [found.category(block) for block in found.peak.blocks]
    assert kinds == ["gradients", "activations"]


def test_parameters_that_fsdp_gathers_are_no_activations(plan: Plan) -> None:
    """Those of its root stay from the forward pass to the end of backward."""
    file = "/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param.py"
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=plan.stack(1303, "alloc_storage", file))
    plan.event("phase_end", "forward")
    found = trace.analyse(plan.done())
    rows = found.contributors(found.peak)
    assert [row.name for row in rows] == ["parameters (gathered by FSDP)"]


@pytest.mark.parametrize("is_differentiated_again", [False, True])
def test_what_goes_in_a_later_backward_is_a_gradient(
    plan: Plan, is_differentiated_again: bool
) -> None:
    """Those of a DistributedDataParallel whose first of two passes is in no_sync(): in the second, buckets take them
    over.

    With create_graph=True they may be what a second derivative needs.
    """
    plan.event("user", f"create_graph={is_differentiated_again}")
    for begin in (1, 3):
        plan.event("phase_begin", "backward")
        for i in (begin, begin + 1):
            plan.event("alloc", addr=i << 30, bytes=MIB)
        for at in {1: [2], 3: [1, 3, 4]}[begin]:
            plan.event("free_requested", addr=at << 30)
            plan.event("free_completed", addr=at << 30)
        plan.event("phase_end", "backward")
    found = trace.analyse(plan.done())
    kinds = [found.category(block) for block in found.peak.blocks]
    kept = "backward temporaries" if is_differentiated_again else "gradients"
    assert kinds == [kept, *["backward temporaries"] * 2]


def test_what_backward_drops_again_is_not_named_a_gradient(plan: Plan) -> None:
    """The scratch memory of a sum, say.  In a dry run its stack has pyalloc's own frames, and no others."""
    plan.event("phase_begin", "backward")
    stack = plan.stack(1, "sized", "/x/pyalloc/_bootstrap/sizes.py")
    plan.event("alloc", addr=1 << 30, bytes=2 * MIB, stack=stack)
    plan.event("free_requested", addr=1 << 30)
    plan.event("free_completed", addr=1 << 30)
    plan.event("phase_end", "backward")
    found = trace.analyse(plan.done())
    assert [row.name for row in found.contributors(found.peak)] == ["2.0 MiB: made in backward"]


def test_state_of_a_step_that_ran_out_of_memory_is_state(record: Record) -> None:
    """Also if the program catches the error and drops all of it: none of it outlived the step."""
    path = record("""
    import torch
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2048, device="cuda")).sum().backward()
    torch.cuda.set_per_process_memory_fraction(0.108)
    try:
        optimizer.step()
    except torch.OutOfMemoryError:
        del model, optimizer
    """, "--memory", "4000MB")  # fmt: skip
    found = trace.analyse(path)
    assert len(found.ooms) == 1
    made = [b for b in found.peak.blocks if b.phase == "optimizer"]
    assert len(made) >= 7  # torch 2.15 gives the workspaces of cuBLAS back: room for four more
    assert {found.category(block) for block in made} == {"optimizer state"}


@pytest.mark.parametrize("optimizers", ["LBFGS", "LBFGS, AdamW"])
def test_state_is_the_only_optimizers_whoever_made_it(plan: Plan, optimizers: str) -> None:
    """Not all of it is made where the class of an optimizer is seen in the stack."""
    plan.event("user", f"optimizers={optimizers}")
    plan.event("phase_begin", "optimizer")
    for number, file in enumerate(("/site-packages/torch/optim/lbfgs.py", "/home/me/train.py")):
        address = (number + 1) << 30
        plan.event("alloc", addr=address, bytes=4 * MIB, stack=plan.stack(5, "step", file))
        plan.event("category", "optimizer state", addr=address)
    plan.event("phase_end", "optimizer")
    found = trace.analyse(plan.done())
    others = "optimizer state (LBFGS)" if optimizers == "LBFGS" else "optimizer state"
    names = [row.name for row in found.by_maker(found.peak.blocks)]
    assert set(names) == {"optimizer state (LBFGS)", others}
