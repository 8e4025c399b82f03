"""The report for a terminal: 80 columns, colour only if asked for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyalloc.analysis import leaks, reserved, retries
from pyalloc.analysis.advice import advise
from pyalloc.analysis.asked import Asked, Size, by_requests
from pyalloc.analysis.meaning import Analysis
from pyalloc.analysis.reserved import Reserved
from pyalloc.common import console
from pyalloc.common.config import CUBLAS_NOTES
from pyalloc.common.folding import FILLER, by_column, clip, column
from pyalloc.common.units import MIB, size
from pyalloc.traces.caveats import BEFORE, is_from_torch
from pyalloc.traces.facts import Oom, Phase, Row
from pyalloc.traces.moments import STEP, Moment, page_bytes

WIDTH = 80
_LARGEST_STEP = 64 * MIB  # the most that an allocator grows by for a smaller request
_MUCH_TEMPORARY = 0.05  # of the peak
_MUCH_OUTSIDE = 0.05  # of a device: on most, a CUDA context alone is less
_LONGEST = 400  # characters of a command or a setting: some contain a whole configuration
# Notes about what the program did: advice reports them.
FOUND = (
    "retain_graph",
    "create_graph",
    "chained",
    "doubled_state",
    "unused_gradients",
    "untrained",
    "left_over",
)
_NOT_SETTINGS = (  # notes that are shown elsewhere, or only meant for programs
    "command",
    "pid",
    "about",
    "workload",
    "clock",
    "history",
    BEFORE,
    "steps_end_with",
    *CUBLAS_NOTES.values(),
    *FOUND,
)
MAKERS = "segments by the line they were allocated for"
_MAKERS = 6
_NAMES = 12  # of phases, each with a line
_BAR = 20  # columns
_BLOCKS = " ▁▂▃▄▅▆▇█"


def bold(text: str, color: bool) -> str:
    """Bold on a terminal."""
    return f"\x1b[1m{text}\x1b[0m" if color else text


def wrapped(text: str, first: str = "  ", rest: str = "  ") -> str:
    """A paragraph in 80 columns; first, rest: what its lines begin with.  Names and options are not broken."""
    return textwrap.fill(
        by_column(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(FILLER, "")


def rows(title: str, found: Sequence[Row], total: int, limit: int = 8) -> list[str]:
    """A table of blame with shares of the total; the rows after the first `limit` are summed up."""
    lines = [title]
    limit += len(found) == limit + 1  # instead of "and 1 more", name it
    for row in found[:limit]:
        share = 100 * row.bytes / total if total else 0
        first, *more = _folded(row.name, WIDTH - 34, 4) or [""]
        shown = [f"  {size(row.bytes):>10} {share:5.1f} % {row.blocks:>6} x  {first}"]
        shown += [" " * 33 + part for part in more]
        lines += [line.replace(FILLER, "") for line in shown]
    rest = found[limit:]
    if rest:
        lines.append(f"  {size(sum(r.bytes for r in rest)):>10}  and {len(rest)} more")
    return lines


def _folded(name: str, columns: int, most: int) -> list[str]:
    """A name in at most `most` lines.  A longer one keeps its end, which says the line and the function."""
    wide = by_column(" ".join(name.split()))
    parts = textwrap.wrap(wide, columns)
    return (
        parts if len(parts) <= most else [*parts[: most - 1], "… " + wide[2 - columns :].lstrip()]
    )


def hung(head: str, name: str, most: int = 3) -> str:
    """Columns of figures, then a name: behind them in at most `most` lines, or below them if there is no room."""
    at = len(by_column(head)) + 2
    if WIDTH - at < 24:
        return "\n".join(filter(None, (head, wrapped(name, " " * 8, " " * 8) if name else "")))
    parts = _folded(name, WIDTH - at, most)
    lines = [f"{head}  {parts[0]}" if parts else head, *(" " * at + part for part in parts[1:])]
    return "\n".join(lines).replace(FILLER, "")


def temporary(
    moment: str,
    most_between: int,
    found: Sequence[tuple[Asked, int, int]],
    totals: dict[str, Any],
    limit: int,
) -> list[str]:
    """Which lines make blocks that are freed within a few further requests.

    Args:
        moment: "at the peak (...)" or another.
        most_between: how many requests are a few.
        found: lines, each with bytes and number of these blocks at that moment.
        totals: of the pass that counted them.
        limit: rows.
    """
    n = sum(line.temporary for line, _, _ in found)
    share = 100 * n / max(totals["n_allocs"], 1)
    lines = [
        wrapped(
            f"temporary, freed within {most_between:,} further request{'s' * (most_between != 1)} on the device: "
            f"{n:,} of {totals['n_allocs']:,} requests ({share:.1f} %)",
            "",
        )
    ]
    if not found:
        return lines
    head = moment.partition(" (")[0]
    if len(head) > 11:
        lines.append(f"moment: {moment}")
        head = "moment"
    lines.append(f"{head:>12}{'blocks':>8}{'in all':>12}{'requests':>11}  line")
    for line, n_bytes, n_blocks in found[:limit]:
        first = f"{size(n_bytes):>12}{n_blocks:>8,}{size(line.temporary_bytes):>12}{line.temporary:>11,}"
        lines.append(hung(first, line.name))
    rest = found[limit:]
    if rest:
        n_bytes, in_all = sum(row[1] for row in rest), sum(row[0].temporary_bytes for row in rest)
        lines.append(f"{size(n_bytes):>12}{'':>8}{size(in_all):>12}  and {len(rest)} more")
    return lines + [wrapped(each, "") for each in _peaks_without(totals)]


def asked(lines: Sequence[Asked], sizes: Sequence[Size], limit: int) -> list[str]:
    """Requests over the whole run: how many of each size, and the lines with most bytes and most requests."""
    if not lines:
        return []
    n, n_bytes = sum(each.requests for each in sizes), sum(each.bytes for each in sizes)
    most = max(each.requests for each in sizes)
    told = ["", f"{'size':<15}{'requests':>12}{'share':>8}{'bytes':>{_BAR + 15}}{'share':>8}"]
    for each in sizes:
        least = f"from {size(each.least)}" if each.least > STEP else f"under {size(2 * STEP)}"
        bar = "#" * -(-_BAR * each.requests // most)
        told.append(
            f"{least:<15}{each.requests:>12,}{100 * each.requests / n:>6.1f} %  {bar:<{_BAR}}"
            f"{size(each.bytes):>13}{100 * each.bytes / max(n_bytes, 1):>6.1f} %"
        )
    for title, found in (("most bytes", lines), ("most requests", by_requests(lines))):
        told += ["", f"lines with the {title}", f"{'bytes':>12}{'requests':>12}  line"]
        told += [
            hung(f"{size(line.bytes):>12}{line.requests:>12,}", line.name) for line in found[:limit]
        ]
    return told


def _peaks_without(totals: dict[str, Any]) -> list[str]:
    """What the peak would be without temporary blocks; it may then be at another moment."""
    peaks = totals["device_peak"]
    told = []
    for device, peak in peaks.items():
        where = f" on device {device}" * (len(peaks) > 1)
        left = totals["device_peak_lasting"].get(device, 0)
        lower = f"{size(left)} instead of {size(peak)}, {size(peak - left)} less"
        if size(left) == size(peak):
            lower = f"{size(peak - left)} less than {size(peak)}" if left < peak else "the same"
        told.append(f"without all of them the peak{where} would be {lower}")
    return told


def sparkline(analysis: Analysis, width: int = 60) -> str:
    """Allocated bytes over the run, in one line of at most `width` characters."""
    bins = analysis.bins
    top = max(analysis.totals["peak_bytes"], 1)
    cells = []
    n = min(width, len(bins))
    for i in range(n):
        part = bins[i * len(bins) // n : (i + 1) * len(bins) // n]
        cells.append(_BLOCKS[min(8, round(8 * max(row[2] for row in part) / top))])
    return "".join(cells)


def phase_table(analysis: Analysis, limit: int = 16) -> list[str]:
    """Allocated at the end, peak and reserved of each phase, also inside others; long runs get a line for each name."""
    shown = analysis.phases
    if not shown:
        return []
    if len(shown) > limit:
        return _phase_sums(shown)
    lines = [f"{'step':>5}  {'phase':<24}{'allocated':>11}{'peak':>11}{'reserved':>11}"]
    for phase in shown:
        name = f"{'  ' * phase.depth}{phase.name}"
        lines.append(
            f"{phase.step:>5}  {column(name, 24)}{size(phase.end_bytes):>11}"
            f"{size(phase.peak_bytes):>11}{size(phase.peak_reserved_bytes):>11}"
        )
    return lines


class PhaseSum(NamedTuple):
    """All phases of one name; the most allocated at an end, the highest peak and its step, the most reserved at one."""

    name: str
    times: int
    end_bytes: int
    peak_bytes: int
    step: int  # of that peak
    reserved_bytes: int


def phase_sums(phases: Sequence[Phase]) -> list[PhaseSum]:
    """Sums by name, in the order of their first phases."""
    named: dict[str, list[Phase]] = {}
    for phase in phases:  # in one pass: each may have a name of its own
        named.setdefault(phase.name, []).append(phase)
    sums = []
    for name, own in named.items():
        top = max(own, key=lambda phase: phase.peak_bytes)
        end_bytes = max(phase.end_bytes for phase in own)
        reserved_bytes = max(phase.peak_reserved_bytes for phase in own)
        sums.append(PhaseSum(name, len(own), end_bytes, top.peak_bytes, top.step, reserved_bytes))
    return sums


def _phase_sums(phases: Sequence[Phase]) -> list[str]:
    """A line for each name."""
    lines = [
        f"{'phase':<24}{'times':>8}{'max at end':>13}{'peak':>12}{'in step':>9}{'reserved':>12}"
    ]
    sums = phase_sums(phases)
    for each in sums[:_NAMES]:
        lines.append(
            f"{column(each.name, 24)}{each.times:>8,}{size(each.end_bytes):>13}"
            f"{size(each.peak_bytes):>12}{each.step:>9,}{size(each.reserved_bytes):>12}"
        )
    return lines + [f"  and {len(sums) - _NAMES:,} more"] * (len(sums) > _NAMES)


def summary(analysis: Analysis, *, color: bool = False) -> str:
    """The whole terminal report."""
    totals = analysis.totals
    peak = analysis.peak
    seconds = (totals["last_ns"] - totals["first_ns"]) / 1e9
    name = analysis.path.name
    first = wrapped(
        f"{name}: {totals['n_events']:,} event{'s' * (totals['n_events'] != 1)}, "
        f"{totals['n_allocs']:,} allocation{'s' * (totals['n_allocs'] != 1)}"
        + (f", {seconds:.1f} s" if analysis.notes.get("clock") != "events" else ""),
        "",
    )
    lines = [
        first.replace(name, bold(name, color), 1),
        *(wrapped(caveat) for caveat in analysis.caveats),
        *_settings(analysis),
    ]
    if analysis.is_empty:
        return "\n".join(lines)
    lines += [
        wrapped(
            f"peak allocated {size(totals['peak_bytes'])}"
            + (f", peak reserved {size(totals['peak_reserved_bytes'])}" * analysis.has_segments)
            + _where(analysis),
            rest="    ",
        ),
        *([] if analysis.is_moment else [f"  [{sparkline(analysis)}]"]),
        "",
        *rows("at the peak, by contributor", analysis.contributors(peak), peak.allocated_bytes),
        "",
        "\n".join(rows("by category", analysis.by_category(peak.blocks), peak.allocated_bytes, 6)),
        "",
        "\n".join(rows("by line", analysis.by_line(peak.blocks), peak.allocated_bytes, 6)),
    ]
    if peak.temporary_bytes > _MUCH_TEMPORARY * peak.allocated_bytes:
        lines += ["", wrapped(_temporary_at_peak(analysis))]
    labels = analysis.by_label(peak.blocks)
    if labels:
        lines += ["", *rows("by label", labels, peak.allocated_bytes, 6)]
    lines += _pools(analysis)
    lines += _reserved(analysis)
    table = phase_table(analysis)
    if table:
        lines += ["", *table]
    lines += ["", wrapped(leaks.verdict(analysis), "")]
    advice = advise(analysis)
    if advice:
        lines += ["", bold("advice", color)]
        lines += [wrapped(item.text, "  - ", "    ") for item in advice[:8]]
    if analysis.oom is not None:
        lines += ["", *_oom(analysis, analysis.oom)]
    return "\n".join(lines)


def _temporary_at_peak(analysis: Analysis) -> str:
    path = console.quoted(analysis.path)
    return (
        f"{size(analysis.peak.temporary_bytes)} of the peak are freed within one further request; to see who makes "
        f"them, and the peak without them: `pyalloc top {path} --temporary`"
    )


def _pools(analysis: Analysis) -> list[str]:
    found = analysis.by_pool(analysis.peak)
    lines = ["", *rows("by private pool", found, analysis.peak.allocated_bytes, 6)] if found else []
    return lines + idle_pools(analysis, analysis.peak)


def idle_pools(analysis: Analysis, moment: Moment) -> list[str]:
    """What private pools hold idle, which nobody else can get."""
    found = analysis.idle_pools(moment)
    if not found:
        return []
    told = ", ".join(f"{size(row.bytes)} in {row.name}" for row in found[:4])
    told += f" and {size(sum(row.bytes for row in found[4:]))} in {len(found) - 4} more" * (
        len(found) > 4
    )
    return [wrapped(f"idle, but kept for a CUDA graph or a MemPool: {told}")]


def reserved_title(analysis: Analysis, found: Reserved) -> str:
    """When most was reserved, and for what."""
    most, event = size(found.moment.reserved_bytes), found.moment.last_event
    title = f"when reserved memory peaked ({most}, after event {event:,})"
    if found.request is None:
        return title
    where = analysis.labels([found.request])[0]
    return f"{title}, for a request of {size(found.request.bytes)}: {where}"


def _reserved(analysis: Analysis) -> list[str]:
    found = reserved.at_most(analysis)
    if found is None:
        return []
    title = wrapped(reserved_title(analysis, found), "")
    lines = ["", *rows(title, found.rows, found.moment.reserved_bytes)]
    if found.makers:
        lines.append(f"{MAKERS} (reserved, idle)")
    for maker in found.makers[:_MAKERS]:
        head = f"  {size(maker.bytes):>10} {size(maker.idle_bytes):>10} {maker.segments:>6} x"
        lines.append(hung(head, maker.name))
    rest = found.makers[_MAKERS:]
    if rest:
        both = size(sum(m.bytes for m in rest)), size(sum(m.idle_bytes for m in rest))
        lines.append(f"  {both[0]:>10} {both[1]:>10}  and {len(rest)} more")
    return lines


def _settings(analysis: Analysis) -> list[str]:
    shown = [
        f"{name}={clip(value, _LONGEST)}"
        for name, value in analysis.notes.items()
        if name not in _NOT_SETTINGS
    ]
    lines = [wrapped(", ".join(shown))] if shown else []
    if "command" in analysis.notes:
        lines.append(wrapped(clip(analysis.notes["command"], _LONGEST)))
    return lines


def _where(analysis: Analysis) -> str:
    phase, step = clip(analysis.totals["peak_phase"], 40), analysis.totals["peak_step"]
    if step is None:
        return f", in {phase}" if phase else ""
    return f", in {phase} of step {step}" if phase else f", in step {step}"


def out_of_memory(oom: Oom) -> list[str]:
    """What was requested, what there was, who else held memory, and the cause, one sentence each."""
    moment = oom.moment
    there = f"{size(moment.allocated_bytes)} were in use"
    if moment.segments:
        there += (
            f" and {size(moment.reserved_bytes)} reserved: {size(moment.idle_bytes)} idle, the largest piece "
            f"{size(moment.largest_gap)}"
            + f"; {size(moment.pending_bytes)} freed, but still used by other streams (record_stream)"
            * bool(moment.pending)
        )
    return [
        f"out of memory{oom.where}: {size(oom.asked)} were requested, and the device had {size(oom.free)} free",
        f"{there}.",
        *_outside(oom),
        _cause(oom),
    ]


def _outside(oom: Oom) -> list[str]:
    if oom.outside_bytes < oom.capacity * _MUCH_OUTSIDE or not oom.outside_bytes:
        return []
    return [
        f"{size(oom.outside_bytes)} of the device's {size(oom.capacity)} were held outside this allocator: by other "
        "processes (nvidia-smi lists them), CUDA's context, NCCL, or libraries that allocate memory themselves."
    ]


def _oom(analysis: Analysis, oom: Oom) -> list[str]:
    first, *more = out_of_memory(oom)
    _, left_behind = retries.text_of(analysis, oom.moment)
    sentences = [*more, left_behind] if left_behind else more
    lines = [wrapped(first, first=""), *(wrapped(sentence) for sentence in sentences)]
    held = oom.moment.allocated_bytes
    return lines + rows("  held by", analysis.contributors(oom.moment), held, 6)


def _cause(oom: Oom) -> str:
    moment, asked = oom.moment, oom.asked
    could_have = oom.free + moment.reserved_bytes
    if oom.is_reserved_known and asked > could_have:
        return (
            f"Cause: this request alone is larger than the {size(could_have)} that the program could have had with "
            "everything freed. Check the sizes that it is computed from, or make the tensor in parts."
        )
    if oom.is_fragmented:
        return _fragmentation(oom)
    if moment.pending and oom.idle_bytes + oom.usable_free + moment.pending_bytes >= asked:
        return (
            f"Cause: {size(moment.pending_bytes)} had been freed but could not be reused, because other streams "
            "still used them (record_stream); they would have been enough. While a CUDA graph is captured, such memory "
            "stays unavailable until the capture ends; otherwise the other stream lags far behind, so wait for it "
            "earlier."
        )
    kept = moment.idle_bytes - oom.idle_bytes
    if moment.pools and oom.idle_bytes + oom.usable_free + kept >= asked:
        return (
            f"Cause: {size(kept)} of the idle memory are kept for private pools (CUDA graphs, MemPool) and cannot "
            "serve other requests; they would have been enough. Let graphs share one pool, and delete the graphs and "
            "pools that you no longer need: their memory is then given back."
        )
    if oom.free - asked >= _LARGEST_STEP:
        return (
            "Cause: a limit. The device had enough free, but the program is not allowed to use it: "
            "torch.cuda.set_per_process_memory_fraction(), pyalloc.set_limit() or an option sets the limit."
        )
    return (
        "Cause: at this point the program needs more memory than there is, even with nothing wasted. "
        "Reduce what is held then, or spread it over more devices."
    )


def _fragmentation(oom: Oom) -> str:
    if oom.largest_gap >= oom.asked:
        keeps = (
            "torch's allocator keeps memory for the stream that requested it, separately for requests up to 1 MiB and "
            "above"
            if oom.is_from_torch
            else "pyalloc keeps memory for the stream that requested it while work there may use it, and in plain "
            "segments (vmm:False) separately for requests up to 1 MiB and above"
        )
        return (
            f"Cause: a piece of the idle memory was large enough, but was kept for other requests: {keeps}, and CUDA "
            "graphs and MemPools cannot use it."
        )
    free = ", together with what the device had free," * (oom.idle_bytes < oom.asked)
    pages = page_bytes(oom.moment.common_gaps)
    joined = (
        f"{size(pages)} of it were whole pages, which pyalloc joins, so it would have served this request."
        if pages + oom.usable_free >= oom.asked
        else f"Only {size(pages)} of it were whole pages, which pyalloc could have joined."
    )
    return (
        f"Cause: fragmentation. The idle memory{free} would have been enough, but no piece of it was large enough. "
        f"{joined}"
    )


def explain_oom(analysis: Analysis, device: int, asked: int, trace: Path) -> str:
    """Why an allocation of `asked` bytes failed, for the file that is written at that moment; trace: its recording."""
    moment = analysis.moments[max(analysis.moments)]
    oom = analysis.ooms[-1] if analysis.ooms else (0, asked, 0)
    shown = analysis.moments.get(oom[0], moment)
    capacity = analysis.totals["capacity"].get(device, 0)
    lines = [
        wrapped(f"device {device}, {clip(analysis.notes.get('command', ''), _LONGEST)}", ""),
        *_oom(analysis, Oom(shown, asked, oom[2], "", capacity, is_from_torch(analysis.notes))),
    ]
    place = analysis.place(oom[5]) if len(oom) > 5 else None
    if place is not None:
        lines.insert(1, f"requested at {place}")
    lines += ["", f"next: pyalloc report {console.quoted(trace)}"]
    return "\n".join(lines)


def compare(results: Sequence[tuple[str, dict[str, Any]]], passes: int = 1) -> list[str]:
    """The table of policies.  Late calls are those of the second half or, of several passes, of the last one."""
    late, key = ("late calls", "second_half") if passes == 1 else ("last pass", "last_pass")
    lines = [f"{'policy':<12}{'fits':>5}{'peak':>12}{'calls':>9}{late:>11}{'modelled ms':>12}"]
    for name, result in results:
        fits = "yes" if result["completed"] else "no"
        lines.append(
            f"{name:<12}{fits:>5}{size(result['peak_bytes']):>12}{result['n_calls']:>9,}"
            f"{result[f'n_calls_{key}']:>11,}{result['device_ns'] / 1e6:>12.1f}"
        )
    when = "; late: second half" if passes == 1 else ""
    return [*lines, f"calls: that allocate, map or free memory{when}; ms: on an H200"]
