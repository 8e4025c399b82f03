"""The report as one page that needs no network: all data and code are in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pyalloc.analysis import reserved
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import size
from pyalloc.report import data, ranks
from pyalloc.report.parts import Stacks, filled
from pyalloc.report.text import FOUND, MAKERS, out_of_memory, phase_sums, reserved_title
from pyalloc.traces.facts import Advice, Phase
from pyalloc.traces.moments import Block, Moment
from pyalloc.traces.stays import Stay

_MAX_PIECES = 1200  # of one state of the segment map
_MAX_SEGMENTS = 400
_TOP = 40  # rows of a table
# Of tables that say nothing with fewer.
_LEAST_ROWS = {"label": 1, "pool": 1, "stream": 2, "thread": 2}
_MAX_FLAME = 600  # stacks of the peak
_MAX_STAYS = 6000
_MAX_PHASES = 400
_MAX_STEPS = 400
_MAX_GROWTHS = 3000
T = TypeVar("T")
IDLE = 0  # index of idle memory in the palette
IDLE_IN_POOL = "idle in private pools"
PENDING = "freed, other streams work on it"


def page(analysis: Analysis, compared: Sequence[Analysis] = ()) -> str:
    """The page's HTML.  compared: all ranks, if this is one of several."""
    found = {**_content(analysis), "ranks": ranks.rows(list(compared)) if len(compared) > 1 else []}
    return filled("page.html", analysis.path.name, found)


def _content(analysis: Analysis) -> dict[str, Any]:
    summary = data.summary(analysis)
    names: list[str] = ["idle"]
    stacks = Stacks(analysis)
    origins: dict[tuple[str, str], int] = {}
    peak_flame = _peak_flame(analysis, names, stacks, origins)
    window = _window(analysis, names, stacks)
    moments = [
        _map(analysis, moment, names, stacks) for _, moment in sorted(analysis.moments.items())
    ]
    origin = analysis.totals["first_ns"]
    tables = {
        key: [[row["name"], row["bytes"], row["blocks"]] for row in summary["peak"][field][:_TOP]]
        for key, field in (
            ("contributor", "contributors"),
            ("category", "by_category"),
            ("line", "by_line"),
            ("module", "by_module"),
            ("size", "by_size"),
            ("label", "by_label"),
            ("stream", "by_stream"),
            ("thread", "by_thread"),
            ("pool", "by_pool"),
        )
        if len(summary["peak"][field]) >= _LEAST_ROWS.get(key, 0)
    }
    return {
        "file": analysis.path.name,
        "isEmpty": analysis.is_empty,
        "isMoment": analysis.is_moment,
        "settings": {name: value for name, value in analysis.notes.items() if name not in FOUND},
        "caveats": analysis.caveats,
        "totals": summary["totals"],
        "peakPhase": summary["peak"]["phase"],
        # In the same list as the advice, which says of a leak what grows, and by how much.
        "leak": "" if "leak" in {item["kind"] for item in summary["advice"]} else summary["leak"],
        "advice": [
            {"kind": item["kind"], "text": item["text"], "saved": size(item["saved_bytes"] or 0)}
            for item in [*map(asdict, _out_of_memory(analysis)), *summary["advice"]]
        ],
        "bins": [[b[0], b[1] - origin, b[2], b[3], b[5]] for b in analysis.bins],
        "phases": [
            [p.name, p.step, p.depth, p.begin, p.end, p.end_bytes, p.peak_bytes]
            for p in _shown_phases(analysis)
        ],
        "phaseSums": [each[:5] for each in phase_sums(analysis.phases)[:_TOP]],
        "nPhases": len(analysis.phases),
        "steps": [[s[0], s[1], s[3], s[4]] for s in _evenly(analysis.steps, _MAX_STEPS)],
        "ooms": [oom[:2] for oom in analysis.ooms],
        "tables": tables,
        "reserved": _reserved(analysis),
        "growths": _growths(analysis, stacks),
        "hasStacks": any(block.stack for block in analysis.peak.blocks),
        "window": window,
        "moments": moments,
        "marks": [mark - 1 for mark in analysis.marks],
        "peakFlame": peak_flame,
        "stays": _stays(analysis, names, stacks, origins),
        "origins": list(origins),
        "events": _events(analysis, stacks),
        "names": names,
        "replays": {
            name: [r["completed"], r["peak_bytes"], r["n_calls"], r["device_ns"]]
            for name, r in analysis.replays.items()
        },
        "frames": [list(frame) for frame in stacks.frames],
        "stacks": stacks.stacks,
    }


def _out_of_memory(analysis: Analysis) -> list[Advice]:
    """The out-of-memory error that is reported, in the words of the terminal report."""
    if analysis.oom is None:
        return []
    first, *more = out_of_memory(analysis.oom)
    words = " ".join([f"{first[0].upper()}{first[1:]}.", *more])
    return [Advice("out_of_memory", words, None)]


def _reserved(analysis: Analysis) -> dict[str, Any] | None:
    """What device memory was used for when most of it was reserved."""
    found = reserved.at_most(analysis)
    if found is None:
        return None
    title = reserved_title(analysis, found)
    return {
        "title": f"{title[0].upper()}{title[1:]}.",
        "rows": [[row.name, row.bytes, row.blocks] for row in found.rows],
        "makersTitle": f"{MAKERS[0].upper()}{MAKERS[1:]}",
        "makers": [[m.name, m.bytes, m.idle_bytes, m.segments] for m in found.makers[:_TOP]],
    }


def _growths(analysis: Analysis, stacks: Stacks) -> dict[str, Any]:
    """What reserved memory grew for: [bytes, begin, end (-1: never), name, stack, pieces]; largest names first."""
    grown = reserved.over_time(analysis)
    sums: Counter[str] = Counter()
    for each in grown:
        sums[each.name] += each.bytes
    names = {name: i for i, (name, _) in enumerate(sums.most_common())}
    rows = [
        [
            each.bytes,
            each.begin,
            -1 if each.end is None else each.end,
            names[each.name],
            stacks.number(each.stack, "") if each.stack else -1,
            each.pieces,
        ]
        for each in reserved.largest(grown, _MAX_GROWTHS)
    ]
    return {"rows": rows, "names": [[name, sums[name]] for name in names][:_TOP]}


def _evenly(items: list[T], n: int) -> list[T]:
    """At most n of them, from the whole run."""
    return items if len(items) <= n else [items[i * len(items) // n] for i in range(n)]


def _shown_phases(analysis: Analysis) -> list[Phase]:
    """All phases of a short run; those around the peak of a long one, so that they can be told apart."""
    if len(analysis.phases) <= _MAX_PHASES:
        return analysis.phases
    peak = analysis.totals["peak_event"]
    at = sum(phase.begin < peak for phase in analysis.phases)
    first = max(0, at - _MAX_PHASES // 2)
    return analysis.phases[first : first + _MAX_PHASES]


def _origin(analysis: Analysis, of: Block | Stay, origins: dict[tuple[str, str], int]) -> int:
    """The index of its thread and stream in origins."""
    key = analysis.thread_name(of.thread), analysis.stream_name(of)
    return origins.setdefault(key, len(origins))


def _peak_flame(
    analysis: Analysis, names: list[str], stacks: Stacks, origins: dict[tuple[str, str], int]
) -> list[list[int]]:
    """The peak's stays, largest first, with what is known about blocks without a stack; smaller ones summed up last."""
    blocks = analysis.peak.blocks
    at = analysis.marks.index(analysis.totals["peak_event"])
    sums: dict[tuple[int, str, int, int], list[int]] = {}
    for block, label in zip(blocks, analysis.labels(blocks), strict=True):
        category = _index(names, analysis.category(block))
        key = block.stack, "" if block.stack else label, category, _origin(analysis, block, origins)
        row = sums.setdefault(key, [0, 0])
        row[0] += block.bytes
        row[1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    found = [
        [at, at, *row, stacks.number(stack, label), category, origin]
        for (stack, label, category, origin), row in ordered[:_MAX_FLAME]
    ]
    rest = [(at, at, *row, key[2], key[3]) for key, row in ordered[_MAX_FLAME:]]
    return [*found, *_smaller(rest, stacks)]


def _stays(
    analysis: Analysis, names: list[str], stacks: Stacks, origins: dict[tuple[str, str], int]
) -> list[list[int]]:
    """[first mark, last mark, bytes, blocks, stack, category, origin]; most bytes times marks first."""
    known = [
        (stay, _index(names, category), _origin(analysis, stay, origins))
        for stay, category in analysis.stays_by_category()
    ]
    known.sort(key=lambda row: -row[0].bytes * (row[0].last - row[0].first + 1))
    found = []
    for stay, category, origin in known[:_MAX_STAYS]:
        number = stacks.number(stay.stack, _nameless(analysis, stay))
        found.append([*stay[:4], number, category, origin])
    rest = [(*stay[:4], category, origin) for stay, category, origin in known[_MAX_STAYS:]]
    return [*found, *_smaller(rest, stacks)]


def _nameless(analysis: Analysis, stay: Stay) -> str:
    """What a stay without a stack is called; "" if it has one."""
    if stay.stack:
        return ""
    known = analysis.nameless(0, stay.phase)
    return known if "backward" in known else f"{stay.phase} {known}".lstrip()


def _smaller(rest: Sequence[tuple[int, ...]], stacks: Stacks) -> list[list[int]]:
    """Sums of stays that get no stack of their own in the page, by marks, category and origin."""
    sums: dict[tuple[int, ...], list[int]] = {}
    for first, last, n_bytes, n_blocks, category, origin in rest:
        row = sums.setdefault((first, last, category, origin), [0, 0])
        row[0] += n_bytes
        row[1] += n_blocks
    number = stacks.number(0, "smaller stacks") if rest else -1
    return [
        [first, last, *row, number, category, origin]
        for (first, last, category, origin), row in sums.items()
    ]


def _window(analysis: Analysis, names: list[str], stacks: Stacks) -> dict[str, Any]:
    """The step that is shown: bins, and largest blocks as [bytes, begin, end, category, stack, phase, label]."""
    bins = analysis.window_bins
    lines = analysis.labels(analysis.spans)
    spans = []
    phases: dict[str, int] = {}
    labels: dict[str, int] = {"": 0}
    for block, line in zip(analysis.spans, lines, strict=True):
        end = -1 if block.free_event is None else block.free_event
        category = _index(names, analysis.category(block))
        stack = stacks.number(block.stack, line)
        phase = phases.setdefault(block.phase, len(phases))
        label = labels.setdefault(block.label, len(labels))
        spans.append([block.bytes, block.alloc_event, end, category, stack, phase, label])
    return {
        "title": _window_title(analysis),
        "end": analysis.window_end,
        "bins": [[b[0], b[2], b[5]] for b in bins],
        "spans": spans,
        "phases": list(phases),
        "labels": list(labels),
    }


def _events(analysis: Analysis, stacks: Stacks) -> dict[str, Any]:
    """Events one by one; events.js says what a row holds."""
    texts: dict[str, int] = {"": 0}
    origin = analysis.totals["first_ns"]

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    rows = [
        [
            told.event,
            (told.time_ns - origin) // 1000,
            text(told.what),
            told.bytes,
            told.address,
            text(str(told.stream)),
            told.device,
            text(analysis.pool_name(told.pool) if told.pool else ""),
            text(analysis.line_of(told)),
            stacks.number(told.stack, "") if told.stack else -1,
            -1 if told.alloc_event is None else told.alloc_event,
        ]
        for told in analysis.told
    ]
    return {"rows": rows, "texts": list(texts)}


def _window_title(analysis: Analysis) -> str:
    first = analysis.window_bins[0][0] if analysis.window_bins else 0
    if first == 0 and analysis.window_end >= analysis.totals["n_events"]:
        return "The whole run"
    steps = [s[0] for s in analysis.steps if first <= s[1] < analysis.window_end]
    begins = any(s[1] == first for s in analysis.steps)
    if not steps or not begins:
        return "Around the peak"
    if len(steps) > 1:
        return f"Steps {steps[0]} to {steps[-1]}"
    of_peak = ", that of the peak" if steps[0] == analysis.totals["peak_step"] else ""
    return f"Step {steps[0]}{of_peak}"


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _map(analysis: Analysis, moment: Moment, names: list[str], stacks: Stacks) -> dict[str, Any]:
    """Segments as [bytes, [bytes, name, stack of each piece], pool]; small neighbours are joined."""
    blocks, pieces, largest = moment.pieces(moment.reserved_bytes // _MAX_PIECES)
    known = [
        (
            _index(names, analysis.category(block)),
            stacks.number(block.stack, block.phase or "(no stack)"),
        )
        for block in blocks
    ]
    segments: list[tuple[int, list[int], str]] = []
    for (address, length, _, device, _), numbers in zip(moment.segments, pieces, strict=True):
        pool = moment.pools.get((device, address), 0)
        idle = (_index(names, IDLE_IN_POOL) if pool else IDLE, -1)
        pending = (_index(names, PENDING) if -2 in numbers[1::2] else IDLE, -1)
        shown = _joined(numbers, [*known, pending, idle])  # numbers -2 and -1
        segments.append((length, shown, analysis.pool_name(pool) if pool else ""))
    segments.sort(key=lambda segment: -segment[0])
    return {
        "event": moment.last_event,
        "allocated": moment.allocated_bytes,
        "reserved": moment.reserved_bytes,
        "largest": largest,
        "nSegments": len(segments),
        "segments": segments[:_MAX_SEGMENTS],
    }


def _joined(numbers: Sequence[int], known: Sequence[tuple[int, int]]) -> list[int]:
    """Pieces as a flat list of bytes, name, stack; equal neighbours are joined."""
    found: list[list[int]] = []
    for length, which in zip(numbers[::2], numbers[1::2], strict=True):
        what = [*known[which]]
        if found and found[-1][1:] == what:
            found[-1][0] += length
        else:
            found.append([length, *what])
    return [number for piece in found for number in piece]
