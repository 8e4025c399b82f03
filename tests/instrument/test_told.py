"""Events one by one: `pyalloc events`, and in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instrument.browsing import Browser, browser, needs_browser
from instrument.tools import MIB, Plan, pyalloc, small_trace
from pyalloc import trace
from pyalloc.report import html
from pyalloc.traces import told
from pyalloc.traces.convert import KINDS
from pyalloc.traces.told import Told


def rows(path: Path, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(pyalloc("events", path, "--json", "-q", *words))[
        "rows"
    ]
    return found


def test_what_backward_made_without_a_stack_has_its_name_in_each_view(plan: Plan) -> None:
    """torch's own allocator has no frames for its engine's requests, not even of C++."""
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=2 << 30, bytes=4 * MIB)
    plan.event("phase_end", "backward")
    plan.event("free_requested", addr=2 << 30)
    plan.event("alloc", addr=3 << 30, bytes=MIB)
    found = [(row["kind"], row["line"]) for row in rows(plan.done(), "-n", 99) if row["bytes"]]
    told = "backward (no Python stack)"
    assert found == [("alloc", ""), ("alloc", told), ("free_requested", told), ("alloc", "")]


def test_events_tell_of_their_blocks(plan: Plan) -> None:
    path = small_trace(plan)
    found = rows(path, "-n", 12, "--at", 5)
    assert [(row["event"], row["kind"]) for row in found] == [
        *((0, "segment_alloc"), (1, "step"), (2, "phase_begin"), (3, "alloc"), (4, "alloc")),
        *((5, "phase_end"), (6, "free_requested"), (8, "free_requested"), (10, "step")),
        *((11, "phase_begin"), (12, "alloc"), (13, "alloc")),
    ]  # ends of frees that come at once are left out
    freed = found[6]
    assert (freed["bytes"], freed["allocated_by"], freed["address"]) == (4 * MIB, 3, 1 << 30)
    assert freed["line"] == "me/model.py:3 work" and freed["stack"]  # its block's
    assert found[1]["what"] == "step 0 begins" and found[2]["what"] == "forward begins"


def test_the_moment_asked_for_is_marked(plan: Plan) -> None:
    path = small_trace(plan)
    shown = pyalloc("events", path, "-n", 6, "-q")  # at the peak, which the second request makes
    marked = [line for line in shown.splitlines() if line.startswith(">")]
    assert len(marked) == 1 and marked[0].split()[:3] == [">4", "0.004", "allocated"]
    assert shown.startswith("at the peak (7.0 MiB): events 2 to 8 of ")
    assert len(shown.splitlines()) == 1 + 6  # ends of frees do not count either
    assert all(len(line) <= 80 for line in shown.splitlines())
    shown = pyalloc("events", path, "--at", 7, "-n", 4, "-q")  # after an end that is not shown
    assert "\n> 6 " in shown


def test_times_and_sizes_read_as_on_the_page(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 30, bytes=4)
    plan.time += 999  # of a microsecond
    plan.event("alloc", addr=2 << 30, bytes=600)
    shown = pyalloc("events", plan.done(), "--at", "end", "-q")
    assert "\n 0  0.000  allocated  4 bytes\n>1  0.001  allocated  0.6 KiB\n" in shown


def test_an_event_has_one_number_everywhere(plan: Plan, tmp_path: Path) -> None:
    """The peak is at events 4 (most allocated) and 7 (most reserved, for event 8)."""
    line = plan.stack(3)
    plan.event("segment_alloc", addr=1 << 30, bytes=20 * MIB, stack=line)
    plan.event("phase_begin", "forward")
    for at, n in ((0, 4), (4, 3), (8, 8)):
        plan.event("alloc", addr=(1 << 30) + at * MIB, bytes=n * MIB, stack=line)
    plan.event("free_requested", addr=(1 << 30) + 8 * MIB)
    plan.event("phase_end", "forward")
    plan.event("segment_alloc", addr=2 << 30, bytes=40 * MIB, stack=line)
    plan.event("alloc", addr=2 << 30, bytes=MIB, stack=line)
    path = plan.done()
    table = tmp_path / "events.csv"
    pyalloc("export", path, "--to", "csv", "-o", table)
    csv = [row.split(",") for row in table.read_text().splitlines()]
    kinds = {row[0]: row[csv[0].index("kind")] for row in csv[1:]}
    assert (kinds["4"], kinds["7"], kinds["8"]) == ("alloc", "segment_alloc", "alloc")
    figures = json.loads(pyalloc("stats", path, "--json", "-q"))
    report = json.loads(pyalloc("report", path, "--no-replay", "--json", "-q"))
    for each in (figures, report["totals"]):
        assert (each["peak_event"], each["peak_reserved_event"]) == (4, 8)
        assert each["peak_reserved_alloc"] == 8
    assert report["reserved"]["event"] == 8
    assert "after event 8)" in pyalloc("report", path, "--no-replay", "-q")
    assert "\n>4 " in pyalloc("events", path, "-q") and "\n>3 " in pyalloc(
        "events", path, "--at", 3, "-q"
    )
    assert "top" in pyalloc("events", path) and "--at 4 --by line" in pyalloc("events", path)
    for event, held in ((2, "4.0 MiB"), (3, "7.0 MiB"), (4, "15.0 MiB"), (5, "7.0 MiB")):
        shown = pyalloc("top", path, "--at", event, "-q")
        assert f"after event {event}" in shown and held in shown
    page = html.page(trace.analyse(path, moments=4))
    content, _ = json.JSONDecoder().raw_decode(page[page.index('{"file"') :])
    assert content["totals"]["peak_event"] == 4
    at = {moment["event"]: moment["allocated"] for moment in content["moments"]}
    assert at[4] == 15 * MIB and at[8] == 8 * MIB


def test_the_error_itself_is_marked_where_memory_ran_out(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    plan.event("oom", bytes=9 * MIB, stack=plan.stack(8))
    plan.event("free_requested", addr=1 << 30)
    shown = pyalloc("events", plan.done(), "--at", "oom", "-q")
    assert "\n>1  0.001  out of memory  9.0 MiB  me/model.py:8 work" in shown


def test_an_end_that_comes_late_is_told(plan: Plan) -> None:
    for addr in (1 << 30, 2 << 30):
        plan.event("alloc", addr=addr, bytes=MIB)
    plan.event("record_stream", addr=1 << 30, arg=7)
    for kind, addr in (("free_requested", 1), ("free_requested", 2), ("free_completed", 1)):
        plan.event(kind, addr=addr << 30)
    found = rows(plan.done())
    assert [row["kind"] for row in found[2:]] == [
        *("record_stream", "free_requested", "free_requested", "free_completed")
    ]
    assert found[-1]["allocated_by"] == 0


def test_no_event_is_asked_for_that_is_none(plan: Plan) -> None:
    path = small_trace(plan)
    assert "or an event's number up to 55, not '999'" in pyalloc(
        "events", path, "--at", 999, expect=2
    )
    assert "memory never ran out" in pyalloc("events", path, "--at", "oom", expect=2)
    assert len(rows(path, "--at", "end", "-n", 5)) <= 5
    assert rows(path, "-n", 10_000_000)[-1]["event"] == trace.totals(path)["n_events"] - 1


def test_ranges_are_joined_and_stay_in_the_trace() -> None:
    assert told.joined([(5, 9), (1, 3), (3, 4), (8, 12), (20, 20)]) == [(1, 4), (5, 12)]
    assert told.around(10, 4, 100) == (8, 12)
    assert told.around(0, 4, 100) == (0, 4) and told.around(99, 4, 100) == (96, 100)
    assert told.around(3, 50, 10) == (0, 10)


def test_all_kinds_have_words_or_are_not_shown() -> None:
    for name, kind in KINDS.items():
        row = Told(0, 0, kind, 0, 0, 0, 0, 0, 3, 1, 0, "text")
        assert (row.what != name) == (list(told.shown([row])) == [row]), name


def long_trace(plan: Plan) -> Path:
    """5000 steps, all alike except for a larger block in one."""
    lines = [plan.stack(3), plan.stack(4, "other")]
    for step in range(5000):
        plan.event("step", "step", arg=step)
        size = 9 * MIB if step == 2500 else 2 * MIB
        plan.event("alloc", addr=1 << 30, bytes=size, stack=lines[step % 2])
        plan.event("free_requested", addr=1 << 30)
        plan.event("free_completed", addr=1 << 30)
    return plan.done()


def opened(page: Browser, target: Path) -> None:
    page.call("Runtime.enable")
    page.visit(target)


@needs_browser
def test_the_page_lists_events_around_what_is_looked_at(plan: Plan, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    pyalloc("report", long_trace(plan), "-o", target, "--no-replay", "--step", "all")
    assert target.stat().st_size < 700_000
    selected = "document.querySelector('#events-rows [aria-selected=true]').innerText"
    typed = "$('events').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    with browser() as page:
        opened(page, target)
        assert page.value(selected).split("\t")[::3] == ["10,001", "9.0 MiB"]  # the peak
        said = page.value("$('events-text').textContent")
        assert "of 20,000" in said and "marks a gap" in said
        page.value(typed % "ArrowDown")
        assert page.value(selected).split("\t")[2] == "freed"
        assert page.value("$('events-other').textContent") == "allocated by event 10,001"
        assert "model.py:3 work" in page.value("$('events-stack').textContent")
        page.value("$('events-other').click()")
        assert page.value(selected).split("\t")[2] == "allocated"
        page.value("(s => { s.value = 0; s.oninput(); })($('scrub'))")  # the first moment
        first = page.value(selected)
        assert first != page.value(f"{typed % 'End'}; {selected}")
        assert page.value("D.events.rows.length") == page.value("row + 1")
        page.value("$('events-only').value = 'other freed'; $('events-only').oninput()")
        shown = page.value(
            "[...document.querySelectorAll('#events-rows tr')].map(r => r.innerText)"
        )
        assert shown and all("freed" in text and "model.py:4 other" in text for text in shown)
        page.value("$('events-only').value = 'nothing like it'; $('events-only').oninput()")
        assert page.value("$('events-text').textContent").startswith("No event in this page")
        page.value("$('events-only').value = ''; $('events-only').oninput()")
        page.value(
            "choose(0)"
        )  # in the chart of blocks: to where it was allocated, or the next here
        assert page.value("listed[row][0] >= W.spans[0][1]")
        # and back: a block in the chart is selected there with its event
        at = page.value(
            "listed.findIndex(r => W.spans.some(s => s[1] === r[10] && s[1] !== W.spans[0][1]))"
        )
        page.value(f"chooseEvent({at}, true)")
        assert page.value(f"W.spans[chosen][1] === listed[{at}][10]")


def test_a_page_without_a_slider_has_the_events_of_its_window(plan: Plan) -> None:
    found = trace.analyse(small_trace(plan), moments=3)
    assert [row.event for row in found.told][:3] == [0, 1, 2]
    assert trace.analyse(plan.path).told == []  # nobody looks at them


@pytest.mark.parametrize("device", [0, 1])
def test_events_of_one_device(plan: Plan, device: int) -> None:
    for number in (0, 1, 0):
        plan.event("alloc", addr=(1 + number) << 30, bytes=MIB, device=number)
        plan.event("free_requested", addr=(1 + number) << 30, device=number)
    found = rows(plan.done(), "--device", device)
    assert {row["device"] for row in found} == {device}
    assert len(found) == (4 if device == 0 else 2)


@needs_browser
def test_a_long_name_of_a_phase_leaves_room_to_the_lines_of_events(
    plan: Plan, tmp_path: Path
) -> None:
    """On a tablet, lines had a letter's width, and each event the height of the screen."""
    plan.event("phase_begin", "a phase that has rather a long name, as people give them, " * 2)
    plan.event("alloc", addr=1 << 30, bytes=8 * MIB, stack=plan.stack(8))
    plan.event("phase_end", "a phase that has rather a long name, as people give them, " * 2)
    target = tmp_path / "report.html"
    pyalloc("report", plan.done(), "-o", target)
    screen = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
    cells = "[...document.querySelectorAll('#events-rows td.name')].map(e => e.%s)"
    with browser() as page:
        for width in (768, 1024, 1280):
            page.call("Emulation.setDeviceMetricsOverride", width=width, **screen)
            page.visit(target)
            assert min(page.value(cells % "offsetWidth")) >= 150
            section = "$('events-section')"
            assert page.value(f"{section}.scrollWidth == {section}.clientWidth"), width
