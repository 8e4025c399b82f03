"""The tree of calls: who called whom for what is alive."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import termios

import pytest

from instrument.tools import MIB, Plan, pyalloc
from pyalloc import cli
from pyalloc.common.folding import by_column

CALLS = {  # outermost first; a line of the program's, or of torch's
    "helper": ["train:9", "step:5", "make:3"],
    "other": ["train:9", "step:6", "make:3"],
    "itself": ["train:9", "step:6"],
    "deep": ["train:9", "step:6", "torch:1", "inner:2", "torch:7"],
    "small": ["train:10"],
}


def planted(plan: Plan) -> None:
    sizes = {"helper": 16, "other": 8, "itself": 4, "deep": 2, "small": 1, "": 32}
    for i, (name, mib) in enumerate(sizes.items()):
        stack = 0
        for call in CALLS.get(name, []):
            function, line = call.split(":")
            file = (
                "/lib/python3.11/site-packages/torch/nn.py" if function == "torch" else "/me/a.py"
            )
            texts = plan.writer.string(function), plan.writer.string(file)
            stack = plan.writer.stack(stack, *texts, int(line))
        plan.event("alloc", addr=(i + 1) << 30, bytes=mib * MIB, stack=stack)
    plan.done()


def told(out: str) -> list[str]:
    """Lines without their figures."""
    return [line[31:] for line in out.splitlines()[1:] if not line.startswith("next:")]


def test_calls_are_a_tree(plan: Plan) -> None:
    planted(plan)
    out = pyalloc("top", plan.path, "--by", "stack")
    assert told(out) == [
        "(no stack)",
        "me/a.py:9 train",
        "  me/a.py:5 step",
        "  me/a.py:3 make",
        "  me/a.py:6 step",
        "    me/a.py:3 make",
        "    (this line itself)",
        "    me/a.py:2 inner",
        "    torch/nn.py:7 torch",
        "me/a.py:10 train",
    ]
    lines = out.splitlines()
    assert lines[2].split()[:6] == ["30.0", "MiB", "47.6", "%", "4", "x"]
    assert lines[4].split() == ["me/a.py:3", "make"]  # as much as its caller
    assert max(map(len, lines[:-1])) <= 80


@pytest.mark.parametrize(("columns", "is_whole"), [(0, False), (60, False), (120, True)])
def test_names_are_cut_where_the_terminal_ends(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, columns: int, is_whole: bool
) -> None:
    """At 80 columns if it does not tell how wide it is, or is narrower."""
    name = "a_function_whose_name_fills_more_than_half_of_a_line"
    stack = plan.writer.stack(0, plan.writer.string(name), plan.writer.string("/me/a.py"), 9)
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=stack)
    plan.done()
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(terminal, "w") as stream, os.fdopen(ours, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main(["top", str(plan.path), "--by", "stack", "-q"]) == 0
        lines = shown.read(4096).decode().splitlines()
    assert lines[1][31:] == (f"me/a.py:9 {name}" if is_whole else f"me/a.py:9 {name[:38]}…")


@pytest.mark.parametrize("words", [(), ("--over-time",)])
@pytest.mark.parametrize("letter", ["a", "\u65e5"])
def test_a_name_that_is_too_long_keeps_its_end(
    plan: Plan, words: tuple[str, ...], letter: str
) -> None:
    """Two lines of one file, deep in folders, looked the same."""
    texts = plan.writer.string("work"), plan.writer.string(f"/me/{letter * 300}/model.py")
    for number in (7, 8):
        stack = plan.writer.stack(0, *texts, number)
        plan.event("alloc", addr=number << 30, bytes=MIB, stack=stack)
    shown = pyalloc("top", plan.done(), "-q", *words)
    for number in (7, 8):
        assert f"/model.py:{number} work\n" in shown
    assert max(len(by_column(line)) for line in shown.splitlines()) <= 80


def test_small_stacks_are_summed_where_they_branch_off(plan: Plan) -> None:
    planted(plan)
    out = pyalloc("top", plan.path, "--by", "stack", "-n", 3)
    assert told(out) == [
        "(no stack)",
        "me/a.py:9 train",
        "  me/a.py:5 step",
        "  me/a.py:3 make",
        "  me/a.py:6 step",
        "    me/a.py:3 make",
        "    2 smaller stacks",
        "1 smaller stack",
    ]
    assert "6.0 MiB   9.5 %      2 x      2 smaller stacks" in out


def test_stacks_as_data(plan: Plan) -> None:
    planted(plan)
    rows = json.loads(pyalloc("top", plan.path, "--by", "stack", "-n", 2, "--json", "-q"))["rows"]
    assert rows == [
        {"calls": ["(no stack)"], "bytes": 32 * MIB, "blocks": 1},
        {
            "calls": ["me/a.py:9 train", "me/a.py:5 step", "me/a.py:3 make"],
            "bytes": 16 * MIB,
            "blocks": 1,
        },
    ]


def test_the_tree_is_turned_over(plan: Plan) -> None:
    """The requesting line comes first; its callers stand below, summed over all of its own callers."""
    stack = plan.writer.stack(0, plan.writer.string("make"), plan.writer.string("/me/a.py"), 3)
    plan.event("alloc", addr=9 << 30, bytes=6 * MIB, stack=stack)
    planted(plan)
    out = pyalloc("top", plan.path, "--by", "stack", "--invert")
    assert out.splitlines()[0] == "at the peak (69.0 MiB), by stack, inverted"
    assert told(out) == [
        "(no stack)",
        "me/a.py:3 make",
        "  me/a.py:5 step",
        "  me/a.py:9 train",
        "  me/a.py:6 step",
        "  me/a.py:9 train",
        "  (no caller)",
        "me/a.py:6 step",
        "me/a.py:9 train",
        "torch/nn.py:7 torch",
        "me/a.py:2 inner",
        "me/a.py:6 step",
        "me/a.py:9 train",
        "me/a.py:10 train",
    ]
    assert "30.0 MiB  43.5 %      3 x  me/a.py:3 make" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    found = json.loads(
        pyalloc("top", plan.path, "--by", "stack", "--invert", "-n", 2, "--json", "-q")
    )
    assert found["inverted"] and found["rows"][1]["calls"] == [
        "me/a.py:3 make",
        "me/a.py:5 step",
        "me/a.py:9 train",
    ]
    for words in ((), ("--by", "stack", "--over-time")):
        refused = pyalloc("top", plan.path, "--invert", *words, expect=2)
        assert "--invert needs --by stack" in refused


def test_functions_hold_what_they_led_to(plan: Plan) -> None:
    planted(plan)
    found = json.loads(pyalloc("top", plan.path, "--by", "function", "--json", "-q"))["rows"]
    held = {
        row["name"]: (row["bytes"] // MIB, row["own_bytes"] // MIB, row["blocks"]) for row in found
    }
    assert held == {
        "(no stack)": (32, 32, 1),
        "train  me/a.py": (31, 1, 5),
        "step  me/a.py": (30, 4, 4),
        "make  me/a.py": (24, 24, 2),
        "torch  torch/nn.py": (2, 2, 1),
        "inner  me/a.py": (2, 0, 1),
    }
    assert sum(row["own_bytes"] for row in found) == 63 * MIB
    out = pyalloc("top", plan.path, "--by", "function", "-n", 3)
    lines = out.splitlines()
    assert lines[3].split() == ["31.0", "MiB", "49.2", "%", "1.0", "MiB", "5", "train", "me/a.py"]
    assert lines[5] == "  and 3 more" and max(map(len, lines[:-1])) <= 80
    told = json.loads(pyalloc("top", plan.path, "--by", "function", "-n", 3, "--json", "-q"))
    assert told["rows"] == found[:3]


def test_a_function_that_calls_itself_counts_once(plan: Plan) -> None:
    stack, file = 0, plan.writer.string("/me/a.py")
    for line in (1, 2, 3):
        stack = plan.writer.stack(stack, plan.writer.string("again"), file, line)
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=stack)
    (row,) = json.loads(pyalloc("top", plan.done(), "--by", "function", "--json", "-q"))["rows"]
    assert (row["bytes"], row["own_bytes"], row["blocks"]) == (MIB, MIB, 1)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("file", ["/me/a.py", "/lib/python3.11/site-packages/torch/nn.py"])
def test_a_leak_is_told_with_who_called(plan: Plan, file: str, every: int) -> None:
    """The requesting line may be in a function that the whole program calls."""
    outer = plan.writer.stack(0, plan.writer.string("train"), plan.writer.string("/me/a.py"), 9)
    texts = plan.writer.string("keep"), plan.writer.string("/me/a.py")
    stack = plan.writer.stack(outer, *texts, 4)
    inner = plan.writer.stack(stack, plan.writer.string("make"), plan.writer.string(file), 2)
    for step in range(10):
        plan.event("step", "step", arg=step)
        if step % every == 0:
            plan.event("alloc", addr=(step + 1) << 30, bytes=MIB, stack=inner)
    out = pyalloc("top", plan.done(), "--over-time")
    callers = [line.strip() for line in out.splitlines() if "called by" in line]
    known = ["called by me/a.py:4 keep", "called by me/a.py:9 train"]
    assert callers == (known if file == "/me/a.py" else known[1:])
    assert ("+1.0 MiB per step" in out) is (every == 1) and ("+2.0 MiB in all" in out) is (
        every > 1
    )
    told = json.loads(pyalloc("top", plan.path, "--over-time", "--json", "-q"))
    grown = told["growth" if every == 1 else "jumps"]
    assert grown[0]["calls"][:2] == ["me/a.py:9 train", "me/a.py:4 keep"]
