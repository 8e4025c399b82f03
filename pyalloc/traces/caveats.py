"""What a trace cannot tell, in sentences that each report puts beside its figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pyalloc.common.config import TORCH_CONF
from pyalloc.common.units import size

STATE_ONLY = ("none", "torn")  # histories of a snapshot that tell of one moment
BEFORE = "before"  # the note of how many events stand for what was there when the history began
_HISTORIES = {  # what a snapshot's does not tell
    "none": "The snapshot has no history, only what was in use when it was written. What is called the peak here is "
    "that moment; earlier peaks are unknown. To keep a history, call torch.cuda.memory._record_memory_history() at "
    "the start of the program, or use `pyalloc run --record`.",
    "torn": "The snapshot's history leaves out allocations or frees (skip_actions of "
    "torch.cuda.memory._record_memory_history()), so it cannot be used. What is called the peak here is the moment "
    "when the snapshot was written.",
    "late": "The snapshot's history begins when memory was already in use (it was switched on late, or there were "
    "more than max_entries events). What happened before is missing, including any higher peak.",
}
_LATE = (
    "The recording begins when memory was already in use. What happened before is missing, including any higher peak, "
    "and the lines that allocated what was in use then are unknown."
)
_CUT = "The file was cut off; the figures are those of the part that is there."
UNMODELLED = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold")
_TORCHS = ("native", "cudaMallocAsync")  # allocators recorded through torch's history


def notes_of(texts: Iterable[str]) -> dict[str, str]:
    """A trace's notes, `name=value`; the last one of a name counts."""
    return dict(text.split("=", 1) for text in texts if "=" in text)


def n_before(notes: dict[str, str]) -> int:
    """Number of events for what existed when the history began; 0 for a single moment."""
    told = notes.get(BEFORE, "")
    return int(told) if told.isdigit() and notes.get("history") not in STATE_ONLY else 0


def has_beginning(notes: dict[str, str]) -> bool:
    """Did it begin before any memory was in use?"""
    return n_before(notes) == 0 and notes.get("history") not in _HISTORIES


def is_from_torch(notes: dict[str, str]) -> bool:
    """Was it made by torch's own allocator?"""
    allocator = notes.get("allocator")
    return allocator in _TORCHS or ("source" in notes and allocator != "pyalloc")


def gap(lost: str, between: str) -> str:
    """The sentence of a recording that missed events."""
    where = f" between events {between}" * bool(between)
    return (
        f"The recording has a gap: {lost} events were lost{where}, so its figures are not those of the program. Peaks, "
        "and what replays and plans need, may be far too low; what is in use later may be too high."
    )


def gap_of(notes: dict[str, str]) -> str:
    """The same for a trace; empty if no event is known to be lost."""
    return gap(notes["lost_events"], notes.get("gaps", "")) if "lost_events" in notes else ""


def unseen(notes: dict[str, str], totals: dict[str, Any]) -> list[str]:
    """Which parts of the program are not in the trace: its end, what preceded a snapshot, lost events."""
    history = _HISTORIES.get(notes.get("history", ""))
    if "history" not in notes and n_before(notes):
        history = _LATE
    found = [text for text in (None if totals["is_complete"] else _CUT, history) if text]
    lost = gap_of(notes)
    if lost:
        found.append(lost)
    from_torch = is_from_torch(notes) or "source" in notes  # snapshots have torch's format
    has_history = notes.get("history") not in STATE_ONLY
    n_streams, n_devices = totals["n_streams"], len(totals["device_peak"])
    if n_streams > max(n_devices, 1) and from_torch and has_history:  # several on one device
        seen = totals["n_record_streams"]
        found.append(
            f"Memory was requested on {n_streams} streams, and torch's history does not contain record_stream() "
            f"(calls from Python in the recording: {seen or 'none'}; calls from C++ are never there). Replays may "
            "reuse such memory too early, so their figures may be a little low. Recordings on pyalloc have all calls."
        )
    return found


def of_replays(notes: dict[str, str]) -> list[str]:
    """Says that a replay on torch's allocators does not use the settings that the program was recorded with."""
    told = " ".join(notes.get(name, "") for name in TORCH_CONF)
    own = [name for name in UNMODELLED if name in notes or re.search(rf"\b{name}\s*:", told)]
    if not own:
        return []
    return [
        f"Recorded with {', '.join(own)}, which replays on native and expandable segments do not model."
    ]


def of(notes: dict[str, str], totals: dict[str, Any], *, is_empty: bool, unsplit: int) -> list[str]:
    """All caveats: those of unseen(), and what the figures do not cover, such as other devices or some phases."""
    found = unseen(notes, totals)
    if is_empty and not totals["is_complete"]:
        found.append(
            "The part that is there holds no allocation, which says nothing about the program. If the file was "
            "copied, copy it again; otherwise record again and let the program run longer, ideally to its end."
        )
    elif is_empty and not gap_of(notes):
        found.append(
            "It holds no allocation: the program used no CUDA memory while it was recorded."
        )
    if "steps_end_with" in notes:
        found.append(
            f"Each step() of {notes['steps_end_with']} ends a step. A snapshot cannot tell two optimizers of one class "
            "apart: with several, each iteration counts as several steps, unless torch.profiler's step() marks them."
        )
    if unsplit > totals["peak_bytes"] / 200:
        found.append(
            f"torch.cuda.max_memory_allocated() is higher by {size(unsplit)} at the peak: torch's allocator also "
            "counts the unused rest behind a large block (up to 1 MiB) that it does not split off."
        )
    peaks = totals["device_peak"]
    if len(peaks) > 1:
        each = ", ".join(f"{index}: {size(peak)}" for index, peak in peaks.items())
        found.append(
            f"The memory of {len(peaks)} devices is added up; their own peaks are {each}. Use --device N to look at "
            "one."
        )
    if totals["n_lost"]:
        found.append(
            f"{totals['n_lost']:,} phases, steps or errors exceed what is kept (65,536; 256 errors). Tables and the "
            "verdict on leaks cover only those before; the peak and its phase cover all."
        )
    return found
