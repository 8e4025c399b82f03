"""Which CUDA device an argument means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from pyalloc.errors import AllocatorError, ConfigError

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = int | str | torch.device | None


def index_of(device: Device = None) -> int:
    """The index of a device given as a number, as "cuda:1" or as a torch.device; None: the current one.

    CUDA is not started for it.

    Raises:
        AllocatorError: there is no torch, and so no allocator of its devices.
        ConfigError: there is no such device.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise AllocatorError(
            "pyalloc is not installed, because this Python has no PyTorch; commands that only read recordings and "
            "snapshots work without it (pyalloc --help)"
        ) from error

    current = int(torch.cuda.current_device()) if torch.cuda.is_initialized() else 0
    if device is None:
        return current
    index = device if isinstance(device, int) else _index_of_name(device, current)
    n_devices = torch.cuda.device_count()
    if not 0 <= index < n_devices:
        raise ConfigError(
            f"there is no CUDA device {index}; torch sees {n_devices}, numbered from 0"
        )
    return index


def _index_of_name(device: Any, current: int) -> int:
    import torch

    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        named = None
    if named is None or named.type != "cuda":
        raise ConfigError(
            f"{device!r} is not a CUDA device; give its number, or a string such as 'cuda:1'"
        )
    return current if named.index is None else named.index


def in_use(torch: Any) -> list[int]:
    """The devices with a context in this process.  Asking any other device about itself would create a context."""
    if not torch.cuda.is_initialized():
        return []
    return [*filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count()))]
