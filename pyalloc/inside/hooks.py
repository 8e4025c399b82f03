"""Replaces functions of torch that raise, or give wrong answers, while another allocator is active.

torch.cuda.memory and torch.accelerator are thin Python over functions of torch._C.  Only the latter are replaced, so
that torch's own code above them (signatures, docstrings, key order, texts) stays in use, in every version.
"""

from __future__ import annotations

import functools
import mmap
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from pyalloc import _core
from pyalloc.common.config import Config
from pyalloc.errors import AllocatorError
from pyalloc.inside import history

Nested = dict[Any, Any]
_POOLS_KEY = "reserved_bytes_by_private_pools"
_NEWER_KEYS = frozenset(("num_oom_rejections", _POOLS_KEY))
_N_INDICES = 2**7  # range of torch's index type, and as many below 0


@dataclass
class Replacements:
    """The replaced functions with their originals, to be listed and undone."""

    originals: list[tuple[Any, str, Any]] = field(default_factory=list)

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replaces owner.name where it exists; torch versions that lack it are left alone."""
        original = getattr(owner, name, None)
        if original is None:
            return
        # Keep torch's names: pickle, and tools that display functions, use them.
        function.__name__ = function.__qualname__ = name
        function.__module__ = getattr(owner, "__name__", function.__module__)
        function.__doc__ = original.__doc__
        self.originals.append((owner, name, original))
        setattr(owner, name, function)

    def undo(self) -> None:
        """Puts every original back."""
        for owner, name, original in reversed(self.originals):
            setattr(owner, name, original)
        self.originals.clear()

    def names(self) -> tuple[str, ...]:
        """Full names of the replaced functions."""
        return tuple(
            f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _ in self.originals
        )


def replace_all(torch: Any, config: Config, done: Replacements) -> None:
    """Replaces every listed function that this torch has; config: shown in snapshots.

    done: gets what was replaced, also if an exception comes in between.
    """
    for name, function in _cuda_functions(torch, config).items():
        done.put(torch._C, "_cuda_" + name, function)
    for name, function in _accelerator_functions(torch).items():
        done.put(torch._C, "_accelerator_" + name, function)


@functools.cache
def _lacking_keys(torch_file: str) -> frozenset[str]:
    """Keys of newer versions that this torch's memory_stats lacks, found by searching its library for their names."""
    library = Path(torch_file).parent / "lib" / "libtorch_python.so"
    if not library.exists():
        return frozenset(_NEWER_KEYS)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return frozenset(key for key in _NEWER_KEYS if text.find(b"\0" + key.encode() + b"\0") < 0)


_found: set[int] = set()  # devices that exist: a cache, as they stay


def _existing(torch: Any, device: int) -> int:
    """The device's number.  A wrong one raises as in torch; the heap itself only knows the devices in use."""
    if device in _found:
        return device
    count = int(torch.cuda.device_count())
    if not 0 <= device < count:
        raise AllocatorError(
            f"there is no CUDA device {device}: this process sees {count}, numbered from 0"
        )
    if torch.cuda.is_initialized():
        _found.add(device)
    return device


def _asked(torch: Any, device: Any, function: str) -> int:
    """The same for torch.cuda's functions, which take integers, numpy's too, but no bool."""
    if isinstance(device, bool) or not isinstance(device, Integral):
        raise AllocatorError(f"invalid argument to {function}")
    return _existing(torch, int(device))


def _indexed(torch: Any, device: Any) -> int:
    """The same for torch.accelerator's functions, which take anything that converts to an 8-bit integer."""
    index = operator.index(device)
    if not -_N_INDICES <= index < _N_INDICES:
        raise TypeError(f"incompatible function arguments: {index} is no number of a device")
    return _existing(torch, index)


def memory_stats(torch: Any, device: int) -> Nested:
    """A device's statistics, under exactly the keys of torch's own allocator in this version."""
    lacking = _lacking_keys(torch.__file__)
    stats = _core.nested_stats(_existing(torch, device), lacking)
    if _POOLS_KEY in lacking:
        return stats
    result: Nested = {}
    for key, value in stats.items():
        result[key] = value
        if key == "reserved_bytes":  # the place it has in torch's
            result[_POOLS_KEY] = _private_pools(device)
    return result


def _private_pools(device: int) -> Nested:
    """Statistics by pool id, as in torch."""
    return {pool: reserved for pool, _, _, reserved in _core.pools(device)}


def _cuda_functions(torch: Any, config: Config) -> dict[str, Callable[..., Any]]:
    own: dict[str, Any] = {
        name: getattr(torch._C, "_cuda_" + name, None)
        for name in ("memorySnapshot", "record_memory_history", "record_memory_history_legacy")
    }
    return {
        "memoryStats": lambda device: memory_stats(
            torch, _asked(torch, device, "memory_allocated")
        ),
        "resetPeakMemoryStats": lambda device: _core.reset_peak(
            _asked(torch, device, "reset_peak_memory_stats")
        ),
        "resetAccumulatedMemoryStats": lambda device: _core.reset_accumulated(
            _asked(torch, device, "reset_accumulated_memory_stats")
        ),
        "getMemoryFraction": lambda device: _core.get_fraction(
            _existing(torch, operator.index(device))
        ),
        "memorySnapshot": lambda wanted=None: history.snapshot(
            torch, own["memorySnapshot"], config, wanted
        ),
        "record_memory_history": lambda *args: history.record(own["record_memory_history"], *args),
        "record_memory_history_legacy": lambda *args: history.record_legacy(
            own["record_memory_history_legacy"], *args
        ),
        "isHistoryEnabled": lambda: history.is_enabled(),
        "allocationTraceback": lambda address: history.traceback_of(address),
        "memoryMetadataSupported": lambda: True,
        "setMemoryMetadata": lambda text: history.set_metadata(text),
        "getMemoryMetadata": lambda: _core.get_metadata(),
        "annotateMemory": lambda address, text: history.annotate(address, text),
    }


def _accelerator_functions(torch: Any) -> dict[str, Callable[..., Any]]:
    return {
        "isAllocatorInitialized": lambda: bool(torch.cuda.is_initialized()),
        "emptyCache": lambda: _core.empty_cache(),
        "getDeviceStats": lambda device: _core.nested_stats(_indexed(torch, device), _NEWER_KEYS),
        "resetPeakStats": lambda device: _core.reset_peak(_indexed(torch, device)),
        "resetAccumulatedStats": lambda device: _core.reset_accumulated(_indexed(torch, device)),
    }
