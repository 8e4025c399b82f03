"""Two recordings, or two moments of one, compared: the sentence, the tables, the page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from instrument.browsing import browser, needs_browser
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.analysis import aligned
from pyalloc.analysis.comparing import Comparison, Side
from pyalloc.report import compared, comparison

MODEL = "/home/me/{}/model.py"


def training(
    path: Path,
    *,
    batch: int = 4,
    line: int = 10,
    folder: str = "a",
    n_steps: int = 3,
    more: int = 0,
) -> Path:
    """Steps of forward and backward: weights, activations of two lines, and more that only one run may have."""
    plan = Plan(path)
    file = MODEL.format(folder)
    plan.event("user", f"command=python train.py --batch {batch}")
    plan.event("segment_alloc", addr=1 << 30, bytes=500 * MIB)
    at = 1 << 30

    def alloc(n: int, number: int, name: str) -> int:
        nonlocal at
        plan.event("alloc", addr=at, bytes=n, stack=plan.stack(number, name, file))
        at += n
        return at - n

    alloc(64 * MIB, line - 5, "__init__")
    for step in range(n_steps):
        begin = at
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        made = [
            alloc(batch * 8 * MIB, line, "attention"),
            alloc(batch * 2 * MIB, line + 1, "attention"),
        ]
        if more:
            made.append(alloc(more, line + 30, "cache"))
        plan.event("phase_end", "forward")
        plan.event("phase_begin", "backward")
        for each in made:
            plan.event("free_requested", addr=each)
        plan.event("phase_end", "backward")
        at = begin
    return plan.done()


def compared_of(before: Path, after: Path) -> Comparison:
    first, second = (trace.analyse(path) for path in (before, after))
    return Comparison(Side(first, first.peak, before.name), Side(second, second.peak, after.name))


def test_the_first_sentence_says_how_much_and_by_what(tmp_path: Path) -> None:
    before = training(tmp_path / "before.pya")
    after = training(tmp_path / "after.pya", batch=8, more=MIB)
    out = pyalloc("diff", before, after, "-q")
    told = " ".join(out.split())
    assert told.startswith(
        "before.pya: peak 104.0 MiB; after.pya: 145.0 MiB, 41.0 MiB more (39.4 %). Most of it: "
        "+40.0 MiB activations: attention (a/model.py); 1 other +1.0 MiB. "
    )
    assert "command --batch 8 (before: --batch 4)" in told
    assert re.search(r"\n +\+32\.0 MiB +32\.0 MiB +64\.0 MiB  a/model\.py:10 attention\n", out)
    assert re.search(r"\n +\+41\.0 MiB +104\.0 MiB +145\.0 MiB  forward\n", out)
    assert all(len(line) <= 80 for line in out.splitlines()), out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((20, 100, -30, 50), "+100.0 MiB {1}, +50.0 MiB {3}, -30.0 MiB {2}; 1 other +20.0 MiB."),
        ((100, 6, 4, 3), "+100.0 MiB {0}, +6.0 MiB {1}; 2 others +7.0 MiB."),
        ((100, 6, 4, -4), "+100.0 MiB {0}, +6.0 MiB {1}."),  # those that make up for each other
    ],
)
def test_the_sentence_names_the_few_largest_changes(
    tmp_path: Path, changes: tuple[int, ...], told: str
) -> None:
    paths = []
    for which in range(2):
        plan = Plan(tmp_path / f"{which}.pya")
        for i, n in enumerate(changes):
            held = 40 + which * n
            plan.event("alloc", addr=i << 40, bytes=held * MIB, stack=plan.stack(i, f"f{i}"))
        paths.append(plan.done())
    names = [f"other: f{i} (me/model.py)" for i in range(4)]
    sentence = compared.sentence(compared_of(*paths))
    assert sentence.endswith(f"Most of it: {told.format(*names)}")


def test_lines_that_moved_are_one(tmp_path: Path) -> None:
    """In another folder, and three lines further down; attention is as before, and what was added is reported."""
    before = training(tmp_path / "before.pya")
    after = training(tmp_path / "after.pya", line=13, folder="b", more=5 * MIB)
    told = compared_of(before, after)
    assert told.n_moved == 3
    changed = [(row.name, row.bytes) for row in told.tables["line"] if row.bytes]
    assert changed == [("b/model.py:43 cache", 5 * MIB)]
    assert "3 lines of code moved" in " ".join(pyalloc("diff", before, after, "-q").split())


def test_nothing_that_changed_is_said_to_be_nothing(tmp_path: Path) -> None:
    one, other = training(tmp_path / "one.pya"), training(tmp_path / "other.pya")
    out = pyalloc("diff", one, other, "-q")
    assert out.startswith("one.pya: peak 104.0 MiB; other.pya: 104.0 MiB. Every line holds as much")
    assert "Settings differ" not in out and "moved" not in out and " change " not in out


def test_what_makes_up_for_something_is_told_where_the_peak_is_the_same(tmp_path: Path) -> None:
    before = training(tmp_path / "before.pya", more=20 * MIB)
    after = training(tmp_path / "after.pya", batch=6)
    out = " ".join(pyalloc("diff", before, after, "-q").split())
    assert "124.0 MiB; after.pya: 124.0 MiB, unchanged. Most of it:" in out
    assert "+20.0 MiB activations: attention" in out and "-20.0 MiB activations: cache" in out


def test_categories_that_only_one_knows_are_not_compared(tmp_path: Path, plan: Plan) -> None:
    """A snapshot without ranges beside a recording."""
    file = MODEL.format("a")
    for i, (n, line, name) in enumerate([(64, 5, "__init__"), (40, 10, "attention")]):
        plan.event("alloc", addr=(i + 1) << 30, bytes=n * MIB, stack=plan.stack(line, name, file))
    told = compared_of(training(tmp_path / "before.pya"), plan.done())
    assert "category" not in told.tables and "contributor" not in told.tables
    assert "+8.0 MiB a/model.py:10 attention" in compared.sentence(told)
    assert "Only one of the two has forward and backward phases" in " ".join(compared.notes(told))


def test_without_stacks_categories_or_sizes_are_named(tmp_path: Path) -> None:
    paths = []
    for which, (n, phase) in enumerate([(2, ""), (300, ""), (300, "forward")]):
        plan = Plan(tmp_path / f"{which}.pya")
        if phase:
            plan.event("phase_begin", phase)
        plan.event("alloc", addr=1 << 30, bytes=n * MIB)
        for i in range(4):  # so that the first is not one that is freed at once
            plan.event("alloc", addr=(i + 2) << 40, bytes=512)
        if phase:
            plan.event("phase_end", phase)
        paths.append(plan.done())
    told = compared.sentence(compared_of(*paths[:2]))
    assert (
        "298.0 MiB more (150 times as much). Most of it: +300.0 MiB blocks of up to 512 MiB" in told
    )
    told = compared.sentence(compared_of(paths[2], paths[2]))
    assert told.endswith("300.0 MiB. Every line holds as much as before.")
    assert compared_of(paths[2], paths[2]).contributors[0].name == "activations"


def one_block(path: Path, how: str) -> Path:
    """With something else that a table may be about."""
    plan = Plan(path)
    at = 1 << 30
    if how == "module":
        plan.event("phase_begin", "module:layers.0.mlp")
    if how == "pool":
        plan.event("pool_begin", addr=1, arg=0)
    plan.event("alloc", addr=at, bytes=MIB, stack=plan.stack(3))
    if how == "module":
        plan.event("phase_end", "module:layers.0.mlp")
    if how == "label":
        plan.event("label", "mine", addr=at)
    if how == "stream":
        plan.event("alloc", addr=at + MIB, bytes=MIB, stream=7, stack=plan.stack(3))
    return plan.done()


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ("", "", []),
        ("module", "module", ["module"]),
        ("module", "", []),
        ("", "module", []),
        ("label", "", ["label"]),
        ("", "stream", ["stream"]),
        ("pool", "", ["pool"]),
    ],
)
def test_tables_are_of_what_the_recordings_know(
    tmp_path: Path, before: str, after: str, more: list[str]
) -> None:
    paths = one_block(tmp_path / "a.pya", before), one_block(tmp_path / "b.pya", after)
    told = json.loads(pyalloc("diff", *paths, "--json", "-q"))
    assert sorted(told["by"]) == sorted(["category", "contributor", "size", *more])


def test_a_side_without_any_memory_is_told(tmp_path: Path) -> None:
    empty = Plan(tmp_path / "empty.pya").done()
    out = pyalloc("diff", training(tmp_path / "before.pya"), empty, "-q")
    assert out.startswith("There is nothing to compare: empty.pya has no allocations.\n")


def test_what_has_no_two_sides_is_refused_and_two_steps_are_enough(tmp_path: Path) -> None:
    one = training(tmp_path / "one.pya", n_steps=1)
    more = training(tmp_path / "more.pya")
    for words in ((one, more, one), (one, more, "--steps", 0, 1)):
        assert "two files, or one file" in pyalloc("diff", *words, expect=2)
    assert "fewer than two steps to compare" in pyalloc("diff", one, expect=2)
    two = training(tmp_path / "two.pya", n_steps=2)
    assert pyalloc("diff", two).startswith("step 0: 64.0 MiB; step 1: 64.0 MiB.")


def test_two_files_of_one_name_are_told_by_their_folders(tmp_path: Path) -> None:
    paths = []
    for folder in ("main", "work"):
        (tmp_path / folder).mkdir()
        paths.append(training(tmp_path / folder / "out.pya"))
    told = json.loads(pyalloc("diff", *paths, "--json", "-q"))
    assert [told["before"]["name"], told["after"]["name"]] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("allowed", "code"),
    [("39.5%", 0), ("39%", 1), ("0%", 1), ("41 MB", 0), ("40.9MiB", 1), ("5", 1)],
)
def test_growth_above_what_is_allowed_fails(tmp_path: Path, allowed: str, code: int) -> None:
    """104 MiB become 145; in the other direction nothing fails."""
    before = training(tmp_path / "before.pya")
    after = training(tmp_path / "after.pya", batch=8, more=MIB)
    out = pyalloc("diff", before, after, "-q", "--fail-above", allowed, expect=code)
    assert ("after.pya holds 41.0 MiB more; --fail-above allows" in out) == bool(code)
    pyalloc("diff", after, before, "-q", "--fail-above", allowed)
    page = tmp_path / "diff.html"
    pyalloc("diff", before, after, "-q", "-o", page, "--fail-above", allowed, expect=code)
    assert page.exists()


@pytest.mark.parametrize("text", ["much", "-5%", "5 percent", "", "%"])
def test_what_is_no_allowance_is_told(tmp_path: Path, text: str) -> None:
    out = pyalloc("diff", training(tmp_path / "a.pya"), f"--fail-above={text}", expect=2)
    assert "is neither a share nor a size; write for example 5% or 100MB" in out


def test_numbers_of_the_comparison_for_programs(tmp_path: Path) -> None:
    before = training(tmp_path / "before.pya")
    after = training(tmp_path / "after.pya", batch=8, n_steps=5)
    told = json.loads(pyalloc("diff", before, after, "--json", "-q"))
    assert told["after"]["allocated_bytes"] - told["before"]["allocated_bytes"] == 40 * MIB
    assert told["settings"] == [{"name": "command", "before": "--batch 4", "after": "--batch 8"}]
    for kind in ("contributor", "category", "size"):
        rows = told["by"][kind]
        assert sum(row["after_bytes"] - row["before_bytes"] for row in rows) == 40 * MIB, kind
    assert figures(told, "step") == [(f"step {i}", 104, 144) for i in range(3)]
    told = json.loads(pyalloc("diff", after, "--steps", 0, 4, "--json", "-q"))
    assert "step" not in told["by"] and "phase" not in told["by"]


def figures(told: dict[str, Any], kind: str) -> list[tuple[str, float, float]]:
    """Rows of a table in MiB."""
    return [
        (row["name"], row["before_bytes"] / MIB, row["after_bytes"] / MIB)
        for row in told["by"][kind]
    ]


def test_phases_are_compared_at_their_highest(tmp_path: Path) -> None:
    """Those that both runs have, without those inside others."""
    paths = []
    for other, heights in (("load", (2, 5, 1)), ("save", (3, 1))):
        plan = Plan(tmp_path / f"{other}.pya")
        for name, n in ((other, 1), *(("forward", n) for n in heights)):
            plan.event("phase_begin", name)
            plan.event("alloc", addr=1 << 30, bytes=n * MIB)
            plan.event("phase_begin", "loss")
            plan.event("alloc", addr=1 << 31, bytes=MIB)
            plan.event("free_requested", addr=1 << 31)
            plan.event("phase_end", "loss")
            plan.event("free_requested", addr=1 << 30)
            plan.event("phase_end", name)
        paths.append(plan.done())
    told = json.loads(pyalloc("diff", *paths, "--json", "-q"))
    assert figures(told, "phase") == [("forward", 6, 4)]


def test_steps_and_phases_of_both_lie_together(tmp_path: Path) -> None:
    """One run has more events in each forward pass, and two steps more."""
    before = trace.analyse(training(tmp_path / "before.pya"))
    after = trace.analyse(training(tmp_path / "after.pya", more=MIB, n_steps=5))
    axis = aligned.axis(before, after)
    assert [number for number, _ in axis.steps] == [0, 1, 2]
    pairs = {(a, b) for a, b, _ in axis.marks}
    for i in range(3):
        assert (before.steps[i][1], after.steps[i][1]) in pairs
    for name in ("forward", "backward"):
        both = [[p for p in found.phases if p.name == name] for found in (before, after)]
        for one, other in zip(*both, strict=False):
            assert {(one.begin, other.begin), (one.end, other.end)} <= pairs
    ends = before.totals["n_events"], after.totals["n_events"]
    assert axis.marks[0] == (0, 0, 0.0) and axis.marks[-1] == (*ends, 1.0)
    for i in range(3):  # events and places
        column = [mark[i] for mark in axis.marks]
        assert column == sorted(column)
    assert 0.4 < next(place for a, b, place in axis.marks if b == after.steps[3][1]) < 0.7


def test_without_steps_the_whole_runs_lie_together(plan: Plan, tmp_path: Path) -> None:
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    one = trace.analyse(plan.done())
    other = Plan(tmp_path / "other.pya")
    for i in range(3):
        other.event("alloc", addr=(i + 1) << 30, bytes=MIB)
    axis = aligned.axis(one, trace.analyse(other.done()))
    assert (axis.marks[0], axis.marks[-1], axis.steps) == ((0, 0, 0.0), (1, 3, 1.0), [])


def passes(path: Path, names: list[str], numbers: list[int] | None = None) -> Path:
    plan = Plan(path)
    for i, name in enumerate(names):
        if numbers:
            plan.event("step", "step", arg=numbers[i])
        plan.event("phase_begin", name)
        plan.event("alloc", addr=(i + 1) << 20, bytes=512)
        plan.event("phase_end", name)
    return plan.done()


def test_long_runs_lie_together_without_looking_at_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server has tens of thousands of passes with one name and no step; another's steps are numbered by twos."""
    looked_at = [0]
    matcher = aligned.difflib.SequenceMatcher

    def watched(junk: None, first: list[Any], second: list[Any], **options: bool) -> Any:
        looked_at.append(len(first) * len(second))
        return matcher(junk, first, second, **options)

    monkeypatch.setattr(aligned.difflib, "SequenceMatcher", watched)
    n = 1100
    all_alike, numbers = ["inference"] * n, list(range(n))
    begun_and_ended_otherwise = ["load", *all_alike, "save"]
    for first, second, n_marks in (
        ((all_alike,), (all_alike[1:],), 2 * n),
        ((["load", *all_alike],), (["load", "load", *all_alike],), 2 * n + 4),
        ((["begin", *all_alike, "end"],), (begun_and_ended_otherwise,), 2),
        ((all_alike, numbers), (all_alike, [2 * i for i in numbers]), aligned._MOST_STEPS // 4),
    ):
        one, other = passes(tmp_path / "one.pya", *first), passes(tmp_path / "other.pya", *second)
        axis = aligned.axis(trace.analyse(one), trace.analyse(other))
        assert len(axis.marks) >= n_marks
        for i in range(3):
            column = [mark[i] for mark in axis.marks]
            assert column == sorted(column)
        for path in (one, other):
            path.unlink()
    assert max(looked_at) <= 1_000_000


def content(told: Comparison) -> dict[str, Any]:
    (found,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', comparison.page(told)
    )
    data: dict[str, Any] = json.loads(found)
    return data


def test_the_pages_flame_graph_has_the_bytes_of_both(tmp_path: Path) -> None:
    """Also if there are more stacks than it shows."""
    paths = []
    for which in range(2):
        plan = Plan(tmp_path / f"{which}.pya")
        for i in range(2000):
            n = 512 * (i % 7 + 1 + which * (i == 5))
            plan.event("alloc", addr=(i + 1) << 30, bytes=n, stack=plan.stack(i, f"f{i}"))
        paths.append(plan.done())
    told = compared_of(*paths)
    rows = content(told)["flame"]
    assert len(rows) <= 1500
    for column, side in ((0, told.before), (2, told.after)):
        assert sum(row[column] for row in rows) == side.moment.allocated_bytes
        assert sum(row[column + 1] for row in rows) == 2000
    (grown,) = [row for row in rows if row[0] != row[2]]
    assert grown[2] - grown[0] == 512 and rows[0] == grown  # what changed comes first


def test_a_page_is_written_once(tmp_path: Path) -> None:
    before, after = training(tmp_path / "before.pya"), training(tmp_path / "after.pya", batch=8)
    page = tmp_path / "diff.html"
    out = pyalloc("diff", before, after, "-o", page)
    assert "40.0 MiB more (38.5 %)" in " ".join(out.split()) and f"wrote {page}" in out
    assert "exists; --force overwrites it" in pyalloc("diff", before, after, "-o", page, expect=2)
    pyalloc("diff", before, after, "-o", page, "--force")
    shutil.copy(after, tmp_path / "cut.pya.part")
    with (tmp_path / "cut.pya.part").open("rb+") as file:
        file.truncate(after.stat().st_size - 1)
    out = pyalloc("diff", before, tmp_path / "cut.pya.part", "-q")
    assert "The file was cut off" in out and "40.0 MiB more" in " ".join(out.split())


@needs_browser
def test_the_page_compares_in_a_browser(tmp_path: Path) -> None:
    before = training(tmp_path / "before.pya", more=6 * MIB)
    after = training(tmp_path / "after<script>.pya", batch=8)
    page = tmp_path / "diff.html"
    pyalloc("diff", before, after, "-o", page)
    with browser() as view:
        for domain in ("Runtime", "Network", "Log"):
            view.call(f"{domain}.enable")
        view.visit(page)
        assert "34.0 MiB more" in view.value("$('answer').textContent")
        column = "[...$('changes').tBodies[0].rows].map(r => r.cells[{}].textContent)"
        assert view.value(column.format(0)) == ["+40.0 MiB", "-6.0 MiB", "0"]
        head = "$('changes').tHead.rows[0].cells[{}]"
        view.value(f"{head.format(2)}.firstChild.click()")  # after, largest first
        assert view.value(column.format(2)) == ["80.0 MiB", "64.0 MiB", "0 bytes"]
        assert view.value(f"{head.format(2)}.getAttribute('aria-sort')") == "descending"
        view.value(f"{head.format(2)}.firstChild.click()")
        assert view.value(column.format(2)) == ["0 bytes", "64.0 MiB", "80.0 MiB"]
        view.value(f"{head.format(4)}.firstChild.click()")  # names, from a on
        names = view.value(column.format(4))
        assert names == sorted(names)
        view.value("document.querySelector('[data-kind=step]').click()")
        assert view.value(column.format(4)) == ["step 0", "step 1", "step 2"]
        press = "(id, key) => $(id).dispatchEvent(new KeyboardEvent('keydown', {key, cancelable: true}))"
        assert view.value(f"({press})('timeline', 'ArrowRight')") is False
        told = view.value("$('timeline-at').textContent")
        assert told.startswith("step 0, forward: 110.0 MiB, then 144.0 MiB, +34.0 MiB"), told
        assert view.value(f"({press})('timeline', 'Tab')") is True
        assert view.value("$('flame-title').textContent").endswith(": 110.0 MiB, then 144.0 MiB")
        widths = {}
        for kind in ("after", "before", "what changed"):
            view.value(f"$('width').value = '{kind}', $('width').onchange()")
            cells = view.value("cells.map(c => [c[3].name, c[3].bytes])")
            widths[kind] = dict(cells)
        assert widths["after"]["all"] == 144 * MIB and widths["before"]["all"] == 110 * MIB
        assert widths["what changed"]["all"] == 46 * MIB
        assert "a/model.py:40 cache" not in widths["after"]
        assert widths["before"]["a/model.py:40 cache"] == 6 * MIB
        color = "LOOK.color(cells.find(c => c[3].name.endsWith('{}'))[3])"
        view.value("$('width').value = 'before', $('width').onchange()")
        reds = [view.value(color.format(name)) for name in ("10 attention", "cache", "__init__")]
        assert reds[0].startswith("#ef4444") and reds[1].startswith("#2563eb") and len(reds[2]) < 9
        screen = {"height": 800, "deviceScaleFactor": 1, "mobile": True}
        view.call("Emulation.setDeviceMetricsOverride", width=390, **screen)
        assert view.value("document.documentElement.scrollWidth") == 390
        methods = [event["method"] for event in view.events]
        for wrong in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            assert wrong not in methods, view.events
        requests = [
            event["params"]["request"]["url"]
            for event in view.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert requests in ([], [page.as_uri()])


@pytest.mark.parametrize("words", [["--steps", "0", "2"], []])
def test_a_page_of_two_steps_of_one(tmp_path: Path, words: list[str]) -> None:
    path, page = training(tmp_path / "out.pya"), tmp_path / "steps.html"
    pyalloc("diff", path, *words, "-o", page)
    assert '"isOfOne":true' in page.read_text()
