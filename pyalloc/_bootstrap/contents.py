"""What lies on a device in a dry run, read and written where it is: no copy of the program's, so none is counted."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import Any

# So much of a block begins with zeros (zeros.c); beyond lies what lay there before.
MOST_BYTES = 2**24
_shares: dict[int, float] = {}
_PAGE = 4096
_host = ctypes.CDLL(None)
# Storages whose zeros are as they should be: what no kernel computed reads as zeros, too.
_known: set[int] = set()


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


def _is_untouched(x: Any) -> bool:
    """Nobody has written there, and whoever looks makes pages of it."""
    start = x.data_ptr() & -_PAGE
    end = x.data_ptr() + (x.nbytes if x.is_contiguous() else 1)
    seen = (ctypes.c_ubyte * -((start - end) // _PAGE))()
    asked = _host.mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), seen)
    return bool(asked == 0 and not bytes(seen).strip(b"\0"))


def is_repeated(torch: Any) -> bool:
    """What is done now will be again, with other numbers: a graph is captured."""
    return bool(torch.cuda.is_current_stream_capturing())


def there(torch: Any, x: Any) -> Any:
    """Not a copy of it; None where nothing can be told by it, but zeros where no kernel computed anything else."""
    if x.nbytes > MOST_BYTES or is_repeated(torch):
        return None
    if x.nbytes > _PAGE and is_plain(torch, x) and _is_untouched(x):
        return None
    found = _on_host(torch, x)
    is_none = found is not None and x.dtype == torch.bool and int(found.view(torch.uint8).max()) > 1
    return None if is_none else found


def told(torch: Any, x: Any) -> Any:
    """A copy on the host of what the program put there or what follows from it, changed in place or not.

    None where it is zeros that a kernel may have computed.
    """
    found = _told(torch, x)
    return None if found is None else found.clone()


def put(torch: Any, x: Any, takes_floats: bool = False) -> Any:
    """What the program put there or what follows from it, which nothing has changed in place since; None otherwise.

    Fractions only where they are asked for.  Not a copy.  Loops that count down in such a tensor would never end by
    what was there before.
    """
    if not x.is_cuda:
        return x
    is_whole = not (x.is_floating_point() or x.is_complex())
    if not (is_whole or takes_floats) or x.is_inference() or x._version > 0:
        return None
    return _told(torch, x)


def is_known(x: Any) -> bool:
    """Where it is zeros, unless something has changed it in place since."""
    return x.untyped_storage()._cdata in _known


def _told(torch: Any, x: Any) -> Any:
    """What lies there, unless it is zeros that a kernel may have computed."""
    found = there(torch, x)
    if found is None or found.any():
        return found
    return found if is_known(x) and not x.is_inference() and x._version == 0 else None


def note_share(x: Any, share: float | None) -> None:
    """So much of it is true, which of it nobody knows."""
    if share is None:
        return
    storage = x.untyped_storage()
    _shares[storage._cdata] = share
    weakref.finalize(storage, _shares.pop, storage._cdata, None)


def share(x: Any) -> float | None:
    """What was noted of it, or of what it is a part of."""
    is_changed = not _shares or x.is_inference() or x._version > 0
    return None if is_changed else _shares.get(x.untyped_storage()._cdata)


def write(torch: Any, x: Any, values: Any, is_new: bool = True) -> None:
    """As if a kernel had computed them.  is_new: they are all that lies in its storage, zeros too."""
    there = _on_host(torch, x)
    if there is None:
        return
    there.copy_(values)
    storage = x.untyped_storage()
    if is_new and storage._cdata not in _known and not is_repeated(torch):
        _known.add(storage._cdata)
        weakref.finalize(storage, _known.discard, storage._cdata)
