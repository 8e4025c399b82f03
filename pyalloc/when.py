"""Moments of a recording as people name them: peak, end, oom, an event's number, a step, a time after the start."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable

from pyalloc import reading, trace
from pyalloc.analysis.meaning import Analysis
from pyalloc.common.folding import clip
from pyalloc.common.units import size
from pyalloc.errors import UsageError
from pyalloc.traces.facts import time_of
from pyalloc.traces.turns import begin_of, numbers_of

FORMS = "peak, end, oom, step:N (its beginning), a time after the first event such as 90s, or an event's number"
SEVERAL = "oom:2 and oom:last are later out-of-memory errors; if several steps have number N, step:N is the last"
_MOST_DIGITS = 20  # of a number; Python refuses to convert more than 4300
_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|min|h)", re.ASCII)
OOM = re.compile(r"oom(?::(last|[1-9]\d{0,8}))?", re.ASCII)
_STEP = re.compile(rf"step:(\d{{1,{_MOST_DIGITS}}})", re.ASCII)
Progress = Callable[[int, int], object]


def moment(
    found: Analysis, at: str, option: str = "--at", progress: Progress | None = None
) -> tuple[int, str]:
    """How many events the moment comes after, and its name.

    Args:
        found: the recording's analysis.
        at: the moment as the user wrote it, one of FORMS.
        option: the option that it was given to, for error messages.
        progress: called with bytes done and in total while a time is looked up in the file.

    Raises:
        UsageError: there is no such moment.
    """
    n = found.totals["n_events"]
    if at == "peak":
        return found.peak.event, f"at the peak ({size(found.totals['peak_bytes'])})"
    if at == "end":
        return max(found.moments), "at the end"
    if error := OOM.fullmatch(at):
        if not found.ooms:
            raise UsageError(f"memory never ran out in this recording; try {option} peak")
        which = -1 if error[1] == "last" else int(error[1] or 1) - 1
        return trace.oom_at(
            found.ooms, which
        ), f"when memory ran out{time_of(which, len(found.ooms))}"
    if n == 0:
        raise UsageError(f"this recording has no events, so {option} {clip(at, 40)} is not in it")
    step, time = _STEP.fullmatch(at), _TIME.fullmatch(at)
    if step:
        return _step(found, int(step[1]), option), f"as step {int(step[1])} begins"
    if time:
        after_ns = int(float(time[1]) * _SECONDS[time[2]] * 1e9)
        return _at_time(found, after_ns, f"{option} {at}", progress), f"after {time[1]} {time[2]}"
    if not at.isdecimal() or len(at) > _MOST_DIGITS or int(at) >= n:
        raise UsageError(f"{option} takes {FORMS} up to {n - 1}, not {clip(at, 40)!r}")
    return int(at) + 1, f"after event {int(at):,}"


def _step(found: Analysis, number: int, option: str) -> int:
    begin = begin_of(found.steps, number)
    if begin is None:
        have = numbers_of(found.steps)
        raise UsageError(f"{option} step:{number}: no such step; {have}")
    return begin


def _at_time(found: Analysis, after_ns: int, told: str, progress: Progress | None) -> int:
    """How many events came by then; read one by one from the beginning of its bin of the timeline."""
    if found.notes.get("clock") == "events":
        raise UsageError(f"{told}: this recording has no times, only the order of events")
    at_ns = found.totals["first_ns"] + after_ns
    if at_ns > found.totals["last_ns"]:
        seconds = (found.totals["last_ns"] - found.totals["first_ns"]) / 1e9
        raise UsageError(f"{told}: the recording ends {seconds:.1f} s after its first event")
    part = bisect.bisect_right(found.bins, at_ns, key=lambda each: each[1]) - 1
    begin = found.bins[part][0] if part >= 0 else 0
    with trace.as_trace_file(found.path, progress) as file:
        for first, rows, _ in reading.rows(file, begin, progress):
            for number, row in enumerate(rows, first):
                if row[2] > at_ns:
                    return number
    return int(found.totals["n_events"])
