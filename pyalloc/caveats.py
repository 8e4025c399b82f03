"""What a trace cannot tell, in words: each report says it beside its figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pyalloc.config import TORCH_CONF
from pyalloc.units import size

STATE_ONLY = ("none", "torn")  # histories of a snapshot that tell of one moment
BEFORE = "before"  # the note of how many events stand for what was there when the history began
_HISTORIES = {  # what a snapshot's does not tell
    "none": "The snapshot has no history, only what was in use when it was written: what is called the peak is "
    "that moment, and earlier peaks are not known. torch.cuda.memory._record_memory_history() at the start "
    "of the program keeps one, and so does `pyalloc run --record`.",
    "torn": "The snapshot's history leaves out allocations or frees (skip_actions of "
    "torch.cuda.memory._record_memory_history()), so that nothing can be told from it: what is called the "
    "peak is the moment when it was written.",
    "late": "The snapshot's history begins when memory was in use already (it was switched on late, or had more "
    "than max_entries events): what happened before, higher peaks too, is not in it.",
}
_LATE = (
    "The recording begins when memory was in use already: what happened before, higher peaks too, is not in it, and of "
    "what was in use then no lines are known."
)
_CUT = "The file was cut off; what is there is shown."
UNMODELLED = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
_TORCHS = ("native", "cudaMallocAsync")  # allocators whose recordings come from torch's history


def notes_of(texts: Iterable[str]) -> dict[str, str]:
    """How a trace came about; of what was told again the last."""
    return dict(text.split("=", 1) for text in texts if "=" in text)


def n_before(notes: dict[str, str]) -> int:
    """So many events stand for what was there when the history began; of a single moment nothing was earlier."""
    told = notes.get(BEFORE, "")
    return int(told) if told.isdigit() and notes.get("history") not in STATE_ONLY else 0


def has_beginning(notes: dict[str, str]) -> bool:
    """Did it begin when nothing was in use yet?"""
    return n_before(notes) == 0 and notes.get("history") not in _HISTORIES


def is_from_torch(notes: dict[str, str]) -> bool:
    """Was it made by torch's own allocator?"""
    allocator = notes.get("allocator")
    return allocator in _TORCHS or ("source" in notes and allocator != "pyalloc")


def gap(lost: str, between: str) -> str:
    """What a recording says that could not get all events."""
    where = f" between events {between}" * bool(between)
    return (
        f"The recording has a gap: {lost} events were lost while recording{where}. Figures are not those of the "
        "program: peaks, and what replays and plans need, may be far too low, what is in use later too high."
    )


def gap_of(notes: dict[str, str]) -> str:
    """The same of a trace; empty where nothing is known to be lost."""
    return gap(notes["lost_events"], notes.get("gaps", "")) if "lost_events" in notes else ""


def unseen(notes: dict[str, str], totals: dict[str, Any]) -> list[str]:
    """What of the program is not in the trace, in words: its end, what was before a snapshot, what got lost."""
    history = _HISTORIES.get(notes.get("history", ""))
    if "history" not in notes and n_before(notes):
        history = _LATE
    found = [text for text in (None if totals["is_complete"] else _CUT, history) if text]
    lost = gap_of(notes)
    if lost:
        found.append(lost)
    from_torch = is_from_torch(notes) or "source" in notes  # what snapshots tell is torch's choice
    has_history = notes.get("history") not in STATE_ONLY
    n_streams, n_devices = totals["n_streams"], len(totals["device_peak"])
    if n_streams > max(n_devices, 1) and from_torch and has_history:  # on a device several
        seen = totals["n_record_streams"]
        found.append(
            f"Memory was asked for on {n_streams} streams, and torch's history does not tell of record_stream() "
            f"({seen or 'no'} calls from Python are in the trace, those from C++ never are): replays may reuse such "
            "memory too early and come out a little low. Recordings on pyalloc have all calls."
        )
    return found


def of_replays(notes: dict[str, str]) -> list[str]:
    """What a replay on torch's allocators is not: with the settings the program was recorded with."""
    told = " ".join(notes.get(name, "") for name in TORCH_CONF)
    own = [name for name in UNMODELLED if name in notes or re.search(rf"\b{name}\s*:", told)]
    if not own:
        return []
    return [
        f"Recorded with {', '.join(own)}; replays on native and expandable segments are without."
    ]


def of(notes: dict[str, str], totals: dict[str, Any], *, is_empty: bool, unsplit: int) -> list[str]:
    """The same, and what its figures are not: of one device, of all phases."""
    found = unseen(notes, totals)
    if is_empty and not totals["is_complete"]:
        found.append(
            "What was written before holds no allocation, which says nothing about the program. If the file was "
            "copied, copy it again; else record again, and let the program run for longer, best to its end."
        )
    elif is_empty and not gap_of(notes):
        found.append(
            "No allocation is in it: the program took no CUDA memory while it was recorded."
        )
    if "steps_end_with" in notes:
        found.append(
            f"Steps end with each step() of {notes['steps_end_with']}. A snapshot does not tell two of a class apart: "
            "with several each iteration has as many steps, unless torch.profiler's step() marks them."
        )
    if unsplit > totals["peak_bytes"] / 200:
        found.append(
            f"torch.cuda.max_memory_allocated() is higher, by {size(unsplit)} at the peak: torch's allocator "
            "counts with a large block what it does not split off behind it (up to 1 MiB)."
        )
    peaks = totals["device_peak"]
    if len(peaks) > 1:
        each = ", ".join(f"{index}: {size(peak)}" for index, peak in peaks.items())
        found.append(
            f"Memory of {len(peaks)} devices is added up; their own peaks are {each}. --device N looks at one."
        )
    if totals["n_lost"]:
        found.append(
            f"{totals['n_lost']:,} phases, steps or errors came after as many as are kept (65,536; 256 errors): "
            "tables and the verdict on leaks are of those before; the peak and its phase are of all."
        )
    return found
