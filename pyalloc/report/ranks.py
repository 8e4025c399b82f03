"""Several ranks side by side, and the one that differs."""

from __future__ import annotations

import statistics
from typing import Any

from pyalloc.analysis import leaks
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.folding import clip, column
from pyalloc.common.units import size
from pyalloc.report.text import wrapped

_ODD = 0.01  # share of the median; less is not a difference


def _median(found: list[Analysis]) -> float:
    return float(statistics.median(one.totals["peak_bytes"] for one in found))


def odd_one(found: list[Analysis]) -> Analysis:
    """The rank whose peak is farthest from the median; of two equally far, the one with the larger peak."""
    middle = _median(found)

    def distance(one: Analysis) -> tuple[float, int]:
        peak = one.totals["peak_bytes"]
        return abs(peak - middle), peak

    return max(found, key=distance)


def rows(found: list[Analysis]) -> list[dict[str, Any]]:
    """A row for each rank: bytes, to_median as a share, and is_odd if it is the one that differs."""
    middle, odd = _median(found), odd_one(found)
    is_any = abs(odd.totals["peak_bytes"] - middle) > middle * _ODD
    return [
        {
            "file": one.path.name,
            "peak_bytes": one.totals["peak_bytes"],
            "to_median": one.totals["peak_bytes"] / max(middle, 1) - 1,
            "peak_reserved_bytes": one.totals["peak_reserved_bytes"],
            "events": one.totals["n_events"],
            "is_odd": is_any and one is odd,
        }
        for one in found
    ]


def changes(found: list[Analysis]) -> tuple[Analysis, list[tuple[int, str]]]:
    """The rank nearest to the median, and what the odd one holds more (or less) of at its peak, by line."""
    middle, odd = _median(found), odd_one(found)
    other = min(
        (one for one in found if one is not odd),
        key=lambda one: abs(one.totals["peak_bytes"] - middle),
    )
    base = {row.name: row.bytes for row in other.by_line(other.peak.blocks)}
    own = {row.name: row.bytes for row in odd.by_line(odd.peak.blocks)}
    found_changes = [(own.get(name, 0) - base.get(name, 0), name) for name in {*base, *own}]
    return other, sorted((c for c in found_changes if c[0]), key=lambda pair: -abs(pair[0]))


def compare(found: list[Analysis]) -> str:
    """A line for each rank, the odd one marked; then what that one holds more or less of."""
    lines = [f"{'file':<29}{'peak':>12}{'to median':>11}{'reserved':>12}{'events':>11}"]
    table = rows(found)
    for row in table:
        percent = round(100 * row["to_median"], 1) + 0.0  # never -0.0
        lines.append(
            f"{column(row['file'], 29)}{size(row['peak_bytes']):>12}{percent:>+10.1f}%"
            f"{size(row['peak_reserved_bytes']):>12}{row['events']:>11,}"
            + (" <odd" if row["is_odd"] else "")
        )
    if not any(row["is_odd"] for row in table):
        return "\n".join([*lines, "all ranks are alike (within 1 % of the median)"])
    odd = odd_one(found)
    other, differing = changes(found)
    lines += ["", f"the odd one is {odd.path.name}; at the peak, compared with {other.path.name}:"]
    for change, name in differing[:8]:
        lines.append(f"  {'+' if change > 0 else '-'}{size(abs(change)):>10}  {clip(name, 64)}")
    if leaks.growth(odd):
        lines.append(wrapped(f"{odd.path.name}: {leaks.verdict(odd)}", ""))
    return "\n".join(lines)
