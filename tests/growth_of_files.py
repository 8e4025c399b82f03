"""Calls of _core about files: prints which of them leave something behind, including calls that fail.

python growth_of_files.py FOLDER        a process of its own; within pytest other things come and go
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from growth import left_by

from pyalloc import _core
from pyalloc.traces.convert import KINDS

MIB = 1 << 20
PLAN = struct.pack("6Q", 0, 1, 1, 0, 2 * MIB, 1)


def raising(*_: object) -> bool:
    raise RuntimeError("no")


def nothing(*_: object) -> None:
    pass


class Broken:
    """Neither a number nor a sequence of numbers."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return 5 if index == 0 else "five"


def recorded(path: Path) -> Path:
    """With something of each kind."""
    writer = _core.TraceWriter(path)
    texts = [writer.string(text) for text in ("forward", "module:a.b", "größe", "out of it")]
    stack = writer.stack(writer.stack(0, texts[0], texts[1], 7), texts[2], texts[1], 8)
    plain = {"time_ns": 1 << 40, "thread": 1 << 41, "device": 1}

    def event(kind: str, **fields: int) -> None:
        writer.event(KINDS[kind], **{**plain, **fields})

    event("user", text=writer.string("optimizers=Adam"))
    for step in range(3):
        event("step", arg=step)
        event("segment_alloc", addr=step + 1 << 34, bytes=20 * MIB, stack=stack)
        event("pool_begin", addr=1 << 40, arg=1 << 41)
        event("phase_begin", text=texts[0])
        event("phase_begin", text=texts[1])
        event("alloc", addr=step + 1 << 34, bytes=2 * MIB, stack=stack, stream=1 << 33)
        event("label", addr=step + 1 << 34, text=texts[3])
        event("phase_end", text=texts[1])
        event("phase_end", text=texts[0])
        event("pool_end", addr=1 << 40, arg=1 << 41)
        event("alloc", addr=(step + 1 << 34) + 4 * MIB, bytes=MIB)
        event("free_requested", addr=(step + 1 << 34) + 4 * MIB)
    event("oom", bytes=1 << 40, arg=1 << 35, stack=stack)
    writer.close()
    return path


def of_files(path: Path) -> dict[str, Callable[[], object]]:
    reader = _core.TraceReader(path)
    columns: Any = reader.read()
    cells = {number: b"cell" for number in range(10)}
    scan = _core.Scan(path, moments=[5, 12, 20], ranges=[1, 20], window=(1, 25), short_life=2)
    n_rows = {name: getattr(scan, name) for name in ("totals", "bins", "phases", "steps", "stacks")}
    more = ("stackless", "sizes", "ooms", "notes", "moments", "pools", "spans", "told", "growths")
    n_rows |= {name: getattr(scan, name) for name in more}
    program, empty = _core.Program(path), _core.Program()
    open_twice = _core.TraceWriter(path.with_name("twice.pya"))

    return (
        n_rows
        | {
            "reader": lambda: _core.TraceReader(path).read(),
            "reader of no trace": lambda: _core.TraceReader(__file__),
            "reader of none": lambda: _core.TraceReader("/nowhere"),
            "reader of no path": lambda: _core.TraceReader(5),  # type: ignore[arg-type]
            "position": reader.position,
            "reader's texts": lambda: (reader.text(1), reader.text(99), reader.frame(1)),
            "writer of the same": lambda: _core.TraceWriter(open_twice_path(path)),
            "writer of another's": lambda: _core.TraceWriter(path),
            "writer": lambda: writer_left_open(path.with_name("left.pya")),
            "writer's mistakes": lambda: open_twice.event(99),
            "writer's strings": lambda: open_twice.string("\ud800"),
            "history": lambda: _core.HistoryWriter(open_twice, set(), str),
            "history of no set": lambda: _core.HistoryWriter(open_twice, [], str),  # type: ignore[arg-type]
            "history of no trace": lambda: _core.HistoryWriter(path, set(), str),  # type: ignore[arg-type]
            "csv": lambda: _core.csv_lines(0, columns, cells, cells),
            "csv without cells": lambda: _core.csv_lines(0, columns, {}, cells),
            "csv of no bytes": lambda: _core.csv_lines(0, columns, {1: 5, 2: 5}, cells),  # type: ignore[dict-item]
            "csv of few columns": lambda: _core.csv_lines(0, columns[:3], cells, cells),
            "scan": lambda: _core.Scan(path, progress=nothing),
            "scan that is ended": lambda: _core.Scan(path, progress=raising),
            "scan of no trace": lambda: _core.Scan(__file__),
            "scan of no moments": lambda: _core.Scan(path, moments=Broken()),  # type: ignore[arg-type]
            "scan of moments backwards": lambda: _core.Scan(path, moments=[5, 3]),
            "scan of no ranges": lambda: _core.Scan(path, moments=[1, 2], ranges=["a"]),  # type: ignore[list-item]
            "scan of other arguments": lambda: _core.Scan(path, n_bins="many"),  # type: ignore[arg-type]
            "frames": lambda: scan.frames(2),
            "text": lambda: scan.text(2),
            **{
                name: partial(getattr(scan, name), 2)
                for name in ("blocks", "pending", "segment_pools", "segment_requests", "stack_sums")
            },
            "pieces": lambda: scan.pieces(2, 1),
            "no such moment": lambda: scan.blocks(9),
            "no such moment's pieces": lambda: scan.pieces(9, 1),
            "program": lambda: _core.Program(path, progress=nothing),
            "program that is ended": lambda: _core.Program(path, progress=raising),
            "program of no trace": lambda: _core.Program(__file__),
            "info": program.info,
            "program's notes": program.notes,
            "replay": lambda: program.replay("pyalloc", capacity=1 << 30, plan=PLAN),
            "replay that is ended": lambda: program.replay("native", progress=raising),
            "replay of no policy": lambda: program.replay("none", plan=PLAN),
            "replay of no plan": lambda: program.replay("native", plan=PLAN[:-1]),
            "replay of no options": lambda: program.replay("native", options="limit:many"),
            "smallest card": lambda: empty.find_min("native", plan=PLAN),
            "no smallest card": lambda: program.find_min("native", capacity=MIB),
            "policies": _core.replay_policies,
            "kinds": _core.trace_kinds,
            "plan": lambda: _core.check_plan(PLAN),
            "no plan": lambda: _core.check_plan(PLAN[:-1]),
            "a plan that cannot be": lambda: _core.check_plan(PLAN[:24] + bytes(24)),
            "a plan of nothing": lambda: _core.check_plan(5),  # type: ignore[arg-type]
            "places": lambda: _core.place_blocks(
                struct.pack("10Q", *[5, 0, 3, 0, 0] * 2), 1, nothing
            ),
            "places, ended": lambda: _core.place_blocks(
                struct.pack("10Q", *[5, 0, 3, 0, 0] * 2), 9, raising
            ),
            "heap": lambda: (_core.create("", PLAN), _core.destroy()),
            "heap of no plan": lambda: _core.create("", PLAN[:-1]),
            "options": lambda: _core.options("memory:tight"),
            "no options": lambda: _core.options("memory:loose"),
        }
    )


def open_twice_path(path: Path) -> Path:
    return path.with_name("twice.pya")


def writer_left_open(path: Path) -> None:
    _core.TraceWriter(path, True).string("a text")


if __name__ == "__main__":
    for name, call in of_files(recorded(Path(sys.argv[1], "a.pya"))).items():
        left = left_by(call, [PLAN])
        if left is not None:
            print(name, left, sep=": ")
