"""Where the parts of jagged nested tensors begin: torch sums their lengths on the device, and reads the sums there."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from pyalloc._bootstrap import contents
from pyalloc._bootstrap.importing import after_import


def answer() -> None:
    """Answers as soon as nested tensors are imported."""
    after_import("torch.nested._internal.nested_tensor", _of_lists)
    after_import("torch.nested._internal.ops", _apart)


def _of_lists(module: Any) -> None:
    """Nested tensors made of a list of tensors, whose lengths are known."""
    make, torch = module.jagged_from_list, module.torch

    @functools.wraps(make)
    def jagged_from_list(tensors: Any, offsets: Any, *args: Any, **kwargs: Any) -> Any:
        found, made = make(tensors, offsets, *args, **kwargs)
        if offsets is None and type(made) is torch.Tensor and made.is_cuda:
            lengths = (each.shape[found._ragged_idx - 1] for each in tensors)
            offsets = [0, *itertools.accumulate(lengths)]
            contents.write(torch, made, torch.tensor(offsets, device="cpu"))
        return found, made

    module.jagged_from_list = jagged_from_list


def _apart(ops: Any) -> None:
    """unbind(): if the offsets are unknown, all parts have the same length."""
    torch, table = ops.torch, ops.JAGGED_OPS_TABLE
    operator = torch.ops.aten.unbind.int
    unbind = table[operator]

    def call(x: Any, dim: int = 0) -> Any:
        values, offsets = x._values, x._offsets
        if (
            not contents.is_plain(torch, values)
            or not values.is_cuda
            or dim != 0
            or x._lengths is not None
        ):
            return unbind(x, dim)
        along = x._ragged_idx - 1
        n, ends = values.shape[along], contents.read(torch, offsets).tolist()
        if ends != sorted(ends) or (ends[0], ends[-1]) != (0, n):
            ends = [each * n // max(len(ends) - 1, 1) for each in range(len(ends))]
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        return torch.split(values, lengths, dim=along)

    table[operator] = call
