"""What grows from step to step: does a program leak?"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from pyalloc.analysis.meaning import Analysis
from pyalloc.common.units import MIB
from pyalloc.traces.moments import Moment
from pyalloc.traces.turns import LEAST_TURNS, looked_at, turns_of


@dataclass(frozen=True)
class Growth:
    """A stack whose live bytes grow from step to step.

    bytes: the growth; series: live bytes at the steps looked at; more_blocks: more of them, not only larger ones;
    phase: the one that made most of the growth, if the stack has no line of Python.
    """

    name: str
    stack: int
    bytes: int
    per_step: float
    series: tuple[int, ...]
    more_blocks: bool
    phase: str


def _least(analysis: Analysis) -> int:
    """Bytes; smaller growth over the steps looked at is not reported."""
    return max(MIB // 4, int(analysis.totals["peak_bytes"]) // 10_000)


def _turns(analysis: Analysis) -> list[int]:
    """Events at which growth is looked for."""
    phases = [(phase.name, phase.begin, phase.end) for phase in analysis.phases]
    return turns_of([step[1] for step in analysis.steps], phases)


def _looked_at(analysis: Analysis) -> list[tuple[int, Moment]]:
    """(number, moment) of those that the verdict is about, without the first two; further moments do not change it."""
    turns = _turns(analysis)
    chosen = set(looked_at(turns)) - set(turns[:2])
    moments = analysis.moments
    return [(i, moments[at]) for i, at in enumerate(turns) if at in chosen and at in moments]


def turn(analysis: Analysis) -> str:
    """What each of these events stands for, in words."""
    return "step" if len(_turns(analysis)) == len(analysis.steps) else "backward pass"


def growth(analysis: Analysis) -> list[Growth]:
    """Stacks whose live bytes grow at every step looked at after the first two, largest first; empty with few steps."""
    found: list[Growth] = []
    turns = _looked_at(analysis)
    if len(turns) < 3:
        return found
    tables = [moment.by_stack for _, moment in turns]
    n_steps = turns[-1][0] - turns[0][0]
    for stack in tables[-1]:
        pairs = [table.get(stack, (0, 0)) for table in tables]
        series = tuple(size for size, _ in pairs)
        more_blocks = pairs[-1][1] > pairs[0][1]
        grown = series[-1] - series[0]
        rises = all(after > before for before, after in itertools.pairwise(series))
        if rises and grown >= _least(analysis):
            phase = _phase(analysis, stack, turns)
            name = analysis.name(stack, phase)
            found.append(Growth(name, stack, grown, grown / n_steps, series, more_blocks, phase))
    return sorted(found, key=lambda each: -each.bytes)


def _phase(analysis: Analysis, stack: int, turns: list[tuple[int, Moment]]) -> str:
    """Only of a stack without a line: to read the blocks of a moment takes long."""
    if analysis.place(stack) is not None:
        return ""
    grown: Counter[str] = Counter()
    for sign, (_, moment) in (-1, turns[0]), (1, turns[-1]):
        for block in moment.blocks:
            grown[block.phase] += sign * block.bytes * (block.stack == stack)
    return max(grown, key=lambda phase: grown[phase])


def jumps(analysis: Analysis) -> list[Growth]:
    """Stacks that hold more and more blocks, but do not grow at every step: at the end of each epoch, for example."""
    turns = _looked_at(analysis)
    tables = [moment.by_stack for _, moment in turns]
    least = max(MIB, analysis.totals["peak_bytes"] // 20)
    found = []
    for stack in tables[-1] if len(tables) >= 3 else ():
        series = [table.get(stack, (0, 0)) for table in tables]
        pairs = list(itertools.pairwise(series))
        grown = series[-1][0] - series[0][0]
        is_steady = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairs)
        n_rises = sum(a[0] < b[0] and a[1] < b[1] for a, b in pairs)
        if is_steady and n_rises >= 2 and grown >= least:
            phase, sizes = _phase(analysis, stack, turns), tuple(size for size, _ in series)
            name = analysis.name(stack, phase)
            found.append(Growth(name, stack, grown, grown / len(pairs), sizes, True, phase))
    return sorted(found, key=lambda each: -each.bytes)


def verdict(analysis: Analysis) -> str:
    """Does the program leak?  The answer in a sentence."""
    if len(_turns(analysis)) < LEAST_TURNS:
        n = len(analysis.steps)
        return (
            f"leak unknown: a verdict needs five or more steps, and {n or 'no'} step{'s' * (n != 1)} began "
            "(optimizer.step() ends one; without an optimizer, call pyalloc.step() where each begins)"
        )
    grown, each = growth(analysis), turn(analysis)
    if grown:
        total = sum(one.per_step for one in grown)
        larger = "" if grown[0].more_blocks else ", in as many blocks as before, but larger ones"
        return f"leak: {total / MIB:.2f} MiB more at each {each}, most at {grown[0].name}{larger}"
    jumped = jumps(analysis)
    if jumped:
        return (
            f"possible leak: nothing grows at every {each}, but {jumped[0].name} came to hold "
            f"{jumped[0].bytes / MIB:.1f} MiB more in a few of them (an evaluation or a cache that keeps something, "
            "or a leak)"
        )
    least = f"{_least(analysis) / MIB:.2f} MiB"
    return f"no leak: nothing grows from {each} to {each} (ignoring growth below {least} in total)"
