"""Tables of memory by phase, on a terminal and in a notebook."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from pyalloc import marks
from pyalloc.common import files
from pyalloc.common.folding import column
from pyalloc.common.units import MIB
from pyalloc.inside import snapshots


@dataclass(frozen=True)
class PhaseRow:
    """Figures in bytes at the end of a phase; peak_bytes: the highest since the step, or the table, began."""

    step: int
    phase: str
    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int


@dataclass(eq=False)  # listeners are told apart by identity
class MemoryTable:
    """Allocated, peak and reserved bytes after each phase; gets a row at the end of each `pyalloc.phase()`.

    str() is a table, and notebooks show it as one.  Works on torch's allocator and on pyalloc; before CUDA is used,
    all figures are 0.
    """

    device: int | None = None
    rows: list[PhaseRow] = field(default_factory=list)
    step: int = 0

    def add(self, phase: str) -> PhaseRow:
        """Adds a row by hand, where no phase ends; phase: its name."""
        import torch

        stats: dict[str, Any] = torch.cuda.memory_stats(self.device)  # empty before CUDA starts
        row = PhaseRow(
            self.step,
            phase,
            int(stats.get("allocated_bytes.all.current", 0)),
            int(stats.get("allocated_bytes.all.peak", 0)),
            int(stats.get("reserved_bytes.all.current", 0)),
        )
        self.rows.append(row)
        return row

    def on_step(self, number: int) -> None:
        """Called by `pyalloc.step()`: peaks start anew."""
        import torch

        self.step = number
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_phase(self, name: str, begins: bool) -> None:
        """Called by `pyalloc.phase()`: its end adds a row."""
        if not begins:
            self.add(name)

    def close(self) -> None:
        """Stops listening; the rows stay."""
        if self in marks.listeners:
            marks.listeners.remove(self)

    def __enter__(self) -> MemoryTable:
        """The table itself, which listens until the end of the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """See close()."""
        self.close()

    def __str__(self) -> str:
        """A header, and a line for each row; figures in MiB."""
        lines = [f"{'step':>4}  {'phase':<20}{'allocated':>10}{'peak':>9}{'reserved':>10}  MiB"]
        lines += [
            f"{row.step:>4}  {column(row.phase, 20)}{row.allocated_bytes / MIB:>10.0f}"
            f"{row.peak_bytes / MIB:>9.0f}{row.reserved_bytes / MIB:>10.0f}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html  # late: it would make importing pyalloc a tenth slower

        cells = "".join(
            f"<tr><td>{row.step}</td><td style='text-align:left'>{html.escape(row.phase)}</td>"
            f"<td>{row.allocated_bytes / MIB:.0f}</td><td>{row.peak_bytes / MIB:.0f}</td>"
            f"<td>{row.reserved_bytes / MIB:.0f}</td></tr>"
            for row in self.rows
        )
        head = "<tr><th>step</th><th>phase</th><th>allocated MiB</th><th>peak</th><th>reserved</th></tr>"
        return f"<table>{head}{cells}</table>"


def memory_table(device: int | None = None) -> MemoryTable:
    """Returns a table that gets a row at the end of each phase from now on; `print(table)` when done.

    This resets torch's peak statistics, and so does each `pyalloc.step()`.

    Args:
        device: whose figures to show; None for the current device.

    Returns:
        The table.  It collects rows until its close(), or until the end of its `with` block.
    """
    table = MemoryTable(device)
    if "torch" in sys.modules:
        table.on_step(0)
    marks.listeners.append(table)
    return table


@dataclass(frozen=True)
class Snapshot:
    """The memory of this process now.  data: as torch.cuda.memory._snapshot() gives it."""

    data: dict[str, Any]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(int(segment["total_size"]) for segment in self.data["segments"])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live blocks."""
        return sum(int(segment["allocated_size"]) for segment in self.data["segments"])

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest idle piece of a segment; 0 if there is none."""
        return max(
            (
                int(block["size"])
                for segment in self.data["segments"]
                for block in segment["blocks"]
                if block["state"] == "inactive"
            ),
            default=0,
        )

    def save(self, path: str) -> None:
        """Writes a pickle that torch's viewer and all `pyalloc` commands read; replaces a file of that name.

        Raises:
            OSError: it cannot be written, or path is a device, a pipe or a folder.
        """
        import pickle
        from pathlib import Path

        files.write(Path(path), pickle.dumps(self.data, protocol=4))

    def __str__(self) -> str:
        """One line for each device."""
        return "\n".join(" ".join(str(cell) for cell in row) for row in self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for device in sorted({int(segment["device"]) for segment in self.data["segments"]}):
            own = [s for s in self.data["segments"] if s["device"] == device]
            live = sum(int(s["allocated_size"]) for s in own)
            held = sum(int(s["total_size"]) for s in own)
            text = (
                f"{live / MIB:.1f} MiB allocated of {held / MIB:.1f} reserved, "
                f"{len(own)} segment{'s' * (len(own) != 1)}"
            )
            rows.append((f"device {device}:", text))
        return rows or [("no", "device memory in use")]

    def _repr_html_(self) -> str:
        import html

        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
            for name, text in self._rows()
        )
        return f"<table>{cells}</table>"


def snapshot() -> Snapshot:
    """Takes a snapshot of this process's CUDA memory, on torch's allocator or on pyalloc; does not start CUDA.

    Returns:
        A Snapshot.  Its str() has a line for each device; its `data` is what torch.cuda.memory._snapshot() returns.
    """
    return Snapshot(snapshots.take())
