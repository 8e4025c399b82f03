"""Several ranks side by side, and the one that differs."""

from __future__ import annotations

import statistics

from pyalloc.advice import size
from pyalloc.analysis import Analysis
from pyalloc.report.text import clip


def odd_one(found: list[Analysis]) -> Analysis:
    """The rank whose peak is farthest from the median."""
    middle = statistics.median(one.totals["peak_bytes"] for one in found)
    return max(found, key=lambda one: abs(one.totals["peak_bytes"] - middle))


def compare(found: list[Analysis]) -> str:
    """One line for each rank; the odd one is marked, and what it holds more or less of."""
    middle = statistics.median(one.totals["peak_bytes"] for one in found)
    odd = odd_one(found)
    is_odd = abs(odd.totals["peak_bytes"] - middle) > middle * 0.01
    lines = [f"{'file':<32}{'peak':>12}{'to median':>12}{'reserved':>12}{'events':>11}"]
    for one in found:
        peak = one.totals["peak_bytes"]
        mark = " <- odd" if is_odd and one is odd else ""
        lines.append(
            f"{clip(one.path.name, 31):<32}{size(peak):>12}{100 * (peak / max(middle, 1) - 1):>+11.1f}%"
            f"{size(one.totals['peak_reserved_bytes']):>12}{one.totals['n_events']:>11,}{mark}"
        )
    if not is_odd:
        return "\n".join([*lines, "all ranks are alike (within 1 % of the median)"])
    other = min(
        (one for one in found if one is not odd),
        key=lambda one: abs(one.totals["peak_bytes"] - middle),
    )
    base = {row.name: row.bytes for row in other.contributors(other.peak)}
    own = {row.name: row.bytes for row in odd.contributors(odd.peak)}
    changes = sorted(
        ((own.get(name, 0) - base.get(name, 0), name) for name in {*base, *own}),
        key=lambda pair: -abs(pair[0]),
    )
    lines.append(f"{odd.path.name} against {other.path.name} (nearest to the median), at the peak:")
    for change, name in changes[:6]:
        if change:
            lines.append(f"  {'+' if change > 0 else '-'}{size(abs(change)):>10}  {clip(name, 64)}")
    return "\n".join(lines)
