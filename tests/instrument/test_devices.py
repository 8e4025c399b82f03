"""Several devices: nothing of one is taken for another's."""

from __future__ import annotations

import json

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.analysis.advice import advise
from pyalloc.report import html
from pyalloc.report.text import summary


@pytest.mark.torch
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_categories_are_told_on_every_device(record: Record, allocator: str) -> None:
    path = record("""
    import torch
    first = torch.nn.Linear(1024, 1024, device="cuda:0")
    second = torch.nn.Linear(2048, 1024, device="cuda:1")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    for _ in range(2):
        hidden = first(torch.ones(4, 1024, device="cuda:0"))
        second(torch.ones(4, 2048, device="cuda:1")).sum().backward()
        hidden.sum().backward()
        optimizer.step()
    """, "--devices", "2", "--allocator", allocator)  # fmt: skip
    for device, mib in ((0, 4), (1, 8)):
        found = trace.analyse(path, device=device)
        told = {
            block.category
            for block in found.moments[max(found.moments)].blocks
            if block.bytes == mib * MIB
        }
        assert told == {"parameters", "gradients", "optimizer state"}, device


def crowded(plan: Plan) -> Plan:
    """Device 1 is full; device 0 has 256 MiB reserved, which are idle when memory runs out."""
    plan.event("segment_alloc", addr=1 << 40, bytes=256 * MIB, device=0)
    plan.event("alloc", addr=1 << 40, bytes=256 * MIB, device=0)
    plan.event("free_requested", addr=1 << 40, device=0)
    plan.event("segment_alloc", addr=1 << 41, bytes=64 * MIB, device=1)
    plan.event("alloc", addr=1 << 41, bytes=64 * MIB, device=1, stack=plan.stack(7, "held"))
    return plan


def test_idle_memory_of_another_device_is_no_fragmentation(plan: Plan) -> None:
    crowded(plan).event("oom", bytes=16 * MIB, arg=3 * MIB, device=1)
    path = plan.done()
    found = trace.analyse(path)
    assert "fragmentation" not in {item.kind for item in advise(found)}
    shown = " ".join(pyalloc("report", path, "--no-replay", "-q").split())
    assert "out of memory on device 1: 16.0 MiB were requested" in shown
    assert "64.0 MiB were in use and 64.0 MiB reserved: 0 bytes idle" in shown
    assert "Cause: at this point the program needs more" in shown
    (first,) = html._out_of_memory(found)
    assert "on device 1" in first.text and "needs more memory than there is" in first.text


def test_a_request_larger_than_the_device_is_told_from_a_full_one(plan: Plan) -> None:
    crowded(plan).event("oom", bytes=40 << 30, arg=3 * MIB, device=1)
    path = plan.done()
    text = pyalloc("report", path, "--no-replay", "-q").replace(str(path), path.name)
    shown = " ".join(text.split())
    assert "Cause: this request alone is larger than the 67.0 MiB that the program could" in shown
    assert "needs more memory than there is" not in shown
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_error_of_the_only_device_looked_at_names_none(plan: Plan) -> None:
    crowded(plan).event("oom", bytes=16 * MIB, arg=3 * MIB, device=1)
    shown = pyalloc("report", plan.done(), "--device", "1", "-q")
    assert "out of memory: 16.0 MiB were requested" in shown


def test_each_devices_own_peak_is_held_against_replays_of_each(plan: Plan) -> None:
    """One device after the other: the peak of the sum is half the sum of the peaks, which replays report."""
    for device in range(2):
        where = {"addr": (device + 1) << 40, "bytes": 100 * MIB, "device": device}
        plan.event("segment_alloc", **where)
        plan.event("alloc", **where)
        plan.event("free_requested", addr=where["addr"], device=device)
        plan.event("segment_free", **where)
    path = plan.done()
    found = trace.analyse(path)
    assert found.totals["peak_reserved_bytes"] == 100 * MIB
    assert found.totals["device_peak_reserved"] == {0: 100 * MIB, 1: 100 * MIB}
    found.replays = {"pyalloc": {"peak_bytes": 150 * MIB, "completed": True}}
    policy = next(item.text for item in advise(found) if item.kind == "policy")
    assert "150.0 MiB of device memory instead of 200.0 MiB" in policy
    assert "sums over the peaks of 2 devices" in policy
    assert json.loads(pyalloc("stats", path, "--json", "-q"))["device_peak_reserved"]


@pytest.mark.parametrize(("n_streams", "is_told"), [(1, False), (2, True)])
def test_the_default_streams_of_two_devices_are_not_several(
    plan: Plan, n_streams: int, is_told: bool
) -> None:
    plan.event("user", "allocator=native")
    for device in range(2):
        for stream in range(n_streams):
            plan.event(
                "alloc", addr=(stream + 1) << 30, bytes=MIB, device=device, stream=16 * stream
            )
    path = plan.done()
    for found in (trace.analyse(path), trace.analyse(path, device=1)):
        assert ("record_stream()" in " ".join(found.caveats)) == is_told


def test_what_a_trace_does_not_have_is_said_by_every_command(plan: Plan) -> None:
    for text in ("allocator=native", "lost_events=7"):
        plan.event("user", text)
    for step in range(3):
        plan.event("step", "step", arg=step)
        for device in range(2):
            plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, device=device, stream=16 * step)
    path = plan.done()
    for words in (
        ["report", path],
        ["top", path],
        ["diff", path],
        ["diff", path, path],
        ["replay", path],
    ):
        told = " ".join(json.loads(pyalloc(*words, "--json", "-q"))["caveats"])
        shown = " ".join(pyalloc(*words, "-q").split())
        for each in (told, shown):
            assert "7 events were lost" in each and "does not contain record_stream()" in each, (
                words
            )
    content = json.loads(
        pyalloc("diff", path, "--device", "1", "--steps", "1", "2", "--json", "-q")
    )
    assert [(row["before_bytes"], row["after_bytes"]) for row in content["changes"]] == [
        (MIB, 2 * MIB)
    ]
    assert "has no memory of device 5" in pyalloc("diff", path, "--device", "5", expect=2)
    at_a_moment = pyalloc("top", path, "--device", "1", "--at", "6", "--json", "-q")
    assert sum(row["bytes"] for row in json.loads(at_a_moment)["rows"]) == MIB


@pytest.mark.parametrize("has_own", [True, False])
def test_memory_that_others_hold_is_told_when_it_ran_out(plan: Plan, has_own: bool) -> None:
    plan.event("device", "a card", bytes=100 * MIB)
    if has_own:
        plan.event("segment_alloc", addr=1 << 40, bytes=64 * MIB)
        plan.event("alloc", addr=1 << 40, bytes=64 * MIB)
    plan.event("oom", bytes=16 * MIB, arg=3 * MIB)
    plan.event("oom", bytes=16 * MIB, arg=3 * MIB)
    path = plan.done()
    shown = " ".join(pyalloc("report", path, "--no-replay", "-q").split())
    held = "33.0 MiB" if has_own else "97.0 MiB"
    assert f"{held} of the device's 100.0 MiB were held outside this allocator" in shown
    (told,) = html._out_of_memory(trace.analyse(path))
    assert held in told.text


@pytest.mark.parametrize("capacity", [67 * MIB, 70 * MIB, 0])
def test_a_context_or_an_unknown_capacity_is_not_told(plan: Plan, capacity: int) -> None:
    if capacity:
        plan.event("device", "a card", bytes=capacity)
    plan.event("segment_alloc", addr=1 << 40, bytes=64 * MIB)
    plan.event("alloc", addr=1 << 40, bytes=64 * MIB)
    plan.event("oom", bytes=16 * MIB, arg=3 * MIB)
    assert "held outside" not in pyalloc("report", plan.done(), "--no-replay", "-q")


def test_a_limit_is_told_from_a_full_device(plan: Plan) -> None:
    plan.event("segment_alloc", addr=1 << 40, bytes=64 * MIB)
    plan.event("alloc", addr=1 << 40, bytes=64 * MIB)
    plan.event("oom", bytes=16 * MIB, arg=500 * MIB)
    shown = " ".join(pyalloc("report", plan.done(), "--no-replay", "-q").split())
    assert (
        "Cause: a limit. The device had enough free" in shown
        and "the program needs more" not in shown
    )


def test_blocks_of_an_errors_moment_are_made_once(plan: Plan) -> None:
    crowded(plan).event("oom", bytes=16 * MIB, arg=3 * MIB, device=1)
    found = trace.analyse(plan.done())
    asked = []

    class Scan:
        """Passes everything on, and notes whose blocks were asked for."""

        def __init__(self, scan: object) -> None:
            self.scan = scan

        def __getattr__(self, name: str) -> object:
            return getattr(self.scan, name)

        def blocks(self, number: int) -> object:
            asked.append(number)
            return found.scan.blocks(number)

    for moment in found.moments.values():
        vars(moment).pop("blocks", None)
        vars(moment)["scan"] = Scan(moment.scan)
    assert "on device 1" in summary(found) and "on device 1" in html.page(found)
    assert found.oom is not None
    assert asked.count(found.moments[found.ooms[0][0]].number) == 1
    assert {block.device for block in found.oom.moment.blocks} == {1}


def test_sums_over_all_devices_are_not_given_for_one(plan: Plan) -> None:
    whole = trace.analyse(crowded(plan).done()).peak
    part = whole.of_device(1)
    assert whole.stack_sums() and whole.by_stack
    for ask in (part.stack_sums, lambda: part.by_stack, lambda: part.pieces(0)):
        with pytest.raises(ValueError, match="over all devices"):
            ask()
