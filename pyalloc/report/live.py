"""The figures of a running process for a terminal."""

from __future__ import annotations

from typing import Any

from pyalloc.analysis import Row
from pyalloc.report.text import clip, rows, wrapped
from pyalloc.units import size

_BAR = 40
_LEVELS = " ▁▂▃▄▅▆▇█"
_NO_STACKS = (
    "which lines hold it is not known: `pyalloc attach` or `pyalloc run --record`, or the program's own call of "
    "torch.cuda.memory._record_memory_history(), keeps stacks"
)


def screen(figures: dict[str, Any], history: list[int]) -> str:
    """A few lines; history: allocated bytes so far."""
    command = " ".join(" ".join(figures["argv"]).split())  # a program given as text has lines
    lines = [clip(f"process {figures['pid']}: {command}", 80)]
    if not figures["devices"]:
        lines.append("  has not used CUDA yet")
    for index, stats in figures["devices"].items():
        total = max(stats["device_total_bytes"], 1)
        allocated = stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        used = round(_BAR * allocated / total)
        held = max(round(_BAR * reserved / total) - used, 0)
        bar = "#" * used + "-" * held + "." * (_BAR - used - held)
        lines += [
            f"  device {index} [{bar}] {size(reserved)} of {size(total)}",
            f"    allocated {size(allocated)} (peak {size(stats['allocated_bytes.all.peak'])}), "
            f"idle {size(reserved - allocated)}, retries {stats.get('num_alloc_retries', 0)}, "
            f"OOMs {stats.get('num_ooms', 0)}",
        ]
    lines += [*_lines(figures), *_recording(figures.get("recording"))]
    top = max(history, default=0)
    if len(history) > 1 and top:
        lines.append("  " + "".join(_LEVELS[round(8 * value / top)] for value in history[-76:]))
    return "\n".join(lines)


def _recording(told: dict[str, Any] | None) -> list[str]:
    if not told:
        return []
    when = "will be recorded, once it uses CUDA," if told.get("waits") else "recorded"
    left = f", {told['left_s']:.0f} s more" if told.get("left_s") is not None else ""
    return [f"  {when} to {told['path']}{left}"]


def _lines(figures: dict[str, Any]) -> list[str]:
    """Who holds it, where that was asked for."""
    if "lines" not in figures:
        return []
    if figures["lines"] is None:
        return [wrapped(_NO_STACKS)]
    held = [Row(**line) for line in figures["lines"]]
    return rows("  held now, by line", held, sum(row.bytes for row in held), len(held))
