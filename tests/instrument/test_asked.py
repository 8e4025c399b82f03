"""What was requested over the whole run: what is freed soon, requests by size and by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace
from pyalloc.analysis import asked

WIDTH = 80


def temporaries(plan: Plan) -> Path:
    """Line 3 keeps 10 MiB.  Line 5 allocates 8 that are freed after one more request, and line 7 allocates 1, freed at
    once.

    The peak, 10 + 8 + 4, is line 5's.  Without it and line 7 the highest is 10 + 6, which line 9 allocates later and
    keeps.
    """
    at = 1 << 30
    plan.event("alloc", addr=at, bytes=10 * MIB, stack=plan.stack(3))
    for _ in range(3):
        plan.event("alloc", addr=at + 16 * MIB, bytes=8 * MIB, stack=plan.stack(5))
        plan.event("alloc", addr=at + 32 * MIB, bytes=4 * MIB, stack=plan.stack(6, "longer" * 12))
        plan.event("free_requested", addr=at + 16 * MIB)
        plan.event("alloc", addr=at + 48 * MIB, bytes=MIB, stack=plan.stack(7))
        plan.event("free_requested", addr=at + 48 * MIB)
        plan.event("alloc", addr=at + 48 * MIB, bytes=512)
        plan.event("free_requested", addr=at + 32 * MIB)
        plan.event("alloc", addr=at + 50 * MIB, bytes=512)
        plan.event("free_requested", addr=at + 48 * MIB)
        plan.event("free_requested", addr=at + 50 * MIB)
    plan.event("alloc", addr=at + 64 * MIB, bytes=6 * MIB, stack=plan.stack(9))
    return plan.done()


def table(path: Path, *words: object) -> dict[str, list[float]]:
    """For each line: bytes and blocks at the peak, bytes and requests in all, in MiB."""
    found = json.loads(pyalloc("top", path, "--temporary", *words, "--json", "-q"))
    return {
        line["name"]: [
            line["bytes_then"] / MIB,
            line["blocks_then"],
            line["bytes"] / MIB,
            line["requests"],
        ]
        for line in found["lines"]
    }


def test_who_makes_what_is_freed_soon(plan: Plan) -> None:
    path = temporaries(plan)
    five, six, seven = (
        "me/model.py:5 work",
        f"me/model.py:6 {'longer' * 12}",
        "me/model.py:7 work",
    )
    few = 512 / MIB
    assert table(path, 0) == {seven: [0, 0, 3, 3], "(no stack)": [0, 0, 3 * few, 3]}
    assert table(path) == {
        five: [8, 1, 24, 3],
        seven: [0, 0, 3, 3],
        "(no stack)": [0, 0, 6 * few, 6],
    }
    assert table(path, 2)[six] == [4, 1, 12, 3] and len(table(path, 2)) == 4
    assert table(path, 0, "--at", 4)[seven] == [1, 1, 3, 3]
    # Most bytes at the moment come first, then most in all.
    assert list(table(path, 2, "--at", 4)) == [six, seven, five, "(no stack)"]
    assert list(table(path, 4, "-n", 2)) == [five, six]


def test_what_its_line_keeps_is_not_counted_with_what_it_frees_soon(plan: Plan) -> None:
    """One block of the line is freed after two requests, one much later, one never."""
    line = plan.stack(5)
    for i, n in enumerate((4, 2, 1)):
        plan.event("alloc", addr=(i + 1) << 30, bytes=n * MIB, stack=line)
    plan.event("free_requested", addr=1 << 30)
    for i in range(5):
        plan.event("alloc", addr=(i + 9) << 30, bytes=512)
    plan.event("free_requested", addr=2 << 30)
    path = plan.done()
    assert table(path, 1) == {}
    assert table(path, 2) == {"me/model.py:5 work": [4, 1, 4, 1]}
    assert table(path, 6) == {"me/model.py:5 work": [6, 2, 6, 2]}


def test_what_the_peak_would_be_without_them(plan: Plan) -> None:
    """Of another moment: without what is gone at the peak, the next highest remains."""
    path = temporaries(plan)
    for n, without in ((0, 22), (1, 16), (2, 16)):
        found = json.loads(pyalloc("top", path, "--temporary", n, "--json", "-q"))
        (peak,) = found["peaks"]
        assert (peak["device"], peak["peak_bytes"]) == (0, 22 * MIB)
        assert peak["peak_without_bytes"] // MIB == without
    assert "put the file before --temporary, or write --temporary=1" in pyalloc(
        "top", "--temporary", path, expect=2
    )
    out = pyalloc("top", path, "--temporary")
    assert (
        "without all of them the peak would be 16.0 MiB instead of 22.0 MiB, 6.0 MiB less"
        in " ".join(out.split())
    )
    assert "without all of them the peak would be the same" in pyalloc(
        "top", path, "--temporary", 0
    )


def test_a_little_less_of_much_is_told(plan: Plan) -> None:
    """Two sizes that look equal would look like a mistake."""
    for at, n_bytes in ((1 << 40, 5200 * MIB), (1 << 30, 4 * MIB)):
        plan.event("alloc", addr=at, bytes=n_bytes)
    plan.event("free_requested", addr=1 << 30)
    out = pyalloc("top", plan.done(), "--temporary")
    assert "without all of them the peak would be 4.0 MiB less than 5.08 GiB" in out


def test_temporaries_on_a_terminal(plan: Plan) -> None:
    out = pyalloc("top", temporaries(plan), "--temporary", 2)
    told = " ".join(out.split())
    assert "freed within 2 further requests on the device: 15 of 17 requests (88.2 %)" in told
    assert (
        " at the peak blocks in all requests line 8.0 MiB 1 24.0 MiB 3 me/model.py:5 work" in told
    )
    assert max(map(len, out.splitlines()[:-1])) <= WIDTH
    out = pyalloc("top", plan.path, "--temporary", "--at", 3, "-n", 1)
    assert "moment: after event 3\n      moment  blocks " in out and "and 2 more" in out


def test_the_report_says_where_they_are_much(plan: Plan) -> None:
    out = " ".join(pyalloc("report", temporaries(plan), "--no-replay").split())
    assert "8.0 MiB of the peak are freed within one further request;" in out
    assert "plan.pya --temporary`" in out
    assert json.loads(pyalloc("report", plan.path, "--no-replay", "--json", "-q"))["peak"][
        "temporary_bytes"
    ] == (8 * MIB)


def test_the_report_does_not_where_they_are_little(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 30, bytes=100 * MIB)
    plan.event("alloc", addr=1 << 31, bytes=4 * MIB)
    plan.event("free_requested", addr=1 << 31)
    assert "further request" not in pyalloc("report", plan.done(), "--no-replay")


def test_devices_have_requests_of_their_own(plan: Plan) -> None:
    for i in range(4):
        plan.event("alloc", addr=1 << 30, bytes=MIB, device=0)
        plan.event("alloc", addr=(1 << 30) + (i << 20), bytes=MIB, device=1)
        plan.event("free_requested", addr=1 << 30, device=0)
    out = pyalloc("top", plan.done(), "--temporary", 0)
    assert "4 of 8 requests (50.0 %)" in " ".join(out.split())
    assert "the peak on device 0 would be 0 bytes instead of 1.0 MiB" in out
    assert "the peak on device 1 would be the same" in out
    alone = pyalloc("top", plan.path, "--temporary", 0, "--device", 1)
    assert "0 of 4 requests (0.0 %)" in " ".join(alone.split()) and "line\n" not in alone


def test_temporaries_of_a_snapshot(plan: Plan, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    pyalloc("export", temporaries(plan), "--to", "torch", "-o", snapshot)
    assert table(snapshot, 2) == table(plan.path, 2)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--temporary", "--by", "size"), "--temporary is always by line"),
        (("--temporary", 2, "--over-time"), "--temporary is always by line"),
        (("--over-time", "--by", "module"), "--over-time covers the whole run"),
        (("--over-time", "--at", "end"), "--over-time covers the whole run"),
        (("--temporary", -1), "not a whole number"),
        (("--temporary", 5000), "at most 4096 requests"),
        (("--temporary", "many"), "not a whole number"),
    ],
)
def test_what_cannot_be_asked(plan: Plan, words: tuple[object, ...], why: str) -> None:
    assert why in pyalloc("top", temporaries(plan), *words, expect=2)


def test_requests_by_size_and_by_line(plan: Plan) -> None:
    path = temporaries(plan)
    _, lines, sizes = trace.figures(path)
    assert [(each.least, each.requests) for each in sizes[:2]] == [(512, 6), (1024, 0)]
    assert [(each.least // MIB, each.requests, each.bytes // MIB) for each in sizes[11:]] == [
        (1, 3, 3),
        (2, 0, 0),
        (4, 4, 18),
        (8, 4, 34),
    ]
    assert [(line.name[12:14], line.requests, line.bytes // MIB) for line in lines] == [
        ("5 ", 3, 24),
        ("6 ", 3, 12),
        ("3 ", 1, 10),
        ("9 ", 1, 6),
        ("7 ", 3, 3),
        ("", 6, 0),
    ]
    out = pyalloc("stats", path, "-n", 2)
    rows = [line.split() for line in out.splitlines()]
    assert ["under", "1.0", "KiB", "6", "35.3", "%", "#" * 20, "3.0", "KiB", "0.0", "%"] in rows
    assert ["from", "2.0", "MiB", "0", "0.0", "%", "0", "bytes", "0.0", "%"] in rows
    assert ["from", "8.0", "MiB", "4", "23.5", "%", "#" * 14, "34.0", "MiB", "61.8", "%"] in rows
    bytes_first = rows[rows.index(["lines", "with", "the", "most", "bytes"]) + 2 :]
    assert bytes_first[0][:4] == ["24.0", "MiB", "3", "me/model.py:5"]
    requests_first = rows[rows.index(["lines", "with", "the", "most", "requests"]) + 2 :]
    assert requests_first[0] == ["3.0", "KiB", "6", "(no", "stack)"]
    assert max(map(len, out.splitlines()[:-1])) <= WIDTH
    found = json.loads(pyalloc("stats", path, "-n", 1, "--json", "-q"))
    assert found["lines_by_bytes"] == [
        {"name": "me/model.py:5 work", "bytes": 24 * MIB, "requests": 3}
    ]
    assert found["lines_by_requests"][0]["name"] == "(no stack)"
    assert found["sizes"][-1] == {"least_bytes": 8 * MIB, "requests": 4, "bytes": 34 * MIB}


def test_sizes_add_up_and_end_where_requests_do() -> None:
    sizes = [(0, 0)] * 64
    assert asked.by_size(sizes, 512) == []
    sizes[3] = sizes[9] = (1, 512)
    sizes[12] = (2, 8192)
    found = asked.by_size(sizes, 512)
    assert [(each.least, each.requests, each.bytes) for each in found] == [
        (512, 2, 1024),
        (1024, 0, 0),
        (2048, 0, 0),
        (4096, 2, 8192),
    ]
    sizes[3] = sizes[9] = (0, 0)
    assert asked.by_size(sizes, 512) == [asked.Size(4096, 2, 8192)]


def test_figures_of_nothing(plan: Plan) -> None:
    plan.event("user", "allocator=native")
    out = pyalloc("stats", plan.done())
    assert "requests  " not in out and "lines with" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["n_allocs", "0"] in rows and ["is_complete", "True"] in rows
    assert ["peak_bytes", "0", "0", "bytes"] in rows and rows[-2][0] == "seconds"
    assert not any(row[0].endswith("_ns") or row[0] == "peak_phase" for row in rows)
    assert "0 of 0 requests (0.0 %)" in " ".join(pyalloc("top", plan.path, "--temporary").split())


def test_requests_for_nothing(plan: Plan) -> None:
    """Snapshots of other tools have some."""
    plan.event("alloc", addr=1 << 30, bytes=0)
    told = pyalloc("stats", plan.done())
    assert "under 1.0 KiB             1" in told and "0 bytes   0.0 %" in told


def test_an_event_of_none(plan: Plan) -> None:
    assert "this recording has no events" in pyalloc("top", plan.done(), "--at", 0, expect=2)
