"""The report as one page without network: all data and code are in it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from pyalloc.advice import advise, size
from pyalloc.analysis import Analysis, Block, Moment
from pyalloc.report import data

_TEMPLATE = Path(__file__).with_name("page.html")
_MAX_PIECES = 1200  # of one state of the segment map
_MAX_SEGMENTS = 400
_TOP = 40  # rows of a table
IDLE = 0  # index of idle memory in the palette


def page(analysis: Analysis) -> str:
    """The page's text."""
    content = json.dumps(_content(analysis), separators=(",", ":"), default=str)
    # A script element ends at "</", wherever it stands; U+2028 ends a line in old engines.
    content = content.replace("</", "<\\/").replace("\u2028", "\\u2028").replace("<!--", "<\\!--")
    title = html.escape(analysis.path.name)
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("__TITLE__", title).replace("__DATA__", content)


def _content(analysis: Analysis) -> dict[str, Any]:
    summary = data.summary(analysis)
    names: list[str] = ["idle"]
    maps = [
        _map(analysis, moment, names)
        for _, moment in sorted(analysis.moments.items())
        if moment.segments
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
        )
    }
    return {
        "file": analysis.path.name,
        "settings": analysis.notes,
        "totals": analysis.totals,
        "peakPhase": summary["peak"]["phase"],
        "leak": summary["leak"],
        "advice": [
            {"kind": item.kind, "text": item.text, "saved": size(item.saved_bytes or 0)}
            for item in advise(analysis)
        ],
        "bins": [[b[0], b[1] - origin, b[2], b[3], b[5]] for b in analysis.bins],
        "phases": [
            [p.name, p.step - 1, p.depth, p.begin, p.end, p.end_bytes, p.peak_bytes]
            for p in analysis.phases[:400]
        ],
        "steps": [[s[0], s[1], s[3], s[4]] for s in analysis.steps[:400]],
        "tables": tables,
        "maps": maps,
        "names": names,
        "replays": {
            name: [r["completed"], r["peak_bytes"], r["n_calls"], r["device_ns"]]
            for name, r in analysis.replays.items()
        },
        "stacks": _stacks(analysis),
    }


def _stacks(analysis: Analysis) -> list[Any]:
    """The full stacks that hold most at the peak."""
    held: dict[int, int] = {}
    for block in analysis.peak.blocks:
        held[block.stack] = held.get(block.stack, 0) + block.bytes
    largest = sorted(held.items(), key=lambda item: -item[1])[:12]
    return [
        [size, [f"{file}:{line} {name}" for name, file, line in analysis.frames(stack)[:24]]]
        for stack, size in largest
        if stack
    ]


def _map(analysis: Analysis, moment: Moment, names: list[str]) -> dict[str, Any]:
    """Segments as [bytes, [piece bytes, name, piece bytes, name, ...]]: neighbours of one kind are joined."""
    blocks = sorted(moment.blocks, key=lambda block: (block.device, block.address))
    smallest = moment.reserved_bytes // _MAX_PIECES
    segments: list[tuple[int, list[int]]] = []
    at = 0
    for address, length, _, device, _ in sorted(moment.segments, key=lambda s: (s[3], s[0])):
        while at < len(blocks) and (blocks[at].device, blocks[at].address) < (device, address):
            at += 1
        inside = []
        while (
            at < len(blocks)
            and blocks[at].device == device
            and blocks[at].address < address + length
        ):
            inside.append(blocks[at])
            at += 1
        segments.append((length, _pieces(analysis, (address, length), inside, names, smallest)))
    segments.sort(key=lambda segment: -segment[0])
    return {
        "event": moment.event,
        "allocated": moment.allocated_bytes,
        "reserved": moment.reserved_bytes,
        "largest": moment.largest_gap,
        "segments": segments[:_MAX_SEGMENTS],
    }


def _pieces(
    analysis: Analysis,
    segment: tuple[int, int],
    blocks: list[Block],
    names: list[str],
    smallest: int,
) -> list[int]:
    found: list[list[int]] = []

    def add(size: int, name: int) -> None:
        if size <= 0:
            return
        if found and (found[-1][1] == name or size < smallest):
            found[-1][0] += size
        else:
            found.append([size, name])

    position, end = segment[0], segment[0] + segment[1]
    for block in blocks:
        add(block.address - position, IDLE)
        category = analysis.category(block)
        if category not in names:
            names.append(category)
        add(min(block.bytes, end - block.address), names.index(category))
        position = max(position, block.address + block.bytes)
    add(end - position, IDLE)
    return [number for piece in found for number in piece]
