"""From where on a forward pass counts as kept for nothing, by hand; test_planted_passes.py has whole programs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pyalloc.analysis import idle
from pyalloc.common.units import MIB
from pyalloc.traces.facts import Phase
from pyalloc.traces.moments import Block

NOTHING = Phase("", 0, 0, *[0] * 13)


def passes(*kept: tuple[int, int], name: str = "forward") -> list[Phase]:
    """One after the other; for each, the blocks and the bytes that it leaves."""
    return [
        replace(NOTHING, name=name, begin=10 * i, end=10 * i + 9, n_left=n, left_bytes=size)
        for i, (n, size) in enumerate(kept)
    ]


def backward(n_before: int, n_after: int, end_bytes: int = 0) -> list[Phase]:
    """Between so many live blocks."""
    return [
        replace(
            NOTHING, name="backward", n_live_begin=n_before, n_live_end=n_after, end_bytes=end_bytes
        )
    ]


@pytest.mark.parametrize(
    ("n_after", "end_bytes", "freed"),
    [
        (24, 1000, True),  # most of the blocks
        (25, 1000, False),  # three in four are not most
        (100, 249, True),  # most of the bytes
        (100, 250, False),
    ],
)
def test_a_backward_frees_what_the_passes_keep(n_after: int, end_bytes: int, freed: bool) -> None:
    run = passes((40, 400), (60, 600))
    run[-1] = replace(run[-1], end_bytes=1000)
    assert idle.is_freed(run, backward(100, n_after, end_bytes)) == freed


@pytest.mark.parametrize(("n_after", "freed"), [(24, True), (25, False)])
def test_a_later_backward_frees_what_was_left(n_after: int, freed: bool) -> None:
    """Beside what the earlier passes keep."""
    run, none = passes((100, 0)), backward(100, 100)
    after = passes((10, 0)), backward(110, n_after)
    assert idle._is_freed_later(run, none, after) == freed


@pytest.mark.parametrize(("n_after", "retained"), [(51, True), (50, False)])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_backward_keeps_the_graph(n_after: int, retained: bool, is_told: bool) -> None:
    analysis: Any = SimpleNamespace(notes={"retain_graph": "True"} if is_told else {})
    run = passes((20, 0), (100, 0))
    found = idle._is_retained(run, backward(100, n_after), analysis)
    assert found == (retained and is_told)
    assert not idle._is_retained(run, [], analysis)


@pytest.mark.parametrize(("in_backward", "used"), [(51, True), (50, False)])
def test_a_backward_frees_most_of_what_is_at_the_peak(in_backward: int, used: bool) -> None:
    """What was allocated between the passes does not count."""
    blocks = [
        Block(0, size, 0, event, None, 0, "", "", "", 0, phase, 0)
        for size, event, phase in (
            (in_backward, 5, "backward"),
            (30, 15, "optimizer"),
            (20, 16, ""),
            (1000, 10, ""),
            (1000, 20, "backward"),
        )
    ]
    analysis: Any = SimpleNamespace(peak=SimpleNamespace(blocks=blocks))
    assert idle._is_used(passes((1, 1), (1, 1)), analysis) == used


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ([(3, MIB), (3, MIB)], 2),
        ([(3, MIB), (2, MIB), (3, MIB - 1)], 1),  # too few, too little
        ([(2, MIB), (3, MIB - 1)], 0),
        ([(3, MIB)], 0),  # one pass may be the last of a program
    ],
)
def test_passes_that_keep_enough_for_a_backward_that_never_comes(
    kept: list[tuple[int, int]], found: int
) -> None:
    analysis: Any = SimpleNamespace(
        notes={},
        phases=passes(*kept),
        peak=SimpleNamespace(blocks=[]),
        spans=[],
        workspaces=set(),
        unmarked=[],
        ooms=[],
        totals={"n_events": 100},
    )
    runs, retained = idle.idle_runs(analysis)
    assert [len(run) for run in runs] == [found] * bool(found) and not retained


@pytest.mark.parametrize(("between", "is_there"), [(9, False), (10, True), (19, True), (20, False)])
def test_what_lies_between_two_events(between: int, is_there: bool) -> None:
    analysis: Any = SimpleNamespace(unmarked=[between], ooms=[(between, 0)])
    assert idle._has_backward(10, 20, analysis) == is_there
    assert idle._has_oom(10, 20, analysis) == is_there
