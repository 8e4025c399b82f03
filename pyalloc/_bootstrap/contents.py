"""What lies on a device in a dry run, read and written where it is: no copy of the program's, so none is counted."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

MOST_BYTES = 2**20  # larger ones would be many pages that nobody else touches


def is_plain(torch: Any, x: Any) -> bool:
    """Not one that only stands for others, as fake tensors do: those lie nowhere."""
    return type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _on_host(torch: Any, x: Any, most_bytes: int = MOST_BYTES) -> Any:
    """The same memory as a tensor of the host; None where there is nothing or too much of it."""
    if x.numel() == 0 or not is_plain(torch, x) or x.data_ptr() == 0:
        return None
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    n_bytes = reach * x.element_size()
    if max(n_bytes, x.nbytes) > most_bytes:  # expanded ones reach less far than they are large
        return None
    there = (ctypes.c_char * n_bytes).from_address(x.data_ptr())
    return torch.frombuffer(there, dtype=x.dtype).as_strided(x.shape, x.stride())


def read(torch: Any, x: Any) -> Any:
    """All of it on the host, whatever it is and however much; the device is waited for, as operators that read do."""
    if not x.is_cuda:
        return x
    torch.cuda.current_stream(x.device).synchronize()
    there = _on_host(torch, x, sys.maxsize)
    return torch.empty(x.shape, dtype=x.dtype) if there is None else there.clone()


def there(torch: Any, x: Any) -> Any:
    """Not a copy of it; None where nothing can be told by it, but zeros where no kernel computed anything else."""
    found = _on_host(torch, x)
    is_none = found is not None and x.dtype == torch.bool and int(found.view(torch.uint8).max()) > 1
    return None if is_none else found


def told(torch: Any, x: Any) -> Any:
    """What the program put there, on the host; None where it is zeros: no kernel computes anything else."""
    found = there(torch, x)
    return found.clone() if found is not None and bool(found.any()) else None


def put(torch: Any, x: Any) -> Any:
    """Whole numbers and masks as the program put them there, which nothing has changed in place since; None otherwise.

    Not a copy of them.  Loops that count down in such a tensor would never end by what was there before.
    """
    if not x.is_cuda:
        return x
    if x.is_floating_point() or x.is_complex() or x.is_inference() or x._version > 0:
        return None
    found = there(torch, x)
    return found if found is not None and bool(found.any()) else None


def write(torch: Any, x: Any, values: Any) -> None:
    """As if a kernel had computed them."""
    there = _on_host(torch, x)
    if there is not None:
        there.copy_(values)
