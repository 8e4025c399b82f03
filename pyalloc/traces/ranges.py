"""Phases and steps of torch's snapshots, from the ranges of torch.profiler.record_function in a program.

torch's optimizers and profiler make ranges of their own, so most programs have steps without an edit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyalloc.traces.convert import Mark

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)\.step")
_ZERO_GRAD = re.compile(r"Optimizer\.zero_grad#\w+\.zero_grad$")
_PHASES = ("forward", "backward", "optimizer", "loss", "inference")  # names that reports know
_MOST_NAME = 200  # characters
_ORDER = ("phase_end", "user", "step", "phase_begin")  # of marks at the same time
_Edge = tuple[int, str, bool]  # time_ns, name, does the range begin?


def marks(told: Sequence[dict[str, Any]], first_ns: int) -> list[Mark]:
    """Marks from a snapshot's external_annotations, in order of time; of those before first_ns, what still held then.

    Steps are those of torch.profiler.  If it did not run, a step ends with that of the first optimizer, as in
    recordings.
    """
    edges = list(_edges(sorted(told, key=lambda each: int(each["time_us"]))))
    steps = list(_profiled(edges)) or list(_optimized(edges, first_ns))
    found = [*_phases(edges), *steps]
    found.sort(key=lambda mark: (mark.time_ns, _ORDER.index(mark.kind)))
    n_before = sum(mark.time_ns < first_ns for mark in found)
    held = [replace(mark, time_ns=first_ns) for mark in _held(found[:n_before])]
    return [*held, *found[n_before:]]


def _edges(told: Sequence[dict[str, Any]]) -> Iterator[_Edge]:
    """In order, each at its own time: torch has whole microseconds, and an end that comes last in one closes it."""
    n = 0
    for each, after in itertools.zip_longest(told, told[1:]):
        begins, time_us = each["stage"] == "START", int(each["time_us"])
        is_last = after is None or time_us < int(after["time_us"])
        yield (
            time_us * 1000 + (999 if is_last and not begins else min(n, 499)),
            each["name"],
            begins,
        )
        n = 0 if is_last else n + 1


def _phases(edges: Sequence[_Edge]) -> Iterator[Mark]:
    optimizers: list[str] = []
    for time_ns, name, begins in edges:
        if _STEP.fullmatch(name):
            continue
        optimizer = _OPTIMIZER.fullmatch(name)
        if optimizer and optimizer[1] not in optimizers:  # stacks do not tell Adam from AdamW
            optimizers.append(optimizer[1])
            yield Mark(time_ns, "user", f"optimizers={', '.join(optimizers)}")
        plain = "optimizer" if optimizer else name.strip("#=-* ").lower()  # "## forward ##"
        shown = plain if plain in _PHASES else _ZERO_GRAD.sub("zero_grad", name)[:_MOST_NAME]
        yield Mark(time_ns, "phase_begin" if begins else "phase_end", shown or "(no name)")


def _profiled(edges: Sequence[_Edge]) -> Iterator[Mark]:
    for time_ns, name, begins in edges:
        step = _STEP.fullmatch(name)
        if step and begins:
            yield Mark(time_ns, "step", "step", arg=int(step[1]))


def _optimized(edges: Sequence[_Edge], first_ns: int) -> Iterator[Mark]:
    """Optimizers of one class share a name; repeated runs of n zero_grads and n steps show that there are n of them."""
    ends = [(time_ns, name) for time_ns, name, begins in edges if not begins]
    ends = [(time_ns, name) for time_ns, name in ends if time_ns >= first_ns]
    first = next((name for _, name in ends if _OPTIMIZER.fullmatch(name)), None)
    if first is None:
        return
    zeroed = first.replace(".step", ".zero_grad")
    runs = [
        (name == first, [time_ns for time_ns, _ in run])
        for name, run in itertools.groupby(
            (end for end in ends if end[1] in (first, zeroed)), key=lambda end: end[1]
        )
    ]
    inner = {len(times) for _, times in runs[1:-1]}
    n = max(inner, default=1) if len(runs) > 3 and len(inner) == 1 else 1
    if n > 1 and max(len(runs[0][1]), len(runs[-1][1])) <= n:
        if len(runs[0][1]) < n:  # it began before first_ns
            del runs[0]
        times = [times[0] for is_step, times in runs if is_step]
    else:
        times = [time_ns for time_ns, name in ends if name == first]
        yield Mark(first_ns, "user", f"steps_end_with={first.split('#')[1].removesuffix('.step')}")
    for number, time_ns in enumerate([first_ns, *times]):
        yield Mark(time_ns, "step", "step", arg=number)


def _held(past: Sequence[Mark]) -> list[Mark]:
    """What still holds after these marks: notes, the last step, phases that have not ended."""
    notes: list[Mark] = []
    phases: list[Mark] = []
    steps: list[Mark] = []
    for mark in past:
        if mark.kind == "phase_begin":
            phases.append(mark)
        elif mark.kind == "phase_end":  # phases inside it end with it
            same = [i for i, phase in enumerate(phases) if phase.text == mark.text]
            del phases[same[-1] if same else len(phases) :]
        elif mark.kind == "step":
            steps = [mark]
        else:
            notes.append(mark)
    return [*notes, *steps, *phases]
