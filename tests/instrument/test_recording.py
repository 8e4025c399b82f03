"""Recording while a program runs: threads, streams, pools; nothing lost, nothing invented."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB, pyalloc
from pyalloc import trace
from pyalloc.reading import events

pytestmark = pytest.mark.torch


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
        "torch's history does not contain record_stream() (calls from Python in the recording: 1;"
        in text
    ) == (allocator == "native")


def test_events_and_marks_keep_their_order(record: Record) -> None:
    """Phases with one allocation each: the allocation lies between its phase's marks, to the nanosecond."""
    path = record("""
    import torch, pyalloc
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
            take(64)
    pool = torch.cuda.MemPool()
    within(pool)
    take(64)
    within(pool)
    del pool
    other = torch.cuda.MemPool()
    within(other)
    """, "--allocator", allocator)  # fmt: skip
    told = [
        (event.kind, (event.addr, event.arg)) for event in events(path) if "pool_" in event.kind
    ]
    one = told[0][1]
    assert [(kind.removeprefix("pool_"), pool == one) for kind, pool in told][:7] == [
        ("begin", True),
        ("end", True),
        ("begin", True),
        ("release", True),  # of the second begin
        ("end", True),
        ("release", True),  # the pool goes
        ("begin", False),
    ]
    assert [kind for kind, _ in told[7:]] in ([], ["pool_end"])  # with the program
    with trace.program(path) as program:
        assert program.info()["n_pools"] == 2
        assert program.replay("native", capacity=130 * MIB)["completed"]
        assert not program.replay("native", capacity=126 * MIB)["completed"]
