"""The figures of a running process, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyalloc.common.folding import FILLER, by_column, clip
from pyalloc.common.units import size
from pyalloc.report.text import WIDTH, hung, rows, wrapped
from pyalloc.traces.facts import Row

NO_TERMINAL = WIDTH + 1  # columns: lines may be WIDTH long
_BAR = 40  # at most, and without what stands around it
_BESIDE_BAR = 40
_LEAST_BAR = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_NO_STACKS = (
    "it is unknown which lines hold the memory; to record stacks, use `pyalloc attach` or `pyalloc run --record`, or "
    "call torch.cuda.memory._record_memory_history() in the program"
)
ORDERS = ("bytes", "blocks", "change")


@dataclass
class View:
    """What the user has chosen by keys.

    n_lines: most lines of the program to show, 0: none; before: bytes of each line when counting of changes began.
    """

    n_lines: int = 0
    order: str = ORDERS[0]
    is_paused: bool = False
    before: dict[str, int] | None = None
    held: dict[str, int] = field(default_factory=dict)  # the same at the latest look


def watched(
    figures: dict[str, Any], history: list[int], view: View, height: int, columns: int = NO_TERMINAL
) -> str:
    """screen(), with what the keys changed, in at most `height` lines."""
    told = {key: value for key, value in figures.items() if key != "lines"}
    lines = screen(told, history, columns).split("\n")
    keys = f"q quit, space {'resume' if view.is_paused else 'pause'}, l {'hide' if view.n_lines else 'show'} lines"
    if view.n_lines and figures.get("lines") is None:
        lines += wrapped(_NO_STACKS).split("\n")
    elif view.n_lines:
        lines += _sorted(figures["lines"], view)
        keys += f", +/- more/fewer, s by {view.order}, c count anew"
    below = ["", *_fitted([keys], columns)]
    return "\n".join([*list(_fitted(lines, columns))[: height - len(below)], *below])


def _fitted(lines: Iterable[str], columns: int) -> Iterator[str]:
    """The lines that a terminal shows.  None fills the last column: erasing the rest of a line would erase that too."""
    for line in "\n".join(lines).split("\n"):
        wide = by_column(line)
        if len(wide) < columns:
            yield line
            continue
        # What stood below a column to the right stands below the line's beginning.
        wide = wide if wide[: columns // 2].strip() else f"    {wide.strip()}"
        parts = textwrap.wrap(
            wide, max(columns, _LEAST_BAR) - 1, subsequent_indent="    ", break_on_hyphens=False
        )
        yield from (part.replace(FILLER, "") for part in parts)


def _sorted(lines: list[dict[str, Any]], view: View) -> list[str]:
    """Which lines hold the memory, in the chosen order."""
    view.held = {row["name"]: row["bytes"] for row in lines}
    before = view.before = view.held if view.before is None else view.before
    gone = [{"name": name, "bytes": 0, "blocks": 0} for name in before if name not in view.held]
    table = [(row, row["bytes"] - before.get(row["name"], 0)) for row in [*lines, *gone]]
    table.sort(
        key=lambda each: abs(each[1]) if view.order == "change" else each[0][view.order],
        reverse=True,
    )
    total = max(sum(row["bytes"] for row in lines), 1)
    found = [f"{'held now':>10}{'share':>8}{'blocks':>8}{'change':>12}  line"]
    for row, change in table[: view.n_lines]:
        changed = ("+" if change > 0 else "-") + size(abs(change)) if change else ""
        figures = f"{size(row['bytes']):>10}{100 * row['bytes'] / total:>6.1f} %{row['blocks']:>8,}"
        found.append(hung(f"{figures}{changed:>12}", row["name"]))
    left = len(table) - view.n_lines
    return found + [f"  and {left:,} more"] * (left > 0)


def screen(figures: dict[str, Any], history: list[int], columns: int = NO_TERMINAL) -> str:
    """A few lines; history: allocated bytes at the looks so far."""
    command = " ".join(" ".join(figures["argv"]).split())  # a program given by -c may have lines
    lines = [clip(f"process {figures['pid']}: {command}", min(columns - 1, WIDTH))]
    width = max(_LEAST_BAR, min(_BAR, columns - _BESIDE_BAR))
    if not figures["devices"]:
        lines.append("  has not used CUDA yet")
    for index, stats in figures["devices"].items():
        total = max(stats["device_total_bytes"], 1)
        allocated = stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        used = round(width * allocated / total)
        held = max(round(width * reserved / total) - used, 0)
        bar = "#" * used + "-" * held + "." * (width - used - held)
        lines += [
            f"  device {index} [{bar}] {size(reserved)} of {size(total)}",
            f"    allocated {size(allocated)} (peak {size(stats['allocated_bytes.all.peak'])}), "
            f"idle {size(reserved - allocated)}, retries {stats.get('num_alloc_retries', 0)}, "
            f"OOMs {stats.get('num_ooms', 0)}",
        ]
    lines += [*_lines(figures), *_recording(figures.get("recording"))]
    top = max(history, default=0)
    if len(history) > 1 and top:
        latest = history[-max(1, min(columns - 1, WIDTH) - 4) :]
        lines.append("  " + "".join(_LEVELS[round(8 * value / top)] for value in latest))
    return "\n".join(lines)


def _recording(told: dict[str, Any] | None) -> list[str]:
    if not told:
        return []
    when = "will be recorded once it uses CUDA," if told.get("waits") else "recorded"
    left = f", for {told['left_s']:.0f} s more" if told.get("left_s") is not None else ""
    return [f"  {when} to {told['path']}{left}"]


def _lines(figures: dict[str, Any]) -> list[str]:
    """Which lines hold the memory, if that was asked for."""
    if "lines" not in figures:
        return []
    if figures["lines"] is None:
        return [wrapped(_NO_STACKS)]
    held = [Row(**line) for line in figures["lines"]]
    return rows("  held now, by line", held, sum(row.bytes for row in held), len(held))
