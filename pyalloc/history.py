"""torch's memory history and snapshots, answered from pyalloc: the functions behind torch.cuda.memory._snapshot().

Levels, defaults and errors are torch's: torch.cuda.memory._record_memory_history documents them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from pyalloc import _core
from pyalloc.config import Config
from pyalloc.errors import AllocatorError

Entry = dict[str, Any]
_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}
_ACTIONS = _core.actions()
_OURS = 1 << _ACTIONS.index("record_stream")  # torch's traces do not have it
_POWERS = [str(1 << power) for power in range(16)]


@dataclass
class _History:
    """What of the recording lives in Python."""

    enabled: bool = False
    has_trace: bool = False
    level: int = 0


_history = _History()


def is_enabled() -> bool:
    """Is history being recorded?"""
    return _history.enabled


def record(  # torch passes these in this order; newer versions append more
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
    *newer: Any,
) -> None:
    """torch._C._cuda_record_memory_history."""
    if enabled not in (None, "state", "all"):
        raise RuntimeError(f"expected enabled to be None, 'state' or 'all', not {enabled!r}")
    if context not in _LEVELS:
        raise RuntimeError(
            f"expected context to be None, 'state', 'alloc' or 'all', not {context!r}"
        )
    if stacks not in ("python", "all"):
        raise RuntimeError(f"expected stacks to be 'python' or 'all', not {stacks!r}")
    unknown = [name for name in skip_actions or () if name not in _ACTIONS]
    if unknown:
        raise RuntimeError(
            f"no such trace action: {', '.join(unknown)}; there are {', '.join(_ACTIONS)}"
        )
    if enabled is None:
        _stop()
        return
    skip_mask = sum(1 << _ACTIONS.index(name) for name in skip_actions or ())
    _start(
        _LEVELS[context], enabled == "all", max_entries, skip_mask, stacks == "all", clear_history
    )


def record_legacy(
    enabled: bool,
    record_context: bool = True,
    max_entries: int = 1,
    record_context_of_allocations: bool = False,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    *newer: Any,
) -> None:
    """torch._C._cuda_record_memory_history_legacy."""
    if not enabled:
        _stop()
        return
    level = (2 if record_context_of_allocations else 1) if record_context else 0
    _start(level, True, max_entries, 0, record_context_cpp, clear_history)


def _start(
    level: int, trace: bool, max_entries: int, skip_mask: int, native: bool, clear: bool
) -> None:
    if clear:
        _forget()
    _core.history_start(level, trace, max_entries, skip_mask | _OURS, native)
    _history.enabled, _history.has_trace, _history.level = True, trace, level


def _stop() -> None:
    _core.history_stop()
    _history.enabled = False


def _forget() -> None:
    _core.history_forget()


def snapshot(torch: Any, wanted: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """torch._C._cuda_memorySnapshot: everything, or (pool id[, include_traces]); pool (0, 0) means all pools."""
    pool = (
        None if wanted is None or tuple(wanted[:2]) == (0, 0) else (int(wanted[0]), int(wanted[1]))
    )
    with_trace = wanted is None or len(wanted) < 3 or bool(wanted[2])
    segments, traces = _core.snapshot(torch.cuda.device_count(), with_trace, pool)
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": _settings(),
        "external_annotations": [],
        "host_segments": [],
        "host_traces": [],
    }


def _settings() -> dict[str, Any]:
    """The keys of torch's own snapshot, for readers that look at them; `pyalloc` has ours."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "max_round_threshold": -1,
        "max_cached_size": -1,
        "roundup_power2_divisions": dict.fromkeys(_POWERS, 0),
        "pyalloc": {option.name: option.value for option in Config.of().options},
    }


def annotate(address: int, text: str) -> None:
    """torch._C._cuda_annotateMemory: an "annotate" entry for a live block; nothing where history is off."""
    if _history.enabled and _history.has_trace:
        with contextlib.suppress(AllocatorError):  # torch ignores pointers that are not live
            _core.annotate(address, text)


def traceback_of(torch: Any, address: int) -> list[dict[str, Any]] | None:
    """torch._C._cuda_allocationTraceback: who allocated the live block at this address."""
    if not _history.enabled or _history.level == 0:
        return None
    for segment in _core.snapshot(torch.cuda.device_count(), False, None)[0]:
        for block in segment["blocks"]:
            if block["address"] == address and block["state"] == "active_allocated":
                frames: list[dict[str, Any]] = block["frames"]
                return frames or None
    return None


def has_exactly(device: int, pool: tuple[int, int], expected: set[int], torch: Any) -> bool:
    """torch._C._cuda_checkPoolLiveAllocations: are these addresses the live blocks of the pool?"""
    segments = _core.snapshot(torch.cuda.device_count(), False, pool)[0]
    blocks = [
        block for segment in segments if segment["device"] == device for block in segment["blocks"]
    ]
    live = {block["address"] for block in blocks if block["state"] == "active_allocated"}
    return live == set(expected)
