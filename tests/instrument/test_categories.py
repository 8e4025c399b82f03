"""What blocks hold, as recordings tell it: of models and optimizers whose tensors are not torch's plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import MIB
from pyalloc import trace

pytestmark = pytest.mark.torch


def told(path: Path, n_bytes: int) -> list[str]:
    """The categories of blocks of a size at the end."""
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
