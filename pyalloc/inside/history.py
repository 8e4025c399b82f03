"""torch's memory history and snapshots, answered from pyalloc: the functions behind torch.cuda.memory._snapshot().

Levels, defaults and errors are torch's: torch.cuda.memory._record_memory_history documents them.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pyalloc import _core
from pyalloc.common.config import Config
from pyalloc.errors import AllocatorError

Entry = dict[str, Any]
_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}
TORCHS = {name: 1 << bit for bit, (name, is_torchs) in enumerate(_core.actions()) if is_torchs}
_OURS = sum(1 << bit for bit, (_, is_torchs) in enumerate(_core.actions()) if not is_torchs)
# Of torch._C._cuda_record_memory_history; older versions have fewer arguments.
_DEFAULTS = ("all", "all", "all", sys.maxsize, False, False, False, (), False, True)
_NEWER_DEFAULTS = _DEFAULTS[5:]
OTHER_TRACES = ("host_traces", "external_annotations")  # in snapshots, beside device_traces
_OWN_FRAMES = 2  # between whoever annotates and the allocator: annotate() and what calls it in torch._C's place


@dataclass
class _History:
    """What of the recording lives in Python."""

    enabled: bool = False
    again: Callable[[], None] | None = None  # switches it on as it is
    is_held: bool = False  # by a recording
    has_told: bool = False


_history = _History()


def is_enabled() -> bool:
    """Is history being recorded?"""
    return _history.enabled


def again() -> Callable[[], None] | None:
    """What switches the history on again as it is; None while it is off."""
    return _history.again


def hold(is_held: bool) -> None:
    """While a recording holds it, the program's own calls do not change the history: it would lose what they drop."""
    _history.is_held = is_held
    _core.torch_hold_history(is_held)


def _is_held() -> bool:
    if _history.is_held and not _history.has_told:
        _history.has_told = True
        logging.getLogger("pyalloc").warning(
            "torch.cuda.memory._record_memory_history() has no effect while pyalloc records; the recording has all "
            "events, and snapshots have those of the last half second"
        )
    return _history.is_held


def _ask(original: Callable[..., Any], *arguments: Any) -> Any:
    """Torch's own function, whose part is all but device memory."""
    _core.torch_ask(True)
    try:
        return original(*arguments)
    finally:
        _core.torch_ask(False)


def record(original: Callable[..., Any], *given: Any) -> None:
    """torch._C._cuda_record_memory_history; torch checks the arguments and records what is not device memory."""
    if _is_held():
        return
    values = given + _DEFAULTS[len(given) :]
    enabled, context, stacks, max_entries, clear, _, _, skip_actions, _, record_cuda = values[:10]
    skip_mask = _skip_mask(skip_actions)
    _ask(original, *given)
    if not record_cuda:
        return
    if enabled is None:
        _stop()
        return
    entries = max_entries if enabled == "all" else 1  # with "state" torch keeps the latest
    _start(_LEVELS[context], entries, skip_mask, stacks == "all", clear)
    _history.again = functools.partial(record, original, *given)


def _skip_mask(names: Any) -> int:
    """Of a history that leaves these actions out.

    Raises:
        AllocatorError: there is no such action, in torch's own words.
    """
    if (
        isinstance(names, str)
        or not isinstance(names, Iterable)
        or not all(isinstance(name, str | bytes) for name in names)
    ):
        return 0  # torch, asked next, refuses them
    unknown = [name for name in names if name not in TORCHS]
    if unknown:
        raise AllocatorError(f"Unknown TraceEntry action: {unknown[0]}")
    return sum(TORCHS[name] for name in set(names))


def record_legacy(
    original: Callable[..., Any],
    enabled: bool,
    record_context: bool = True,
    max_entries: int = 1,
    record_context_of_allocations: bool = False,
    record_context_cpp: bool = False,
    *newer: Any,
) -> None:
    """torch._C._cuda_record_memory_history_legacy; torch before 2.8 has no more arguments than these."""
    if _is_held():
        return
    # clear_history, compile_context, global_record_annotations, skip_actions, record_pinned_host_memory, record_cuda
    clear_history, _, _, skip_actions, _, record_cuda = (
        *newer,
        *(False, *_NEWER_DEFAULTS)[len(newer) :],
    )[:6]
    skip_mask = _skip_mask(skip_actions)
    _ask(
        original,
        enabled,
        record_context,
        max_entries,
        record_context_of_allocations,
        record_context_cpp,
        *newer,
    )
    if not record_cuda:
        return
    if not enabled:
        _stop()
        return
    level = (2 if record_context_of_allocations else 1) if record_context else 0
    _start(level, max_entries, skip_mask, record_context_cpp, clear_history)
    _history.again = functools.partial(
        record_legacy,
        original,
        enabled,
        record_context,
        max_entries,
        record_context_of_allocations,
        record_context_cpp,
        *newer,
    )


def _start(level: int, max_entries: int, skip_mask: int, native: bool, clear: bool) -> None:
    if clear:
        _core.history_forget()
    _core.history_start(level, True, operator.index(max_entries), skip_mask | _OURS, native)
    _history.enabled = True


def _stop() -> None:
    _core.history_stop()
    _history.enabled = False
    _history.again = None


def snapshot(
    torch: Any, original: Callable[..., Any], config: Config, wanted: tuple[Any, ...] | None
) -> dict[str, Any]:
    """torch._C._cuda_memorySnapshot: everything, or (pool id[, include_traces]); pool (0, 0) means all pools.

    config: the settings of the installation, which are told too.
    """
    context = getattr(torch.cuda, "MemPoolContext", None)  # before torch 2.8
    if wanted is not None:
        _check_wanted(wanted)
    asked = _pool_in_use(context) if wanted is None else wanted[:2]
    pool = None if tuple(asked) == (0, 0) else (int(asked[0]), int(asked[1]))
    with_trace = wanted is None or len(wanted) < 3 or bool(wanted[2])
    result: dict[str, Any] = {"allocator_settings": {}, "external_annotations": []}
    if _core.torch_has_slots("pinned memory in snapshots"):
        # Not by pool, whose part is here: torch 2.14 drops references to the numbers of a tuple that it does not own.
        takes_pool = context is None and hasattr(torch.cuda, "MemPool")  # torch 2.4 has neither
        result = _ask(original, *[None] * takes_pool)
    if not with_trace:
        result |= {name: [] for name in OTHER_TRACES if name in result}
    segments, traces = _core.snapshot(torch.cuda.device_count(), with_trace, pool)
    result |= {"segments": segments, "device_traces": traces if with_trace else []}
    result["allocator_settings"]["pyalloc"] = {
        option.name: option.value for option in config.options
    }
    return result


def _check_wanted(wanted: Any) -> None:
    """Raises what torch raises, in its own words, where that is no pool's number[, include_traces]."""
    if not isinstance(wanted, tuple):
        raise AllocatorError("Expected tuple or None")
    if len(wanted) not in (2, 3):
        raise AllocatorError("Expected tuple of size 2 or 3")
    for number in wanted[:2]:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise AllocatorError("mempool_id elements must be integers")
        if not -(2**63) <= int(number) < 2**63:
            raise ValueError("Overflow when unpacking long long")
    if not all(isinstance(each, bool) for each in wanted[2:]):
        raise AllocatorError("include_traces must be a boolean")


def _pool_in_use(context: Any) -> tuple[int, int]:
    """Before torch 2.8 a snapshot is of the pool in use, and a pool is asked by using it; (0, 0): none, or newer."""
    active = None if context is None else context.active_pool()
    return (0, 0) if active is None else tuple(active.id)


def _bytes_of(text: str | bytes | bytearray) -> bytes:
    """As torch takes them; those of a text."""
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise TypeError(f"metadata is a str in UTF-8, or bytes: {error}") from None


def set_metadata(text: str | bytes | bytearray) -> None:
    """torch._C._cuda_setMemoryMetadata."""
    _core.set_metadata(_bytes_of(text))


def annotate(address: int, text: str | bytes | bytearray) -> None:
    """torch._C._cuda_annotateMemory: an "annotate" entry for a live block; nothing where history is off.

    Raises:
        AllocatorError: no live block begins there, whether history is on or not, in torch's own words.
    """
    if not _core.annotate(address, _bytes_of(text), _OWN_FRAMES):
        where = f"{address:#x}" if address else "0"  # as C++ prints pointers
        raise AllocatorError(f"annotateMemory: no live allocation found at pointer {where}")


def traceback_of(address: int) -> list[dict[str, Any]] | None:
    """torch._C._cuda_allocationTraceback: who allocated the live block at this address."""
    if not isinstance(address, int):
        raise TypeError("an integer is required")
    if address >= 2**64:
        raise OverflowError("Python int too large to convert to C unsigned long")
    return _core.traceback(address) or None
