"""The page in a real browser: no errors, no requests, controls that work."""

from __future__ import annotations

import json
import pickle
import random
import re
from pathlib import Path

import pytest
from dry_support import wait_until

from instrument.browsing import browser, needs_browser
from instrument.tools import MIB, Plan, pyalloc, small_trace
from pyalloc import trace
from pyalloc.errors import UsageError
from pyalloc.report import html, text

# What axis() writes beside a timeline of so many bytes.
TICKS = """(() => {
    const said = [], nothing = () => {};
    const pen = {beginPath: nothing, moveTo: nothing, lineTo: nothing, stroke: nothing};
    axis({...pen, fillText: text => said.push(text), canvas: {clientHeight: 200}}, 300, %s, v => v);
    return said.join();
})()"""


def rich(plan: Plan) -> Path:
    """A trace with everything that the page shows, and names that would break out of a script."""
    plan.event("user", "note=</script><script>alert(1)</script>")
    stack = plan.stack(5, "</script><b>work")
    plan.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    for step in range(6):
        plan.event("step", "step", arg=step)
        for phase in ("forward", "loss", "backward"):
            plan.event("phase_begin", phase)
            n = 0 if phase == "loss" else 8
            for i in range(n):
                plan.event(
                    "alloc", addr=(1 << 30) + 8 * i * MIB, bytes=(i + 1) * MIB // 2, stack=stack
                )
            for i in range(n):
                plan.event("free_requested", addr=(1 << 30) + 8 * i * MIB)
            plan.event("phase_end", phase)
    return plan.done()


@needs_browser
def test_the_page_works(plan: Plan, tmp_path: Path) -> None:
    target, of_nothing = tmp_path / "report.html", tmp_path / "nothing.html"
    pyalloc("report", rich(plan), "-o", target)
    empty = Plan(tmp_path / "nothing.pya")
    empty.event("user", "torch=2.14.1")
    assert "nothing.pya: 1 event, 0 alloc" in pyalloc("report", empty.done(), "-o", of_nothing)
    with browser() as page:
        for domain in ("Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.visit(target)
        assert page.value("document.querySelectorAll('#peak tr').length") > 0
        assert (
            page.value("[...document.querySelectorAll('[hidden]')].some(e => e.offsetParent)")
            is False
        )
        for top, told in (
            (4.47 * 2**30, "0,1 GiB,2 GiB,3 GiB,4 GiB"),
            (1.6 * 2**30, "0,512 MiB,1 GiB,1.5 GiB"),
            (1, "0,1 byte"),
        ):
            assert page.value(TICKS % top) == told
        assert page.value("document.querySelectorAll('b').length") == 6  # nothing was injected
        for kind in ("category", "line", "module", "size"):
            page.value(f"document.querySelector('[data-kind={kind}]').click()")
            assert (
                page.value(
                    f"document.querySelector('[data-kind={kind}]').getAttribute('aria-pressed')"
                )
                == "true"
            )
            assert page.value("document.querySelectorAll('#peak tr').length") > 0
        before = page.value("document.getElementById('map-text').textContent")
        page.value(
            "(s => { s.value = 1; s.dispatchEvent(new Event('input')); })(document.getElementById('scrub'))"
        )
        after = page.value("document.getElementById('map-text').textContent")
        assert before != after and "reserved" in after
        told = page.value("document.getElementById('scrub').getAttribute('aria-valuetext')")
        assert re.fullmatch(r"after event [\d,]+.*: .* allocated", told)  # not "1"
        legend = "[...document.querySelectorAll('#timeline-legend i')].map(i => i.style.background)"
        colors = page.value(legend)
        assert len(set(colors)) == len(colors) == 6
        # Hidden for a while, as in a notebook's tab: the blocks stayed away, and what is below them.
        before = page.value("$('blocks').toDataURL()")
        for display in ("none", "block"):
            page.value(f"document.querySelector('main').style.display = '{display}'")
            page.value("dispatchEvent(new Event('resize'))")
        assert page.value("$('blocks').toDataURL()") == before
        picture = "document.getElementById('timeline').toDataURL()"
        drawn = page.value(picture)
        page.value("document.getElementById('by-time').click()")
        assert page.value(picture) != drawn or page.value("byTime")
        page.value(
            "(c => { const b = c.getBoundingClientRect(); c.dispatchEvent(new MouseEvent('mousemove', "
            "{clientX: b.left + b.width / 2, clientY: b.top + 20})); })(document.getElementById('timeline'))"
        )
        assert "allocated" in page.value("document.getElementById('tip').textContent")
        point = (
            "((id, x, y, kind) => { const c = document.getElementById(id), b = c.getBoundingClientRect(); "
            "c.dispatchEvent(new MouseEvent(kind, {clientX: b.left + x * b.width, clientY: b.top + y * b.height})); "
            "return document.getElementById('tip').textContent; })"
        )
        assert "3.5 MiB" in page.value(f"{point}('blocks', 0.31, 0.4, 'mousemove')")
        page.value(f"{point}('blocks', 0.31, 0.4, 'click')")
        assert "work" in page.value("document.getElementById('blocks-stack').textContent")
        page.value("$('scrub').value = peakAt; scrubbed()")
        assert page.value("$('flame-title').textContent") == "Flame graph of the peak: 18.0 MiB"
        assert "18.0 MiB, 100.0 % of what is allocated, 8 blocks" in page.value(
            f"{point}('flame', 0.5, 0.75, 'mousemove')"
        )
        page.value(f"{point}('flame', 0.5, 0.75, 'click')")
        assert len(page.value("zoomed")) == 1
        page.value("document.getElementById('foreign').click()")
        assert page.value("zoomed") == []
        page.value(f"{point}('timeline', 0.99, 0.5, 'click')")
        assert page.value("Number(document.getElementById('scrub').value) > 1")
        assert "after event" in page.value("document.getElementById('flame-title').textContent")
        dragged = point.replace("MouseEvent(kind, {", "MouseEvent(kind, {bubbles: true, ")
        for x, kind in ((0.3, "mousedown"), (0.5, "mousemove"), (0.5, "mouseup")):
            page.value(f"{dragged}('blocks', {x}, 0.5, '{kind}')")
        assert page.value("first > whole[0] && until < whole[1]")
        page.value("document.getElementById('blocks-out').click()")
        assert page.value("first === whole[0] && until === whole[1]")
        typed = "((id, key) => document.getElementById(id).dispatchEvent(new KeyboardEvent('keydown', {key})))"
        page.value("chosen = -1")
        told, sizes = "document.getElementById('blocks-stack').textContent", []
        for _ in range(3):
            page.value(f"{typed}('blocks', 'ArrowDown')")
            sizes.append(page.value(told).split(" MiB")[0])
        assert sizes[0] == "4.0" and sizes == sorted(sizes, reverse=True)  # the largest first
        page.value(f"{typed}('blocks', 'ArrowUp'), {typed}('blocks', 'ArrowUp')")
        assert page.value(told).startswith("4.0 MiB") and "work" in page.value(told)
        pieces = "document.getElementById('map-stack').textContent"
        page.value("$('scrub').value = peakAt; $('scrub').oninput()")
        seen = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
            page.value(f"{typed}('map', '{key}')")
            seen.append(page.value(pieces))
        assert seen[0] == seen[2] != seen[1] and "in a segment of 64.0 MiB" in seen[0]
        words = "$('timeline-legend').textContent.includes('phases: the 18 around the peak')"
        assert not page.value(words)
        assert page.value(f"D.nPhases++, timeline(), {words}")
        page.visit(of_nothing)
        visible = "[...document.querySelectorAll('h2')].filter(h => h.offsetParent)"
        assert page.value(f"{visible}.map(h => h.textContent)") == ["Settings"]
        methods = [event["method"] for event in page.events]
        requests = [
            event["params"]["request"]["url"]
            for event in page.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert set(requests) <= {target.as_uri(), of_nothing.as_uri()}
        assert "Runtime.exceptionThrown" not in methods
        assert "Log.entryAdded" not in methods, page.events
        assert "Runtime.consoleAPICalled" not in methods


@needs_browser
def test_the_page_on_a_phone_in_the_dark_and_on_paper(plan: Plan, tmp_path: Path) -> None:
    plan.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    plan.event("segment_alloc", addr=1 << 31, bytes=8 * MIB, device=1)
    for _ in range(40):
        plan.event("alloc", addr=1 << 30, bytes=MIB, stack=plan.stack(6))
        plan.event("free_requested", addr=1 << 30)
    plan.event("phase_begin", "a_phase_with_a_long_name")
    texts = plan.writer.string("work"), plan.writer.string("/home/me/model.py")
    inner = plan.writer.stack(plan.stack(20, "main"), *texts, 7)
    plan.event("alloc", addr=1 << 30, bytes=60 * MIB, stack=inner)
    plan.event("alloc", addr=1 << 31, bytes=8 * MIB, stack=plan.stack(8), device=1)
    plan.event("phase_end", "a_phase_with_a_long_name")
    plan.event("oom", bytes=100 * MIB, arg=3 * MIB)
    target = tmp_path / "report.html"
    shown = pyalloc("report", plan.done(), "-o", target)
    assert "The memory of 2 devices is added up" in " ".join(shown.split())
    with browser() as page:
        page.call("Runtime.enable")
        screen = {"height": 800, "deviceScaleFactor": 1, "mobile": True}
        page.call("Emulation.setDeviceMetricsOverride", width=390, **screen)
        page.visit(target)
        assert page.value("document.documentElement.scrollWidth") == 390
        page.value(
            "for (const id of ['advice', 'blocks-legend']) add($(id), 'span', 'x'.repeat(300));"
        )
        fits = "s => $(s).parentElement.scrollWidth == $(s).parentElement.clientWidth"
        assert page.value(f"['advice', 'blocks-legend'].map({fits})") == [True, True]
        first = page.value("$('advice').firstChild.textContent")
        assert (
            first.startswith("Out of memory on device 0: 100.0 MiB were requested")
            and "Cause:" in first
        )
        assert page.value("$('stacks').children.length") == 2
        press = "(id, key) => $(id).dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}))"
        for key, where in (
            ("ArrowDown", "model.py:20 main: 60.0 MiB, 1 block"),
            ("ArrowRight", "model.py:8 work: 8.0 MiB"),
            ("ArrowRight", "model.py:8 work: 8.0 MiB"),
            ("ArrowLeft", "model.py:20 main: 60.0 MiB"),
            ("ArrowUp", ""),
        ):
            assert page.value(f"({press})('flame', '{key}')") is False  # the page does not scroll
            assert where in page.value("$('flame-at').textContent")
            assert page.value("zoomed.length") == (1 if where else 0)
        page.value(f"$('inverted').click(), ({press})('flame', 'ArrowDown')")
        assert "model.py:7 work: 60.0 MiB" in page.value("$('flame-at').textContent")
        page.value(f"({press})('flame', 'ArrowDown')")
        assert "model.py:20 main: 60.0 MiB" in page.value("$('flame-at').textContent")
        page.value("$('inverted').click()")
        assert page.value("zoomed") == []
        everything = page.value("[first, until]")
        page.value(f"({press})('blocks', '+')")
        inside = page.value("[first, until]")
        assert everything[0] <= inside[0] < inside[1] <= everything[1] and inside != everything
        page.value(f"({press})('blocks', 'Escape')")
        assert page.value("[first, until]") == everything
        assert page.value(f"({press})('blocks', 'Tab')") is True
        picture = "document.getElementById('timeline').toDataURL()"
        drawn = [page.value(picture)]
        swatch = "getComputedStyle(document.querySelector('#map-legend i')).backgroundColor"
        swatches = []  # of idle memory
        page.value("window.seen = element => getComputedStyle(element).display !== 'none'; 0")
        for media, scheme in (("screen", "dark"), ("print", "dark"), ("screen", "dark")):
            page.call(
                "Emulation.setEmulatedMedia",
                media=media,
                features=[{"name": "prefers-color-scheme", "value": scheme}],
            )
            wait_until(lambda: page.value(picture) != drawn[-1])  # drawn anew in other colours
            drawn.append(page.value(picture))
            swatches.append(page.value(swatch))
            if media == "print":
                assert page.value("[...document.querySelectorAll('label')].some(seen)") is False
                paper = page.value("getComputedStyle(document.body).backgroundColor")
                assert paper == "rgb(255, 255, 255)"
                shown = (
                    "[...$('tabs').children].filter(b => getComputedStyle(b).display !== 'none')"
                )
                assert page.value(f"{shown}.map(b => b.textContent)") == ["by contributor"]
                assert (
                    page.value(
                        "getComputedStyle($('peak-table').tHead.rows[0].cells[0]"
                        ".firstChild).display"
                    )
                    != "none"
                )
                assert (
                    page.value(
                        "getComputedStyle(document.querySelector('.legend i')).printColorAdjust"
                    )
                    == "exact"
                )
        assert swatches[0] == swatches[2] != swatches[1]
        assert "Runtime.exceptionThrown" not in [event["method"] for event in page.events]


@needs_browser
def test_names_have_a_line_of_their_own_on_a_phone(plan: Plan, tmp_path: Path) -> None:
    """Beside the numbers, lines of the events had room for four letters."""
    target = tmp_path / "report.html"
    pyalloc("report", small_trace(plan), "-o", target)
    name = "[...document.querySelectorAll('%s td.name')].filter(e => e.offsetParent)"
    numbers = "[...document.querySelectorAll('#events-rows td.n')].filter(e => e.offsetParent)"
    with browser() as page:
        for width, least in ((390, 300), (1200, 300)):
            page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=800,
                deviceScaleFactor=1,
                mobile=width < 600,
            )
            page.visit(target)
            for table in ("#peak", "#reserved", "#makers", "#events-rows"):
                found = page.value(f"{name % table}.map(e => e.offsetWidth)")
                assert found and min(found) > least, (table, width)
            above = page.value(
                "$('peak').rows[0].cells[0].offsetTop < $('peak').rows[0].cells[3].offsetTop"
            )
            assert above is (width < 600)
            assert page.value(f"{numbers}.every(e => e.scrollWidth <= e.clientWidth)")  # not cut
        addresses = "[...document.querySelectorAll('#events .wide')].some(e => e.offsetParent)"
        assert page.value(addresses) is True
        page.call("Emulation.setEmulatedMedia", media="print")  # paper is not wide
        assert page.value(addresses) is False


@needs_browser
def test_the_page_offers_nothing_that_the_recording_lacks(plan: Plan, tmp_path: Path) -> None:
    """Without segments and stacks: reserved memory, a range for the flame graph, stacks called (no stack)."""
    plan.event("alloc", addr=1 << 30, bytes=8 * MIB)
    plan.event("free_requested", addr=1 << 30)
    bare, full = plan.done(), small_trace(Plan(tmp_path / "full.pya"))
    for path, has_all in ((full, True), (bare, False)):
        target = path.with_suffix(".html")
        pyalloc("report", path, "-o", target)
        with browser() as page:
            page.visit(target)
            legend = page.value("$('timeline-legend').textContent")
            assert ("reserved" in legend) is has_all and "allocated" in legend
            assert ("begin a range" in page.value("$('scrub-text').textContent")) is has_all
            assert page.value("$('range').offsetParent !== null") is has_all
            lacks = page.value("$('stacks').textContent") == "The recording has no stacks."
            assert lacks is not has_all
            page.value(
                "(c => { const b = c.getBoundingClientRect(), y = b.top + 20; c.dispatchEvent(new MouseEvent("
                "'mousemove', {clientX: b.left + b.width / 2, clientY: y})); })($('timeline'))"
            )
            told = page.value("$('tip').textContent")
            assert ("reserved" in told) is has_all and "allocated" in told


@needs_browser
@pytest.mark.parametrize("scale", [1, 1.25])
def test_an_area_has_one_colour_whatever_the_screens_scale(
    scale: float, plan: Plan, tmp_path: Path
) -> None:
    """Between columns whose edges lie inside a device's pixel, the background showed: an area had stripes."""
    other = Plan(tmp_path / "other.pya")
    for each, step in ((plan, 2), (other, 4)):
        for i in range(0, 400, step):
            each.event("alloc", addr=(i + 1) << 30, bytes=MIB, stack=each.stack(7))
    paths = plan.done(), other.done()
    report, compared = tmp_path / "report.html", tmp_path / "diff.html"
    pyalloc("report", paths[0], "-o", report)
    pyalloc("diff", *paths, "-o", compared)
    row = """(id => {
        const c = $(id), g = c.getContext('2d'), ratio = devicePixelRatio;
        const [left, wide] = [Math.ceil(c.clientWidth * .75), Math.floor(c.clientWidth * .2)].map(x => x * ratio | 0);
        const found = g.getImageData(left, ratio * %d | 0, wide, 1).data;
        return [wide, new Set(new Uint32Array(found.buffer)).size];
    })"""
    with browser() as page:
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=1100,
            height=800,
            deviceScaleFactor=scale,
            mobile=False,
        )
        for target, canvas, y in ((report, "blocks", 300), (compared, "timeline", 200)):
            page.visit(target)
            wide, colours = page.value(f"{row % y}('{canvas}')")
            assert wide > 150 * scale and colours == 1


@needs_browser
def test_a_snapshot_without_history_has_no_course(tmp_path: Path) -> None:
    """Its blocks were shown as if they had been allocated one after the other, and replayed."""
    blocks = [{"size": 32 * MIB, "state": state} for state in ("active_allocated", "inactive")]
    segment = {"address": 1 << 30, "total_size": 64 * MIB, "stream": 0, "blocks": blocks}
    path, target = tmp_path / "state.pickle", tmp_path / "report.html"
    path.write_bytes(pickle.dumps([segment]))
    pyalloc("report", path, "-o", target)
    with browser() as page:
        page.visit(target)
        seen = page.value(
            "[...document.querySelectorAll('h2')].filter(h => h.offsetParent).map(h => h.textContent)"
        )
    assert seen == [
        "What to do",
        "At the peak",
        "Reserved and in use",
        "Segment map",
        "Stacks that hold the most at the peak",
        "Settings",
    ]


def test_any_step_is_shown_block_by_block(plan: Plan, tmp_path: Path) -> None:
    path, page = small_trace(plan), tmp_path / "page.html"
    events = [step[1] for step in trace.analyse(path).steps]
    for step in (0, 4, 5):
        found = trace.analyse(path, step=step)
        last = found.totals["n_events"]
        assert (found.window_bins[0][0], found.window_end) == (
            events[step],
            [*events, last][step + 1],
        )
        assert len(found.spans) == 2 + (step == 5)
        assert f'"window":{{"title":"Step {step}' in html.page(found)
    out = pyalloc("report", path, "-o", page, "--step", 6, expect=2)
    assert "there is no step 6; steps go from 0 to 5" in out and not page.exists()
    pyalloc("report", path, "-o", page, "--step", 1)
    assert '"window":{"title":"Step 1",' in page.read_text()
    assert "-o report.html" in pyalloc("report", path, "--step", 1, expect=2)


def test_several_steps_are_shown_block_by_block(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    events = [step[1] for step in trace.analyse(path).steps]
    some, everything = trace.analyse(path, step=(1, 3)), trace.analyse(path, step="all")
    assert (some.window_bins[0][0], some.window_end) == (events[1], events[4])
    assert len(some.spans) == 6 and '"window":{"title":"Steps 1 to 3",' in html.page(some)
    assert len(everything.spans) == 13
    assert '"window":{"title":"The whole run",' in html.page(everything)
    for wrong, told in (
        ("4-9", "there is no step 9"),
        ("3-1", "must not come after"),
        ("1-", "nor steps N-M"),
    ):
        assert told in pyalloc("report", path, "-o", tmp_path / "x.html", "--step", wrong, expect=2)
    pyalloc("report", path, "-o", tmp_path / "x.html", "--step", "2-3", "-q")
    assert '"title":"Steps 2 to 3"' in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("first", "last", "begin", "end"),
    [(1, 3, 6, 9), (0, 2, 10, 13), (3, 3, 8, 9), (2, 3, 7, 9), (4, 4, 9, 10), (3, 4, 8, 10)],
)
def test_steps_whose_numbers_begin_again(
    plan: Plan, first: int, last: int, begin: int, end: int
) -> None:
    """The last step with a number, as if it were the only one: back to the last step of the other number before it."""
    for i, number in enumerate([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]):
        plan.event("step", "step", arg=number)
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    found = trace.analyse(plan.done(), step=(first, last))
    events = [step[1] for step in found.steps] + [found.totals["n_events"]]
    assert (found.window_bins[0][0], found.window_end) == (events[begin], events[end])


def test_steps_that_come_in_another_order(plan: Plan) -> None:
    for number in (2, 1):
        plan.event("step", "step", arg=number)
        plan.event("alloc", addr=number << 30, bytes=MIB)
    with pytest.raises(UsageError, match="no step 1 comes before the last step 2"):
        trace.analyse(plan.done(), step=(1, 2))


@pytest.mark.parametrize("smallest", [0, 3 * MIB])
def test_a_picture_of_the_segments_has_all_bytes(plan: Plan, smallest: int) -> None:
    """Against the same done block by block.  Blocks also lie outside segments, across their ends, and in each other."""
    rng = random.Random(smallest)
    for i in range(12):
        at = ((i // 2) << 30) + 40 * MIB * (i % 2 + 1)
        plan.event("segment_alloc", addr=at, bytes=36 * MIB, device=i % 3)
    for _ in range(300):
        at = (rng.randrange(6) << 30) + rng.randrange(36, 120) * MIB
        size, line, device = rng.randrange(1, 9) * MIB - 700, rng.randrange(4), rng.randrange(3)
        plan.event("phase_begin", f"phase{device}")
        plan.event("alloc", addr=at, bytes=size, device=device, stack=line and plan.stack(line))
    found = trace.analyse(plan.done())
    moment = found.moments[max(found.moments)]
    blocks, segments, largest = moment.pieces(smallest)
    told = [
        [(n, blocks[at] if at >= 0 else None) for n, at in zip(each[::2], each[1::2], strict=True)]
        for each in segments
    ]
    assert len(told) == 12 and largest == moment.largest_gap > 0
    for (start, length, _, device, _), pieces in zip(moment.segments, told, strict=True):
        naive: list[tuple[int, object]] = []
        at = start
        inside = [
            b for b in moment.blocks if b.device == device and start <= b.address < start + length
        ]
        for end, block in [*((b.address, b) for b in inside), (start + length, None)]:
            added = [(end - at, None)]
            if block is not None:
                added.append((min(block.bytes, start + length - end), block))
                at = max(at, end + block.bytes)
            for n, what in added:
                if n > 0 and naive and n < smallest:
                    naive[-1] = naive[-1][0] + n, naive[-1][1]
                elif n > 0:
                    naive.append((n, what))
        assert pieces == naive
    sums = {(stack, phase): (size, n) for stack, phase, size, n in moment.stack_sums()}
    wanted: dict[tuple[int, str], tuple[int, int]] = {}
    for block in moment.blocks:
        key = block.stack, "" if block.stack else block.phase
        size, n = wanted.get(key, (0, 0))
        wanted[key] = size + block.bytes, n + 1
    assert sums == wanted and len(sums) > 4


def test_the_page_stays_small(plan: Plan) -> None:
    """100,000 events of 2,000 live blocks: under 2 MB, with the whole map."""
    stacks = [plan.stack(line) for line in range(300)]
    plan.event("segment_alloc", addr=1 << 30, bytes=4096 * MIB)
    for i in range(50_000):
        at = (1 << 30) + (i % 2000) * 2 * MIB
        if i >= 2000:
            plan.event("free_requested", addr=at)
        plan.event("alloc", addr=at, bytes=(i % 7 + 1) * MIB // 4, stack=stacks[i % 300])
    found = trace.analyse(plan.done(), moments=24)
    assert found.totals["n_events"] > 95_000
    assert len(html.page(found).encode()) < 2_000_000


def test_the_page_tells_of_all_segments_and_shows_the_largest(plan: Plan) -> None:
    for i in range(500):
        plan.event("segment_alloc", addr=(i + 1) << 32, bytes=(i + 1) * MIB)
    content = html._content(trace.analyse(plan.done()))
    state = content["moments"][-1]
    assert state["nSegments"] == 500 and len(state["segments"]) == 400
    assert state["segments"][0][0] == 500 * MIB


def test_a_leak_is_told_once_in_the_page(plan: Plan) -> None:
    """Both the advice and the verdict are in its list of what to do."""
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=plan.stack(7))
    content = html._content(trace.analyse(plan.done()))
    assert [item["kind"] for item in content["advice"]].count("leak") == 1
    assert not content["leak"]


def test_without_a_leak_the_page_says_so(plan: Plan) -> None:
    assert html._content(trace.analyse(small_trace(plan)))["leak"].startswith("no leak")


def test_what_the_program_did_is_no_setting(plan: Plan) -> None:
    did = ("retain_graph=True", "create_graph=False", "chained=True")
    doubled = "doubled_state=8 bytes of 16, 2 optimizers"
    held = (doubled, "unused_gradients=8 bytes, Net", "left_over=8 bytes, 1, Net", "untrained=Net")
    for note in ("stacks=python", *did, *held):
        plan.event("user", note)
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    found = trace.analyse(plan.done())
    assert html._content(found)["settings"] == {"stacks": "python"}
    told = text.summary(found)
    assert "stacks=python" in told
    of_advice = ("_graph", "chained", "doubled_state", "unused_gradients", "left_over", "untrained")
    assert not [note for note in of_advice if note in told]


def test_names_with_marks_of_html_reach_the_page_as_they_are(plan: Plan) -> None:
    name = "<!-- <script> </script> \u2028 \\"
    plan.event("user", f"note={name}")
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=plan.stack(5, name))
    text = html.page(trace.analyse(plan.done()))
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text)
    assert "<" not in found
    content = json.loads(found)
    assert content["settings"]["note"] == name
    assert any(frame[0].endswith(name) for frame in content["frames"])


def test_the_page_names_no_other_place(plan: Plan) -> None:
    text = html.page(trace.analyse(rich(plan), moments=4))
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert "</script><script>alert" not in text
    assert "default-src 'none'" in text
    assert re.search(r"<noscript>.*<code>pyalloc report FILE</code>.*</noscript>", text)


@needs_browser
def test_thousands_of_live_blocks_are_drawn_in_few_rectangles(plan: Plan, tmp_path: Path) -> None:
    """They hold as much as the blocks: thin ones are joined, and each is drawn once for all its equal columns."""
    n_live, n_short = 3000, 2000
    plan.event("segment_alloc", addr=1 << 30, bytes=8192 * MIB)
    for i in range(n_live):
        stack = plan.stack(i % 40)
        plan.event("alloc", addr=(1 << 30) + i * MIB, bytes=MIB // (i % 3 + 1), stack=stack)
    plan.event("alloc", addr=(1 << 30) + 7000 * MIB, bytes=300 * MIB, stack=plan.stack(50))
    for i in range(n_short):
        at = (1 << 30) + (n_live + i % 300) * MIB
        if i >= 300:
            plan.event("free_requested", addr=at)
        plan.event("alloc", addr=at, bytes=MIB, stack=plan.stack(41 + i % 5))
    target = tmp_path / "report.html"
    pyalloc("report", plan.done(), "-o", target, "--no-replay", "-q")
    with browser() as page:
        page.visit(target)
        for colour in ("category", "line"):
            page.value(f"$('by-{colour}').click()")
            told = page.value(
                "(() => { let n = 0; const real = CanvasRenderingContext2D.prototype.fillRect;"
                "CanvasRenderingContext2D.prototype.fillRect = "
                "function (...box) { n++; return real.apply(this, box); };"
                "pictured = ''; blocks(); const drawn = n; n = 0; drag = [100, 200]; blocks(); drag = null;"
                "CanvasRenderingContext2D.prototype.fillRect = real;"
                "const fills = W.spans.map((s, i) => spanColor(i));"
                "const off = columns.map(c => { const p = piecesOf(c, W.spans, fills, columnScale, -1);"
                "  return p.reduce((sum, v, i) => i % 3 ? sum : sum + v, 0) "
                "    - c.reduce((sum, i) => sum + W.spans[i][0], 0) * columnScale; });"
                "return [drawn, n, Math.max(...off.map(Math.abs)), Math.max(...columns.map(c => c.length))]; })()"
            )
            drawn, dragging, off, live = told
            assert live > 3000 and off < 1e-6
            assert 10 < drawn < 100_000, drawn  # one for each block and column: above three million
            assert dragging == 1  # over the existing picture
