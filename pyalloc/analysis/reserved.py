"""Why more device memory is reserved than in use: what it consisted of when most was reserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import size
from pyalloc.traces.caveats import is_from_torch
from pyalloc.traces.facts import Row
from pyalloc.traces.moments import SMALL_SEGMENT, Block, Moment

_UNKNOWN = "from before the recording, or unknown"
_LEAST = 0.02  # share of reserved memory; if less is idle, there is nothing to explain


@dataclass(frozen=True)
class Maker:
    """A line of the program, with the segments that were allocated for its requests; bytes, idle_bytes: of these."""

    name: str
    bytes: int
    idle_bytes: int
    segments: int


@dataclass(frozen=True)
class Reserved:
    """The moment with the most reserved memory.  request: the one that it had grown for, None if unknown."""

    moment: Moment
    request: Block | None
    rows: list[Row]
    makers: list[Maker]


class Piece(NamedTuple):
    """Device memory taken for one request.  begin, end: events; end is None if it stayed reserved to the end."""

    begin: int
    end: int | None
    bytes: int
    stack: int
    phase: str
    is_known: bool


@dataclass(frozen=True)
class Grown:
    """Pieces for one line that began and ended together."""

    name: str
    stack: int
    begin: int
    end: int | None
    bytes: int
    pieces: int


def over_time(analysis: Analysis) -> list[Grown]:
    """What reserved memory grew for, in the order in which it grew; empty for a snapshot of a single moment."""
    if analysis.is_moment:
        return []
    sums: dict[tuple[int, int | None, int, str], list[int]] = {}
    for piece in map(Piece._make, analysis.growths):
        begin = max(piece.begin, analysis.n_before)
        name = _UNKNOWN
        if piece.is_known:
            where = analysis.where(piece.stack)
            name = where or analysis.nameless(piece.stack, piece.phase)
        row = sums.setdefault((begin, piece.end, piece.stack, name), [0, 0])
        row[0] += piece.bytes
        row[1] += 1
    found = [
        Grown(name, stack, begin, end, *row) for (begin, end, stack, name), row in sums.items()
    ]
    return sorted(found, key=lambda g: (g.begin, -g.bytes, g.stack))


def largest(grown: list[Grown], n: int) -> list[Grown]:
    """The n largest of them, in the same order."""
    return sorted(sorted(grown, key=lambda g: -g.bytes)[:n], key=lambda g: g.begin)


def at_most(analysis: Analysis) -> Reserved | None:
    """What device memory was used for when most was reserved; None if nearly all was in use, or if that is unknown."""
    totals = analysis.totals
    event, asked = totals["peak_reserved_event"], totals["peak_reserved_alloc"]
    if analysis.is_moment:  # its blocks were not requested in this order
        event, asked = totals["n_events"], None
    moment = analysis.moments.get(event)
    begin = analysis.moments.get(analysis.n_before)
    if begin is not None and begin.reserved_bytes == totals["peak_reserved_bytes"]:
        asked = None  # what it had grown for is not known
        if analysis.peak.reserved_bytes == totals["peak_reserved_bytes"]:
            moment = analysis.peak  # what was not needed even then never was
    if moment is None or not moment.segments:
        return None
    if moment.reserved_bytes - moment.allocated_bytes < _LEAST * moment.reserved_bytes:
        return None
    request = next((block for block in moment.blocks if block.alloc_event == asked), None)
    in_pools = [n for each, _, n in moment.idle_pieces if (each[3], each[0]) in moment.pools]
    rows = [
        Row("in use", moment.allocated_bytes, len(moment.blocks)),
        Row(
            "freed, but still used by other streams (record_stream)",
            moment.pending_bytes,
            len(moment.pending),
        ),
        Row("idle, kept for CUDA graphs and MemPools", sum(in_pools), len(in_pools)),
        *_idle(moment, request, is_split=is_from_torch(analysis.notes)),
    ]
    return Reserved(moment, request, [row for row in rows if row.bytes], _makers(analysis, moment))


def _makers(analysis: Analysis, moment: Moment) -> list[Maker]:
    """Most idle first; empty if no segment is known to be for one request, which those mapped by pages never are."""
    requests = moment.segment_requests
    if not requests:
        return []
    idle: Counter[tuple[int, int]] = Counter()
    for segment, _, n in moment.idle_pieces:
        idle[segment[3], segment[0]] += n
    sums: dict[str, list[int]] = {}
    for address, n_bytes, _, device, is_mapped in moment.segments:
        name = "mapped page by page, for many requests" if is_mapped else _UNKNOWN
        if (device, address) in requests:
            stack, phase = requests[device, address]
            name = analysis.where(stack) or analysis.nameless(stack, phase)
        row = sums.setdefault(name, [0, 0, 0])
        for i, number in enumerate((n_bytes, idle[device, address], 1)):
            row[i] += number
    return sorted(
        (Maker(name, *row) for name, row in sums.items()), key=lambda m: (-m.idle_bytes, m.name)
    )


def _idle(moment: Moment, request: Block | None, *, is_split: bool) -> Iterator[Row]:
    """Idle memory outside of private pools.  is_split: by stream and request size, as torch's allocator keeps it."""
    streams = _streams(moment, request)
    unsplit = set(moment.unsplit((*moment.blocks, *moment.pending)))
    found: dict[str, list[int]] = {}
    for piece in moment.common_pieces:
        _, n_segment, stream, device, is_mapped = piece[0]
        name = ""
        if is_split and stream != streams.get(device, stream):
            name = "idle, in segments of other streams"
        elif is_split and n_segment == SMALL_SEGMENT and not is_mapped:
            name = "idle, kept for requests up to 1 MiB"
        elif is_split and piece in unsplit:
            name = "unused rest behind blocks above 1 MiB, too small to split off"
        found.setdefault(name, []).append(piece[2])
    for name, sizes in sorted(found.items(), reverse=True):
        yield Row(name or f"idle, in pieces of at most {size(max(sizes))}", sum(sizes), len(sizes))


def _streams(moment: Moment, request: Block | None) -> dict[int, int]:
    """By device: the stream of the request, else the one with most bytes in use outside of private pools."""
    used: Counter[tuple[int, int]] = Counter()
    for block in moment.blocks:
        if block.pool:
            continue  # a graph's stream serves nothing else
        used[block.device, block.stream] += block.bytes
    found = {device: stream for (device, stream), _ in reversed(used.most_common())}
    return found | ({request.device: request.stream} if request is not None else {})
