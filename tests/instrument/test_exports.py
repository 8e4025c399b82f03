"""Exports: round trips keep what matters, each format has the figures, and only what is alive takes memory."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest

from instrument.tools import MIB, ROOT, Plan, pyalloc, small_trace
from pyalloc import _core, export, reading, trace
from pyalloc.cli import main
from pyalloc.traces.convert import KINDS


def test_to_torch_and_back(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    before = trace.analyse(path)
    target = tmp_path / "snapshot.pickle"
    with target.open("wb") as out:
        export.to_torch(path, before, out)
    after = trace.analyse(target)
    for key in ("peak_bytes", "peak_reserved_bytes", "end_bytes", "n_allocs", "n_frees"):
        assert after.totals[key] == before.totals[key], key
    assert after.by_line(after.peak.blocks) == before.by_line(before.peak.blocks)


def test_a_step_without_events_begins_before_it_ends(plan: Plan, tmp_path: Path) -> None:
    plan.event("step", "step", arg=0)
    plan.event("alloc", addr=1 << 30, bytes=MIB)
    plan.event("step", "step", arg=1)
    path, target = plan.done(), tmp_path / "torch.pickle"
    pyalloc("export", path, "--to", "torch", "-o", target)
    notes = pickle.loads(target.read_bytes())["external_annotations"]
    assert [(n["name"], n["stage"]) for n in notes] == [
        ("ProfilerStep#0", "START"),
        ("ProfilerStep#0", "END"),
        ("ProfilerStep#1", "START"),
        ("ProfilerStep#1", "END"),
    ]


# What torch/utils/viz/MemoryViz.js knows of pickle's instructions; for any other it shows nothing.
READ_BY_MEMORY_VIZ = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK",
    "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip


def test_memory_viz_reads_an_export(plan: Plan, tmp_path: Path) -> None:
    for i in range(3000):  # stacks that are new within a batch, and at its beginning
        plan.event("alloc", addr=(1 << 40) + i * MIB, bytes=MIB, stack=plan.stack(i // 2 + 1))
    path, target = plan.done(), tmp_path / "snapshot.pickle"
    with target.open("wb") as out:
        export.to_torch(path, trace.analyse(path), out)
    data = target.read_bytes()
    found = {code.name for code, _, _ in pickletools.genops(data)}
    assert found <= READ_BY_MEMORY_VIZ
    entries = pickle.loads(data)["device_traces"][0]
    lines = [entry["frames"][0]["line"] for entry in entries]
    assert lines == [i // 2 + 1 for i in range(3000)]
    assert entries[0]["frames"] is entries[1]["frames"]  # each once
    assert data.count(b"/home/me/model.py") == 1


def test_an_export_is_replayed_with_the_cache_emptied_where_it_was(
    plan: Plan, tmp_path: Path
) -> None:
    """Of what the program gave back.  What an allocator short of memory gave back is not a call of its own."""
    for device in (0, 1):
        at = (device + 1) << 40
        plan.event("segment_alloc", addr=at, bytes=12 * MIB, device=device)
        plan.event("alloc", addr=at, bytes=12 * MIB, device=device)
        plan.event("free_requested", addr=at, device=device)
        plan.event("free_completed", addr=at, device=device)
        if device == 0:
            plan.event("empty_cache")
        plan.event("segment_free", addr=at, bytes=12 * MIB, device=device)
        plan.event("segment_alloc", addr=at + (1 << 30), bytes=30 * MIB, device=device)
        plan.event("alloc", addr=at + (1 << 30), bytes=30 * MIB, device=device)
    path, target = plan.done(), tmp_path / "torch.pickle"
    pyalloc("export", path, "--to", "torch", "-o", target)
    traces = pickle.loads(target.read_bytes())["device_traces"]
    frames = [entry["frames"] for trace_ in traces for entry in trace_]
    assert [[frame["name"] for frame in each] for each in frames if each] == [["empty_cache"]]
    with trace.program(path) as ours, trace.program(target) as theirs:
        peaks = [each.replay("native")["peak_bytes"] for each in (ours, theirs)]
    assert peaks[0] == peaks[1]


def test_what_empty_cache_gave_back_after_waiting_for_a_stream_is_told(
    plan: Plan, tmp_path: Path
) -> None:
    """After record_stream(), the frees complete only then.  What goes later goes for another reason."""
    for i in (1, 2):
        plan.event("segment_alloc", addr=i << 30, bytes=MIB)
        plan.event("alloc", addr=i << 30, bytes=MIB)
        plan.event("free_requested", addr=i << 30)
    plan.event("empty_cache")
    for i in (1, 2):
        plan.event("free_completed", addr=i << 30)
        plan.event("segment_free", addr=i << 30, bytes=MIB)
    target = tmp_path / "out.pickle"
    pyalloc("export", plan.done(), "--to", "torch", "-o", target)
    [told] = pickle.loads(target.read_bytes())["device_traces"]
    assert [bool(entry["frames"]) for entry in told] == [False] * 7 + [True, False, False]


@pytest.mark.parametrize("device", [0, 1])
def test_frees_of_what_the_exported_part_does_not_show_have_a_size(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: int
) -> None:
    """For torch's viewer, a free without a request is of a block of that size, there from the beginning."""
    plan.event("segment_alloc", addr=1 << 30, bytes=1 << 40, device=device)
    for i in range(40):
        plan.event("alloc", addr=(i + 1) << 30, bytes=(i + 1) * MIB, device=device)
    for i in range(40):
        plan.event("free_requested", addr=(i + 1) << 30, device=device)
        plan.event("free_completed", addr=(i + 1) << 30, device=device)
    path, target = plan.done(), tmp_path / "late.pickle"
    monkeypatch.setattr(export, "_MAX_TORCH_ENTRIES", 90)
    with target.open("wb") as out:
        export.to_torch(path, trace.analyse(path), out)
    entries = pickle.loads(target.read_bytes())["device_traces"][device]
    frees = [entry["size"] // MIB for entry in entries if entry["action"] == "free_requested"]
    assert len(entries) == 90 and frees == list(range(1, 41))
    assert trace.analyse(target).totals["peak_bytes"] == sum(range(1, 41)) * MIB


@pytest.mark.parametrize(
    ("form", "name"), [("csv", "a.json"), ("torch", "a.csv"), ("json", "a.PICKLE")]
)
def test_a_name_of_another_format_is_refused(
    plan: Plan, tmp_path: Path, form: str, name: str
) -> None:
    path, target = small_trace(plan), tmp_path / name
    told = pyalloc("export", path, "--to", form, "-o", target, expect=2)
    assert f"{target}: --to {form} writes {export.FORMATS[form][0]}" in told
    assert not target.exists()
    pyalloc("export", path, "--to", form, "-o", tmp_path / "any.name")


def test_a_name_that_tensorboard_does_not_look_at_is_refused(plan: Plan, tmp_path: Path) -> None:
    to_tensorboard = ["export", small_trace(plan), "--to", "tensorboard", "-o"]
    told = pyalloc(*to_tensorboard, tmp_path / "out.log", expect=2)
    assert "TensorBoard reads only files with tfevents in their names" in told
    pyalloc(*to_tensorboard, tmp_path / "events.out.tfevents.1")


def test_progress_is_of_what_is_written(plan: Plan) -> None:
    """Skipping takes an eighth of the time: a rate that counts it promises too early an end."""
    piece = 65536
    for i in range(4 * piece):
        plan.writer.event(KINDS["sync"], time_ns=i)
    path = plan.done()
    told: list[tuple[int, int]] = []
    for _ in reading.rows(path, 2 * piece, lambda done, total: told.append((done, total))):
        pass
    [(_, total), (end, _)] = told
    assert 0.99 * total < end <= total < path.stat().st_size / 2


def test_perfettos_counter_reaches_the_peak(tmp_path: Path) -> None:
    """Also if its bin ends below it."""
    own = Plan(tmp_path / "peaks.pya")
    own.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    own.event("user", "note=bins end behind a free")
    for i in range(50_000):
        own.writer.event(1, addr=1 << 30, bytes=(i % 30_000) * 512 + 512, time_ns=3 * i)
        own.writer.event(2, addr=1 << 30, time_ns=3 * i)
    path, target = own.done(), tmp_path / "out.json"
    pyalloc("export", path, "--to", "perfetto", "-o", target)
    counters = [event["args"] for event in json.loads(target.read_text())["traceEvents"]]
    assert max(each["allocated"] for each in counters) == trace.analyse(path).totals["peak_bytes"]
    assert {each["allocated"] + each["idle"] for each in counters} == {64 * MIB}


def test_perfetto_shows_where_memory_ran_out(tmp_path: Path) -> None:
    own = Plan(tmp_path / "out.pya")
    own.writer.event(KINDS["alloc"], addr=1 << 30, bytes=MIB, time_ns=1000)
    for i in range(2):
        own.writer.event(
            KINDS["oom"], device=1, bytes=(3 + i) * MIB, arg=2 * MIB, time_ns=(4 + i) * 1000
        )
    path, target = own.done(), tmp_path / "out.json"
    pyalloc("export", path, "--to", "perfetto", "-o", target)
    marks = [each for each in json.loads(target.read_text())["traceEvents"] if each["ph"] == "i"]
    assert [(mark["name"], mark["ts"], mark["args"]) for mark in marks] == [
        ("out of memory", ts, {"device": 1, "requested_bytes": size, "free_bytes": 2 * MIB})
        for ts, size in ((3, 3 * MIB), (4, 4 * MIB))
    ]


def test_a_copy_without_source_of_a_cut_file_is_cut(plan: Plan, tmp_path: Path) -> None:
    path = small_trace(plan)
    path.write_bytes(path.read_bytes()[:-1])
    target = tmp_path / "out.json"
    pyalloc("export", path, "--to", "json", "--no-source", "-o", target)
    assert json.loads(target.read_text())["caveats"] == [
        "The file was cut off; the figures are those of the part that is there."
    ]


@pytest.mark.parametrize("to", sorted(export.FORMATS))
def test_exports_are_written_once(plan: Plan, tmp_path: Path, to: str) -> None:
    path, target = small_trace(plan), tmp_path / "tfevents.out"
    pyalloc("export", path, "--to", to, "-o", target)
    content = target.read_bytes()
    assert content
    assert "--force overwrites it" in pyalloc("export", path, "--to", to, "-o", target, expect=2)
    if to in ("perfetto", "json", "speedscope"):
        json.loads(content)
    if to == "csv":
        assert content.count(b"\n") == 1 + trace.analyse(path).totals["n_events"]


@pytest.mark.parametrize("ending", [".pya", ".pya.part", ".pya.gz", ".pya.part.xz"])
def test_what_is_made_from_a_recording_has_its_name(
    plan: Plan, tmp_path: Path, ending: str
) -> None:
    """Without what says that it was cut off or is compressed."""
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(ending).suffix, bytes)
    path = tmp_path / f"my.run{ending}"
    path.write_bytes(pack(small_trace(plan).read_bytes()))
    pyalloc("plan", path)
    pyalloc("export", path, "--to", "csv")
    names = {each.name for each in tmp_path.glob("my.run*")}
    assert names == {path.name, "my.run.plan", "my.run.csv"}


def test_csv_reads_a_trace_once(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def analyse(*_: object, **__: object) -> None:
        raise AssertionError("the whole trace is looked at for nothing")

    monkeypatch.setattr(trace, "analyse", analyse)
    path, target = small_trace(plan), tmp_path / "out.csv"
    assert main(["export", str(path), "--to", "csv", "-o", str(target), "-q"]) == 0
    assert target.read_bytes().startswith(b"event,kind")


ADDR, BYTES, STACK, ARG, TEXT = (
    1,
    2,
    4,
    8,
    16,
)  # the fields of an event of each kind, as in csrc/replay/trace.h


def test_csv_has_every_field_of_every_event(tmp_path: Path) -> None:
    own = Plan(tmp_path / "odd.pya")
    name, file = own.writer.string('a,"b"\n'), own.writer.string("größe.py")
    most = 2**64 - 1
    stacks = [0]
    for line in range(12):
        stacks.append(own.writer.stack(stacks[-1], name, file, line))
    for kind in export.KINDS.values():
        own.writer.event(
            kind, addr=most, bytes=most, stream=most, arg=most, thread=most, device=63,
            text=name, stack=stacks[kind % 13], time_ns=kind,
        )  # fmt: skip
    path, target = own.done(), tmp_path / "odd.csv"
    pyalloc("export", path, "--to", "csv", "-o", target)
    with target.open(newline="", encoding="utf-8") as cells_of:
        header, *found = csv.reader(cells_of)
    told = list(reading.events(path))
    assert header[0] == "event" and len(found) == len(told) == len(export.KINDS)
    for i, (kind, number, has, _) in enumerate(_core.trace_kinds()):
        event = told[i]
        addr, size, arg = (most * bool(has & field) for field in (ADDR, BYTES, ARG))
        lines = reversed(range(number % 13 if has & STACK else 0))
        stack = tuple(('a,"b"\n', "größe.py", line) for line in lines)
        text = 'a,"b"\n' * bool(has & TEXT)
        assert event == (i, kind, 63, number, most, most, addr, size, arg, stack, text)
        frames = [f"{file}:{line} {name}" for name, file, line in event.stack[:8]]
        cells = {**event._asdict(), "event": event.number, "stack": " < ".join(frames)}
        assert found[i] == [str(cells[field]) for field in header]


@pytest.mark.parametrize("to", ["csv", "torch"])
def test_stacks_of_a_dry_run_are_the_programs(plan: Plan, tmp_path: Path, to: str) -> None:
    """In a dry run some kernels are pyalloc's Python."""
    own, way = "/lib/pyalloc/_bootstrap/following.py", "/lib/torch/_ops.py"
    stack = 0
    for name, file in (("main", "/home/me/train.py"), ("__call__", way), ("call", own)):
        stack = plan.writer.stack(stack, plan.writer.string(name), plan.writer.string(file), 7)
    plan.event("segment_alloc", addr=1 << 21, bytes=1 << 21, stack=stack)
    plan.event("alloc", addr=1 << 21, bytes=512, stack=stack)
    path, target = plan.done(), tmp_path / "out"
    pyalloc("export", path, "--to", to, "-o", target)
    content = target.read_bytes()
    assert b"/home/me/train.py" in content
    assert b"_bootstrap" not in content and b"_ops.py" not in content


def test_lines_are_made_of_columns_and_cells_that_fit() -> None:
    columns = (b"\1", b"\0", *[b"\0" * 8] * 6, *[b"\0" * 4] * 2)
    assert _core.csv_lines(7, columns, {}, {}) == b"7,alloc,0,0,0,0,0,0,0,,\r\n"
    assert _core.csv_lines(7, (b"\xff", *columns[1:]), {}, {}).startswith(b"7,255,0,")
    for wrong in (columns[:9], (*columns[:9], b"\0"), (*columns[:9], b"\1\0\0\0"), (None,) * 10):
        with pytest.raises((ValueError, KeyError, IndexError, TypeError)):
            _core.csv_lines(0, wrong, {}, {})


def test_exports_need_memory_for_what_lives_not_for_how_long(tmp_path: Path) -> None:
    """Events are processed in portions: twice as many need hardly more memory."""
    code = """
import sys
sys.path.append("tests")
from peak_memory import peak_kib
from pyalloc import cli
assert cli.main(["export", sys.argv[1], "--to", sys.argv[2], "-q", "--force", "-o", sys.argv[3]]) == 0
print(peak_kib())
"""
    paths = []
    for n in (120_000, 240_000):
        own = Plan(tmp_path / f"{n}.pya")
        for i in range(n // 2):
            own.writer.event(1, addr=(i % 64 + 1) << 20, bytes=512, stack=0, time_ns=i)
            own.writer.event(2, addr=(i % 64 + 1) << 20, time_ns=i)
        paths.append(own.done())
    for to in ("csv", "torch"):
        resident = []
        for path in paths:
            done = subprocess.run(
                [sys.executable, "-c", code, path, to, tmp_path / "out"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            resident.append(int(done.stdout))
        assert resident[1] - resident[0] < 16 * 1024, (to, resident)  # KiB


@pytest.mark.parametrize("to", sorted(export.FORMATS))
def test_an_export_tells_of_a_gap(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    plan.event("user", "lost_events=11")
    plan.event("user", "gaps=7 and 9")
    target = tmp_path / "written.tfevents.1"
    assert main(["export", str(small_trace(plan)), "--to", to, "-o", str(target), "-q"]) == 0
    told = capsys.readouterr().err
    assert "The recording has a gap: 11 events were lost" in told and "events 7 and 9" in told
