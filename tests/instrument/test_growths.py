"""What reserved memory grew for, over the run."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from instrument.browsing import browser, needs_browser
from instrument.test_told import opened
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import _core, trace
from pyalloc.analysis import reserved
from pyalloc.common.units import size

AT = 1 << 40


def program(plan: Plan, kind: str = "segment_alloc") -> Path:
    """Two lines, and a backward without a stack, make it grow; some is given back."""
    for i, n in ((0, 20), (1, 20), (2, 10)):
        plan.event(kind, addr=AT + i * 100 * MIB, bytes=n * MIB)
        plan.event("alloc", addr=AT + i * 100 * MIB, bytes=n * MIB, stack=plan.stack(3 + i // 2))
    plan.event("phase_begin", "backward")
    plan.event(kind, addr=AT + 300 * MIB, bytes=40 * MIB)
    plan.event("alloc", addr=AT + 300 * MIB, bytes=39 * MIB)
    plan.event("phase_end", "backward")
    for i in (0, 1):
        plan.event("free_requested", addr=AT + i * 100 * MIB)
        plan.event("free_completed", addr=AT + i * 100 * MIB)
    for i in (0, 1):
        plan.event(
            kind.replace("alloc", "free").replace("_map", "_unmap"),
            addr=AT + i * 100 * MIB,
            bytes=20 * MIB,
        )
    plan.event(kind, addr=AT + 500 * MIB, bytes=2 * MIB)  # for nothing
    return plan.done()


@pytest.mark.parametrize("kind", ["segment_alloc", "segment_map"])
def test_by_line_and_phase(plan: Plan, kind: str) -> None:
    found = reserved.over_time(trace.analyse(program(plan, kind)))
    assert [(g.name, g.bytes // MIB, g.begin, g.end) for g in found] == [
        ("me/model.py:3 work", 20, 0, 14),
        ("me/model.py:3 work", 20, 2, 15),
        ("me/model.py:4 work", 10, 4, None),
        ("backward (no Python stack)", 40, 7, None),
        ("from before the recording, or unknown", 2, 16, None),
    ]


def test_what_began_and_ended_together_is_one_row(plan: Plan) -> None:
    for i in (0, 1):
        plan.event("segment_alloc", addr=AT + i * 100 * MIB, bytes=20 * MIB)
    plan.event("user", "before=2")
    plan.event("alloc", addr=AT, bytes=MIB, stack=plan.stack(3))
    rows = json.loads(pyalloc("report", plan.done(), "--no-replay", "--json", "-q"))
    assert rows["reserved_growth"] == [
        {
            "name": "me/model.py:3 work",
            "stack": 1,
            "begin": 2,
            "end": None,
            "bytes": 40 * MIB,
            "pieces": 2,
        }
    ]


def test_a_single_moment_tells_of_no_growth(plan: Plan) -> None:
    plan.event("user", "history=none")
    assert reserved.over_time(trace.analyse(program(plan))) == []


@needs_browser
def test_the_page_draws_it(plan: Plan, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    pyalloc("report", program(plan), "-o", target, "--no-replay")
    typed = "$('growths').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))"
    with browser() as page:
        opened(page, target)
        assert not page.value("$('growths-section').hidden")
        legend = page.value("$('growths-legend').textContent")
        assert "me/model.py:3 work" in legend and "backward (no Python stack)" in legend
        page.value(typed)  # the largest
        told = page.value("$('growths-stack').textContent")
        assert told.startswith("40.0 MiB for backward (no Python stack)\nreserved from event 7 to")
        page.value(typed)
        assert "20.0 MiB for me/model.py:3 work" in page.value("$('growths-stack').textContent")
        assert page.value("listed[row][0] >= G[grown][1]")  # the list of events follows
        # the value drawn at a column is what was reserved there
        sums = "grownColumns.map(c => c.reduce((n, i) => n + G[i][0], 0))"
        assert page.value(f"Math.max(...{sums}) === T.peak_reserved_bytes")
        assert page.value(f"{sums}.pop() === T.end_reserved_bytes")
        place = "box => ({clientX: box.left + LEFT + 2, clientY: box.bottom - 8})"
        point = f"({place})($('growths').getBoundingClientRect())"
        page.value(f"$('growths').dispatchEvent(new MouseEvent('click', {point}))")
        assert page.value("grown") == 0
        page.value(f"$('growths').dispatchEvent(new MouseEvent('mousemove', {point}))")
        assert page.value("$('tip').textContent").startswith("20.0 MiB for me/model.py:3 work")
        page.value("$('by-time').click()")
        assert page.value(f"{sums}.pop() === T.end_reserved_bytes")


@needs_browser
def test_a_trace_without_device_memory_has_no_such_chart(plan: Plan, tmp_path: Path) -> None:
    plan.event("alloc", addr=AT, bytes=MIB)
    target = tmp_path / "report.html"
    pyalloc("report", plan.done(), "-o", target, "--no-replay")
    with browser() as page:
        opened(page, target)
        assert page.value("$('growths-section').hidden")


def test_a_few_bytes_are_told_as_such() -> None:
    assert [size(n) for n in (0, 1, 16, 511, 512)] == [
        "0 bytes",
        "1 byte",
        "16 bytes",
        "511 bytes",
        "0.5 KiB",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_what_is_reserved(tmp_path: Path, seed: int) -> None:
    """Whatever is taken and given back, in whatever pieces, known or not."""
    draw = random.Random(seed)
    plan = Plan(tmp_path / "random.pya")
    for _ in range(400):
        kind = draw.choice(("segment_alloc", "segment_map", "segment_free", "segment_unmap"))
        at, n = draw.randrange(40), draw.randrange(1, 8)
        if draw.random() < 0.3:
            plan.event("alloc", addr=1, bytes=512, stack=plan.stack(draw.randrange(3, 6)))
            plan.event("free_requested", addr=1)
        plan.event(kind, addr=AT + at * MIB, bytes=n * MIB, device=draw.randrange(2))
    scan = _core.Scan(plan.done())
    pieces = [reserved.Piece._make(row) for row in scan.growths()]
    changes: Counter[int] = Counter()
    for piece in pieces:
        changes[piece.begin] += piece.bytes
        if piece.end is not None:
            changes[piece.end] -= piece.bytes
    held = most = 0
    for event in range(scan.totals()["n_events"]):
        held += changes[event]
        most = max(most, held)
    assert held == scan.totals()["end_reserved_bytes"]
    assert (
        0.9 < most / scan.totals()["peak_reserved_bytes"] <= 1
    )  # the pages for one request come one by one
    assert all(piece.end is None or piece.begin <= piece.end for piece in pieces)
