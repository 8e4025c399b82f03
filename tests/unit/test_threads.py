"""Python threads that use one allocator and its objects: what a GIL keeps apart, and free-threaded Python does not."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pyalloc import _core
from pyalloc.errors import AllocatorError
from pyalloc.traces.convert import KINDS

N_THREADS = 4
EVENTS = 2000  # of each thread


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What each call, in a thread of its own, returned or raised; all begin at the same moment."""
    gate = threading.Barrier(len(calls))
    results: list[object] = [None] * len(calls)

    def work(i: int) -> None:
        gate.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def read_addresses(reader: _core.TraceReader) -> list[int]:
    found: list[int] = []
    while (columns := reader.read(100))[0]:
        found += struct.unpack(f"<{len(columns[0])}Q", columns[5])
    return found


def test_one_allocator_is_created() -> None:
    for _ in range(5):
        results = at_once(*[lambda: _core.create("")] * N_THREADS)
        assert results.count(None) == 1
        assert sum(isinstance(each, AllocatorError) for each in results) == N_THREADS - 1
        at_once(*[_core.destroy] * N_THREADS)
        assert not _core.is_created()


def test_one_trace_is_written_by_many(tmp_path: Path) -> None:
    writer = _core.TraceWriter(tmp_path / "a.pya")

    def write(first: int) -> None:
        for i in range(EVENTS):
            text = writer.string(f"text {i % 50}")
            stack = writer.stack(0, text, text, i % 20)
            writer.event(KINDS["alloc"], addr=first + i, bytes=512, stack=stack)
            if i % 500 == 0:
                writer.flush()

    firsts = [i * EVENTS for i in range(N_THREADS)]
    assert at_once(*[lambda first=first: write(first) for first in firsts]) == [None] * N_THREADS
    writer.close()
    found = read_addresses(_core.TraceReader(tmp_path / "a.pya"))
    assert sorted(found) == list(range(N_THREADS * EVENTS))
    by_thread = [[each for each in found if 0 <= each - first < EVENTS] for first in firsts]
    assert all(each == sorted(each) for each in by_thread)  # each thread's in its own order


@pytest.mark.parametrize("n", range(8))
def test_a_trace_may_be_closed_while_others_write(tmp_path: Path, n: int) -> None:
    """What was written until then is there; later writers get an error."""
    writer = _core.TraceWriter(tmp_path / "a.pya")
    written: list[int] = []
    has_begun = threading.Event()

    def write(first: int) -> None:
        for i in range(EVENTS):
            writer.event(KINDS["alloc"], addr=first + i, bytes=512)
            written.append(first + i)
            has_begun.set()

    def close() -> None:
        has_begun.wait()
        writer.close()

    *writing, closing = at_once(
        lambda: write(0), lambda: write(EVENTS), lambda: write(2 * EVENTS), close
    )
    assert closing is None
    for each in writing:
        assert each is None or str(each) == "the trace is closed"
    assert sorted(read_addresses(_core.TraceReader(tmp_path / "a.pya"))) == sorted(written)


def test_one_trace_is_read_by_many(tmp_path: Path) -> None:
    """Each event comes once; whoever comes in between gets an error."""
    writer = _core.TraceWriter(tmp_path / "a.pya")
    text = writer.string("name")
    for i in range(20_000):
        writer.event(KINDS["alloc"], addr=i, bytes=512, text=text)
    writer.close()
    reader = _core.TraceReader(tmp_path / "a.pya")

    def read() -> list[int]:
        found: list[int] = []
        while True:
            is_complete = reader.is_complete()  # also while another reads
            at, total = reader.position()
            assert at == total if is_complete else at <= total
            try:
                columns = reader.read(10)
                assert reader.text(1) == "name"
            except RuntimeError as error:
                assert str(error) == "another thread is reading from this trace"
                continue
            if not columns[0]:
                return found
            found += struct.unpack(f"<{len(columns[0])}Q", columns[5])

    found: list[int] = []
    for each in at_once(*[read] * N_THREADS):
        assert isinstance(each, list), each
        found += each
    assert len(found) <= 20_000 and set(found) <= set(range(20_000))
    assert len(set(found)) == len(found)  # none twice; what a refused thread had read is lost


def test_a_history_is_moved_by_one_at_a_time(tmp_path: Path) -> None:
    _core.create("")
    try:
        writer = _core.TraceWriter(tmp_path / "a.pya")
        text = writer.string("mark")
        history = _core.HistoryWriter(writer, set(), str)
        marks = [(1, KINDS["user"], text, 0, 0, 0, 0)] * 50

        def drain() -> int:
            n_written = 0
            for _ in range(200):
                mine = list(marks)
                try:
                    written, lost = history.drain(0, mine)
                except RuntimeError as error:
                    assert "one thread drains at a time" in str(error) and mine == marks
                    continue
                assert (written, lost, mine) == (len(marks), 0, [])
                n_written += written
            return n_written

        n_written = at_once(*[drain] * N_THREADS)
        writer.close()
        assert sum(n_written) == len(read_addresses(_core.TraceReader(tmp_path / "a.pya")))  # type: ignore[arg-type]
    finally:
        _core.destroy()


def test_a_program_that_is_replayed_does_not_change() -> None:
    program = _core.Program()

    def add(first: int) -> int:
        n_added = 0
        for i in range(EVENTS):
            try:
                program.add(KINDS["alloc"], addr=512 * (first + i + 1), bytes=512)
                n_added += 1
            except RuntimeError as error:
                assert str(error) == "the program is being replayed by another thread"
        return n_added

    def replay() -> None:
        for _ in range(20):
            n_before = program.info()["n_allocs"]
            assert program.replay("pyalloc")["completed"]
            assert program.info()["n_allocs"] >= n_before
            program.notes()

    *added, first, second = at_once(lambda: add(0), lambda: add(EVENTS), replay, replay)
    assert (first, second) == (None, None)
    assert program.info()["n_allocs"] == sum(added)  # type: ignore[arg-type]


@pytest.mark.torch
def test_all_at_once(dry_python, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Tensors freed where they were made and elsewhere, snapshots, statistics, a recording with its marks."""
    dry_python(
        f"""
        import queue, threading, torch, pyalloc
        from pyalloc import _core, trace

        torch.cuda.init()
        KIB, ROUNDS = 1 << 10, 120
        handed = queue.SimpleQueue()
        layer = torch.nn.PReLU(64).cuda()
        errors = []

        def allocate(seed):
            kept = []
            for i in range(ROUNDS):
                kept.append(torch.empty((1 + (seed + i) % 9) * 100 * KIB, dtype=torch.uint8, device="cuda"))
                if i % 3 == 0:
                    handed.put(kept.pop(0))
                if i % 7 == 0:
                    kept.clear()

        def free(_):
            for _ in range(2 * ROUNDS // 3):
                handed.get()  # and forgets it

        def look(_):
            for i in range(25):
                torch.cuda.memory._snapshot()
                _core.snapshot(1, True, None)
                assert torch.cuda.memory_allocated() >= 0 and pyalloc.stats()
                torch.cuda.empty_cache()

        def mark(_):
            for i in range(ROUNDS):
                pyalloc.step()
                with pyalloc.phase(f"phase {{i % 5}}"):
                    layer(torch.zeros(8, 64, device="cuda")).sum().backward()
                with pyalloc.on_pressure(lambda device, bytes: False):
                    torch.cuda.memory._set_memory_metadata(f"round {{i}}")
                    recorder.flush()

        def guarded(call, seed):
            gate.wait()
            try:
                call(seed)
            except BaseException as error:
                errors.append(error)

        calls = [allocate, allocate, free, look, look, mark, mark]
        gate = threading.Barrier(len(calls))
        before = torch.cuda.memory_allocated()
        with pyalloc.record({str(tmp_path / "all.pya")!r}, stacks="all") as recorder:
            threads = [threading.Thread(target=guarded, args=each) for each in zip(calls, range(7))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors, errors
        del threads
        layer.zero_grad()
        assert handed.empty()
        assert torch.cuda.memory_allocated() == before, torch.cuda.memory_allocated() - before
        assert _core.check(0) == 0
        found = trace.analyse({str(tmp_path / "all.pya")!r})
        assert found.totals["n_lost"] == 0 and found.totals["n_unknown_frees"] == 0, found.totals
        assert found.totals["n_allocs"] > 2 * ROUNDS
        assert {{number for number, *_ in found.steps}} == set(range(2 * ROUNDS)), len(found.steps)
        """,
        install=True,
    )
