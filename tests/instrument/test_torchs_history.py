"""Recordings on torch's own allocator: its history is moved to the file now and then, and nothing is lost by it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB
from pyalloc import trace
from pyalloc.inside import eventsources
from pyalloc.reading import events

pytestmark = pytest.mark.torch


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
        from pyalloc.inside import snapshots
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
