"""What is idle when memory is short: fragmentation, or kept for others.  Out-of-memory errors are explained by it."""

from __future__ import annotations

import json

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, kinds, pyalloc
from pyalloc import trace
from pyalloc.analysis.advice import advise


def test_fragmentation(plan: Plan) -> None:
    line = plan.stack(7)
    plan.event("segment_alloc", addr=1 << 30, bytes=64 * MIB)
    for i in range(32):
        plan.event("alloc", addr=(1 << 30) + 2 * i * MIB, bytes=2 * MIB, stack=line)
    for i in range(0, 32, 2):
        plan.event("free_requested", addr=(1 << 30) + 2 * i * MIB)
    plan.event("oom", bytes=16 * MIB, arg=0, stack=line)
    path = plan.done()
    found = kinds(path)["fragmentation"]
    assert "Out of memory for 16.0 MiB while 32.0 MiB were reserved but idle" in found.text
    assert "16 pieces of at most 2.0 MiB" in found.text
    assert "Cause: fragmentation" in pyalloc("report", path)


@pytest.mark.parametrize(("free", "cause"), [(8, "fragmentation"), (7, "the program needs more")])
def test_what_was_free_counts_beside_what_was_idle(plan: Plan, free: int, cause: str) -> None:
    plan.event("segment_alloc", addr=1 << 30, bytes=16 * MIB)
    for i in range(8):
        plan.event("alloc", addr=(1 << 30) + 2 * i * MIB, bytes=2 * MIB)
    for i in range(0, 8, 2):
        plan.event("free_requested", addr=(1 << 30) + 2 * i * MIB)
    plan.event("oom", bytes=16 * MIB, arg=free * MIB)
    path = plan.done()
    told = " ".join(pyalloc("report", path).split())
    assert cause in told and ("Cause: fragmentation" in told) == (free == 8)
    if free == 8:
        assert "4 pieces of at most 2.0 MiB, and 8.0 MiB were free: fragmentation" in told
        assert "8.0 MiB of it were whole pages, which pyalloc joins, so it would have" in told
    else:
        assert "fragmentation" not in kinds(path)


@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
@pytest.mark.parametrize("pool", [False, True])
def test_idle_memory_that_is_kept_for_others_is_no_fragmentation(
    plan: Plan, pool: bool, allocator: str
) -> None:
    """For a CUDA graph, or another stream: the piece is large enough."""
    plan.event("user", f"allocator={allocator}")
    if pool:
        plan.event("pool_begin", addr=1, arg=0)
    plan.event("segment_alloc", addr=1 << 30, bytes=64 * MIB, stream=7)
    for at, size in ((0, 2), (2, 60)):
        plan.event("alloc", addr=(1 << 30) + at * MIB, bytes=size * MIB, stream=7)
    plan.event("free_requested", addr=(1 << 30) + 2 * MIB)
    if pool:
        plan.event("pool_end", addr=1, arg=0)
    plan.event("segment_alloc", addr=1 << 31, bytes=32 * MIB)
    plan.event("alloc", addr=1 << 31, bytes=32 * MIB)
    plan.event("oom", bytes=32 * MIB, arg=0)
    path = plan.done()
    told = " ".join(pyalloc("report", path).split())
    assert "Cause: fragmentation" not in told and "needs more memory than there is" not in told
    if pool:
        assert "Cause: 62.0 MiB of the idle memory are kept for private pools" in told
        assert "fragmentation" not in kinds(path)
    else:
        own = {"native": "torch's allocator", "pyalloc": "pyalloc"}[allocator]
        told_of = (
            "Cause: a piece of the idle memory was large enough, but was kept for other requests:"
        )
        assert f"{told_of} {own} keeps memory for the stream" in told
        assert "at most 62.0 MiB: it was kept for another stream" in told


@pytest.mark.parametrize("mapped", [False, True])
def test_what_torch_counts_with_a_block_is_told(plan: Plan, mapped: bool) -> None:
    """A rest of at most 1 MiB behind a large block; one at the beginning of a segment does not count."""
    plan.event("user", "allocator=native")
    kind = "segment_map" if mapped else "segment_alloc"
    plan.event(kind, addr=1 << 30, bytes=20 * MIB)
    plan.event(kind, addr=(1 << 30) + 20 * MIB, bytes=20 * MIB)
    for at, n in (
        (0, 2 * MIB),
        (3 * MIB, 9 * MIB + MIB // 2),
        (13 * MIB, 7 * MIB),
        (21 * MIB, MIB),
    ):
        plan.event("alloc", addr=(1 << 30) + at, bytes=n, stack=plan.stack(7))
    told = [text for text in trace.analyse(plan.done()).caveats if "max_memory_allocated" in text]
    assert [("by 1.5 MiB" in text) for text in told] == ([] if mapped else [True])


def test_a_little_idle_memory_of_another_stream_is_not_told(plan: Plan) -> None:
    plan.event("user", "allocator=native")
    for at, n, stream in ((1 << 30, 100, 0), (1 << 40, 10, 7)):
        plan.event("segment_alloc", addr=at, bytes=n * MIB, stream=stream)
        plan.event("alloc", addr=at, bytes=n * MIB // 2, stream=stream, stack=plan.stack(7))
    text = kinds(plan.done())["fragmentation"].text
    assert "55.0 MiB lay idle" in text and "When reserved memory peaked" not in text


@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_idle_memory_of_other_streams_is_told(plan: Plan, allocator: str) -> None:
    """Of a CUDA graph, or a warm-up beside the main stream: torch's allocator keeps it for that stream."""
    plan.event("user", f"allocator={allocator}")
    for stream, n in ((0, 10), (7, 4), (9, 1)):
        at = (stream + 1) << 40
        plan.event("segment_alloc", addr=at, bytes=20 * MIB, stream=stream)
        plan.event("alloc", addr=at, bytes=n * MIB, stream=stream, stack=plan.stack(7))
        plan.event("free_requested", addr=at)
    plan.event("alloc", addr=1 << 40, bytes=2 * MIB, stack=plan.stack(7))  # the peak was earlier
    text = kinds(plan.done())["fragmentation"].text
    told = "When reserved memory peaked, 40.0 MiB of the idle memory belonged to 2 other streams"
    assert (told in text) == (allocator == "native")  # pages move between streams


@pytest.mark.parametrize("beside", [0, 7])
def test_idle_memory_of_graphs_pools_is_not_another_streams(plan: Plan, beside: int) -> None:
    """A capture has a stream of its own, but only the pool keeps its memory from others."""
    plan.event("user", "allocator=native")
    plan.event("segment_alloc", addr=1 << 40, bytes=40 * MIB)
    plan.event("alloc", addr=1 << 40, bytes=40 * MIB, stack=plan.stack(7))
    plan.event("pool_begin", addr=1, arg=0)
    plan.event("segment_alloc", addr=2 << 40, bytes=30 * MIB, stream=9)
    plan.event("alloc", addr=2 << 40, bytes=5 * MIB, stream=9, stack=plan.stack(7))
    plan.event("pool_end", addr=1, arg=0)
    if beside:
        plan.event("segment_alloc", addr=3 << 40, bytes=10 * MIB, stream=beside)
    text = kinds(plan.done())["fragmentation"].text
    mine = "10.0 MiB of the idle memory belonged to another stream: torch's allocator keeps memory for the stream that "
    assert ("When reserved memory peaked, " + mine in text) == bool(beside)
    assert (
        "When reserved memory peaked, 25.0 MiB of the idle memory belonged to a private pool, such as each CUDA "
        "graph's, which no other requests may use." in text
    )


def test_advice_does_not_hang_on_which_moments_are_looked_at(plan: Plan) -> None:
    """An HTML report has more of them than a text report."""
    plan.event("user", "allocator=native")

    def use(stream: int, mib: int, at: int, is_kept: bool) -> None:
        address = (stream + 1 << 40) + at * MIB
        plan.event("alloc", addr=address, bytes=mib * MIB, stream=stream, stack=plan.stack(7))
        if not is_kept:
            plan.event("free_requested", addr=address)

    for stream, segment, peak, kept in ((0, 60, 50, 10), (7, 40, 2, 2)):
        at = (stream + 1) << 40
        plan.event("segment_alloc", addr=at, bytes=segment * MIB, stream=stream)
        use(stream, peak, 0, is_kept=False)
        use(stream, kept, 0, is_kept=True)
    for _ in range(4):  # as much is reserved and more is in use, most of it the other stream's
        use(7, 30, 10, is_kept=False)
    path = plan.done()
    told = {
        each.text
        for moments in (0, 7, 14)
        for each in advise(trace.analyse(path, moments=moments))
        if each.kind == "fragmentation"
    }
    assert len(told) == 1
    assert "38.0 MiB of the idle memory belonged to another stream" in told.pop()


@pytest.mark.torch
def test_fragmentation_of_the_real_allocator(record: Record) -> None:
    path = record("""
    import torch
    MIB = 2**20
    # One segment of 20 MiB each: every second block stays, so that no hole takes 12 MiB.
    blocks = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del blocks[::2]
    big = [torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(24)]
    """)  # fmt: skip
    assert "fragmentation" in kinds(path)


@pytest.mark.torch
def test_out_of_memory_is_explained_at_once(record: Record) -> None:
    path = record("""
    import torch
    def greedy():
        return torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    kept = greedy()
    try:
        greedy()
    except torch.OutOfMemoryError:
        print("caught")
    """)  # fmt: skip
    text = path.with_name("out.oom.txt").read_text()
    assert "3.00 GiB were requested" in text and "greedy" in text
    assert "Cause: at this point the program needs more" in text and "next: pyalloc report" in text
    assert json.loads(pyalloc("report", path, "--json", "-q"))["ooms"]
