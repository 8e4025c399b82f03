"""The allocator's history in a trace file (csrc/module_record.c), beside what the snapshot says of the same history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyalloc.common.config import Config
from pyalloc.inside import history
from pyalloc.outside import hostcuda
from pyalloc.reading import Event, events

ROOT = Path(__file__).parent.parent.parent
OFFSET_NS = 10**12
HEAD = """
import json, sys, threading, time
from pathlib import Path
from pyalloc import _core
from pyalloc.traces.convert import KINDS

folder, offset_ns = Path(sys.argv[1]), int(sys.argv[2])
_core.create("")

def beside(call, *args):
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()

def start(n_entries=100_000):
    _core.history_start(2, True, n_entries, 0, False)

def say(**found):
    (folder / "said.json").write_text(json.dumps(found))
"""


@dataclass
class Done:
    """What the program wrote and said."""

    events: list[Event]
    said: dict[str, Any]

    def of(self, *kinds: str) -> list[Event]:
        return [each for each in self.events if each.kind in kinds]


def done(folder: Path, program: str) -> Done:
    """Runs the program on two devices of the host-memory runtime, without torch."""
    libraries = hostcuda.LIBRARIES
    preload = [libraries / "libcuda.so.1", next(libraries.glob("libcudart.so.*"))]
    env = {"LD_PRELOAD": ":".join(map(str, preload)), "PYALLOC_HOSTCUDA_DEVICES": "2"}
    code = HEAD + textwrap.dedent(program)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(OFFSET_NS)],
        env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        pytest.fail(ended.stderr)
    found = list(events(folder / "out.pya"))
    return Done(found, json.loads((folder / "said.json").read_text()))


def told(entry: dict[str, Any]) -> tuple[Any, ...]:
    """An entry of the snapshot as the trace has it."""
    kind = {"annotate": "label"}.get(entry["action"], entry["action"])
    addr, size = entry.get("addr", 0), entry["size"]
    if kind == "label":
        return kind, addr, 0, entry["stream"], 0, (), entry["user_metadata"]
    if kind.startswith("free_"):
        return kind, addr, size, entry["stream"], 0, (), ""
    frames = tuple(
        (each["name"], each["filename"], each["line"]) for each in entry.get("frames", ())
    )
    return kind, addr, size, entry["stream"], entry.get("device_free", 0), frames, ""


def test_what_happened_is_written_in_order_with_marks_and_names(tmp_path: Path) -> None:
    found = done(
        tmp_path,
        """
        def use(device, n):
            for size in range(1, n):
                _core.free(_core.alloc(device, size << 12, 0))

        first = _core.alloc(0, 3 << 20, 0)
        start()
        names = {threading.get_native_id(): "first"}
        marks = []

        def mark(text, kind="user", at_ns=None):
            now = time.monotonic_ns() if at_ns is None else at_ns
            marks.append((now + offset_ns, KINDS[kind], writer.string(text), 4, 5, 6, 1))

        writer = _core.TraceWriter(folder / "out.pya")
        used = set()
        asked = []
        history = _core.HistoryWriter(writer, used, lambda n: asked.append(n) or names.get(n, ""))
        mark("begins")
        _core.free(first)
        second = _core.alloc(1, 5 << 20, 0)
        mark("second")
        _core.annotate(second, b"its label", 0)
        _core.set_metadata(b"from now on")
        third = _core.alloc(0, 7 << 20, 0)
        _core.set_metadata(b"")
        try:
            _core.alloc(1, 1 << 50, 0)
        except RuntimeError:
            pass
        for device in (1, 0, 1):
            beside(use, device, 600)
        use(0, 300)
        _core.record_stream(third, 7)
        for each in (second, third):
            _core.free(each)
        _core.empty_cache()
        mark("parameter", "category")
        mark("card", "device")
        mark("ends")
        mark("much later", at_ns=time.monotonic_ns() + 10**15)
        entries = _core.snapshot(2, True, None)[1]
        written = history.drain(offset_ns, marks)
        left = len(marks)
        again = history.drain(offset_ns, marks)
        _core.free(_core.alloc(0, 1 << 20, 0))
        later = history.drain(offset_ns, marks)
        writer.close()
        say(entries=entries, written=written, left=left, again=again, later=later, asked=asked)
        """,
    )
    (n_written, n_lost), last = found.said["written"], found.said["later"]
    assert (n_lost, found.said["left"], found.said["again"], last[1]) == (0, 1, [0, 0], 0)
    assert n_written + last[0] == len(found.events) and last[0] >= 2
    before = found.events[:n_written]
    assert [each.time_ns for each in before] == sorted(each.time_ns for each in before)

    others = {"user", "category", "device", "thread", "record_stream"}
    for device, entries in enumerate(found.said["entries"]):
        expected, times = [], []
        for entry in entries:
            expected.append(told(entry))
            times.append(entry["time_us"])
            if entry["action"] == "alloc" and entry["user_metadata"]:
                label = ("label", entry["addr"], 0, 0, 0, (), entry["user_metadata"])
                expected.append(label)
                times.append(entry["time_us"])
        seen = [each for each in before if each.device == device and each.kind not in others]
        assert [
            (e.kind, e.addr, e.bytes or size, e.stream, e.arg, e.stack, e.text)
            for e, (_, _, size, *_) in zip(seen, expected, strict=True)
        ] == expected
        assert len(seen) > 1500
        shift = [e.time_ns - 1000 * at for e, at in zip(seen, times, strict=True)]
        assert max(shift) - min(shift) < 1000  # whole microseconds, rounded down
    assert all(e.bytes == 0 for e in before if e.kind.startswith("free_"))

    # The thread is named before its first event, once; one without a name is not.
    (thread,) = found.of("thread")
    assert thread.text == "first" and found.events[1] == thread
    assert len(found.said["asked"]) == len(set(found.said["asked"])) == 4
    assert {e.thread for e in before} - {0} == set(found.said["asked"])
    (use,) = found.of("record_stream")
    assert (use.device, use.addr, use.arg) == (0, found.of("label")[-1].addr, 7)

    marks = found.of("user")
    assert [(e.text, e.arg, e.device) for e in marks] == [
        (text, 4, 1) for text in ("begins", "second", "ends")
    ]
    assert [(e.text, e.addr) for e in found.of("category")] == [("parameter", 5)]
    assert [(e.text, e.bytes) for e in found.of("device")] == [("card", 6)]
    at = [found.events.index(each) for each in marks]
    label = found.events.index(found.of("label")[0])
    assert at[0] == 0 and at[1] == label - 1 and at[2] == n_written - 1


def test_what_the_full_history_had_to_drop_is_counted(tmp_path: Path) -> None:
    found = done(
        tmp_path,
        """
        blocks = [_core.alloc(device, 1 << 20, 0) for device in (0, 1)]
        start(100)
        for device in (0, 1, 1):
            for _ in range(100):
                _core.free(_core.alloc(device, 1 << 20, 0))
        writer = _core.TraceWriter(folder / "out.pya")
        history = _core.HistoryWriter(writer, set(), str)
        drained = [history.drain(0, []), history.drain(0, [])]
        writer.close()
        say(drained=drained)
        """,
    )
    kept = [each for each in found.events if each.kind != "thread"]
    (n_written, n_lost), again = found.said["drained"]
    assert n_written == len(found.events) and again == [0, 0]
    assert [sum(e.device == device for e in kept) for device in (0, 1)] == [100, 100]
    # An allocation, a free and its completion each; the very first maps memory, too.
    assert 900 <= n_lost + 200 <= 902


def test_a_thread_whose_name_cannot_be_found_is_an_error_of_who_asks(tmp_path: Path) -> None:
    found = done(
        tmp_path,
        """
        start()
        _core.free(_core.alloc(0, 1 << 20, 0))
        writer = _core.TraceWriter(folder / "out.pya")
        marks = [(1, KINDS["user"], writer.string("mark"), 0, 0, 0, 0)]
        history = _core.HistoryWriter(writer, set(), lambda n: 1 / 0)
        try:
            history.drain(0, marks)
            raise SystemExit("no error")
        except ZeroDivisionError:
            pass
        n_marks = len(marks)
        _core.free(_core.alloc(0, 1 << 20, 0))
        written = history.drain(0, marks)
        writer.close()
        say(n_marks=n_marks, written=written)
        """,
    )
    assert found.said["n_marks"] == 1 and found.said["written"][0] == len(found.events)
    assert len(found.of("user")) == 1 and len(found.of("alloc")) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("writer, [], str", "must be set, not list"),
        ("1, set(), str", "TraceWriter"),
        ("writer, set()", "thread_name"),
    ],
)
def test_a_writer_of_wrong_parts_is_refused(tmp_path: Path, words: str, said: str) -> None:
    found = done(
        tmp_path,
        f"""
        writer = _core.TraceWriter(folder / "out.pya")
        try:
            _core.HistoryWriter({words})
        except TypeError as error:
            said = str(error)
        writer.close()
        say(said=said)
        """,
    )
    assert said in found.said["said"] and found.events == []


@pytest.mark.parametrize(
    ("kinds", "arguments"),
    [((), ()), (("MemPool", "MemPoolContext"), ()), (("MemPool",), (None,))],
    ids=["2.4", "2.5 to 2.7", "2.8 and newer"],
)
def test_torchs_own_part_of_a_snapshot_is_asked_as_its_version_wants(
    kinds: tuple[str, ...], arguments: tuple[None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = SimpleNamespace(
        torch_has_slots=lambda _: True, torch_ask=lambda _: None, snapshot=lambda *_: ([], [])
    )
    monkeypatch.setattr(history, "_core", core)
    pool = SimpleNamespace(active_pool=lambda: None)
    cuda = SimpleNamespace(device_count=lambda: 1, **dict.fromkeys(kinds, pool))
    asked: list[tuple[object, ...]] = []

    def original(*given: object) -> dict[str, object]:
        asked.append(given)
        return {"allocator_settings": {}}

    found = history.snapshot(SimpleNamespace(cuda=cuda), original, Config(), None)
    assert asked == [arguments] and found["segments"] == []
