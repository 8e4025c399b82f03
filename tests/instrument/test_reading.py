"""Reports over several ranks and steps, and how much memory reading takes."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instrument.tools import MIB, ROOT, Plan, pyalloc
from pyalloc import cli, trace, when
from pyalloc.common import console
from pyalloc.report.data import summary
from pyalloc.report.text import phase_table
from pyalloc.traces import convert, pickles


def rank(folder: Path, number: int, extra: int) -> Path:
    plan = Plan(folder / f"out.rank{number}.pya")
    for i in range(10):
        plan.event("alloc", addr=(i + 1) << 30, bytes=30 * MIB, stack=plan.stack(5))
    if extra:
        plan.event("alloc", addr=1 << 40, bytes=extra, stack=plan.stack(9, "extra"))
    return plan.done()


def test_the_odd_rank_is_named_and_what_it_holds_more_of(tmp_path: Path) -> None:
    paths = [rank(tmp_path, i, 50 * MIB if i == 2 else 0) for i in range(4)]
    out = pyalloc("report", *paths, "-q")
    odd = next(line for line in out.splitlines() if "<odd" in line)
    assert odd.startswith("out.rank2.pya") and "+16.7%" in odd
    assert "the odd one is out.rank2.pya" in out
    assert "+  50.0 MiB  me/model.py:9 extra" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    page = tmp_path / "ranks.html"
    pyalloc("report", *paths, "-o", page)
    assert "out.rank2.pya · memory" in page.read_text() and "out.rank3.pya" in page.read_text()
    out = pyalloc("report", paths[1], rank(tmp_path, 4, 512), "--no-replay")
    assert "all ranks are alike" in out and out.count("+0.0%") == 2


def test_two_runs_and_two_steps_are_compared(tmp_path: Path, plan: Plan) -> None:
    first, second = rank(tmp_path, 0, 0), rank(tmp_path, 1, 50 * MIB)
    data = json.loads(pyalloc("diff", first, second, "--json", "-q"))
    assert data["changes"][0]["after_bytes"] - data["changes"][0]["before_bytes"] == 50 * MIB
    for step in range(30):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=plan.stack(8, "leaky"))
    path = plan.done()
    data = json.loads(pyalloc("diff", path, "--steps", "11", "17", "--json", "-q", expect=1))
    change = data["changes"][0]
    assert (change["before_bytes"], change["after_bytes"]) == (11 * MIB, 17 * MIB)
    assert data["verdict"].startswith("leak: 1.00 MiB more at each step")
    out = pyalloc("diff", path, "--steps", "1", "40", expect=2)
    assert "there is no step 40; steps go from 0 to 29\n" in out
    out = pyalloc("diff", first, "--steps", "1", "2", expect=2)
    assert "there is no step 1; the file has no steps\n" in out


def test_what_begins_after_the_last_step_is_its_end(plan: Plan) -> None:
    """Steps that end with the optimizer's: the end of the last one begins a step that the program does not have."""
    for step in range(3, 6):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=plan.stack(8))
    plan.event("step", "step", arg=6)
    plan.event("free_requested", addr=4 << 30)
    plan.event("free_completed", addr=4 << 30)
    path = plan.done()
    out = pyalloc("diff", path, "--steps", "3", "6", "-q")
    assert out.startswith("step 3: 0 bytes; the end of step 5: 3.0 MiB, 3.0 MiB more. ")
    out = " ".join(pyalloc("diff", path, "--steps", "3", "7", expect=2).split())
    assert "there is no step 7; steps go from 3 to 5; 6 means the end of the last one" in out


def test_lines_of_alike_names_are_told_apart(plan: Plan, tmp_path: Path) -> None:
    """Names that differ only at their ends."""
    plan.event("segment_alloc", addr=1 << 30, bytes=40 * MIB)
    for i, name in enumerate(("first", "second")):
        at, n = (1 << 30) + i * 20 * MIB, (i + 4) * MIB
        file = f"/home/me/user-scripts/{name}.py"
        plan.event("alloc", addr=at, bytes=n, stack=plan.stack(3, "forward", file))
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=at + 10 * MIB, bytes=n)
        plan.event("phase_end", "backward")
    empty = Plan(tmp_path / "empty.pya")
    empty.event("alloc", addr=1 << 30, bytes=512, stack=empty.stack(1))
    out = pyalloc("diff", empty.done(), plan.done(), "-q")
    told = " ".join(out.split())
    for name in ("first", "second"):
        assert f"gradient of the tensor made at user- scripts/{name}.py:3" in told, out
    assert all(len(line) <= 80 for line in out.splitlines()), out


def test_a_verdict_names_its_file_and_what_is_too_little(plan: Plan, tmp_path: Path) -> None:
    for step in range(8):
        plan.event("step", "step", arg=step)
        plan.event("alloc", addr=(step + 1) << 30, bytes=1024, stack=plan.stack(8))
    path = plan.done()
    out = " ".join(pyalloc("diff", rank(tmp_path, 0, 0), path, "-q").split())
    assert f"verdict on {path.name} by itself: no leak" in out and "growth below 0.25 MiB" in out
    assert "verdict: no leak" in pyalloc("diff", path, "-q")


def test_the_files_of_ranks_are_named_where_there_is_none_without_one(tmp_path: Path) -> None:
    for number in (1, 0):
        rank(tmp_path, number, 0)
    told = pyalloc("report", "out.pya", expect=2, cwd=tmp_path)
    assert "each rank has its own file: out.rank0.pya out.rank1.pya\n" in told
    (tmp_path / "out.rank0.pya").rename(tmp_path / "o\nut.rank0.pya")
    told = pyalloc("report", "o\nut.pya", expect=2, cwd=tmp_path)
    assert r"each rank has its own file: $'o\x0aut.rank0.pya'" in told


def test_top_at_any_moment(plan: Plan) -> None:
    for i in range(6):
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB, stack=plan.stack(i))
    path = plan.done()
    assert "2.0 MiB" in pyalloc("top", path, "--by", "category", "--at", "1")
    assert "--at takes peak" in pyalloc("top", path, "--at", "\N{SUPERSCRIPT TWO}", expect=2)
    assert "6.0 MiB" in pyalloc("top", path, "--by", "category", "--at", "end")
    assert "never ran out" in pyalloc("top", path, "--at", "oom", expect=2)
    for wrong in ("6", "later", "-1", "9" * 5000):
        out = pyalloc("top", path, f"--at={wrong}", expect=2)
        assert "up to 5" in out and len(out) < 200
    assert "did you mean 8GB?" in pyalloc("replay", path, "--limit", "8", expect=2)
    small = pyalloc("replay", path, "--limit", "100KB", expect=2)
    assert "write for example 24GB" in small and "KBGB" not in small
    huge = "99999999999999GB"
    assert "more than any device has" in pyalloc("replay", path, "--limit", huge, expect=2)


def test_top_names_each_block(plan: Plan) -> None:
    plan.event("step", "step", arg=3)
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=0x7F0000, bytes=MIB, stack=plan.stack(5))
    plan.event("phase_end", "forward")
    plan.event("alloc", addr=0x9F0000, bytes=2 * MIB, device=1)
    shown = pyalloc("top", plan.done(), "--by", "block", "-q")
    assert all(len(line) <= 80 for line in shown.splitlines())
    _, first, second, *_ = re.split(r"\n +(?=\d+\.\d MiB)", shown)
    assert "(no stack), at 0x9f0000 of device 1, step 3, event 4" in " ".join(first.split())
    told = "me/model.py:5 work, at 0x7f0000 of device 0, made in forward, step 3, event 2"
    assert told in " ".join(second.split())


def test_phases_that_were_left_open_by_an_exception_end(plan: Plan) -> None:
    plan.event("phase_begin", "forward")
    plan.event("phase_begin", "inner")
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "optimizer")
    found = trace.analyse(plan.done())
    assert [(p.name, p.depth) for p in found.phases] == [
        ("forward", 0),
        ("inner", 1),
        ("optimizer", 0),
    ]


@pytest.mark.parametrize("n", [1, 20])
def test_phases_within_others_have_their_row(plan: Plan, n: int) -> None:
    """A closure's backward lies within the optimizer's step, and so does the peak."""
    for _ in range(n):
        plan.event("phase_begin", "optimizer")
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=0x200000, bytes=4 * MIB)
        plan.event("free_requested", addr=0x200000)
        plan.event("free_completed", addr=0x200000)
        plan.event("phase_end", "backward")
        plan.event("phase_end", "optimizer")
    rows = phase_table(trace.analyse(plan.done()))
    assert [bool(re.search(r"\bbackward .*\b4\.0 MiB", row)) for row in rows] == [
        False,
        False,
        True,
    ]


class Watched(list[Any]):
    """A list that counts how often it is iterated over."""

    n_times = 0

    def __iter__(self) -> Iterator[Any]:
        self.n_times += 1
        return super().__iter__()


def test_phases_that_have_a_name_each_are_gone_through_once(plan: Plan) -> None:
    """As `phase(f"batch {n}")` makes them, up to 65,536."""
    for i in range(30):
        plan.event("phase_begin", f"batch {i}")
        plan.event("phase_end", f"batch {i}")
    found = trace.analyse(plan.done())
    found.phases = Watched(found.phases)
    rows = phase_table(found)
    assert len(rows) == 14 and rows[1].startswith("batch 0 ") and rows[-1] == "  and 18 more"
    assert found.phases.n_times <= 2


def test_the_step_of_the_peak_is_looked_at_block_by_block(plan: Plan) -> None:
    """Blocks that touch the step are shown, earlier and later ones are not, small ones give way."""
    for step in range(3):
        plan.event("step", "step", arg=step)
        if step == 1:
            for i in range(9000):
                plan.event("alloc", addr=(i + 1) << 30, bytes=512 * (i % 3 + 1))
            for i in range(9000):
                plan.event("free_requested", addr=(i + 1) << 30)
        plan.event("alloc", addr=(step + 1) << 50, bytes=MIB, stack=plan.stack(step))
        if step:
            plan.event("free_requested", addr=step << 50)
    found = trace.analyse(plan.done())
    assert found.window_bins[0][0] == found.steps[1][1]
    assert found.window_end == found.steps[2][1]
    large = [span for span in found.spans if span.bytes == MIB]
    assert [span.step for span in large] == [0, 1]
    assert 3000 < len(found.spans) <= 8192
    assert min(span.bytes for span in found.spans) > 512
    assert max(b[2] for b in found.window_bins) == found.totals["peak_bytes"]


@pytest.mark.slow
def test_a_long_trace_is_read_in_bounded_memory(plan: Plan) -> None:
    event, alloc, free = plan.writer.event, 1, 2
    stacks = [plan.stack(line) for line in range(100)]
    for i in range(1_000_000):
        at = (1 << 30) + (i % 1000) * MIB
        if i >= 1000:
            event(free, addr=at, time_ns=i)
        event(alloc, addr=at, bytes=(i % 9 + 1) << 16, stack=stacks[i % 100], time_ns=i)
    path = plan.done()
    code = f"""
import sys
from pathlib import Path
sys.path.append("tests")
from peak_memory import peak_kib
from pyalloc import trace
before = peak_kib()
found = trace.analyse(Path({str(path)!r}), moments=24)
assert found.totals["n_events"] == 1_999_000
print(peak_kib() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100 * 1024  # KiB: for 24 states of 1000 blocks, whatever the length


def test_phases_and_steps_have_the_same_numbers(plan: Plan) -> None:
    plan.event("phase_begin", "load")
    plan.event("phase_end", "load")
    for step in (7, 8):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=MIB)
        plan.event("free_requested", addr=1 << 30)
        plan.event("phase_end", "forward")
    told = summary(trace.analyse(plan.done()))
    assert [step["number"] for step in told["steps"]] == [7, 8]
    assert [phase["step"] for phase in told["phases"]] == [-1, 7, 8]


@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["top", "--at", "3"],
        ["diff", "--steps", "0", "2"],
        ["stats"],
        ["export", "--to", "csv"],
    ],
)
def test_a_snapshot_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """With a million entries that takes half a minute."""
    entries = []
    ranges = []
    for step in range(12):
        for action in ("alloc", "free_requested", "free_completed"):
            entries.append(
                {"action": action, "addr": 1 << 30, "size": 1 << 20, "time_us": 10 * step + 5}
            )
        for stage in ("START", "END"):
            ranges.append(
                {
                    "name": f"ProfilerStep#{step}",
                    "stage": stage,
                    "time_us": 10 * step + 9 * (stage == "END"),
                }
            )
    path = tmp_path / "snapshot.pickle"
    content = {"segments": [], "device_traces": [entries], "external_annotations": ranges}
    path.write_bytes(pickle.dumps(content))
    reads: list[Path] = []
    told: list[tuple[int, int]] = []
    load = pickles.load
    monkeypatch.setattr(
        pickles, "load", lambda file, *rest: (reads.append(file), load(file, *rest))[1]
    )
    shown: set[console.Progress] = set()
    monkeypatch.setattr(
        console.Progress, "__call__", lambda self, *done: (shown.add(self), told.append(done))
    )
    monkeypatch.setattr(console.Progress, "close", lambda self: shown.discard(self))
    monkeypatch.setattr(convert, "_TELL_EVERY", 9)
    assert cli.main([words[0], str(path), *words[1:]]) == 0
    assert reads == [path]
    assert not shown  # otherwise a line would stay on the terminal
    size = path.stat().st_size
    of_entries = [done for done, _ in told if done >= size // 2]  # what the unpickler reads before
    assert [(36 + 9 * i) * size // 72 for i in range(4)] == of_entries[:4]
    assert told[0] == (0, size)


def test_a_snapshot_is_dropped_once_a_trace_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes more memory than all that follows."""

    class Held(dict[str, object]):
        """A dict that weak references may point to."""

    held: list[weakref.ref[Held]] = []

    def load(*_: object) -> Held:
        value = Held(segments=[], device_traces=[])
        held.append(weakref.ref(value))
        return value

    monkeypatch.setattr(pickles, "load", load)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({}))
    with trace.read_once(path):
        assert [each() for each in held] == [None]


def test_a_snapshot_is_read_with_progress_and_may_be_interrupted(tmp_path: Path) -> None:
    """The unpickler is C code that lets no Ctrl-C in until everything is read, minutes later."""
    path = tmp_path / "snapshot.pickle"
    names = [f"line {i}" for i in range(100_000)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [], "names": names}))
    size = path.stat().st_size
    told: list[int] = []
    pickles.load(path, lambda done, total: told.append(done))
    assert told == sorted(told) and told[0] == 0 and len(set(told)) > size // 200_000 > 3

    def interrupted(done: int, total: int) -> None:
        assert total == size
        if done > total / 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pickles.load(path, interrupted)


@pytest.mark.parametrize("command", ["report", "top", "stats", "replay"])
def test_a_dash_is_told_apart_from_a_missing_file(command: str) -> None:
    assert "'-' does not work here" in pyalloc(command, "-", expect=2)


@pytest.fixture
def again(plan: Plan) -> Path:
    """Steps 7 and 8, twice: 1 and 2 MiB, then 4 and 8 more.  The counter is beyond 32 bits."""
    for i in range(4):
        plan.event("step", "step", arg=2**40 + 7 + i % 2)
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=(i + 1) << 30, bytes=MIB << i, stack=plan.stack(i + 1))
        plan.event("phase_end", "forward")
    return plan.done()


def test_step_numbers_are_as_large_as_a_program_has_them(again: Path) -> None:
    found = trace.analyse(again)
    steps = [2**40 + 7, 2**40 + 8] * 2
    assert [step[0] for step in found.steps] == steps
    assert [phase.step for phase in found.phases] == steps
    assert sorted(block.step for block in found.peak.blocks) == sorted(steps)
    assert found.totals["peak_step"] == steps[-1]
    assert {each[7] - 1 for each in found.bins} == {*steps}


def test_of_several_steps_with_one_number_the_last_counts(again: Path) -> None:
    first, second = 2**40 + 7, 2**40 + 8
    found = trace.analyse(again)
    begins = [step[1] for step in found.steps]
    assert when.moment(found, f"step:{first}")[0] == begins[2]
    assert trace.analyse(again, step=(first, second)).window_bins[0][0] == begins[2]
    out = pyalloc("top", again, "--at", f"step:{second}", "-q")
    assert out.startswith(f"as step {second} begins, by line\n     4.0 MiB")
    out = pyalloc("diff", again, "--steps", first, second, "-q")
    assert out.startswith(f"step {first}: 3.0 MiB; step {second}: 7.0 MiB, 4.0 MiB more (")
    out = pyalloc("diff", again, "--steps", second, first, "-q")  # the last of one before it
    assert out.startswith(f"step {second}: 1.0 MiB; step {first}: 3.0 MiB, 2.0 MiB more (")
    out = pyalloc("diff", again, "-q")  # without a choice, in the order of the run
    assert out.startswith(f"step {first}: 3.0 MiB; step {second}: 7.0 MiB, 4.0 MiB more (")
    assert "the last" in pyalloc("top", "--help") and "the last" in pyalloc("diff", "--help")
