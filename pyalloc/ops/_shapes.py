"""From broadcast batch shapes to the three kinds of batch index the kernels know.

Every batch dimension of a log-probability belongs to samples alone (l), to components alone (m) or
to both (t).  Reordered that way, value is (l, t, D), loc (m, t, D) and the result (l, m, t), and the
product of size l * m * t * D that broadcasting would make never exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyalloc.ops._sizes import asker

_is_compiling = torch.compiler.is_compiling


@dataclass(frozen=True)
class Axes:
    """Which dimensions of the broadcast batch shape are of which kind."""

    batch: tuple[int, ...]
    l: tuple[int, ...]  # noqa: E741  (the name of the index everywhere else)
    m: tuple[int, ...]
    t: tuple[int, ...]

    def size(self, axes: Sequence[int]) -> int:
        return math.prod([self.batch[k] for k in axes])

    @property
    def t_first(self) -> bool:
        """Whether the result is laid out (t, l, m) in memory rather than (l, m, t).

        With several samples and several components a tile of (l, m) is written at once; otherwise
        the order of the caller's dimensions decides, so that the result is contiguous.
        """
        if self.l and self.m:
            holds = asker()
            if not holds(self.size(self.l) <= 1) and not holds(self.size(self.m) <= 1):
                return True
        return bool(self.t) and self.t[0] < min((*self.l, *self.m), default=len(self.batch))

    def gathering(self, shape: Sequence[int], outer: Sequence[int] | None, n_tail: int) -> Steps:
        """Steps from a shape that broadcasts to the batch shape, then n_tail dimensions, to (outer, t, *tail).

        Batch dimensions not in outer or t have size 1 there; outer None: to (t, *tail).
        """
        rank, kept = len(self.batch), (*(outer or ()), *self.t)
        sizes = [self.batch[k] if k in kept else 1 for k in range(rank)]
        tail = list(shape[len(shape) - n_tail :])
        given = [1] * (rank + n_tail - len(shape)) + list(shape)
        steps = Steps(shape)
        if given != sizes + tail:
            steps.reshape(given).expand(sizes + tail)
        if list(kept) != sorted(kept):  # the others have size 1, so their place does not matter
            others = [k for k in range(rank) if k not in kept]
            steps.reshape(sizes + tail)
            steps.permute((*others, *kept, *range(rank, rank + n_tail)))
        outer_size = [] if outer is None else [self.size(outer)]
        return steps.reshape([*outer_size, self.size(self.t), *tail])

    def scattering(self, *kinds: Sequence[int]) -> Steps:
        """Steps from the kernel's result, (t, *kinds) or (*kinds, t), to the batch shape."""
        kinds = (self.t, *kinds) if self.t_first else (*kinds, self.t)
        order = [k for kind in kinds for k in kind]
        steps = Steps([self.size(kind) for kind in kinds])
        if order == sorted(order):
            return steps.reshape(self.batch)
        others = [k for k in range(len(self.batch)) if k not in order]
        steps.reshape([self.batch[k] for k in order] + [1 for _ in others])
        position = {k: i for i, k in enumerate((*order, *others))}
        return steps.permute([position[k] for k in range(len(self.batch))])


class Steps:
    """Views to take one after the other, found once for all tensors of a shape; leaves out those without effect."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = list(shape)
        self._steps: list[tuple[Callable[..., Tensor], Sequence[int]]] = []

    def apply(self, x: Tensor) -> Tensor:
        for step, argument in self._steps:
            x = step(x, argument)
        return x

    def reshape(self, shape: Sequence[int]) -> Steps:
        return self._to(Tensor.reshape, list(shape))

    def expand(self, shape: Sequence[int]) -> Steps:
        return self._to(Tensor.expand, list(shape))

    def _to(self, step: Callable[..., Tensor], shape: list[int]) -> Steps:
        if _is_compiling() or shape != self._shape:  # sizes may not be known yet
            self._steps.append((step, shape))
            self._shape = shape
        return self

    def permute(self, order: Sequence[int]) -> Steps:
        self._shape = [self._shape[k] for k in order]
        if self._steps and self._steps[-1][0] is Tensor.permute:
            _, before = self._steps.pop()
            order = [before[k] for k in order]
        if list(order) != sorted(order):
            self._steps.append((Tensor.permute, order))
        return self

    def then(self, others: Steps) -> Steps:
        """Appends the others, which begin with the shape that these end with."""
        for step, argument in others._steps:
            self.permute(argument) if step is Tensor.permute else self._to(step, list(argument))
        return self


def classify(
    batch: tuple[int, ...], value: Sequence[int], params: Sequence[int], *, components: bool
) -> Axes:
    """Sorts the batch dimensions; with components=False those of parameters alone count as t."""
    value = (1,) * (len(batch) - len(value)) + tuple(value)
    params = (1,) * (len(batch) - len(params)) + tuple(params)
    kinds: dict[str, list[int]] = {"l": [], "m": [], "t": []}
    holds = asker()
    for k, size in enumerate(batch):
        if holds(size == 1):
            continue
        if holds(params[k] == 1):
            kinds["l"].append(k)
        elif components and holds(value[k] == 1):
            kinds["m"].append(k)
        else:
            kinds["t"].append(k)
    return Axes(batch, tuple(kinds["l"]), tuple(kinds["m"]), tuple(kinds["t"]))
