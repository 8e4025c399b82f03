"""Recording while a program runs: threads, streams, pools; nothing lost, nothing invented."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB, pyalloc
from pyalloc import attached, eventsources, recording, trace
from pyalloc.errors import UsageError
from pyalloc.reading import events

pytestmark = pytest.mark.torch


def _active(recorder: recording.Recorder) -> recording._Active:
    """As while it runs."""
    active = recording._Active()
    active.take(recorder)
    return active


def _observed() -> tuple[list[Any], SimpleNamespace]:
    """The observers called when memory runs out, and what torch is given for them."""
    observers: list[Any] = []
    attach = observers.append
    return observers, SimpleNamespace(
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attach)
    )


def test_programs_that_run_out_of_memory_all_the_time_are_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explaining reads the trace so far: after it took one second, it takes none of the next twenty."""
    observers, torch = _observed()
    recorder = recording.Recorder(tmp_path / "out.pya")
    now, explained = [100.0], []

    def explain(*arguments: object) -> None:
        explained.append(now[0])
        now[0] += 1.0

    monkeypatch.setattr(recording, "dump_oom", explain)
    monkeypatch.setattr(recording.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recording, "_active", _active(recorder))
    recording._observe_oom(torch)
    for _ in range(300):
        observers[0](0, 1 << 20, 0, 0)
        now[0] += 0.1
    assert explained[0] == 100.0
    assert 2 <= len(explained) <= 3
    assert explained[1] >= 121.0


def test_out_of_memory_that_cannot_be_explained_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip replaced the running pyalloc, and the module that explains was not imported yet."""
    observers, torch = _observed()

    def explain(*arguments: object) -> None:
        raise ImportError("cannot import name 'analyse' from 'pyalloc.trace'")

    monkeypatch.setattr(recording, "dump_oom", explain)
    recorder = recording.Recorder(tmp_path / "out.pya")
    monkeypatch.setattr(recording, "_active", _active(recorder))
    recording._observe_oom(torch)
    for _ in range(3):
        recorder.explain_from = 0.0
        observers[0](0, 1 << 20, 0, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot import name 'analyse'" in line
    assert line.endswith(f"pyalloc report {tmp_path / 'out.pya'}")


def test_recordings_that_are_over_are_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps its out-of-memory observers for ever, and a program may record each of its requests."""
    observers, torch = _observed()
    active, told = recording._Active(), []
    monkeypatch.setattr(recording, "_active", active)
    monkeypatch.setattr(recording, "dump_oom", lambda recorder, *_: told.append(recorder.path.name))
    over = []
    for name in ("a.pya", "b.pya"):
        recorder = recording.Recorder(tmp_path / name)
        active.take(recorder)
        recording._observe_oom(torch)
        over.append(weakref.ref(recorder))
        for observe in observers:
            observe(0, 1 << 20, 0, 0)
        active.let_go(recorder)
    del recorder
    for observe in observers:
        observe(0, 1 << 20, 0, 0)
    gc.collect()
    assert told == ["a.pya", "b.pya"] and len(observers) == 1
    assert [each() for each in over] == [None, None]


def _begun(recorder: recording.Recorder) -> bool:
    """Did it begin?"""
    try:
        recorder.begin()
    except UsageError as error:
        assert "already recording to" in str(error)
        return False
    return True


def _begun_within(nth: int, first: recording.Recorder, second: recording.Recorder) -> list[bool]:
    """Did they begin?  The second tries before the nth line of what the first does; not at all if there is none."""
    n, found = 0, []

    def trace_line(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal n
        if frame.f_code.co_filename != recording.__file__:
            return None
        n += event == "line"
        if n == nth:
            sys.settrace(None)
            found.append(_begun(second))
        return trace_line

    sys.settrace(trace_line)
    try:
        is_first = _begun(first)
    finally:
        sys.settrace(None)
    return [is_first, *found]


def test_of_two_recordings_that_begin_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin in two threads, or the second in the middle of the first, as attached.py begins one."""
    monkeypatch.setattr(recording, "_active", recording._Active())
    monkeypatch.setattr(recording.Recorder, "_begin", lambda _recorder: None)
    outcomes = []
    while len(outcomes) == 0 or len(outcomes[-1]) == 2:
        both = [recording.Recorder(tmp_path / name) for name in ("1.pya", "2.pya")]
        outcomes.append(_begun_within(len(outcomes) + 1, *both))
        path = recording.active_path()
        assert outcomes[-1].count(True) == 1 and path == both[outcomes[-1].index(True)].path
        for each in both:
            each._detach()
    assert [True, False] in outcomes and [False, True] in outcomes


def test_a_recording_whose_thread_cannot_start_leaves_nothing(dry_python, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The system may allow no further threads.  The next recording is as good as any."""
    dry_python(
        f"""
        import os, threading, torch, pyalloc
        torch.cuda.init()
        start = threading.Thread.start

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refuse
        for _ in range(2):
            try:
                with pyalloc.record({str(tmp_path / "out.pya")!r}):
                    raise SystemExit("it recorded")
            except RuntimeError as error:
                assert "start new thread" in str(error), error
            assert os.listdir({str(tmp_path)!r}) == [] and not torch._C._cuda_isHistoryEnabled()
        threading.Thread.start = start
        with pyalloc.record({str(tmp_path / "out.pya")!r}):
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    assert trace.analyse(tmp_path / "out.pya").totals["peak_bytes"] == MIB


def test_a_recording_that_ends_while_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the program, in another thread: it was reported as a recording to None, or not answered at all."""
    left: list[recording.Recorder | None] = []

    class Active:
        @property
        def recorder(self) -> recording.Recorder | None:
            return left.pop() if left else None

    monkeypatch.setattr(recording, "_active", Active())
    found = []
    for n_looks in (1, 2, 3):
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        found.append(attached.state())
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        found.append(attached.answer({"attach": "end"})["error"])
        left[:] = [recording.Recorder(tmp_path / "own.pya")] * n_looks
        with pytest.raises(UsageError, match="already recording to "):
            recording.check(tmp_path / "out.pya", "none", force=False)
    states, errors = found[::2], found[1::2]
    assert states == [{"path": str(tmp_path / "own.pya")}] * 3
    assert all(f"its recording to {tmp_path / 'own.pya'} was started by" in each for each in errors)


def test_a_program_at_work_is_not_interrupted_for_torchs_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow machine five seconds without a mark mean nothing: if a move takes long, the next one waits longer."""
    now, made = [100.0], [0]
    monkeypatch.setattr(eventsources.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(eventsources, "made", lambda: (made[0], made[0]))
    for cost, wait in ((0.0, 10), (1.0, 20), (9.0, 60)):
        source = eventsources.Torchs(None, "none")  # type: ignore[arg-type]
        source.cost = cost
        asked = []
        for _ in range(140):
            now[0] += 0.5
            made[0] += 1
            asked.append(source.in_background())
        assert not any(asked[: 2 * wait]) and all(asked[2 * wait :])
    source = eventsources.Torchs(None, "none")  # type: ignore[arg-type]
    now[0] += 6
    assert not source.in_background()
    now[0] += 0.5
    assert source.in_background()  # it rests


def test_torchs_history_is_cleared_at_work_no_oftener_than_has_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What happens between a snapshot and the clearing after it is lost."""
    now, cleared = [100.0], []
    whole = {"segments": [], "device_traces": [[{"action": "alloc"}] * 10]}
    monkeypatch.setattr(eventsources.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(eventsources, "made", lambda: (0, 0))
    monkeypatch.setattr(eventsources.snapshots, "take", lambda: whole)
    monkeypatch.setattr(eventsources.sharing, "is_on", lambda: True)
    monkeypatch.setattr(eventsources, "_torch_history", lambda *_, **__: cleared.append(now[0]))
    monkeypatch.setattr(eventsources, "_TORCH_EVENTS", 5)

    class Writer:
        n_events = 0

        def merged(self, traces: list[list[object]], marks: list[object]) -> None:
            pass

    source = eventsources.Torchs(Writer(), "none")  # type: ignore[arg-type]
    for _ in range(13):
        now[0] += 10
        source.drain([], at_mark=False)
    assert [at - 100 for at in cleared] == [60, 120] and source.n_seen == 30
    source.drain([], at_mark=True)
    assert len(cleared) == 3


def test_torchs_history_is_moved_at_marks_where_there_are_no_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that only answers requests, and is killed, would lose what it did in the minutes before."""
    now = [100.0]
    monkeypatch.setattr(eventsources.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(eventsources, "made", lambda: (0, 0))
    source = eventsources.Torchs(None, "none")  # type: ignore[arg-type]
    for at, is_due in ((0.4, False), (0.6, True)):
        now[0] = 100.0 + at
        assert source.is_due() == is_due


@pytest.mark.parametrize(("n_blocks", "period"), [(10, 0.5), (20_000, 2.0), (1_000_000, 5.0)])
def test_many_blocks_are_looked_at_more_rarely(
    monkeypatch: pytest.MonkeyPatch, n_blocks: int, period: float
) -> None:
    """A snapshot of torch's contains all of them, however little happened."""
    half = {"blocks": [{}] * (n_blocks // 2)}
    monkeypatch.setattr(
        eventsources.snapshots, "take", lambda: {"segments": [half] * 2, "device_traces": [[]]}
    )
    monkeypatch.setattr(eventsources.sharing, "is_on", lambda: True)
    monkeypatch.setattr(eventsources, "made", lambda: (0, 0))
    writer = SimpleNamespace(n_events=0, merged=lambda *_: None)
    source = eventsources.Torchs(writer, "none")  # type: ignore[arg-type]
    source.drain([], at_mark=False)
    assert source.period == pytest.approx(period)


def test_what_a_thread_allocates_while_torchs_history_is_moved_is_not_lost(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """torch lets other threads run while it makes a snapshot, for seconds on a loaded machine."""
    done = dry_python(f"""
        import threading, time, torch, pyalloc
        torch.ones(1, device="cuda")
        ended = threading.Event()
        def work():
            while not ended.is_set():
                time.sleep(0.001)
                kept = [torch.empty(100, device="cuda") for _ in range(10)]
        with pyalloc.record({str(tmp_path / "out.pya")!r}) as recorder:
            thread = threading.Thread(target=work)
            thread.start()
            for _ in range(5):
                time.sleep(0.2)
                recorder.drain()
            ended.set()
            thread.join()
            recorder.drain()
            print(recorder.source.n_seen > 0, recorder.source.n_lost())
        """)
    assert done.stdout == "True 0\n"


@pytest.mark.parametrize("when", ["begins", "moves"])
def test_what_the_collector_frees_while_torchs_history_is_moved_is_not_lost(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, when: str
) -> None:
    """A snapshot makes many objects, so Python collects: a model in a cycle was freed, and stayed in the recording."""
    path = tmp_path / "out.pya"
    done = dry_python(f"""
        import gc, torch, pyalloc
        class Model:
            def __init__(self):
                self.itself, self.weight = self, torch.empty(1 << 20, device="cuda")
        torch.empty(1, device="cuda")
        original = torch.cuda.memory._snapshot
        def snapshot(*given, **named):
            whole = original(*given, **named)
            made = [[] for _ in range(5000)]  # as those of a longer history
            return whole
        torch.cuda.memory._snapshot = snapshot
        gc.disable()
        gc.collect()
        if {when == "begins"}:
            Model()
        gc.enable()
        with pyalloc.record({str(path)!r}, stacks="none") as recorder:
            if {when == "moves"}:
                gc.disable()
                gc.collect()
                Model()
                gc.enable()
                recorder.drain(at_mark=True)
                assert gc.isenabled()
            gc.collect()
        """)
    assert done.returncode == 0, done.stderr
    totals = trace.analyse(path).totals
    assert totals["peak_bytes"] == 4 * MIB
    assert totals["end_bytes"] == 0 and totals["n_frees"] == totals["n_allocs"]


@ALLOCATORS
def test_no_compiler_is_loaded_for_stacks(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, allocator: str
) -> None:
    """torch's own snapshot imports torch._inductor, for seconds.  Others that want the module get it, then and
    later."""
    done = dry_python(
        f"""
        import sys, threading, torch, pyalloc
        from pyalloc import snapshots
        with pyalloc.record({str(tmp_path / "out.pya")!r}) as recorder:
            kept = torch.ones(1, device="cuda")
            recorder.drain()
        pyalloc.snapshot()
        print("torch._inductor" in sys.modules)
        with snapshots._without_compiler(torch):
            thread = threading.Thread(target=lambda: print(torch._inductor.__name__))
            thread.start()
            thread.join()
        print(torch._export.__name__)
        """,
        install=allocator == "pyalloc",
    )
    assert done.stdout == "False\ntorch._inductor\ntorch._export\n"
    stacks = [event.stack for event in events(tmp_path / "out.pya")]
    assert any(stacks)


def test_threads_that_allocate_without_the_gil_lose_nothing(record: Record) -> None:
    """Four threads and the backward's own: the trace has every allocation once, and every free."""
    path = record("""
    import threading, torch

    def work():
        x = torch.ones(1000, device="cuda", requires_grad=True)
        for _ in range(400):
            (x * 2).exp().sum().backward()
            x.grad = None

    threads = [threading.Thread(target=work) for _ in range(4)]
    torch.empty(1, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for t in threads: t.start()
    for t in threads: t.join()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    print("made", made, flush=True)
    open(__file__ + ".made", "w").write(str(made))
    """, "--allocator", "pyalloc")  # fmt: skip
    made = int(path.with_name("program.py.made").read_text())
    totals = trace.analyse(path).totals
    assert made >= 4 * 400 * 3
    assert totals["n_allocs"] >= made and totals["n_unknown_frees"] == 0
    assert totals["n_allocs"] - totals["n_frees"] == totals["n_live"]
    assert totals["n_allocs"] == made + 1


@ALLOCATORS
def test_what_was_before_the_recording_is_not_in_it(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, allocator: str
) -> None:
    """If the program had torch's history on: what is alive when the recording begins is its initial state."""
    dry_python(
        f"""
        import torch, pyalloc
        def empty(mib):
            return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=10_000_000)
        kept = [empty(3) for _ in range(4)]
        for _ in range(10):
            empty(5)
        with pyalloc.record({str(tmp_path / "out.pya")!r}):
            for _ in range(6):
                empty(7)
        """,
        install=allocator == "pyalloc",
    )
    totals = trace.analyse(tmp_path / "out.pya").totals
    assert (totals["n_allocs"], totals["n_frees"], totals["n_unknown_frees"]) == (4 + 6, 6, 0)
    assert totals["peak_bytes"] == (4 * 3 + 7) * MIB


@ALLOCATORS
def test_a_programs_own_history_takes_nothing_from_the_recording(
    record: Record, allocator: str
) -> None:
    """Programs switch torch's history on for some steps, and off again: the recording goes on."""
    path = record("""
    import torch
    def empty(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    for ring in (5, 100_000):
        torch.cuda.memory._record_memory_history(max_entries=ring)
        for _ in range(30):
            empty(3)
        torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        for _ in range(30):
            empty(5)
    """, "--allocator", allocator)  # fmt: skip
    found = trace.analyse(path)
    assert found.totals["n_allocs"] == found.totals["n_frees"] == 120
    assert found.totals["peak_bytes"] == 5 * MIB and not found.notes.get("lost_events")


def test_history_calls_from_cpp_take_nothing_from_the_recording(record: Record) -> None:
    """As the profiler's service makes them: past torch's Python functions, some of which pyalloc answers itself."""
    path = record("""
    import sys, torch
    def empty(mib):
        return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    empty(3)
    (from_cpp,) = [
        original for _, name, original in sys.modules["pyalloc.install"]._state.replacements.originals
        if name == "_cuda_record_memory_history"
    ]
    torch._C._cuda_record_memory_history = from_cpp
    for state in ("all", None):
        torch.cuda.memory._record_memory_history(state, max_entries=5)
        for _ in range(30):
            empty(3)
    """, "--allocator", "pyalloc")  # fmt: skip
    found = trace.analyse(path)
    assert found.totals["n_allocs"] == found.totals["n_frees"] == 61
    assert not found.notes.get("lost_events")


@ALLOCATORS
def test_uses_on_other_streams_are_recorded(record: Record, allocator: str) -> None:
    path = record("""
    import torch
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    y = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    y.record_stream(side)
    del x, y
    """, "--allocator", allocator)  # fmt: skip
    found = trace.analyse(path)
    assert found.totals["n_streams"] == 2
    uses = [e for e in events(path) if e.kind == "record_stream"]
    allocs = {e.bytes: e for e in events(path) if e.kind == "alloc"}
    assert len(uses) == found.totals["n_record_streams"] == 1
    assert uses[0].addr == allocs[5 << 20].addr and uses[0].arg == allocs[3 << 20].stream
    text = " ".join(pyalloc("report", path, "--no-replay").split())
    assert (
        "torch's history does not contain record_stream() (calls from Python in the trace: 1;"
        in text
    ) == (allocator == "native")


def test_events_and_marks_keep_their_order(record: Record) -> None:
    """Phases with one allocation each: the allocation lies between its phase's marks, to the nanosecond."""
    path = record("""
    import pyalloc, torch
    torch.empty(1, device="cuda")
    for i in range(3000):
        with pyalloc.phase("one"):
            x = torch.empty(4096, dtype=torch.uint8, device="cuda")
        del x
    """, "--allocator", "pyalloc", "--no-marks")  # fmt: skip
    phases = [p for p in trace.analyse(path).phases if p.name == "one"]
    assert len(phases) == 3000
    assert all((p.n_made, p.n_left) == (1, 1) for p in phases)


def test_events_of_two_devices_keep_their_order(record: Record) -> None:
    """Each device has a history of its own; requests come before what was there is freed."""
    path = record("""
    import torch
    for i in range(40):
        x = torch.empty(4096, dtype=torch.uint8, device=f"cuda:{i % 2}")
    """, "--allocator", "pyalloc", "--devices", "2")  # fmt: skip
    told = [(e.kind, e.device) for e in events(path) if e.kind in ("alloc", "free_requested")]
    expected = [("alloc", 0)]
    for i in range(1, 40):
        expected += [("alloc", i % 2), ("free_requested", (i - 1) % 2)]
    assert told[: len(expected)] == expected


def test_cpp_frames_begin_where_the_request_came_from(record: Record) -> None:
    path = record("""
    import torch
    def ask():
        return torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    x = ask()
    """, "--allocator", "pyalloc", "--stacks", "all", cold=True)  # fmt: skip
    found = trace.analyse(path)
    (block,) = found.peak.blocks
    names = [name for name, _, _ in found.frames(block.stack)]
    files = [file for _, file, _ in found.frames(block.stack)]
    assert any("at::" in name for name in names) and not any("_core" in file for file in files)
    assert names[-2:] == ["ask", "<module>"]
    assert str(found.place(block.stack)).endswith("program.py:4 ask")


def test_cpp_frames_leave_room_for_the_programs_own(record: Record) -> None:
    """Deep programs: each call of a module is one Python frame and several of C."""
    path = record("""
    import torch
    def ask(depth):
        if depth == 0:
            return torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
        return list(map(ask, [depth - 1]))[0]
    x = ask(50)
    """, "--allocator", "pyalloc", "--stacks", "all")  # fmt: skip
    found = trace.analyse(path)
    (block,) = found.peak.blocks
    names = [name for name, _, _ in found.frames(block.stack)]
    assert any("at::" in name for name in names) and names.count("ask") > 40, names
    assert str(found.place(block.stack)).endswith("program.py:5 ask")


@ALLOCATORS
def test_what_the_program_gives_back_is_given_back_in_replays(
    record: Record, allocator: str
) -> None:
    """300 MiB are cached and given back before 400 are requested: 400 are enough, as they were."""
    path = record("""
    import torch
    def take(mib):
        torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    take(300)
    torch.cuda.empty_cache()
    take(400)
    """, "--allocator", allocator, "--devices", "2")  # fmt: skip
    found = trace.analyse(path)
    assert found.totals["peak_reserved_bytes"] == 400 * MIB
    with trace.program(path) as program:
        assert program.info()["n_devices"] == 1  # the other is not used
        for policy in ("native", "expandable", "pyalloc"):
            assert program.replay(policy)["peak_bytes"] == 400 * MIB, policy


@ALLOCATORS
def test_private_pools_are_recorded_and_replayed(record: Record, allocator: str) -> None:
    """A pool's free memory is nobody else's while the pool lives: 64 MiB in it, 64 beside it; then another's."""
    if allocator == "native" and pytest.importorskip("torch").__version__ < (2, 12):
        pytest.skip("the history of this torch says nothing of pools")
    path = record("""
    import torch
    def take(mib):
        torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    def within(pool):
        with torch.cuda.use_mem_pool(pool):
            take(64)
    pool = torch.cuda.MemPool()
    within(pool)
    take(64)
    within(pool)
    del pool
    other = torch.cuda.MemPool()
    within(other)
    """, "--allocator", allocator)  # fmt: skip
    kinds = [event.kind for event in events(path)]
    assert kinds.count("pool_begin") == 3
    assert kinds.count("pool_release") == 2  # of the second begin, and when the pool goes
    with trace.program(path) as program:
        assert program.info()["n_pools"] == 2
        assert program.replay("native", capacity=130 * MIB)["completed"]
        assert not program.replay("native", capacity=126 * MIB)["completed"]
