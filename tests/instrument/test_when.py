"""Moments by name: steps and times, and what was allocated since one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instrument.tools import MIB, Plan, pyalloc
from pyalloc import trace, when
from pyalloc.errors import UsageError

LEAST_EVENTS = 40_000  # many times as many as a timeline has parts


def steps_of_three(plan: Plan) -> Path:
    """In each of three steps, a block of 1 MiB that stays and one of 4 that does not."""
    for step in range(3):
        plan.event("step", "step", arg=step + 5)
        plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=plan.stack(step + 1, "keep"))
        plan.event("alloc", addr=9 << 30, bytes=4 * MIB, stack=plan.stack(8, "use"))
        plan.event("free_requested", addr=9 << 30)
        plan.event("free_completed", addr=9 << 30)
    return plan.done()


def test_a_step_is_where_it_begins(plan: Plan) -> None:
    path = steps_of_three(plan)
    found = trace.analyse(path)
    assert when.moment(found, "step:6") == (found.steps[1][1], "as step 6 begins")
    assert "as step 6 begins, by line\n     1.0 MiB 100.0 %" in pyalloc(
        "top", path, "--at", "step:6"
    )
    assert "no such step; steps go from 5 to 7" in pyalloc("top", path, "--at", "step:9", expect=2)
    assert "as step 7 begins: events" in pyalloc("events", path, "--at", "step:7")


def test_a_time_is_found_to_the_event(plan: Plan) -> None:
    """Events of a hand-written trace are one microsecond apart."""
    for i in range(LEAST_EVENTS // 2):
        plan.event("alloc", addr=(i % 7 + 1) << 30, bytes=512, stack=plan.stack(1))
        plan.event("free_requested", addr=(i % 7 + 1) << 30)
    found = trace.analyse(plan.done())
    for microseconds in (0, 1, 777, 12_345, LEAST_EVENTS - 1):
        at = when.moment(found, f"{microseconds / 1000}ms")
        assert at == (microseconds + 1, f"after {microseconds / 1000} ms"), microseconds
    with pytest.raises(UsageError, match=r"--since 5min: the recording ends 0\.0 s after"):
        when.moment(found, "5min", "--since")


def test_what_was_allocated_since_a_moment_and_is_still_held(plan: Plan) -> None:
    path = steps_of_three(plan)
    out = pyalloc("top", path, "--since", "step:6", "-q")
    assert out.startswith("at the end: 2.0 MiB of 3.0 MiB allocated since step:6, by line\n")
    assert "model.py:2 keep" in out and "model.py:3 keep" in out
    assert "model.py:1" not in out and "use" not in out
    at_peak = ["--at", "peak", "--since", "step:7"]
    for by in ("line", "category", "block", "stack", "function", "contributor", "size"):
        out = pyalloc("top", path, *at_peak, "--by", by, "-q")
        assert "at the peak (7.0 MiB): 5.0 MiB of 7.0 MiB allocated since step:7" in out, out
        told = json.loads(pyalloc("top", path, *at_peak, "--by", by, "--json", "-q"))
        held = sum(row["bytes"] for row in told["rows"] if by != "function")
        assert held == (0 if by == "function" else 5 * MIB), by
        assert (told["at"], told["since"]) == ("peak", "step:7")


def test_since_where_nothing_is_left_or_asked_for_backwards(plan: Plan) -> None:
    path = steps_of_three(plan)
    for words, told in (
        (["--since", "12"], "nothing held at the end was allocated since 12"),
        (["--since", "step:7", "--at", "step:6"], "--since step:7 is later than --at step:6"),
        (["--since", "soon"], "--since takes peak, end, oom, step:N (its beginning)"),
        (["--since", "step:6", "--over-time"], "--since cannot be combined with"),
        (["--since", "step:6", "--by", "pool"], "--since cannot be combined with"),
    ):
        out = " ".join(pyalloc("top", path, *words, expect=2).split())
        assert told in out, out


def test_which_of_several_errors_is_told_of(plan: Plan) -> None:
    for i in range(6):
        plan.event("alloc", addr=(i + 1) << 30, bytes=(i + 1) * MIB, stack=plan.stack(i + 1))
        plan.event("oom", bytes=(i + 1) << 30, stack=plan.stack(9))
    path = plan.done()
    found = trace.analyse(path)
    for name, n_blocks, which in (
        ("oom", 1, "the first of 6 times"),
        ("oom:1", 1, "the first of 6 times"),
        ("oom:5", 5, "time 5 of 6"),
        ("oom:last", 6, "the last of 6 times"),
    ):
        event, title = when.moment(found, name)
        assert (event, title) == (found.ooms[n_blocks - 1][0], f"when memory ran out ({which})")
        out = pyalloc("top", path, "--at", name, "-q")
        assert out.startswith(title) and len(out.splitlines()) == 1 + n_blocks
        option = ["--oom", name[4:]] if ":" in name else []
        out = pyalloc("report", path, "-q", "--no-replay", *option)
        assert f"out of memory ({which}): {n_blocks}.00 GiB were requested" in out
        assert "held by" in out and f"me/model.py:{n_blocks} work" in out
        at = 2 * n_blocks - 1
        assert f"{title}: events {at} to {at}" in pyalloc("events", path, "--at", name, "-n", 1)
    for wrong in ("7", "0", "first"):
        assert "oom" in pyalloc("top", path, "--at", f"oom:{wrong}", expect=2)
        assert "oom" in pyalloc("report", path, "--oom", wrong, expect=2)
    assert "there is no oom:7: memory ran out 6 times" in pyalloc(
        "top", path, "--at", "oom:7", expect=2
    )


def test_no_error_is_explained_where_memory_never_ran_out(plan: Plan) -> None:
    path = steps_of_three(plan)
    for wanted in ("1", "2", "last"):
        out = pyalloc("report", path, "--oom", wanted, expect=2)
        assert out == "pyalloc report: memory never ran out in this recording; leave out --oom\n"
