"""Which threads and streams requested memory."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.inside import eventsources
from pyalloc.report import html

AT = 1 << 30


def several(plan: Plan) -> Path:
    """One device's memory, requested by three threads on two streams; the threads' names come after requests."""
    plan.event("segment_alloc", addr=AT, bytes=40 * MIB)
    plan.event("alloc", addr=AT, bytes=MIB)  # before the recording
    plan.event("alloc", addr=AT + 2 * MIB, bytes=2 * MIB, thread=77, stack=plan.stack(3))
    plan.event("thread", "trainer", arg=77)
    plan.event("alloc", addr=AT + 4 * MIB, bytes=4 * MIB, thread=77, stream=64)
    plan.event("alloc", addr=AT + 8 * MIB, bytes=8 * MIB, thread=1 << 40, stream=64)
    plan.event("alloc", addr=AT + 16 * MIB, bytes=16 * MIB, thread=78)
    plan.event("thread", "löader", arg=78)
    return plan.done()


def test_both_are_told(plan: Plan) -> None:
    path = several(plan)
    found = trace.analyse(path)
    assert [(row.name, row.bytes, row.blocks) for row in found.by_thread(found.peak.blocks)] == [
        ("löader (thread 78)", 16 * MIB, 1),
        (f"thread {1 << 40}", 8 * MIB, 1),
        ("trainer (thread 77)", 6 * MIB, 2),
        ("(in use before the recording)", MIB, 1),
    ]
    assert [(row.name, row.bytes) for row in found.by_stream(found.peak.blocks)] == [
        ("default stream", 19 * MIB),
        ("stream 0x40", 12 * MIB),
    ]
    for by in ("thread", "stream"):
        rows = json.loads(pyalloc("top", path, "--by", by, "--json", "-q"))["rows"]
        shown = pyalloc("top", path, "--by", by)
        assert all(row["name"] in shown for row in rows)
        assert sum(row["bytes"] for row in rows) == 31 * MIB
    first = pyalloc("top", path, "--by", "thread", "-n", 1)
    assert "löader (thread 78)\n    15.0 MiB  and 3 more\n" in first
    page = html.page(found)
    assert '"thread":[["l' in page and '"stream":[["default stream"' in page
    assert "thread 77 is trainer" in pyalloc("events", path, "--at", "4")


def test_names_are_of_all_devices(plan: Plan) -> None:
    plan.event("thread", "trainer", arg=77)
    for device in range(2):
        plan.event("segment_alloc", addr=AT, bytes=4 * MIB, device=device)
        plan.event("alloc", addr=AT, bytes=MIB, device=device, thread=77, stream=device)
    path = plan.done()
    assert "trainer (thread 77)" in pyalloc("top", path, "--by", "thread", "--device", "1")
    assert "stream 0x1 of device 1" in pyalloc("top", path, "--by", "stream")


def test_one_thread_and_one_stream_need_no_table(plan: Plan) -> None:
    plan.event("segment_alloc", addr=AT, bytes=4 * MIB)
    plan.event("alloc", addr=AT, bytes=MIB)
    path = plan.done()
    page = html.page(trace.analyse(path))
    assert '"thread":[' not in page and '"stream":[' not in page
    refused = " ".join(pyalloc("top", path, "--by", "thread", expect=2).split())
    assert "recordings on pyalloc do, those on torch's own allocator do not" in refused


def test_names_are_pythons_or_the_systems() -> None:
    assert eventsources.thread_name(os.getpid()) == threading.main_thread().name
    assert eventsources.thread_name(1 << 30) == ""  # more than the system gives
    told = []

    def work() -> None:
        own = threading.get_native_id()
        told.append(eventsources.thread_name(own))
        threading.current_thread().name = "Dummy-7"  # Python's name for a thread started in C
        told.append(
            eventsources.thread_name(own) == Path(f"/proc/self/task/{own}/comm").read_text().strip()
        )

    thread = threading.Thread(target=work, name="the test's")
    thread.start()
    thread.join()
    assert told == ["the test's", True]


@pytest.mark.torch
def test_a_recording_on_pyalloc_tells_threads(record: Record) -> None:
    source = """
        import threading
        import torch

        started = threading.Event()

        def load():
            global loaded
            loaded = torch.zeros(5 << 20, device="cuda")
            started.set()
            threading.Event().wait()

        threading.Thread(target=load, name="loader", daemon=True).start()
        started.wait()
        weight = torch.zeros(2 << 20, device="cuda", requires_grad=True)
        (weight * 2).sum().backward()
        held = torch.zeros(1 << 20, device="cuda")
    """
    path = record(source, "--allocator", "pyalloc")
    found = trace.analyse(path)
    at_end = found.moments[found.totals["n_events"]]
    sums = {row.name.split(" (")[0]: row.bytes for row in found.by_thread(at_end.blocks)}
    assert sums == {"loader": 20 * MIB, "MainThread": 12 * MIB, "pt_autograd_0": 8 * MIB}
    native = record(source, "--allocator", "native")
    assert "those on torch's own allocator do not" in " ".join(
        pyalloc("top", native, "--by", "thread", expect=2).split()
    )


@pytest.mark.torch
def test_a_name_that_is_no_text_ends_no_recording(record: Record) -> None:
    path = record(
        r"""
        import threading
        import torch

        threading.current_thread().name = "no text: \udcff"
        held = torch.zeros(1 << 20, device="cuda")
        """,
        "--allocator",
        "pyalloc",
    )
    found = trace.analyse(path)
    (row,) = found.by_thread(found.peak.blocks)
    assert row.name.startswith("no text: \ufffd (thread ") and row.bytes == 4 * MIB
