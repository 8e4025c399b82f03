"""What tables and snapshots show, of figures given by hand; of real memory: tests/instrument/test_library.py."""

from __future__ import annotations

from typing import Any

import pytest

from pyalloc import marks
from pyalloc.tables import MemoryTable, PhaseRow, Snapshot, memory_table

MIB = 1 << 20


def test_each_figure_has_its_column() -> None:
    rows = [
        PhaseRow(0, "forward", 36 * MIB, 1100 * MIB, 2000 * MIB),
        PhaseRow(12, "<update> of all parameters", 7 * MIB, 8 * MIB, 9 * MIB),
    ]
    table = MemoryTable(rows=rows)
    assert str(table).splitlines() == [
        "step  phase                allocated     peak  reserved  MiB",
        "   0  forward                     36     1100      2000",
        "  12  <update> of all pa…          7        8         9",
    ]
    html = table._repr_html_()
    assert "<td>36</td><td>1100</td><td>2000</td></tr>" in html
    assert "<td>12</td><td style='text-align:left'>&lt;update&gt; of all parameters</td>" in html


def test_tables_alike_are_closed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "listeners", [])
    first, second = memory_table(), memory_table()
    assert str(first) == str(second)
    second.close()
    assert len(marks.listeners) == 1 and marks.listeners[0] is first
    second.close()
    assert len(marks.listeners) == 1
    first.close()
    assert marks.listeners == []


def segment(device: int, live: int, total: int, *blocks: tuple[str, int]) -> dict[str, Any]:
    return {
        "device": device,
        "allocated_size": live * MIB,
        "total_size": total * MIB,
        "blocks": [{"state": state, "size": size * MIB} for state, size in blocks],
    }


def test_a_snapshot_tells_of_each_device() -> None:
    busy = segment(1, 3, 20, ("active_allocated", 3), ("inactive", 2), ("active_pending_free", 15))
    idle = segment(0, 0, 8, ("inactive", 5), ("inactive", 3))
    now = Snapshot({"segments": [busy, idle, segment(1, 4, 4, ("active_allocated", 4))]})
    assert str(now).splitlines() == [
        "device 0: 0.0 MiB allocated of 8.0 reserved, 1 segment",
        "device 1: 7.0 MiB allocated of 24.0 reserved, 2 segments",
    ]
    assert "<tr><td>device 1:</td><td>7.0 MiB allocated of 24.0 reserved" in now._repr_html_()
    assert (now.allocated_bytes, now.reserved_bytes) == (7 * MIB, 32 * MIB)
    assert now.largest_free_bytes == 5 * MIB


def test_a_snapshot_of_nothing_says_so() -> None:
    nothing = Snapshot({"segments": []})
    assert str(nothing) == "no device memory in use"
    assert nothing.largest_free_bytes == nothing.reserved_bytes == 0
