"""Programs that plans are made for: a trace written by hand, and a training."""

from __future__ import annotations

from instrument.tools import MIB, Plan
from pyalloc import planning

KIB = 1024


TRAINING = """
    import torch
    torch.manual_seed(1)
    layers = [torch.nn.Linear(700 + 64 * i, 700 + 64 * (i + 1)) for i in range(6)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    grown = []
    for step in range(STEPS):
        for batch in range(BATCHES):
            loss = model(torch.randn(900, 700, device="cuda")).square().mean()
            if batch == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
"""


def training(steps: int, batches: int = 1) -> str:
    return TRAINING.replace("STEPS", str(steps)).replace("BATCHES", str(batches))


class Program:
    """Requests and frees of a trace written by hand; addresses are never used twice."""

    def __init__(self, hand: Plan) -> None:
        self.hand = hand
        self.n = 0
        self.sizes: dict[int, int] = {}

    def take(self, size: int, **fields: int) -> int:
        self.n += 1
        self.hand.event("alloc", addr=self.n << 40, bytes=size, **fields)
        self.sizes[self.n] = size
        return self.n

    def give(self, number: int, **fields: int) -> None:
        self.hand.event("free_requested", addr=number << 40, **fields)
        self.hand.event("free_completed", addr=number << 40, **fields)

    def step(self, first: bool) -> None:
        kept = [self.take(size * MIB) for size in (3, 8, 2, 5)]
        self.take(16)  # a loss that is never freed
        for number in reversed(kept):
            extra = self.take(4 * MIB)
            small = self.take(7 * KIB)
            self.give(number)
            self.give(extra)
            self.give(small)
            if first:
                self.take(2 * MIB)


def only(made: planning.Plan) -> planning.Part:
    """The plan of the only device."""
    (part,) = made.parts
    assert part.device is None
    return part
