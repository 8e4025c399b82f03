"""Whether all of something is true: asserted, or waited for in a loop.  In a dry run no kernel has found out.

It is, where nothing else is known: assertions hold, loops end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import contents, sizes


def answer(torch: Any) -> None:
    """From now on.  torch.equal(), allclose(), torch.distributions and some operators' own checks ask in this way."""
    aten = torch.ops.aten
    for name, kernel in (
        ("all", aten.all.all_out),
        ("all.dim", aten.all.out),
        ("all.dims", aten.all.dims_out),
    ):
        sizes.implement(torch, "CUDA", name, _all(torch, kernel))


def _all(torch: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def is_all_true(x: Any, *dim: Any, **keepdim: Any) -> Any:
        kind = torch.uint8 if x.dtype == torch.uint8 else torch.bool
        found = torch.empty(0, dtype=kind, device=x.device)
        kernel(x, *dim, **keepdim, out=found)  # for the memory it works in
        known = contents.told(torch, x)
        contents.write(torch, found, True if known is None else torch.all(known, *dim, **keepdim))
        return found

    return is_all_true
