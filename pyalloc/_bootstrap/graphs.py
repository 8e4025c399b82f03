"""How many nodes the largest graph of a batch has: torch_geometric pads all graphs to that number."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from pyalloc._bootstrap import contents
from pyalloc._bootstrap.importing import after_import
from pyalloc._bootstrap.replacing import standing_for


def answer() -> None:
    """Answers as soon as the library is imported."""
    for name in ("to_dense_batch", "to_dense_adj"):
        after_import(f"torch_geometric.utils._{name}", functools.partial(_pad, name))


def _pad(name: str, module: Any) -> None:
    pad, torch = getattr(module, name), module.torch
    signature = inspect.signature(pad)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        batch = bound.arguments.get("batch")
        if batch is not None and batch.is_cuda and bound.arguments.get("max_num_nodes") is None:
            known = contents.told(torch, batch)
            # If nothing is known, all nodes belong to one graph.
            n = len(batch) if known is None else int(known.bincount().max())
            bound.arguments["max_num_nodes"] = n
        return pad(*bound.args, **bound.kwargs)

    setattr(module, name, standing_for(pad, call))
