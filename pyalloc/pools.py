"""`with pyalloc.pool():` keeps the memory of a part of a program apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyalloc.errors import AllocatorError
from pyalloc.inside.devices import index_of
from pyalloc.limits import Size, get_limit, set_limit

if TYPE_CHECKING:
    from pyalloc.inside.devices import Device


@contextmanager
def pool(
    device: Device = None, *, use_on_oom: bool = False, limit: Size | None = None
) -> Iterator[Any]:
    """Routes this thread's allocations on one device to a private pool while the block runs.

    Inside the block, requests use only the pool's memory, and no other requests use it.  The pool ends with the block,
    or with the last variable that holds it, if that is later; its free memory then goes back to the device.  Tensors
    may outlive the pool; the memory they free is cached until torch.cuda.empty_cache(), or until it is needed.

    Args:
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.
        use_on_oom: let other allocations use this pool's memory before they run out of memory.
        limit: maximum bytes the pool may hold, a number or a string such as "2GiB"; needs pyalloc to be installed.

    Yields:
        The torch.cuda.MemPool, for `snapshot()` and for further `torch.cuda.use_mem_pool` blocks.

    Raises:
        AllocatorError: a limit is given, but pyalloc is not installed; or torch is older than 2.5 and has no pools.
        ConfigError: the limit is not a size, or there is no such device.
    """
    import torch

    if not hasattr(torch.cuda, "MemPool"):
        raise AllocatorError(
            f"pool() needs torch.cuda.MemPool, which torch {torch.__version__} lacks; torch 2.5 and later have it"
        )
    index = index_of(device)
    if limit is not None:
        get_limit(index)  # raises if pyalloc is not installed, before CUDA is started
    with torch.cuda.device(index):  # a MemPool belongs to the device that is current
        # Older versions of torch do not know the argument, so it is passed only if needed.
        created = torch.cuda.MemPool(use_on_oom=True) if use_on_oom else torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(created, device=index):
        if limit is not None:
            set_limit(limit, index, pool=created)
        yield created
