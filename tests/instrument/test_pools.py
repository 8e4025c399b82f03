"""Private pools (CUDA graphs, MemPool) beside the rest: what is in use there, and what they keep."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from instrument.tools import MIB, Plan, pyalloc
from pyalloc import export, reading, trace
from pyalloc.report import html, text
from pyalloc.traces import pickles

AT = 1 << 40


def graphs(plan: Plan) -> Path:
    """8 MiB outside pools; a graph's pool of 22 MiB with 2 in use, and an idle one of 6; on device 1, a pool of
    pages."""
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    plan.event("alloc", addr=AT, bytes=8 * MIB, stack=plan.stack(3))
    plan.event("pool_begin", addr=1, arg=0)
    for at, size in ((AT + 64 * MIB, 20), (AT + 128 * MIB, 2)):
        plan.event("segment_alloc", addr=at, bytes=size * MIB)
        plan.event("alloc", addr=at, bytes=2 * MIB, stack=plan.stack(4))
    plan.event("free_requested", addr=AT + 64 * MIB)
    plan.event("pool_end", addr=1, arg=0)
    plan.event("pool_begin", addr=2, arg=0)
    plan.event("segment_alloc", addr=AT + 256 * MIB, bytes=6 * MIB)
    plan.event("alloc", addr=AT + 256 * MIB, bytes=6 * MIB, stack=plan.stack(5))
    plan.event("free_requested", addr=AT + 256 * MIB)
    plan.event("pool_end", addr=2, arg=0)
    plan.event("alloc", addr=AT + 10 * MIB, bytes=10 * MIB, stack=plan.stack(3))
    return plan.done()


def test_what_a_pool_keeps_is_told(plan: Plan, tmp_path: Path) -> None:
    path = graphs(plan)
    found = trace.analyse(path)
    peak = found.peak
    rows = [(row.name, row.bytes, row.blocks) for row in found.by_pool(peak)]
    assert rows == [
        ("(no private pool)", 18 * MIB, 2),
        ("private pool (1, 0)", 2 * MIB, 1),
        ("private pool (2, 0)", 0, 0),
    ]
    idle = [(row.name, row.bytes) for row in found.idle_pools(peak)]
    assert idle == [("private pool (1, 0)", 20 * MIB), ("private pool (2, 0)", 6 * MIB)]
    for words in (("report", "--no-replay"), ("top", "--by", "pool")):
        shown = pyalloc(*words, path, "-q")
        told = " ".join(shown.split())
        assert "2.0 MiB 10.0 % 1 x private pool (1, 0)" in told
        assert "20.0 MiB in private pool (1, 0), 6.0 MiB in private pool (2, 0)" in told
        assert all(len(line) <= 80 for line in shown.splitlines())
    data = json.loads(pyalloc("top", path, "--by", "pool", "--json", "-q"))
    assert [row["bytes"] for row in data["idle"]] == [20 * MIB, 6 * MIB]
    page = html.page(found)
    assert '"idle in private pools"' in page and '"private pool (2, 0)"' in page
    target = tmp_path / "torch.pickle"
    pyalloc("export", path, "--to", "torch", "-o", target)
    segments = pickle.loads(target.read_bytes())["segments"]
    assert [s["segment_pool_id"] for s in segments] == [(0, 0), (1, 0), (1, 0), (2, 0)]
    again = trace.analyse(target)
    assert [again.pool_id(block.pool) for block in again.peak.blocks] == [(0, 0), (0, 0), (1, 0)]
    with trace.program(path) as ours, trace.program(target) as theirs:
        assert theirs.replay("native")["peak_bytes"] == ours.replay("native")["peak_bytes"]


@pytest.mark.parametrize(("most", "n"), [(2, 2), (4, 3), (100, 5)])
def test_exports_tell_the_pools_of_segments_and_their_ends(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, n: int
) -> None:
    """Also if only the newest entries are exported.  Requests go to a pool after its memory came, as in torch."""
    plan.event("user", "allocator=native")
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    plan.event("pool_begin", addr=1, arg=2)
    plan.event("alloc", addr=AT, bytes=8 * MIB)
    plan.event("alloc", addr=AT + 8 * MIB, bytes=8 * MIB)
    plan.event("pool_end", addr=1, arg=2)
    plan.event("free_requested", addr=AT)
    plan.event("segment_free", addr=AT, bytes=20 * MIB)
    path, target, again = plan.done(), tmp_path / "torch.pickle", tmp_path / "again.pya"
    monkeypatch.setattr(export, "_MAX_TORCH_ENTRIES", most)
    with target.open("wb") as out:
        export.to_torch(path, trace.analyse(path), out)
    snapshot = pickles.load(target)
    assert [entry["pool_id"] for entry in snapshot["device_traces"][0]] == [(1, 2)] * n
    trace.write_snapshot(snapshot, again)
    assert "pool_release" in [event.kind for event in reading.events(again)]


def test_a_program_without_pools_is_told_of_none(plan: Plan) -> None:
    plan.event("segment_alloc", addr=AT, bytes=20 * MIB)
    plan.event("alloc", addr=AT, bytes=8 * MIB)
    path = plan.done()
    found = trace.analyse(path)
    assert found.by_pool(found.peak) == found.idle_pools(found.peak) == []
    assert "pool" not in text.summary(found) and '"pool":[[' not in html.page(found)
    assert "there is no private pool" in pyalloc("top", path, "--by", "pool", expect=2)


def test_pages_go_from_one_pool_to_another(plan: Plan) -> None:
    """In a segment that is mapped by pages, each page belongs to the pool that used it last."""
    plan.event("segment_map", addr=AT, bytes=8 * MIB)
    plan.event("pool_begin", addr=0, arg=3)
    plan.event("alloc", addr=AT, bytes=8 * MIB)
    plan.event("free_requested", addr=AT)
    plan.event("pool_end", addr=0, arg=3)
    plan.event("alloc", addr=AT + 3 * MIB, bytes=2 * MIB)  # of two pages
    plan.event("segment_unmap", addr=AT, bytes=2 * MIB)
    found = trace.analyse(plan.done())
    end = found.moments[max(found.moments)]
    assert [s[:2] for s in end.segments] == [(AT + 2 * MIB, 4 * MIB), (AT + 6 * MIB, 2 * MIB)]
    assert end.pools == {(0, AT + 6 * MIB): 1} and found.pool_id(1) == (0, 3)
    assert end.of_device(1).pools == {} and end.of_device(0).reserved_by_pool() == {1: 2 * MIB}


def test_pages_used_before_the_first_pool_stay_what_they_were(plan: Plan) -> None:
    """A warm-up without pools comes before most captures."""
    plan.event("segment_map", addr=AT, bytes=8 * MIB)
    plan.event("alloc", addr=AT, bytes=MIB)
    plan.event("pool_begin", addr=1, arg=0)
    plan.event("alloc", addr=AT + 2 * MIB, bytes=4 * MIB)
    peak = trace.analyse(plan.done()).peak
    assert peak.reserved_by_pool() == {1: 4 * MIB}


def test_a_block_over_pages_of_several_pools_takes_all_of_them(plan: Plan) -> None:
    plan.event("segment_map", addr=AT, bytes=12 * MIB)
    plan.event("alloc", addr=AT, bytes=12 * MIB)
    plan.event("free_requested", addr=AT)
    plan.event("pool_begin", addr=1, arg=0)
    for at in (2, 6):
        plan.event("alloc", addr=AT + at * MIB, bytes=2 * MIB)
        plan.event("free_requested", addr=AT + at * MIB)
    plan.event("alloc", addr=AT + 3 * MIB, bytes=6 * MIB)
    found = trace.analyse(plan.done())
    end = found.moments[max(found.moments)]
    assert [((at - AT) // MIB, size // MIB) for at, size, *_ in end.segments] == [
        (0, 2),
        (2, 8),
        (10, 2),
    ]
    assert end.pools == {(0, AT + 2 * MIB): 1}
    assert end.gaps == [
        (AT, 2 * MIB),
        (AT + 2 * MIB, MIB),
        (AT + 9 * MIB, MIB),
        (AT + 10 * MIB, 2 * MIB),
    ]


def test_segments_of_a_snapshot_are_of_the_pool_that_their_entries_name(tmp_path: Path) -> None:
    """torch reports the segment before the block that it is for."""
    path = tmp_path / "snapshot.pickle"
    sizes = {AT: (50, 20, (0, 1)), 2 * AT: (300, 300, (0, 0))}
    entries, segments = [], []
    for address, (mib, used, pool) in sizes.items():
        for action, size in (("segment_alloc", mib), ("alloc", used)):
            entries.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size * MIB,
                    "pool_id": pool,
                    "frames": [],
                }
            )
        block = {"address": address, "size": used * MIB, "state": "active_allocated"}
        segments.append(
            {
                "address": address,
                "total_size": mib * MIB,
                "segment_pool_id": pool,
                "blocks": [block],
            }
        )
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [entries]}))
    rows = json.loads(pyalloc("events", path, "--json", "-q"))["rows"]
    assert [(row["kind"], row["pool"]) for row in rows if row["bytes"]] == [
        ("segment_alloc", [0, 1]),
        ("alloc", [0, 1]),
        ("segment_alloc", None),
        ("alloc", None),
    ]
