"""Why more device memory is reserved than in use: what it was made of when most was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pyalloc.advice import size
from pyalloc.analysis import Analysis, Row
from pyalloc.caveats import STATE_ONLY, is_from_torch
from pyalloc.moments import MIB, Block, Moment

_SMALL_SEGMENT = 2 * MIB  # torch's allocator has these for requests up to 1 MiB, and no others
_LEAST = 0.02  # of what is reserved: where all but this is in use there is nothing to explain


@dataclass(frozen=True)
class Reserved:
    """The moment of most reserved memory.  request: what it had grown for; None: not known."""

    moment: Moment
    request: Block | None
    rows: list[Row]


def at_most(analysis: Analysis) -> Reserved | None:
    """What device memory was used for when most was reserved; None where that was mostly in use, or is not known."""
    totals = analysis.totals
    event, asked = totals["peak_reserved_event"], totals["peak_reserved_alloc"]
    if analysis.notes.get("history") in STATE_ONLY:  # what is there was not asked for in this order
        event, asked = totals["n_events"], None
    moment = analysis.moments.get(event)
    if event <= analysis.n_before:  # what it had grown for is not known
        asked = None
        if analysis.peak.reserved_bytes == totals["peak_reserved_bytes"]:
            moment = analysis.peak  # what was not even needed then never was
    if moment is None or not moment.segments:
        return None
    if moment.reserved_bytes - moment.allocated_bytes < _LEAST * moment.reserved_bytes:
        return None
    request = next((block for block in moment.blocks if block.alloc_event == asked), None)
    in_pools = [n for each, _, n in moment.idle_pieces if (each[3], each[0]) in moment.pools]
    rows = [
        Row("in use", moment.allocated_bytes, len(moment.blocks)),
        Row(
            "freed, but other streams still work on it (record_stream)",
            moment.pending_bytes,
            len(moment.pending),
        ),
        Row("idle, kept for CUDA graphs and MemPools", sum(in_pools), len(in_pools)),
        *_idle(moment, request, is_split=is_from_torch(analysis.notes)),
    ]
    return Reserved(moment, request, [row for row in rows if row.bytes])


def _idle(moment: Moment, request: Block | None, *, is_split: bool) -> Iterator[Row]:
    """Outside of private pools.  is_split: by stream and size of request, as torch's allocator does it."""
    streams = _streams(moment, request)
    unsplit = set(moment.unsplit((*moment.blocks, *moment.pending)))
    found: dict[str, list[int]] = {}
    for piece in moment.common_pieces:
        _, n_segment, stream, device, is_mapped = piece[0]
        name = ""
        if is_split and stream != streams.get(device, stream):
            name = "idle, in segments that other streams asked for"
        elif is_split and n_segment == _SMALL_SEGMENT and not is_mapped:
            name = "idle, kept for requests up to 1 MiB"
        elif is_split and piece in unsplit:
            name = "behind blocks above 1 MiB, too little to be split off"
        found.setdefault(name, []).append(piece[2])
    for name, sizes in sorted(found.items(), reverse=True):
        yield Row(name or f"idle, in pieces of at most {size(max(sizes))}", sum(sizes), len(sizes))


def _streams(moment: Moment, request: Block | None) -> dict[int, int]:
    """By device the stream that the request was of, or that most outside of private pools is used by."""
    used: Counter[tuple[int, int]] = Counter()
    for block in moment.blocks:
        if block.pool:
            continue  # a graph's stream gets nothing else
        used[block.device, block.stream] += block.bytes
    found = {device: stream for (device, stream), _ in reversed(used.most_common())}
    return found | ({request.device: request.stream} if request is not None else {})
