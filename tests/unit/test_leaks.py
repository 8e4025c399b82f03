"""Calls of _core, those that fail too, leave neither objects nor host memory behind."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython
from growth import left_by

from pyalloc import _core
from pyalloc.convert import KINDS

MIB = 1 << 20


def raising(*_: object) -> bool:
    raise RuntimeError("no")


def nothing(*_: object) -> None:
    pass


class Broken:
    """Neither a number nor a sequence of such."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> object:
        return 5 if index == 0 else "five"


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Looking through all of pytest's takes longer than the calls."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with something of each kind."""
    path = tmp_path_factory.mktemp("leaks") / "a.pya"
    writer = _core.TraceWriter(path)
    texts = [writer.string(text) for text in ("forward", "module: a.b", "größe", "out of it")]
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
        event("alloc", addr=step + 1 << 34, bytes=2 * MIB, stack=stack, stream=1 << 33)
        event("label", addr=step + 1 << 34, text=texts[3])
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
    program = _core.Program(path)
    plan = struct.pack("3Q", 0, 1, 1) + struct.pack("3Q", 2 * MIB, 0, 1)
    open_twice = _core.TraceWriter(path.with_name("twice.pya"))

    def rewound() -> None:
        reader.rewind()
        reader.read()

    return (
        n_rows
        | {
            "reader": lambda: _core.TraceReader(path).read(3),
            "reader of no trace": lambda: _core.TraceReader(__file__),
            "reader of none": lambda: _core.TraceReader("/nowhere"),
            "reader of no path": lambda: _core.TraceReader(5),  # type: ignore[arg-type]
            "rewound": rewound,
            "position": reader.position,
            "reader's texts": lambda: (reader.text(1), reader.text(99), reader.frame(1)),
            "writer of the same": lambda: _core.TraceWriter(open_twice_path(path)),
            "writer of another's": lambda: _core.TraceWriter(path),
            "writer": lambda: writer_left_open(path.with_name("left.pya")),
            "writer's mistakes": lambda: open_twice.event(99),
            "writer's strings": lambda: open_twice.string("\ud800"),
            "history": lambda: _core.HistoryWriter(open_twice, set()),
            "history of no set": lambda: _core.HistoryWriter(open_twice, []),  # type: ignore[arg-type]
            "history of no trace": lambda: _core.HistoryWriter(path, set()),  # type: ignore[arg-type]
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
                name: (lambda method, more: lambda: method(2, *more))(getattr(scan, name), more)
                for name, more in {
                    "blocks": (),
                    "pending": (),
                    "segment_pools": (),
                    "segment_requests": (),
                    "stack_sums": (),
                    "pieces": (1,),
                }.items()
            },
            "no such moment": lambda: scan.blocks(9),
            "no such moment's pieces": lambda: scan.pieces(9, 1),
            "program": lambda: _core.Program(path, progress=nothing),
            "program that is ended": lambda: _core.Program(path, progress=raising),
            "program of no trace": lambda: _core.Program(__file__),
            "info": program.info,
            "program's notes": program.notes,
            "replay": lambda: program.replay("pyalloc", capacity=1 << 30, plan=plan),
            "replay that is ended": lambda: program.replay("native", progress=raising),
            "replay of no policy": lambda: program.replay("none", plan=plan),
            "replay of no plan": lambda: program.replay("native", plan=plan[:-1]),
            "replay of no options": lambda: program.replay("native", options="limit:many"),
            "smallest card": lambda: program.find_min("native", plan=plan),
            "no smallest card": lambda: program.find_min("native", capacity=MIB),
            "policies": _core.replay_policies,
            "kinds": _core.trace_kinds,
            "plan": lambda: _core.check_plan(plan),
            "no plan": lambda: _core.check_plan(plan[:-1]),
            "a plan that cannot be": lambda: _core.check_plan(plan[:24] + bytes(24)),
            "a plan of nothing": lambda: _core.check_plan(5),  # type: ignore[arg-type]
            "places": lambda: _core.place_blocks(
                struct.pack("10Q", *[5, 0, 3, 0, 0] * 2), 1, nothing
            ),
            "places, ended": lambda: _core.place_blocks(
                struct.pack("10Q", *[5, 0, 3, 0, 0] * 2), 9, raising
            ),
            "options": lambda: _core.options("memory:tight"),
            "no options": lambda: _core.options("memory:loose"),
        }
    )


def open_twice_path(path: Path) -> Path:
    return path.with_name("twice.pya")


def writer_left_open(path: Path) -> None:
    _core.TraceWriter(path, True).string("a text")


def told(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    left = {name: left_by(call) for name, call in calls.items()}
    return {name: text for name, text in left.items() if text is not None}


def test_of_files(path: Path) -> None:
    assert told(of_files(path)) == {}


@pytest.mark.torch
def test_of_the_allocator(dry_python: RunPython) -> None:
    out = dry_python(
        """
        import sys
        import torch
        sys.path.insert(0, "tests")
        from growth import left_by
        import pyalloc
        from pyalloc import _core

        MIB = 1 << 20
        sys.unraisablehook = lambda told: None
        torch.cuda.memory._record_memory_history(max_entries=20, stacks="all")
        held = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = torch.empty(MIB, device="cuda")
        address = held.data_ptr()
        tensors = [torch.zeros(2, 3, 4, 5) for _ in range(3)]
        nobody = torch.view_as_complex(torch.zeros(2, 2)).conj().imag

        class Own(torch.Tensor):
            pass

        def out_of_memory():
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")

        def under_pressure():
            answers = [lambda *_: 1 / 0, lambda *_: False, lambda *_: None]
            handles = [pyalloc.on_pressure(answer) for answer in answers]
            try:
                out_of_memory()
            finally:
                for handle in handles:
                    handle.remove()

        def alloc_and_free():
            _core.free(_core.alloc(0, MIB, 0))

        def labelled():
            _core.set_metadata(b"a label")
            torch.empty(1000, device="cuda")
            assert _core.get_metadata() == "a label"
            assert _core.annotate(address, b"a note")

        def own_pool():
            with pyalloc.pool(limit="1GiB"):
                torch.empty(3 * MIB, device="cuda")

        types = torch.Tensor, torch.nn.Parameter
        key = _core.tensor_key(*types)
        rule = _core.attention_rule(types, torch.float32, 1000, 10, 10, 256)
        calls = {
            "stats": lambda: _core.stats(0),
            "stats of no device": lambda: _core.stats(-1),
            "nested": lambda: _core.nested_stats(0, {"num_ooms"}),
            "nested without a number": lambda: _core.nested_stats(0, 5),
            "pools": lambda: _core.pools(0),
            "snapshot": lambda: _core.snapshot(2, True, None),
            "snapshot of a pool": lambda: _core.snapshot(2, False, pool.id),
            "snapshot of no pool": lambda: _core.snapshot(2, False, (1, "two")),
            "snapshot of too many": lambda: _core.snapshot(99, False, None),
            "actions": _core.actions,
            "features": _core.torch_features,
            "hooks": _core.torch_attach,
            "counts": _core.counts,
            "traceback": lambda: _core.traceback(address),
            "traceback of nothing": lambda: _core.traceback(1),
            "no annotation": lambda: _core.annotate(1, b"a note"),
            "labels": labelled,
            "metadata of no bytes": lambda: _core.set_metadata("text"),
            "alloc": alloc_and_free,
            "alloc of too much": lambda: _core.alloc(0, 1 << 60, 0),
            "free of nothing": lambda: _core.free(1),
            "block": lambda: _core.block_info(address),
            "no block": lambda: _core.block_info(1),
            "reserve of too much": lambda: _core.reserve(0, 1 << 40, 0),
            "limit": lambda: (_core.set_limit(0, True, 8 << 30), _core.get_limit(0, True)),
            "limit of no pool": lambda: _core.pool_set_limit(0, (9, 9), MIB),
            "text": _core.oom_text,
            "tensors": lambda: torch.empty(3 * MIB, device="cuda"),
            "a pool": own_pool,
            "out of memory": out_of_memory,
            "pressure": under_pressure,
            "key": lambda: key(*tensors, None),
            "key of no tensor": lambda: key(tensors[0], 5),
            "key of a negation": lambda: key(tensors[0], nobody),
            "key of a class": lambda: key(tensors[0].as_subclass(Own)),
            "maker of keys": lambda: _core.tensor_key(*types),
            "rule": lambda: rule(*tensors),
            "rule of others": lambda: rule(*(tensor.double() for tensor in tensors)),
            "rule of a class": lambda: rule(*(tensor.as_subclass(Own) for tensor in tensors)),
            "rule of no tensors": lambda: rule(1, 2, 3),
            "maker of rules": lambda: _core.attention_rule(types, torch.float32, 1, 2, 3, 4),
            "maker of none": lambda: _core.attention_rule(types, torch.float32, 1, 2, 3, "4"),
            "op without a place": lambda: _core.op_call(address, b"1" * 8, b"12", None, 5, 6),
            "op beyond": lambda: _core.op_call(address, b"1" * 8, b"\\1\\1", None, 5),
            "op of no tensor": lambda: _core.op_call(address, b"1" * 8, b"\\0\\0", None, "five"),
        }
        for name, call in calls.items():
            left = left_by(call)
            if left is not None:
                print(name, left, sep=": ")
        torch.cuda.memory._record_memory_history(None)
        assert _core.check(0) == 0
        """,
        install=True,
    ).stdout
    assert out == ""
