"""From broadcast batch shapes to the three kinds of batch index the kernels know.

Every batch dimension of a log-probability belongs to samples alone (l), to components alone (m) or
to both (t).  Reordered that way, value is (l, t, D), loc (m, t, D) and the result (l, m, t), and the
product of size l * m * t * D that broadcasting would make never exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyalloc.ops._sizes import asker


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

    def gather(self, x: Tensor, outer: Sequence[int], n_tail: int) -> Tensor:
        """A view (or copy) of x as (outer, t) followed by its n_tail own dimensions.

        x broadcasts to the batch shape; dimensions not in outer or t have size 1 in x.
        """
        rank, kept = len(self.batch), (*outer, *self.t)
        sizes = [self.batch[k] if k in kept else 1 for k in range(rank)]
        tail = list(x.shape[x.dim() - n_tail :])
        given = [1] * (rank + n_tail - x.dim()) + list(x.shape)
        if given != sizes + tail:
            x = x.reshape(given).expand(sizes + tail)
        if list(kept) != sorted(kept):  # the others are 1, wherever they stand
            others = [k for k in range(rank) if k not in kept]
            x = x.reshape(sizes + tail).permute((*others, *kept, *range(rank, rank + n_tail)))
        return x.reshape([self.size(outer), self.size(self.t), *tail])

    def scatter(self, out: Tensor) -> Tensor:
        """The kernel's result, (t, l, m) or (l, m, t), as a view of the batch shape."""
        order = (*self.t, *self.l, *self.m) if self.t_first else (*self.l, *self.m, *self.t)
        if list(order) == sorted(order):
            return out.reshape(self.batch)
        out = out.reshape([self.batch[k] for k in order])
        others = [k for k in range(len(self.batch)) if k not in order]
        for _ in others:
            out = out.unsqueeze(-1)
        position = {k: i for i, k in enumerate((*order, *others))}
        return out.permute([position[k] for k in range(len(self.batch))])


def classify(
    batch: tuple[int, ...], value: Sequence[int], params: Sequence[int], *, components: bool
) -> Axes:
    """Sorts the dimensions; with components=False those of parameters alone count as shared."""
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
