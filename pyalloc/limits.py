"""How much memory may be used, how much is kept, and what happens when it runs short."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pyalloc import _core
from pyalloc.common.config import Config, option_text
from pyalloc.errors import ConfigError
from pyalloc.inside.devices import index_of

if TYPE_CHECKING:
    from pyalloc.inside.devices import Device

Size = int | str
Callback = Callable[[int, int], object]


def trim(bytes: Size = 0, device: Device = None) -> None:
    """Gives cached memory back to a device until at most `bytes` are reserved there, or nothing idle is left.

    Waits for the device.  The memory that is least likely to be needed again goes first: unused for longest, mapped at
    no second address, largest.  Live tensors stay, and so does what `reserve()` keeps.

    Args:
        bytes: a number of bytes or a string such as "2GiB"; 0 gives back all that is idle.
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.

    Raises:
        AllocatorError: pyalloc is not installed, or the device failed.
        ConfigError: bytes is not a size, or there is no such device.
    """
    _core.trim(index_of(device), _bytes(bytes))


def reserve(bytes: Size, device: Device = None) -> None:
    """Reserves at least `bytes` of memory on a device now, and from now on keeps at least that much reserved.

    The memory serves all streams.  `reserve(0)` ends the reservation.

    Args:
        bytes: a number of bytes or a string such as "2GiB"; what the process already holds counts.
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.

    Raises:
        AllocatorError: pyalloc is not installed, there is not that much memory, or a limit forbids it; nothing was
            changed.
        ConfigError: bytes is not a size, or there is no such device.
    """
    index = index_of(device)
    wanted = _bytes(bytes)
    # Raises if pyalloc is not installed, before _stream() starts CUDA.
    _core.get_limit(index, False)
    _core.reserve(index, wanted, _stream(index))


def set_limit(
    bytes: Size | None,
    device: Device = None,
    *,
    soft: bool = False,
    pool: Any = None,
) -> None:
    """Limits the memory of a device, or of one pool there.

    Args:
        bytes: a number of bytes or a string such as "20GiB"; None removes the limit.
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.
        soft: set a soft limit: above it memory is reused and given back before more is reserved, but requests never
            fail because of it.
        pool: a torch.cuda.MemPool or its id; the limit lasts as long as the pool is in use.

    Raises:
        ConfigError: bytes is not a size above 0, there is no such device, pool is not a pool, or soft=True is given
            for one.
        AllocatorError: pyalloc is not installed, or the pool is not in use on the device.
    """
    index = index_of(device)
    wanted = 0 if bytes is None else _bytes(bytes)
    if bytes is not None and wanted == 0:
        raise ConfigError(
            "a limit of 0 bytes would refuse every request; pass None to remove the limit"
        )
    if pool is None:
        _core.set_limit(index, soft, wanted)
        return
    if soft:
        raise ConfigError("pools have hard limits only; leave out soft=True")
    try:
        first, second = map(operator.index, getattr(pool, "id", pool))
    except (TypeError, ValueError):
        raise ConfigError(
            f"{pool!r} is not a pool; pass a torch.cuda.MemPool or its id (`with pyalloc.pool() as pool:` makes one)"
        ) from None
    _core.pool_set_limit(index, (first, second), wanted)


def get_limit(device: Device = None, *, soft: bool = False) -> int | None:
    """Returns the limit of a device, as set by set_limit() or the options `limit` and `soft_limit`.

    Args:
        device: a CUDA device, as a number, "cuda:1" or a torch.device; the current one by default.
        soft: return the soft limit instead of the hard one.

    Returns:
        Bytes, or None if there is no limit.  A share of the card (torch.cuda.set_per_process_memory_fraction(), the
        option `per_process_memory_fraction`) is a separate limit, which is not returned here; the smaller one applies.

    Raises:
        AllocatorError: pyalloc is not installed.
        ConfigError: there is no such device.
    """
    return _core.get_limit(index_of(device), soft) or None


class PressureHandle:
    """What on_pressure() returns: `remove()`, or leaving a `with` block, unregisters the callback."""

    def __init__(self, call: Callable[[int, int], bool]) -> None:
        """Registers the call."""
        self._call = call
        _core.pressure_callbacks.append(call)

    def remove(self) -> None:
        """Unregisters the callback; calling it again has no effect."""
        if self._call in _core.pressure_callbacks:
            _core.pressure_callbacks.remove(self._call)

    def __enter__(self) -> PressureHandle:
        """The handle itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes the callback."""
        self.remove()


def on_pressure(callback: Callback) -> PressureHandle:
    """Calls `callback(device, bytes)` when a request of that many bytes finds no memory, before the request fails.

    The callback should free what it can spare; the request is then tried again.  It returns False if it freed nothing;
    any other result, including None, means "try again".  It may allocate, but its own requests fail immediately when
    memory is short.  An exception that it raises is printed, not propagated.  It is not called for requests larger than
    the whole device.

    Several callbacks are called in the order of their registration, all of them each time.  They are called again only
    as long as memory is being freed, and at most eight times for one request.

    Args:
        callback: gets the device's number and the bytes requested; called in the thread that makes the request.

    Returns:
        A handle whose `remove()` unregisters the callback; it also works in a `with` statement.

    Raises:
        TypeError: the callback is not callable.
    """
    if not callable(callback):
        raise TypeError(f"on_pressure() needs a function of (device, bytes), not {callback!r}")

    def call(device: int, bytes: int) -> bool:
        return callback(device, bytes) is not False

    return PressureHandle(call)


def _bytes(size: Size) -> int:
    """Bytes of a size, by the rules of the options."""
    try:
        checked = Config(option_text({"limit": size}))
    except ConfigError:
        raise ConfigError(
            f"{size!r} is not a size; pass a number of bytes or a string such as '512MB' or '2GiB'"
        ) from None
    return int(next(option.value for option in checked.options if option.name == "limit"))


def _stream(device: int) -> int:
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
