"""Why more is reserved than in use: what the memory was when most was reserved."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.analysis import reserved
from pyalloc.analysis.advice import advise
from pyalloc.report import html
from pyalloc.traces import moments
from pyalloc.traces.convert import KINDS

AT = 1 << 40


def freed(plan: Plan, addr: int, *, completes: bool = True) -> None:
    plan.event("free_requested", addr=addr)
    if completes:
        plan.event("free_completed", addr=addr)


def program(plan: Plan, allocator: str) -> Path:
    """Everything that can lie idle, then a request of 40 MiB that none of it serves."""
    plan.event("user", f"allocator={allocator}")
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    for at, n in ((0, 30), (30, 10), (40, 24)):
        plan.event("alloc", addr=AT + at * MIB, bytes=n * MIB, stack=plan.stack(3))
    freed(plan, AT)
    freed(plan, AT + 40 * MIB, completes=False)
    for stream, at, n in ((0, 100, 2), (7, 200, 8)):
        plan.event("segment_alloc", addr=AT + at * MIB, bytes=n * MIB, stream=stream)
        plan.event("alloc", addr=AT + at * MIB, bytes=MIB, stream=stream)
        freed(plan, AT + at * MIB)
    plan.event("pool_begin", addr=1, arg=0)
    plan.event("segment_alloc", addr=AT + 300 * MIB, bytes=6 * MIB)
    plan.event("alloc", addr=AT + 300 * MIB, bytes=6 * MIB)
    plan.event("pool_end", addr=1, arg=0)
    freed(plan, AT + 300 * MIB)
    plan.event("segment_alloc", addr=AT + 400 * MIB, bytes=41 * MIB)
    plan.event("alloc", addr=AT + 400 * MIB, bytes=40 * MIB, stack=plan.stack(9, "train"))
    freed(plan, AT + 400 * MIB)
    freed(plan, AT + 30 * MIB)
    return plan.done()


def test_what_is_reserved_and_not_in_use_is_told_apart(plan: Plan, tmp_path: Path) -> None:
    path = program(plan, "native")
    shown = pyalloc("report", path, "--no-replay", "-q").replace(str(path), path.name)
    told = " ".join(shown.split())
    for line in (
        "for a request of 40.0 MiB: me/model.py:9 train",
        "24.0 MiB 19.8 % 1 x freed, but still used by other streams (record_stream)",
        "30.0 MiB 24.8 % 1 x idle, in pieces of at most 30.0 MiB",
        "8.0 MiB 6.6 % 1 x idle, in segments of other streams",
        "2.0 MiB 1.7 % 1 x idle, kept for requests up to 1 MiB",
        "6.0 MiB 5.0 % 1 x idle, kept for CUDA graphs and MemPools",
        "1.0 MiB 0.8 % 1 x unused rest behind blocks above 1 MiB, too small to split off",
    ):
        assert line in told, (line, shown)
    assert all(len(line) <= 80 for line in shown.splitlines())
    data = json.loads(pyalloc("report", path, "--no-replay", "--json", "-q"))["reserved"]
    assert data["request_bytes"] == 40 * MIB
    assert sum(row["bytes"] for row in data["rows"]) == 121 * MIB
    assert '"freed, other streams work on it"' in html.page(trace.analyse(path))


@pytest.mark.parametrize("source", ["recording", "torch snapshot"])
def test_pyallocs_memory_is_not_kept_by_stream_or_size(plan: Plan, source: str) -> None:
    """Nor if a snapshot says so, which lacks what recordings have."""
    if source != "recording":
        plan.event("user", f"source={source}")
    analysis = trace.analyse(program(plan, "pyalloc"))
    assert any("record_stream()" in text for text in analysis.caveats) == (source != "recording")
    found = reserved.at_most(analysis)
    assert found is not None and [row.bytes // MIB for row in found.rows] == [50, 24, 6, 41]


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_nothing_is_said_where_nearly_all_is_in_use(plan: Plan, idle: int) -> None:
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    plan.event("alloc", addr=AT, bytes=(64 - idle) * MIB)
    freed(plan, AT)
    path = plan.done()
    assert (reserved.at_most(trace.analyse(path)) is None) == (idle < 2)
    assert ("when reserved memory peaked" in pyalloc("report", path)) == (idle == 2)


def test_a_mapped_page_is_not_kept_for_small_requests(plan: Plan) -> None:
    """In expandable segments; two MiB by themselves are."""
    plan.event("user", "allocator=native")
    plan.event("segment_map", addr=AT, bytes=2 * MIB)
    plan.event("segment_alloc", addr=AT + 64 * MIB, bytes=2 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None
    small = "idle, kept for requests up to 1 MiB"
    assert {row.name: row.bytes // MIB for row in found.rows}.pop(small) == 2


def test_pieces_that_are_idle(plan: Plan) -> None:
    """Only whole pages of them can be mapped elsewhere; a block within another one's page hides nothing of that."""
    for at, n, pages in ((1, 2, 0), (2, 2, 1), (1, 4, 1), (0, 4, 2), (1, 1, 0)):
        assert moments.page_bytes([(AT + at * MIB, n * MIB)]) == pages * 2 * MIB
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    for at, n in ((0, 10), (4, 2)):
        plan.event("alloc", addr=AT + at * MIB, bytes=n * MIB)
    assert trace.analyse(plan.done()).peak.gaps == [(AT + 10 * MIB, 10 * MIB)]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_waits_for_other_streams_is_no_fragmentation(plan: Plan, waits: bool) -> None:
    for at in range(5):
        plan.event("segment_alloc", addr=AT + 64 * at * MIB, bytes=20 * MIB, stream=7)
        plan.event("alloc", addr=AT + 64 * at * MIB, bytes=20 * MIB, stream=7)
        freed(plan, AT + 64 * at * MIB, completes=not waits or at == 4)
    kinds = {advice.kind: advice for advice in advise(trace.analyse(plan.done()))}
    assert ("fragmentation" in kinds, "record_stream" in kinds) == (not waits, waits)
    if waits:
        assert "80.0 MiB of freed tensors" in kinds["record_stream"].text


@pytest.mark.parametrize("waits", [True, False])
def test_out_of_memory_while_freed_memory_waits(plan: Plan, waits: bool) -> None:
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    for at in (0, 20, 40):
        plan.event("alloc", addr=AT + at * MIB, bytes=20 * MIB, stream=7)
    freed(plan, AT, completes=not waits)
    freed(plan, AT + 40 * MIB)
    plan.event("oom", bytes=40 * MIB)
    told = " ".join(pyalloc("report", plan.done(), "--no-replay").split())
    assert ("Cause: 20.0 MiB had been freed" in told) == waits
    assert ("64.0 MiB reserved: 24.0 MiB idle" in told) == waits
    assert ("Cause: fragmentation" in told) == (not waits)


@pytest.mark.parametrize("told", [True, False])
def test_what_is_freed_waits_only_where_the_ends_of_frees_are_told(plan: Plan, told: bool) -> None:
    """Histories may leave them out (skip_actions), or lose one: what lies there later shows that the free came."""
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    for at in (0, 10, 20, 30):
        plan.event("alloc", addr=AT + at * MIB, bytes=8 * MIB, stack=plan.stack(4))
    freed(plan, AT, completes=told)
    freed(plan, AT + 10 * MIB, completes=False)  # waits
    freed(plan, AT + 20 * MIB, completes=False)  # lost: another block begins within
    plan.event("alloc", addr=AT + 22 * MIB, bytes=2 * MIB)
    freed(plan, AT + 30 * MIB, completes=False)  # lost: the same place
    plan.event("alloc", addr=AT + 30 * MIB, bytes=4 * MIB)
    found = trace.analyse(plan.done())
    end = found.moments[max(found.moments)]
    assert [block.address for block in end.pending] == [AT + 10 * MIB] * told
    assert end.allocated_bytes == sum(block.bytes for block in end.blocks) == 6 * MIB
    assert end.idle_bytes == sum(n for _, n in end.gaps) == (58 - 8 * told) * MIB
    assert found.totals["n_unknown_frees"] == 0


def test_what_was_there_before_is_no_growth_for_a_request(plan: Plan) -> None:
    """A recording that begins late has it at its first time: all segments, then all blocks."""
    for at in (0, 100):
        plan.writer.event(KINDS["segment_alloc"], addr=AT + at * MIB, bytes=40 * MIB, time_ns=1)
    for at in (0, 100):
        plan.writer.event(KINDS["alloc"], addr=AT + at * MIB, bytes=20 * MIB, time_ns=1)
    plan.time = 1
    plan.event("alloc", addr=AT + 20 * MIB, bytes=2 * MIB)
    freed(plan, AT + 20 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is None
    assert [row.bytes // MIB for row in found.rows] == [40, 40]


def test_a_snapshot_without_history_has_grown_for_no_request(tmp_path: Path) -> None:
    """All of it was there at that moment, not only its first block."""
    states = ["active_allocated", "inactive", "active_allocated", "active_allocated", "inactive"]
    blocks = [{"size": 4 * MIB, "state": state} for state in states]
    segment = {"address": AT, "total_size": 20 * MIB, "stream": 0, "blocks": blocks}
    path = tmp_path / "state.pickle"
    path.write_bytes(pickle.dumps([segment]))
    found = reserved.at_most(trace.analyse(path))
    assert found is not None and found.request is None
    assert [(row.bytes // MIB, row.blocks) for row in found.rows] == [(12, 3), (8, 2)]


def test_a_growth_is_for_a_request_on_its_own_device(plan: Plan) -> None:
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB, device=1)
    plan.event("segment_alloc", addr=AT, bytes=40 * MIB)
    plan.event("alloc", addr=AT, bytes=5 * MIB, device=1)  # by another thread meanwhile
    plan.event("alloc", addr=AT, bytes=30 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is not None
    assert (found.request.bytes // MIB, found.moment.event) == (30, 4)


@pytest.mark.parametrize("end", ["oom", "segment_free", ""])
def test_a_growth_that_no_request_follows_is_for_none(plan: Plan, end: str) -> None:
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    plan.event("alloc", addr=AT, bytes=10 * MIB)
    plan.event("segment_alloc", addr=AT + 100 * MIB, bytes=40 * MIB)
    plan.event(end or "user", "note=1", addr=AT + 100 * MIB, bytes=40 * MIB)
    if end:
        plan.event("alloc", addr=AT + 10 * MIB, bytes=5 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is None
    assert (found.moment.event, found.moment.reserved_bytes) == (3, 60 * MIB)


def test_times_that_are_all_equal_tell_nothing_apart(plan: Plan) -> None:
    for kind, at, n in (("segment_alloc", 0, 40), ("alloc", 0, 30), ("alloc", 30, 5)):
        plan.writer.event(KINDS[kind], addr=AT + at * MIB, bytes=n * MIB, time_ns=1)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is not None
    assert (found.request.bytes // MIB, found.moment.event) == (30, 2)


def test_what_was_given_back_waits_for_nobody(plan: Plan) -> None:
    """Even though the end of its free is lost."""
    for at in (0, 100):
        plan.event("segment_alloc", addr=AT + at * MIB, bytes=40 * MIB)
        plan.event("alloc", addr=AT + at * MIB, bytes=40 * MIB)
        freed(plan, AT + at * MIB, completes=at > 0)
    plan.event("segment_free", addr=AT, bytes=40 * MIB)
    found = trace.analyse(plan.done())
    end = found.moments[max(found.moments)]
    assert end.pending == () and end.idle_bytes == 40 * MIB


def test_rests_are_behind_large_blocks_of_their_device(plan: Plan) -> None:
    """Pieces behind freed blocks that wait count too, though not in torch's allocated_bytes."""
    for device, at, start, n in ((0, 0, 0, 40), (1, 0, 39, 1), (0, 100, 0, 40)):
        plan.event("segment_alloc", addr=AT + at * MIB, bytes=41 * MIB, device=device)
        plan.event("alloc", addr=AT + (at + start) * MIB, bytes=n * MIB, device=device)
    freed(plan, AT, completes=True)
    plan.event("alloc", addr=AT, bytes=40 * MIB)
    freed(plan, AT + 100 * MIB, completes=False)
    plan.event("step")
    found = trace.analyse(plan.done())
    end = found.moments[max(found.moments)]
    behind = end.unsplit((*end.blocks, *end.pending))
    assert [((at - AT) // MIB, piece[3]) for piece, at, _ in behind] == [(40, 0), (140, 0)]
    assert end.unsplit_bytes == MIB


@pytest.mark.parametrize("pool", [0, 1])
def test_a_graphs_stream_is_not_the_one_that_asks(plan: Plan, pool: int) -> None:
    plan.event("user", "allocator=native")
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    plan.event("alloc", addr=AT, bytes=5 * MIB)
    if pool:
        plan.event("pool_begin", addr=1, arg=0)
    plan.event("segment_alloc", addr=AT + 100 * MIB, bytes=40 * MIB, stream=7)
    plan.event("alloc", addr=AT + 100 * MIB, bytes=40 * MIB, stream=7)
    plan.event("segment_alloc", addr=AT + 200 * MIB, bytes=20 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is None
    names = [row.name for row in found.rows]
    assert ("idle, in segments of other streams" in names) == (pool == 0)


def test_between_the_two_events_of_a_free_nothing_waits(plan: Plan) -> None:
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    for at in (0, 10):
        plan.event("alloc", addr=AT + at * MIB, bytes=8 * MIB)
    freed(plan, AT, completes=False)  # waits
    freed(plan, AT + 10 * MIB)
    moments = trace.moments_at(plan.done(), [5, 6])
    assert [len(moment.pending) for moment in moments.values()] == [1, 1]


def test_what_was_freed_is_still_among_the_blocks_of_its_step(plan: Plan) -> None:
    found = trace.analyse(program(plan, "native"))
    assert [(span.bytes // MIB, span.free_event is None) for span in found.spans][:2] == [
        (30, False),
        (10, False),
    ]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_where_nothing_grew_the_fullest_moment_tells_what_was_not_needed(
    tmp_path: Path, *, grows: bool, timed: bool
) -> None:
    """A history that begins late sees no growth: how little was in use when it began says nothing."""

    def entry(action: str, at: int, n: int) -> dict[str, Any]:
        return {"action": action, "addr": AT + at * MIB, "size": n * MIB, "stream": 0}

    entries = [entry("alloc", 8, 40), entry("free_requested", 8, 40)]
    blocks = [
        {"size": 8 * MIB, "state": "active_allocated"},
        {"size": 56 * MIB, "state": "inactive"},
    ]
    segments = [{"address": AT, "total_size": 64 * MIB, "stream": 0, "blocks": blocks}]
    if grows:
        entries += [entry("segment_alloc", 100, 20), entry("alloc", 100, 19)]
        blocks = [{"size": 20 * MIB, "state": "active_allocated"}]
        segments.append(
            {"address": AT + 100 * MIB, "total_size": 20 * MIB, "stream": 0, "blocks": blocks}
        )
    if timed:
        entries = [{**one, "time_us": 10 + i // 2} for i, one in enumerate(entries)]
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [entries]}))
    found = reserved.at_most(trace.analyse(path))
    assert found is not None
    told = [row.bytes // MIB for row in found.rows if row.name.startswith(("in use", "idle"))]
    assert told == ([27, 56] if grows else [48, 16])
    assert (found.request is not None) == grows


def test_where_it_grew_that_moment_tells_why(plan: Plan) -> None:
    plan.event("user", "allocator=native")
    plan.event("segment_alloc", addr=AT, bytes=64 * MIB)
    plan.event("alloc", addr=AT, bytes=8 * MIB, stack=plan.stack(3))
    plan.event("alloc", addr=AT + 8 * MIB, bytes=40 * MIB, stack=plan.stack(3))
    freed(plan, AT + 8 * MIB)
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None and found.request is not None
    assert found.request.bytes == 8 * MIB


def test_segments_are_told_by_the_line_they_were_allocated_for(plan: Plan, tmp_path: Path) -> None:
    """By its own stack or that of the first request in it; what lies idle there shows from whom it was kept."""
    plan.event("user", "allocator=native")
    plan.event("segment_alloc", addr=AT, bytes=40 * MIB, stack=plan.stack(3))
    plan.event("alloc", addr=AT, bytes=30 * MIB, stack=plan.stack(3))
    freed(plan, AT)
    plan.event("alloc", addr=AT, bytes=9 * MIB, stack=plan.stack(5))
    plan.event("segment_alloc", addr=AT + 100 * MIB, bytes=50 * MIB)
    plan.event("alloc", addr=AT + 100 * MIB, bytes=50 * MIB, stack=plan.stack(9, "train"))
    path = plan.done()
    found = reserved.at_most(trace.analyse(path))
    assert found is not None
    told = [(m.name, m.bytes // MIB, m.idle_bytes // MIB, m.segments) for m in found.makers]
    assert told == [("me/model.py:3 work", 40, 31, 1), ("me/model.py:9 train", 50, 0, 1)]
    shown = pyalloc("report", path, "--no-replay", "-q")
    assert "    40.0 MiB   31.0 MiB      1 x  me/model.py:3 work" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    data = json.loads(pyalloc("report", path, "--no-replay", "--json", "-q"))["reserved"]
    assert data["segments_for"][0]["idle_bytes"] == 31 * MIB
    assert '"makers":[["me/model.py:3 work",' in html.page(trace.analyse(path))


@pytest.mark.parametrize("begins", ["with the program", "late"])
def test_segments_of_backward_are_told_as_such(plan: Plan, begins: str) -> None:
    """Autograd's threads have no stack; nor has what was there when a recording began."""
    plan.event("user", "allocator=native")
    if begins == "late":
        for i in (5, 6):
            plan.time = 0  # all of it at the first time
            plan.event("segment_alloc", addr=AT + i * 100 * MIB, bytes=8 * MIB)
        plan.time = 0
        plan.event("alloc", addr=AT + 500 * MIB, bytes=2 * MIB)
    plan.event("segment_alloc", addr=AT, bytes=40 * MIB)
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=AT, bytes=30 * MIB)
    if begins == "late":
        plan.event("alloc", addr=AT + 600 * MIB, bytes=MIB)
    plan.event("phase_end", "backward")
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None
    told = [(maker.name, maker.segments) for maker in found.makers]
    late = [("from before the recording, or unknown", 2)] * (begins == "late")
    assert sorted(told) == [("backward (no Python stack)", 1), *late]


@pytest.mark.parametrize("mapped", ["all", "some"])
def test_segments_mapped_by_pages_are_for_many(plan: Plan, mapped: str) -> None:
    plan.event("user", "allocator=native")
    plan.event("segment_map", addr=AT, bytes=40 * MIB, stack=plan.stack(3))
    plan.event("alloc", addr=AT, bytes=9 * MIB, stack=plan.stack(5))
    if mapped == "some":
        plan.event("segment_alloc", addr=AT + 100 * MIB, bytes=2 * MIB)
        plan.event("alloc", addr=AT + 100 * MIB, bytes=MIB, stack=plan.stack(5))
    found = reserved.at_most(trace.analyse(plan.done()))
    assert found is not None
    names = [maker.name for maker in found.makers]
    some = ["mapped page by page, for many requests", "me/model.py:5 work"]
    assert names == (some if mapped == "some" else [])
