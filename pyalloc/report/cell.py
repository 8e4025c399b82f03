"""What a notebook shows for one of its cells: a few lines, and the report's page in a frame."""

from __future__ import annotations

import html
from collections.abc import Sequence

from pyalloc.analysis.advice import advise
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import size
from pyalloc.report.text import rows, sparkline, wrapped

_LINES = 6
_ADVICE = 3
# Sandboxed: names in the page come from the program, so it must not reach the notebook's document, cookies or server.
_FRAME = '<iframe srcdoc="{}" sandbox="allow-scripts" title="{}" style="width:100%;height:{}px;border:0"></iframe>'


def summary(
    analysis: Analysis, before: tuple[int, int], after: tuple[int, int], held: Sequence[str] = ()
) -> str:
    """The few lines.

    Args:
        analysis: of the cell's recording.
        before: bytes in use and requests so far, on all devices, when the cell began.
        after: the same when it ended.
        held: what IPython itself holds, one sentence each.
    """
    totals, peak = analysis.totals, analysis.peak
    seconds = (totals["last_ns"] - totals["first_ns"]) / 1e9
    reserved = f", {size(totals['peak_reserved_bytes'])} reserved" * analysis.has_segments
    phase = f", in {totals['peak_phase']}" * bool(totals["peak_phase"])
    n, left = after[1] - before[1], after[0] - before[0]
    change = f"{size(abs(left))} {'more' if left > 0 else 'less'}" if left else "unchanged"
    lines = [
        wrapped(f"peak allocated {size(totals['peak_bytes'])}{reserved}{phase}", ""),
        wrapped(
            f"in use: {size(before[0])} before the cell, {size(after[0])} after it ({change}); "
            f"{n:,} request{'s' * (n != 1)} in {seconds:.1f} s",
            "",
        ),
        *(wrapped(caveat) for caveat in analysis.caveats),
    ]
    if not analysis.is_empty:
        by_line = analysis.by_line(peak.blocks)
        lines += [
            f"[{sparkline(analysis)}]",
            *rows("at the peak, by line", by_line, peak.allocated_bytes, _LINES),
            *(wrapped(item.text, "  - ", "    ") for item in advise(analysis)[:_ADVICE]),
        ]
    return "\n".join([*lines, *(wrapped(each, "") for each in held)])


def framed(text: str, page: str, title: str, height: int) -> str:
    """HTML of both: the lines, and the page, which draws itself in a frame of this height in pixels."""
    shown = _FRAME.format(html.escape(page), html.escape(title), height)
    return f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>\n{shown}'
