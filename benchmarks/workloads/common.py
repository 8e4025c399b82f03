"""Shared by all workloads: the registry, a recording's marks, small parts of models.

On the host-memory runtime kernels compute nothing, so a workload must not let a value from the device decide a size:
lengths, routings and shapes come from a seeded generator on the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.utils.checkpoint
from torch import nn


@dataclass
class Run:
    """One run of a workload.

    Attributes:
        rng: the only source of randomness.
        mark_step: called as each step begins, with its number.
        most_steps: the most that a loop runs; None: its own number.
        times: each runs this many times its own number of steps.
    """

    rng: random.Random
    mark_step: Callable[[int], None] = field(default=lambda number: None)
    most_steps: int | None = None
    times: int = 1

    def steps(self, n: int) -> range:
        """The numbers of the steps; the caller marks each with :meth:`step`."""
        wanted = n * self.times
        return range(wanted if self.most_steps is None else min(wanted, self.most_steps))

    def step(self, number: int) -> None:
        """Marks the beginning of step ``number``."""
        self.mark_step(number)


@dataclass(frozen=True)
class Workload:
    """A named loop."""

    name: str
    about: str
    body: Callable[[Run], None]


WORKLOADS: dict[str, Workload] = {}


def workload(about: str) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Registers the decorated function under its own name."""

    def register(body: Callable[[Run], None]) -> Callable[[Run], None]:
        name = body.__name__
        WORKLOADS[name] = Workload(name, about, body)
        return body

    return register


def tokens(batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    """Token numbers on the device, shape (batch, length)."""
    return torch.randint(0, vocabulary, (batch, length)).cuda()


class Block(nn.Module):
    """A pre-norm transformer block of ``width`` features and ``heads`` heads."""

    def __init__(self, width: int, heads: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Embedding, blocks and a tied-size head."""

    def __init__(
        self, width: int, heads: int, layers: int, vocabulary: int, *, checkpoint: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpoint = checkpoint

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, length); returns (batch, length, vocabulary)."""
        x = self.embed(ids)
        for block in self.blocks:
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                if self.checkpoint
                else block(x)
            )
        return self.head(self.norm(x))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each token, given those before it."""
    vocabulary = logits.shape[-1]
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocabulary), ids[:, 1:].reshape(-1)
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Backward and an optimizer step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
