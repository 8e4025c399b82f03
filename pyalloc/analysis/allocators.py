"""Advice about reserved memory: what lies idle of it, and what another allocator or a plan would need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console, recorded
from pyalloc.common.units import size
from pyalloc.traces.caveats import STATE_ONLY, is_from_torch, of_replays
from pyalloc.traces.facts import Advice
from pyalloc.traces.moments import PAGE, Moment, page_bytes

PLANNED = "planned"  # among replays: pyalloc with a plan
_PLAN_SHARE = 0.01  # of peak live bytes: saving less is not worth a plan


def advice(analysis: Analysis) -> Iterator[Advice]:
    """Out of memory beside idle memory, then what the replays say."""
    yield from _fragmentation(analysis)
    yield from _policies(analysis)
    yield from _plan(analysis)


def _fragmentation(analysis: Analysis) -> Iterator[Advice]:
    oom = analysis.oom
    if oom is not None and oom.is_fragmented:
        gaps = oom.moment.common_gaps
        free = f", and {size(oom.free)} were free" * (oom.idle_bytes < oom.asked)
        why = (
            f"fragmentation. {size(page_bytes(gaps))} of it were whole pages, which pyalloc joins."
            if oom.largest_gap < oom.asked
            else "it was kept for another stream, or for the other kind of requests (up to 1 MiB, or above)."
        )
        yield Advice(
            "fragmentation",
            f"Out of memory for {size(oom.asked)}{oom.where} while {size(oom.idle_bytes)} were reserved but "
            f"idle, in {len(gaps)} piece{'s' * (len(gaps) != 1)} of at most {size(oom.largest_gap)}{free}: {why}",
            oom.idle_bytes,
        )
    totals = analysis.totals
    idle = totals["peak_reserved_bytes"] - totals["peak_bytes"]
    at_most = analysis.moments.get(totals["peak_reserved_event"])
    pending = at_most.pending_bytes if at_most is not None else 0
    if pending > idle / 2 and idle > totals["peak_bytes"] * 0.1:
        yield Advice(
            "record_stream",
            f"{size(pending)} of freed tensors could not be reused when reserved memory peaked: record_stream() had "
            "marked them as used by other streams, whose work had not finished. Keep fewer of them in flight (less "
            "prefetching, an earlier wait_stream()), or replace record_stream() by waiting for an event before the "
            "last reference goes away.",
            min(pending, idle),
        )
    elif analysis.has_segments and not analysis.ooms and idle > totals["peak_bytes"] * 0.1:
        gaps = analysis.peak.gaps
        yield Advice(
            "fragmentation",
            f"{size(totals['peak_reserved_bytes'])} were reserved for a peak of {size(totals['peak_bytes'])}, so "
            f"{size(idle)} lay idle (at the peak in {len(gaps)} piece{'s' * (len(gaps) != 1)}, the largest "
            f"{size(analysis.peak.largest_gap)}).{_of_other_streams(analysis, at_most)}",
            idle,
        )


def _of_other_streams(analysis: Analysis, moment: Moment | None) -> str:
    """Says how much of the idle memory only other streams could use when most was reserved; "" if it is little."""
    if moment is None or not is_from_torch(analysis.notes):
        return ""  # pyalloc moves pages from stream to stream
    used: Counter[tuple[int, int, int]] = Counter()
    idle: Counter[tuple[int, int, int]] = Counter()
    for address, n, stream, device, _ in moment.segments:
        idle[_owner(device, stream, moment.pools.get((device, address), 0))] += n
    for block in (*moment.blocks, *moment.pending):
        used[_owner(block.device, block.stream, block.pool)] += block.bytes
    idle.subtract(used)
    for device in {device for device, _, _ in used}:  # except the stream that holds most there
        of_streams = [key for key in used if key[0] == device and not key[2]]
        if of_streams:
            del idle[max(of_streams, key=lambda key: used[key])]
    streams = [n for (_, _, pool), n in idle.items() if n > 0 and not pool]
    pools = [n for (_, _, pool), n in idle.items() if n > 0 and pool]
    if sum(streams) + sum(pools) <= moment.idle_bytes / 4:
        return ""
    of_streams_text = "another stream" if len(streams) == 1 else f"{len(streams)} other streams"
    of_pools_text = "a private pool" if len(pools) == 1 else f"{len(pools)} private pools"
    return (
        f" When reserved memory peaked, {size(sum(streams))} of the idle memory belonged to {of_streams_text}: torch's "
        "allocator keeps memory for the stream that requested it." * bool(streams)
    ) + (
        f" When reserved memory peaked, {size(sum(pools))} of the idle memory belonged to {of_pools_text}, such as "
        "each CUDA graph's, which no other requests may use." * bool(pools)
    )


def _owner(device: int, stream: int, pool: int) -> tuple[int, int, int]:
    """What has memory of its own: a private pool with all of its streams, or a stream."""
    return (device, 0, pool) if pool else (device, stream, 0)


def _policies(analysis: Analysis) -> Iterator[Advice]:
    peaks = {
        name: r["peak_bytes"]
        for name, r in analysis.replays.items()
        if r["completed"] and name != PLANNED
    }
    history = analysis.notes.get("history")
    if not peaks or history in STATE_ONLY:  # the blocks of one moment are not a program
        return
    devices, own = _own_peaks(analysis)
    best = min(peaks, key=lambda name: peaks[name])
    saved = own - peaks[best]
    if saved > own * 0.02:
        how = {
            "pyalloc": "`pyalloc run` (or pyalloc.install())",
            "expandable": "PYTORCH_ALLOC_CONF=expandable_segments:True",
            "native": "torch's default allocator",
        }.get(best, best)
        told = ", ".join(f"{name} {size(value)}" for name, value in peaks.items())
        refused = (
            " The recording does not contain the requests that were refused when memory ran out, or what would have "
            "followed."
        )
        rest = refused * bool(analysis.ooms)
        other = "".join(f" {caveat}" for caveat in of_replays(analysis.notes))
        several = f"sums over the peaks of {len(devices)} devices; " * (len(devices) > 1)
        yield Advice(
            "policy",
            f"{how} would have needed {size(peaks[best])} of device memory instead of {size(own)} "
            f"({several}replayed: {told}).{rest}{other}",
            saved,
        )


def _own_peaks(analysis: Analysis) -> tuple[dict[int, int], int]:
    """Peak reserved bytes of each device, and their sum, to compare with replays; if unknown, {} and native's peak."""
    # What was reserved before a late history began does not say what the history needed.
    is_late = analysis.notes.get("history") == "late"
    devices = {} if is_late else analysis.totals["device_peak_reserved"]
    native = analysis.replays.get("native", {})
    return devices, sum(devices.values()) or native.get("peak_bytes", 0)


def is_worth_a_plan(saved: int, live: int) -> bool:
    """Does a plan save enough bytes?  live: the most bytes alive."""
    return saved >= max(_PLAN_SHARE * live, PAGE)


def _plan(analysis: Analysis) -> Iterator[Advice]:
    replays = analysis.replays
    if PLANNED not in replays:
        return
    planned, unplanned = (replays[name]["peak_bytes"] for name in (PLANNED, "pyalloc"))
    _, own = _own_peaks(analysis)
    least = min(own, unplanned)  # what the program takes now, or would on pyalloc without a plan
    if is_worth_a_plan(least - planned, planned):
        make = f"pyalloc plan {console.quoted(analysis.path)}"
        follow = f"pyalloc run --plan {console.quoted(recorded.plan(analysis.path))}"
        yield Advice(
            "plan",
            f"The steps make the same requests each time. With a plan (`{make}`, then `{follow}`) pyalloc would have "
            f"needed {size(planned)} instead of {size(own)} "
            f"({size(unplanned)} without the plan).",
            own - planned,
        )
