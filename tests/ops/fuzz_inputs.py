"""What the fuzzer of the ops draws: sizes, memory layouts, and memory that notices stray writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PAD = 64  # elements on either side of a result that nobody may write
CANARY = -12345.0


class Draw(random.Random):
    """The choices of one case; torch's generator follows the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.manual_seed(seed)

    def chance(self, p: float) -> bool:
        return self.random() < p

    def size(self, most: int) -> int:
        """Often 1, or a neighbour of a power of two, where loops have their ends."""
        kind = self.random()
        if kind < 0.2:
            return 1
        if kind < 0.5:
            return max(1, min(most, 2 ** self.randint(1, most.bit_length()) + self.randint(-1, 1)))
        return self.randint(1, most)

    def batch(self, most_dims: int = 3) -> tuple[int, ...]:
        return tuple(self.choice((1, 2, 3, 5)) for _ in range(self.randint(0, most_dims)))

    def narrowed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        kept = [1 if self.chance(0.3) else n for n in shape]
        return tuple(kept[self.randint(0, len(kept)) if self.chance(0.3) else 0 :])

    def dtype(self) -> torch.dtype:
        return self.choices(FLOATS, (6, 3, 1, 1))[0]

    def laid_out(self, x: Tensor) -> Tensor:
        """The same numbers in other memory: permuted, spread over a larger block, repeated with stride 0."""
        kind = self.random()
        if x.dim() == 0 or kind < 0.3:
            return x.clone()
        if kind < 0.5:
            order = self.sample(range(x.dim()), x.dim())
            return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
        steps = [self.choice((1, 1, 2)) for _ in x.shape]
        offsets = [self.choice((0, 0, 1, 3)) for _ in x.shape]
        shape = [
            n * s + o + self.choice((0, 1)) for n, s, o in zip(x.shape, steps, offsets, strict=True)
        ]
        order = self.sample(range(x.dim()), x.dim()) if kind > 0.8 else range(x.dim())
        filler = True if x.dtype == torch.bool else torch.nan if x.is_floating_point() else 7
        block = torch.full([shape[i] for i in order], filler, dtype=x.dtype)
        view = block.permute([list(order).index(i) for i in range(x.dim())])
        for i, (n, step, offset) in enumerate(zip(x.shape, steps, offsets, strict=True)):
            view = view[(slice(None),) * i + (slice(offset, offset + n * step, step),)]
        return view.copy_(x)

    def repeated(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Expanded to the shape with stride 0, sometimes in memory of its own."""
        wide = x.expand(shape)
        return wide if self.chance(0.5) else self.laid_out(wide)


def bits(x: Tensor) -> Tensor:
    """All of a tensor's memory, including what surrounds it."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.clone(memory_format=torch.contiguous_format).reshape(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class StrayWriteError(AssertionError):
    """Memory beside a result was written."""


@contextmanager
def guarded() -> Iterator[None]:
    """Tensors made in Python get canaries around them, and NaN inside until they are written."""
    blocks: list[tuple[Tensor, int]] = []
    empty = torch.empty

    def room(like: Tensor, filler: float) -> Tensor:
        if not like.is_floating_point() or like.device.type != "cpu":
            return like
        n = like.untyped_storage().nbytes() // like.element_size()
        block = empty(n + 2 * PAD, dtype=like.dtype).fill_(CANARY)
        block[PAD : PAD + n] = filler
        blocks.append((block, n))
        return empty(0, dtype=like.dtype).set_(
            block.untyped_storage(), PAD, like.shape, like.stride()
        )

    real = {"new_empty": Tensor.new_empty, "empty_like": torch.empty_like, "zeros": torch.zeros}
    with (
        mock.patch.object(
            Tensor, "new_empty", lambda x, *a, **k: room(real["new_empty"](x, *a, **k), torch.nan)
        ),
        mock.patch.object(torch, "empty", lambda *a, **k: room(empty(*a, **k), torch.nan)),
        mock.patch.object(
            torch, "empty_like", lambda *a, **k: room(real["empty_like"](*a, **k), torch.nan)
        ),
        mock.patch.object(torch, "zeros", lambda *a, **k: room(real["zeros"](*a, **k), 0.0)),
    ):
        yield
    for block, n in blocks:
        if (block[:PAD] != CANARY).any() or (block[PAD + n :] != CANARY).any():
            raise StrayWriteError(f"beside a result of {n} elements")
