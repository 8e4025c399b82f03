"""Who held memory from mark to mark: the sums, and the page's flame graph of a moment or a range."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from instrument.browsing import Browser, browser, needs_browser
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.traces import stays
from pyalloc.traces.moments import Block

THREADS = (7, 9)


@dataclass
class Life:
    """A block as planned; freed: an event, or one that never comes."""

    made: int
    n_bytes: int
    line: int
    thread: int
    category: str
    freed: int = 10**9

    def is_alive(self, moment: int) -> bool:
        return self.made < moment <= self.freed


def busy(plan: Plan, n: int = 600) -> list[Life]:
    """Writes what some lines and two threads allocate and free in three steps; returns the same as a list."""
    rng = random.Random(5)
    lines = {line: plan.stack(line, f"make_{line}") for line in range(1, 8)}
    lives: list[Life] = []
    alive: dict[int, Life] = {}
    event = 0

    def write(kind: str, text: str = "", **fields: int) -> None:
        nonlocal event
        plan.event(kind, text, **fields)
        event += 1

    write("thread", "MainThread", arg=THREADS[0])
    for i in range(n):
        if i % (n // 3) == 0:
            write("step", "step", arg=i * 3 // n)
        address = (1 + rng.randrange(40)) << 24
        gone = alive.pop(address, None)
        if gone is not None:
            gone.freed = event
            write("free_requested", addr=address)
            continue
        line = rng.choice(list(lines))
        category = "parameters" if line == 1 else ""
        life = Life(event, rng.randrange(1, 9) * MIB, line, rng.choice(THREADS), category)
        write("alloc", addr=address, bytes=life.n_bytes, stack=lines[line], thread=life.thread)
        if category:
            write("category", category, addr=address)
        alive[address] = life
        lives.append(life)
    return lives


def test_what_is_held_at_each_mark(plan: Plan) -> None:
    lives = busy(plan)
    found = trace.analyse(plan.done(), moments=24)
    begins = [step[1] for step in found.steps]
    assert len(found.marks) > 150 and set(found.moments) | set(begins) <= set(found.marks)
    kept = found.stays_by_category()
    for number, mark in enumerate(found.marks):
        here = [(stay, name) for stay, name in kept if stay.first <= number <= stay.last]
        there = [life for life in lives if life.is_alive(mark)]
        by_line: Counter[tuple[int, int]] = Counter()
        for stay, name in here:
            (place, _, line), *_ = found.frames(stay.stack)
            assert place == f"make_{line}" and (name == "parameters") is (line == 1)
            by_line[line, stay.thread] += stay.bytes
        for life in there:
            by_line[life.line, life.thread] -= life.n_bytes
        assert not any(by_line.values()) and sum(s.blocks for s, _ in here) == len(there)


def test_a_workspace_is_told_at_every_mark(plan: Plan) -> None:
    """It has the line and the phase of what follows it."""
    busy(plan)
    found = trace.analyse(plan.done(), moments=24)
    blocks = found.peak.blocks
    found.workspaces.update(block.alloc_event for block in blocks if not block.category)
    at = found.marks.index(found.totals["peak_event"])
    told: Counter[str] = Counter()
    for stay, name in found.stays_by_category():
        told[name] += stay.bytes * (stay.first <= at <= stay.last)
    assert +told == {row.name: row.bytes for row in found.by_category(blocks)}
    assert set(+told) == {"workspace", "parameters"}


def test_marks_are_fewer_where_very_much_is_alive(plan: Plan) -> None:
    busy(plan)
    bins = trace.analyse(plan.done()).bins
    assert stays.marks(bins, [3, 99], [5, 8], 0) == [5, 8]
    some = stays.marks(bins, [3, 99], [5, 8], 10)
    assert len(some) <= 12 and {5, 8} <= set(some) and sorted(some) == some
    top = max(bins, key=lambda each: each[2])
    assert top[8] in some and top[8] in stays.marks(bins, [], [5], 1)  # the peak is no accident
    assert {3, 99} & set(some) == set()
    assert {3, 99} < set(stays.marks(bins, [3, 99], [5, 8], len(bins)))


def test_stays_without_some_blocks() -> None:
    marks = [5, 9, 20]
    freed_late = Block(0, 10, 1, 3, 12, 7, "", "forward", "", 0, "", 0)
    blocks = [freed_late, freed_late._replace(bytes=20), freed_late._replace(alloc_event=6)]
    assert [(stay.first, stay.last) for stay in (stays.over(b, marks) for b in blocks)] == [
        *((0, 1), (0, 1), (1, 1)),
    ]
    held = [
        stays.over(freed_late, marks)._replace(bytes=30, blocks=2),
        stays.over(blocks[2], marks)._replace(bytes=10, blocks=1),
    ]
    assert stays.without(held, blocks[:1], marks) == [
        held[0]._replace(bytes=20, blocks=1),
        held[1],
    ]
    assert stays.without(held, blocks[:2], marks) == held[1:]
    assert stays.without(held, [freed_late._replace(stack=8)], marks) == held


def opened(page: Browser, target: Path) -> None:
    page.call("Runtime.enable")
    page.visit(target)


@needs_browser
def test_the_flame_graph_of_a_range(plan: Plan, tmp_path: Path) -> None:
    lives, target = busy(plan), tmp_path / "page.html"
    pyalloc("report", plan.done(), "-o", target, "-q")
    with browser() as page:
        opened(page, target)
        moments = [mark + 1 for mark in page.value("MARKS")]
        total = "tree().bytes"
        assert page.value("anchor") == -1 and page.value("$('range-modes').hidden") is True
        for number in (0, 40, len(moments) - 1):
            page.value(f"rangeMoved(-1, {number})")
            alive = sum(life.n_bytes for life in lives if life.is_alive(moments[number]))
            assert page.value(total) == alive == page.value(f"heldAt[{number}]")
        for a, b in ((3, 90), (60, 61), (100, len(moments) - 1), (0, len(moments) - 1), (50, 50)):
            page.value(f"rangeMoved({a}, {b})")
            begin, end = moments[a], moments[b]
            sums = {
                "left": [x for x in lives if not x.is_alive(begin) and x.is_alive(end)],
                "gone": [x for x in lives if x.is_alive(begin) and not x.is_alive(end)],
            }
            for kind, expected in sums.items():
                page.value(f"document.querySelector('[data-wanted={kind}]').click()")
                assert page.value(total) == sum(life.n_bytes for life in expected), (kind, a, b)
                assert page.value("tree().blocks") == len(expected)
            page.value("document.querySelector('[data-wanted=most]').click()")
            held = [sum(x.n_bytes for x in lives if x.is_alive(m)) for m in moments[a : b + 1]]
            assert page.value(total) == max(held)
        page.value("rangeMoved(90, 3)")  # begun at its later end
        assert page.value("ends()") == [3, 90]
        page.value("$('range-begin').click()")
        assert page.value("anchor") == -1 and "begin a range" in page.value(
            "$('range-begin').textContent"
        )
        page.value("$('range-begin').click(), $('scrub').value = 20, $('scrub').oninput()")
        assert page.value("[anchor, at()]") == [3, 20]
        told = page.value("$('scrub-text').textContent")
        assert told.startswith("from after event ") and (" more (" in told or " less (" in told)
        drag = (
            "((x, kind) => { const c = $('timeline'), b = c.getBoundingClientRect(); c.dispatchEvent(new MouseEvent("
            "kind, {bubbles: true, clientX: b.left + x * b.width, clientY: b.top + 40})); })"
        )
        for x, kind in ((0.6, "mousedown"), (0.4, "mousemove"), (0.4, "mouseup"), (0.4, "click")):
            page.value(f"{drag}({x}, '{kind}')")
        a, b = page.value("ends()")
        assert 0 < a < b < len(moments) - 1  # the click that ends it does not count
        for kind in ("mousedown", "mouseup", "click"):
            page.value(f"{drag}(0.5, '{kind}')")
        assert page.value("anchor") == -1 and a < page.value("at()") < b
        assert "Runtime.exceptionThrown" not in [event["method"] for event in page.events]


@needs_browser
def test_what_is_sought_and_threads_apart(plan: Plan, tmp_path: Path) -> None:
    lives, target = busy(plan), tmp_path / "page.html"
    pyalloc("report", plan.done(), "-o", target, "-q")
    with browser() as page:
        opened(page, target)
        peak = page.value("MARKS[peakAt]") + 1
        alive = [life for life in lives if life.is_alive(peak)]
        wanted = sum(life.n_bytes for life in alive if life.line == 3)
        page.value("$('sought').value = 'MODEL make_3', $('sought').oninput()")
        assert page.value("tree().found") == wanted > 0
        assert " by stacks with it" in page.value("$('found-text').textContent")
        page.value("$('sought').value = 'nothing', $('sought').oninput()")
        assert page.value("$('found-text').textContent").startswith("0 bytes (0.0 %)")
        kinds = page.value("[...$('apart').options].map(o => o.value)")
        assert kinds == ["", "threads"]  # all are of one stream
        page.value("$('apart').value = 'threads', $('apart').onchange()")
        of_threads = page.value(
            "Object.fromEntries([...tree().children].map(([k, n]) => [k, n.bytes]))"
        )
        sums = {
            name: sum(life.n_bytes for life in alive if life.thread == thread)
            for thread, name in zip(THREADS, ("MainThread (thread 7)", "thread 9"), strict=True)
        }
        assert of_threads == sums
        picture = "$('timeline').toDataURL()"
        drawn = page.value(picture)
        page.value("$('as-bands').click()")
        assert page.value(picture) != drawn
        held = page.value("bandsAt(peakAt)")
        told = {name: n for name, n in held}
        assert told["parameters"] == sum(life.n_bytes for life in alive if life.category)
        assert sum(told.values()) == sum(life.n_bytes for life in alive)
        assert "Runtime.exceptionThrown" not in [event["method"] for event in page.events]


@pytest.mark.parametrize("is_differentiated_again", [False, True])
def test_categories_at_marks_are_those_of_the_blocks(
    plan: Plan, is_differentiated_again: bool
) -> None:
    """Two passes a step, in phases of the program's own: what the first backward allocates is freed in the second, or
    in it."""
    rng = random.Random(5)
    plan.event("user", f"create_graph={is_differentiated_again}")
    at = 1 << 30
    for step in range(90):  # more than have a mark each
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "passes")
        held: list[int] = []
        for _ in range(2):
            plan.event("phase_begin", "backward")
            plan.event("phase_begin", "backward")  # the library's within the program's
            made = []
            for _ in range(12):
                plan.event("alloc", addr=at, bytes=rng.randrange(1, 9) * MIB, stack=plan.stack(1))
                made.append(at)
                at += 8 * MIB
            plan.event("phase_end", "backward")
            rng.shuffle(made)
            for address in (*made[:6], *held):
                plan.event("free_requested", addr=address)
            held = made[6:]
            plan.event("phase_end", "backward")
        for address in held:
            plan.event("free_requested", addr=address)
        plan.event("phase_end", "passes")
    found = trace.analyse(plan.done(), moments=24)
    kept = found.stays_by_category()
    names = set()
    for event, moment in found.moments.items():
        number = found.marks.index(event)
        told: Counter[str] = Counter()
        for stay, name in kept:
            told[name] += stay.bytes * (stay.first <= number <= stay.last)
        wanted = {row.name: row.bytes for row in found.by_category(moment.blocks)}
        assert +told == wanted, event
        names |= set(wanted)
    assert "backward temporaries" in names and "gradients" in names
