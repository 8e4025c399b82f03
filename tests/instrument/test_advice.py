"""What advice is computed from, by hand; test_planted*.py and test_fragmentation.py have whole programs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.tools import MIB, Plan, kinds, small_trace, written
from pyalloc import trace
from pyalloc.analysis import advice, allocators, checkpoints, collected, passes
from pyalloc.analysis.falling import TRAINING, falls_by
from pyalloc.analysis.meaning import Analysis
from pyalloc.report import data, text
from pyalloc.traces.facts import Phase
from pyalloc.traces.moments import Block


def phase(name: str, begin: int, end: int, step: int = 0) -> Phase:
    values = dict.fromkeys(Phase.__dataclass_fields__, 0)
    return Phase(**{**values, "name": name, "begin": begin, "end": end, "step": step})  # type: ignore[arg-type]


def block(size: int, made: int, freed: int | None) -> Block:
    return Block(0, size, 0, made, freed, 0, "", "", "", 0, "", 0)


def test_what_lives_all_through_a_phase_is_as_if_each_block_were_asked() -> None:
    dice, peak = random.Random(1), 50
    for _ in range(300):
        kept = {
            block(1 << i, dice.randint(1, peak), dice.choice([None, dice.randint(peak + 1, 100)]))
            for i in range(dice.randint(1, 8))
        }
        analysis: Any = SimpleNamespace(totals={"peak_event": peak})
        through = passes._bytes_through(kept, analysis)
        begin = dice.randint(0, 100)
        one = phase("forward", begin, dice.randint(begin, 100))
        assert through(one) == sum(
            each.bytes
            for each in kept
            if each.alloc_event <= one.begin
            and (each.free_event is None or each.free_event >= one.end)
        ), (kept, one)


class Watched(tuple[Block, ...]):
    """Blocks that count how often they are iterated over."""

    n_times = 0

    def __iter__(self) -> Iterator[Block]:
        Watched.n_times += 1
        return super().__iter__()


def test_what_is_too_little_is_not_looked_for_in_all_phases_and_blocks(plan: Plan) -> None:
    """A long run may have 65,536 of the ones, and thousands of lines with some of the others."""
    analysis: Any = SimpleNamespace(totals={"peak_event": 5}, phases=None)
    for dropped, least in (((), 0), ((block(MIB, 1, 9),), MIB)):
        assert falls_by(dropped, analysis, ("forward",), least) == 0
    for i in range(80):
        stack = plan.stack(i // 2, f"f{i // 2}")
        plan.event("alloc", addr=(i + 1) << 30, bytes=512 * (1 + i % 2), stack=stack)
    found = trace.analyse(plan.done())
    vars(found.peak)["blocks"] = Watched(found.peak.blocks)
    Watched.n_times = 0
    assert list(collected.advice(found)) == []
    assert Watched.n_times <= 4


def test_small_passes_of_an_evaluation_go_with_what_the_others_keep(plan: Plan) -> None:
    """pytorch-tabnet's explain(): modules called one by one, some of which keep next to nothing, batch by batch."""
    address = 1 << 30

    def made(name: str, *sizes: int) -> list[int]:
        nonlocal address
        plan.event("phase_begin", name)
        found = [address + (i << 30) for i in range(len(sizes))]
        for each, size in zip(found, sizes, strict=True):
            plan.event("alloc", addr=each, bytes=size, stack=plan.stack(3))
        address += len(sizes) << 30
        plan.event("phase_end", name)
        return found

    def freed(*addresses: int) -> None:
        for each in addresses:
            plan.event("free_requested", addr=each)
            plan.event("free_completed", addr=each)

    plan.event("step", "step", arg=0)
    kept = made("forward", *[20 * MIB] * 3)
    plan.event("phase_begin", "backward")
    freed(*kept)
    plan.event("phase_end", "backward")
    made("optimizer")
    for _ in range(4):
        graph = made("forward", *[40 * MIB] * 3)
        freed(*graph[::-1], *made("forward", MIB // 2))
    found = kinds(plan.done())["no_grad"]
    # 120.5 MiB, and 60 in training; the running operation needs 40.
    assert found.saved_bytes == 60 * MIB + MIB // 2
    assert found.text.startswith("4 forward passes in a row keep 120.0 MiB each for a backward")


@pytest.mark.parametrize(
    ("steps", "several"),
    [
        (["b o", "b o"], False),
        (["b b o", "b b o"], False),  # gradients are added up
        (["b o o"], True),  # without a backward between them
        (["b o b o"], True),
        (["b o", "o b"], True),
        (["o", "b o"], False),  # recorded from the middle of a step on
        (["b O o", "b O o"], False),  # one that calls another
    ],
)
@pytest.mark.parametrize("is_counted", [True, False])
def test_optimizers_that_take_turns(steps: list[str], several: bool, is_counted: bool) -> None:
    """b: backward; o: optimizer; O: one that contains the next."""
    phases = []
    marks = [(mark, step) for step, text in enumerate(steps) for mark in text.split()]
    for at, (mark, step) in enumerate(marks):
        name = "backward" if mark == "b" else "optimizer"
        end = 2 * at + (4 if mark == "O" else 2)
        phases.append(phase(name, 2 * at, end, step if is_counted else -1))
    analysis: Any = SimpleNamespace(phases=phases)
    # If no steps are counted, one that comes after each backward may be the only one.
    expected = several and (is_counted or steps != ["b o b o"])
    assert advice._has_optimizers(analysis) == expected


@pytest.mark.parametrize(
    ("before", "later", "accumulates"),
    [("b", "", False), ("b", "o", True), ("ob", "o", True), ("bo", "b", False), ("bob", "o", True)],
)
def test_gradients_are_added_up_until_an_optimizer_steps(
    before: str, later: str, accumulates: bool
) -> None:
    """b: backward; o: optimizer; before and after the peak."""
    names = {"b": "backward", "o": "optimizer"}
    phases = [phase(names[mark], at, at + 1) for at, mark in enumerate(before + later)]
    analysis: Any = SimpleNamespace(phases=phases, totals={"peak_event": len(before)})
    assert advice._is_accumulating(analysis) == accumulates


def at_the_peak(notes: dict[str, str], **sizes: int) -> Any:
    """What is alive at a peak of 1000 bytes, by category."""
    blocks = [
        block(n, 1, None)._replace(category=name.replace("_", " ")) for name, n in sizes.items()
    ]
    return SimpleNamespace(
        notes=notes,
        totals={"peak_bytes": 1000, "peak_event": 20, "peak_phase": "backward", "n_events": 99},
        peak=SimpleNamespace(blocks=blocks, allocated_bytes=1000),
        category=lambda each: each.category,
        phases=[phase("backward", 10, 30)],
        frames=lambda _: (("load", "/lib/torch/serialization.py", 1),),
        name=lambda _: "train.py:3 in resume",
        heights=[],
        steps=[],
    )


@pytest.mark.parametrize(
    ("state", "doubled"),
    [
        (800, 400),
        (500, 100),  # the peak comes before everything was doubled
        (431, 31),
        (430, 0),  # too little
        (300, 0),  # before there were any
    ],
)
def test_doubled_state_is_what_there_is_of_it_at_the_peak(state: int, doubled: int) -> None:
    note = {"doubled_state": "400 bytes of 800, 2 optimizers"}
    told = list(advice._doubled_state(at_the_peak(note, optimizer_state=state, gradients=900)))
    assert [item.saved_bytes for item in told] == [doubled] * bool(doubled)


@pytest.mark.parametrize(
    ("unused", "held", "saved"), [(100, 200, 100), (100, 60, 60), (31, 99, 31), (30, 99, 0)]
)
def test_unused_gradients_are_those_that_are_there_at_the_peak(
    unused: int, held: int, saved: int
) -> None:
    note = {"unused_gradients": f"{unused} bytes, Net"}
    told = list(advice._unused_gradients(at_the_peak(note, gradients=held, parameters=900)))
    assert [item.saved_bytes for item in told] == [saved] * bool(saved)


@pytest.mark.parametrize(("unused", "is_told"), [(5, False), (6, True)])
def test_unused_gradients_of_many_parameters_are_told_beside_large_activations(
    unused: int, is_told: bool
) -> None:
    """A teacher without torch.no_grad(): its gradients are few bytes, but its forward pass keeps many."""
    note = {"unused_gradients": f"{unused} bytes, ResNet"}
    sizes = {"gradients": 9, "parameters": 20, "activations": 900}
    told = [item.kind for item in advice._unused_gradients(at_the_peak(note, **sizes))]
    assert told == ["unused_gradients"] * is_told


@pytest.mark.parametrize(("unused", "is_told"), [(0, True), (69, True), (70, False)])
def test_old_gradients_are_those_that_an_optimizer_would_clear(unused: int, is_told: bool) -> None:
    note = {"unused_gradients": f"{unused} bytes, Net"}
    told = [item.kind for item in advice._gradients(at_the_peak(note, gradients=100))]
    assert told == ["zero_grad"] * is_told


@pytest.mark.parametrize(
    ("held", "left", "is_told"), [(31, 11, True), (30, 30, False), (31, 10, False)]
)
def test_old_gradients_in_a_forward_pass(held: int, left: int, is_told: bool) -> None:
    """left: by how much the peak is above that of another phase."""
    analysis = at_the_peak({}, gradients=held)
    analysis.totals["peak_phase"] = "forward"
    other = replace(phase("optimizer", 60, 80), peak_bytes=1000 - left)
    analysis.phases = [phase("forward", 10, 30), other]
    told = list(advice._gradients(analysis))
    assert [item.saved_bytes for item in told] == [min(held, left)] * is_told


@pytest.mark.parametrize(
    ("held", "left", "is_told"), [(51, 17, True), (50, 50, False), (51, 16, False)]
)
def test_what_a_variable_holds_of_the_step_before(held: int, left: int, is_told: bool) -> None:
    analysis = at_the_peak({}, activations=held)
    analysis.peak.event = 20
    analysis.totals["peak_step"] = 3
    analysis.place = lambda _: None
    before, now, kept = (block(n, 1, freed) for n, freed in ((held, 20), (500, 30), (500, None)))
    analysis.peak.blocks = [
        each._replace(category="activations", step=step)
        for each, step in ((before, 2), (now, 3), (kept, 2), (now._replace(free_event=19), 2))
    ]
    analysis.phases = [replace(phase("optimizer", 60, 80), peak_bytes=1000 - left)]
    told = list(advice._stale(analysis))
    assert [item.saved_bytes for item in told] == [min(held, left)] * is_told


@pytest.mark.parametrize(
    ("pending", "idle", "is_told"), [(51, 100, True), (50, 100, False), (50, 50, False)]
)
def test_much_that_waits_for_other_streams_is_told(pending: int, idle: int, is_told: bool) -> None:
    analysis: Any = SimpleNamespace(
        oom=None,
        totals={"peak_reserved_bytes": 500 + idle, "peak_bytes": 500, "peak_reserved_event": 7},
        moments={7: SimpleNamespace(pending_bytes=pending)},
        has_segments=False,
    )
    told = list(allocators._fragmentation(analysis))
    assert [item.saved_bytes for item in told] == [pending] * is_told


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [(9, 10, None), (10, 11, 10), (19, 20, 10), (20, 30, None), (20, 31, 30), (40, 50, None)],
)
def test_the_pass_in_which_an_event_lies(begin: int, end: int, found: int | None) -> None:
    run = [phase("forward", 10, 20), phase("forward", 30, 40)]
    lies = passes._in_pass(run, begin, end)
    assert (lies and lies.begin) == found


@pytest.mark.parametrize(
    ("sizes", "saved"),
    [
        ({"activations": 51}, 51),
        ({"activations": 50}, 0),  # too little
        ({"activations": 40, "gradients": 40}, 80),
        ({"parameters": 300, "buffers": 300, "optimizer_state": 300}, 0),  # the model's
    ],
)
def test_what_is_loaded_and_held_beside_the_model(sizes: dict[str, int], saved: int) -> None:
    told = list(advice._loaded(at_the_peak({}, **sizes)))
    assert [item.saved_bytes for item in told] == [saved] * bool(saved)


@pytest.mark.parametrize(
    ("freed", "line", "together"),
    [(9, 1, True), (10, 1, True), (11, 1, False), (None, 1, False), (9, 2, False)],
)
def test_what_one_expression_makes_is_dropped_together(
    freed: int | None, line: int, together: bool
) -> None:
    analysis: Any = SimpleNamespace(frames=lambda stack: ("work", "model.py", stack))
    temporary = Block(0, 512, 0, 1, 10, 1, "", "", "", 0, "", 0)
    other = Block(0, 512, 0, 2, freed, line, "", "", "", 0, "", 0)
    assert advice._is_dropped_with(analysis, temporary, other) == together


@pytest.mark.parametrize(
    ("used", "fails", "told"), [(19, False, False), (17, False, True), (17, True, False)]
)
def test_much_idle_memory_is_told_where_nothing_worse_is(
    plan: Plan, used: int, fails: bool, told: bool
) -> None:
    line = plan.stack(3)
    plan.event("segment_alloc", addr=1 << 30, bytes=20 * MIB, stack=line)
    plan.event("alloc", addr=1 << 30, bytes=used * MIB, stack=line)
    if fails:  # for more than was idle
        plan.event("oom", bytes=100 * MIB, arg=0, stack=line)
    assert ("fragmentation" in kinds(plan.done())) == told


@pytest.mark.parametrize(
    ("had", "alone", "planned", "is_told"),
    [
        (200, 110, 100, True),
        (200, 100.5, 100, False),  # pyalloc alone does nearly as well
        (100.5, 110, 100, False),  # and here what the program has
        (20, 11.5, 10, False),  # less than a page
    ],
)
def test_a_plan_is_proposed_for_what_it_alone_saves(
    had: float, alone: float, planned: float, is_told: bool
) -> None:
    sizes = {"native": 300, "pyalloc": alone, "planned": planned}
    analysis: Any = SimpleNamespace(
        replays={name: {"peak_bytes": int(n * MIB)} for name, n in sizes.items()},
        totals={"device_peak_reserved": {0: int(had * MIB)}},
        notes={},
        path=Path("out.pya"),
    )
    told = list(allocators._plan(analysis))
    assert [item.saved_bytes for item in told] == [100 * MIB] * is_told


@pytest.mark.parametrize(("needed", "is_told"), [(97, True), (99, False)])
def test_an_allocator_is_proposed_that_saves_some_percent(needed: int, is_told: bool) -> None:
    """One on which the program ran out of memory does not count."""
    sizes = {"native": (100, True), "expandable": (80, False), "pyalloc": (needed, True)}
    analysis: Any = SimpleNamespace(
        replays={n: {"peak_bytes": mib * MIB, "completed": c} for n, (mib, c) in sizes.items()},
        totals={"device_peak_reserved": {0: 100 * MIB}},
        notes={},
        ooms=[],
    )
    told = list(allocators._policies(analysis))
    assert [item.saved_bytes for item in told] == [(100 - needed) * MIB] * is_told


@pytest.mark.parametrize(
    ("other", "saved"),
    [
        (("forward", 20, 30), 40),  # at its end both are there, at its beginning one
        (("backward", 60, 80), 40),  # at its beginning both are still there
        (("optimizer", 60, 80), 5),  # goes without either
        (("loss", 40, 50), 40),  # the peak's own
        (("loss", 40, 49), 5),
        (("epoch", 0, 90), 40),  # of the program's own
    ],
)
def test_the_peak_falls_to_that_of_another_phase(other: tuple[str, int, int], saved: int) -> None:
    dropped = [block(10 * MIB, 5, 65), block(30 * MIB, 25, None)]
    analysis: Any = SimpleNamespace(
        totals={"peak_event": 50, "peak_bytes": 100 * MIB},
        phases=[replace(phase(*other), peak_bytes=95 * MIB)],
        heights=[],
        steps=[],
    )
    assert falls_by(dropped, analysis, ("forward", "backward")) == saved * MIB


# Phases begin and end, blocks are allocated and freed: 40 MiB of layers twice, and the peak of 100 MiB in backward.
TRAINED = "step forward +a40 +b40 forward. backward +c20 -c {0} -b {1} -a {2} backward. {3} optimizer +s5 -s optimizer."


@pytest.mark.parametrize(
    ("heights", "again", "saved"),
    [
        (["", "", "", ""], False, 80),
        (["", "", "", ""], True, 40),
        (["+d15 -d", "", "", ""], False, 80),  # beside both: 95
        (["", "", "+d70 -d", ""], False, 30),  # after both, in the same backward
        (["", "", "+d70 -d", ""], True, 30),
        (["", "+d50 -d", "", ""], False, 50),  # beside one: 90
        (["", "+d50 -d", "", ""], True, 10),  # which is then computed again
        (["", "+d59 -d", "+d20 -d", ""], False, 41),
        (["", "", "", "+d75 -d"], False, 25),  # between backward and the optimizer
        (
            ["", "", "", "forward +d80 forward. +e15 -e backward -d backward."],
            0,
            80,
        ),  # goes as well
    ],
)
def test_the_peak_falls_to_what_is_left_in_its_step(
    plan: Plan, heights: list[str], again: bool, saved: int
) -> None:
    story = TRAINED.format(*heights)
    found = trace.analyse(written(plan, f"{story} {story}"))
    dropped = [block for block in found.peak.blocks if block.bytes == 40 * MIB]
    assert (len(dropped), found.totals["peak_bytes"]) == (2, 100 * MIB)
    if again:  # each by itself
        dropped = checkpoints._until_made_again([[block] for block in dropped])
    assert falls_by(dropped, found, TRAINING) == saved * MIB


def test_the_backward_of_what_is_dropped_counts_beside_further_ones(plan: Plan) -> None:
    """A program without optimizer steps, such as fastai's, has all passes in one step."""
    found = trace.analyse(
        written(
            plan,
            "step forward +a40 +b40 +t20 -t forward. backward -b -a +d70 -d backward."
            " forward +e80 forward. backward -e backward.",
        )
    )
    dropped = [block for block in found.peak.blocks if block.bytes == 40 * MIB]
    assert falls_by(dropped, found, TRAINING) == 30 * MIB


@pytest.mark.parametrize(
    ("passes", "saved"),
    [
        (("+r19 -r", ""), 80),  # beside what waits for backward
        (("", "+r95 -r"), 5),  # an evaluation
        (("+r19 -r", "+r60 -r"), 40),
        (
            (
                "+r19 -r inference. backward -b -a backward. forward +a40 +b40 forward. inference",
                "",
            ),
            80,
        ),
    ],
)
def test_a_pass_without_gradients_beside_what_waits_for_backward_has_less_without_that(
    plan: Plan, passes: tuple[str, str], saved: int
) -> None:
    """As of a teacher, or of the model that DPO compares with."""
    inside, after = (f"inference {each} inference." for each in passes)
    story = (
        f"{TRAINED.format('', '', '', '').replace(' backward ', f' {inside} backward ')} {after}"
    )
    found = trace.analyse(written(plan, f"{story} {story}"))
    dropped = [block for block in found.peak.blocks if block.bytes == 40 * MIB]
    assert falls_by(dropped, found, TRAINING) == saved * MIB


def test_what_the_phase_of_the_peak_makes_comes_and_goes_there(plan: Plan) -> None:
    """There are others like it at other moments, which nobody knows."""
    story = "step optimizer +a50 +t30 -t +u29 -u optimizer."
    found = trace.analyse(written(plan, story))
    made = [block for block in found.peak.blocks if block.bytes == 30 * MIB]
    assert falls_by(made, found, ("optimizer",)) == 30 * MIB


def test_what_a_report_says_several_times_is_looked_for_once(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_times = [0]

    def idle_runs(analysis: Analysis) -> tuple[list[Any], list[Any]]:
        n_times[0] += 1
        return [], []

    monkeypatch.setattr(advice, "idle_runs", idle_runs)
    found = trace.analyse(small_trace(plan))
    text.summary(found)
    assert data.summary(found)["advice"] == [asdict(item) for item in advice.advise(found)]
    assert n_times == [1]
    found.replays = {"native": {"completed": True, "peak_bytes": 1}}  # reported as well
    assert [item.kind for item in advice.advise(found)] == ["policy", "fragmentation"]
    assert n_times == [2]


def test_state_that_is_as_large_as_the_logits_is_none_of_them(plan: Plan) -> None:
    """An embedding of as many words has half as much if the batch has twice as many rows as it has columns."""
    plan.event("step", "step")
    for i in range(4):
        plan.event("alloc", addr=(i + 1) << 40, bytes=32 * MIB)
        plan.event("category", "optimizer state", addr=(i + 1) << 40)
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=1 << 30, bytes=64 * MIB, stack=plan.stack(3, "forward"))
    plan.event("phase_end", "forward")
    of_loss = plan.stack(5, "cross_entropy", "/lib/site-packages/torch/nn/functional.py")
    plan.event("alloc", addr=2 << 30, bytes=64 * MIB, stack=of_loss)
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=3 << 30, bytes=64 * MIB)
    for i in range(1, 4):
        plan.event("free_requested", addr=i << 30)
    plan.event("phase_end", "backward")
    found = kinds(plan.done())["logits"]
    assert found.text.startswith("3 tensors of 64.0 MiB or half that hold 192.0 MiB at the peak")


@pytest.mark.parametrize("with_gradients", [False, True])
def test_gradients_of_logits_are_told_of_where_there_are_some(
    plan: Plan, with_gradients: bool
) -> None:
    """With a graph retained from the step before, the peak lies in forward."""
    file = "/x/site-packages/torch/nn/functional.py"
    cross_entropy = plan.stack(3, name="cross_entropy", file=file)
    plan.event("step", "step", arg=0)
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=1 << 30, bytes=100 * MIB, stack=plan.stack(2))
    plan.event("alloc", addr=2 << 30, bytes=100 * MIB, stack=cross_entropy)
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    if with_gradients:
        plan.event("alloc", addr=3 << 30, bytes=100 * MIB)
    for i in (1, 2, 3)[: 2 + with_gradients]:
        plan.event("free_requested", addr=i << 30)
        plan.event("free_completed", addr=i << 30)
    plan.event("phase_end", "backward")
    found = kinds(plan.done())["logits"].text
    assert found.startswith(f"{2 + with_gradients} tensors of 100.0 MiB or half that")
    assert ("the gradients of both" in found) == with_gradients


@pytest.mark.parametrize("own", [True, False])
def test_a_peak_of_autotuning_is_told(plan: Plan, own: bool) -> None:
    """torch.compile(mode="max-autotune") tries kernels on tensors of its own; no backward will use them."""
    file = "/x/site-packages/torch/_inductor/runtime/benchmarking.py"
    texts = [plan.writer.string(text) for text in ("benchmark_gpu", file)]
    stack = plan.writer.stack(plan.stack(7) if own else 0, *texts, 716)
    plan.event("alloc", addr=1 << 30, bytes=40 * MIB, stack=plan.stack(3))
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=2 << 30, bytes=50 * MIB, stack=stack)
    for _ in range(12):  # no short life
        plan.event("alloc", addr=3 << 30, bytes=10 * MIB, stack=stack)
        plan.event("free_requested", addr=3 << 30)
    plan.event("free_requested", addr=2 << 30)
    plan.event("alloc", addr=4 << 30, bytes=20 * MIB, stack=plan.stack(8))
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    plan.event("free_requested", addr=4 << 30)
    plan.event("phase_end", "backward")
    path = plan.done()
    found = trace.analyse(path)
    [told] = [item for item in advice.advise(found) if item.kind == "autotuning"]
    assert told.text.startswith("60.0 MiB at the peak are tensors on which torch.compile or Triton")
    assert told.saved_bytes == 40 * MIB  # to forward's own height
    assert found.category(found.peak.blocks[1]) == "temporaries"
    assert "temporaries: autotuning of kernels" in [
        r.name for r in found.by_maker(found.peak.blocks)
    ]
    [line] = [row.name for row in found.by_line(found.peak.blocks) if row.bytes == 60 * MIB]
    assert line == ("me/model.py:7 work > " if own else "") + "autotuning of kernels"


@pytest.mark.parametrize(
    ("file", "switch"),
    [
        ("transformers/models/llama/modeling_llama", "model.gradient_checkpointing_enable()"),
        ("transformers/trainer", ""),
        ("torchtune/modules/transformer", "torchtune.training.set_activation_checkpointing()"),
        ("torchtune/modules/loss/ce_chunked_output_loss", ""),
    ],
)
def test_only_a_librarys_models_have_its_switch(file: str, switch: str) -> None:
    own = ("main", "/home/me/train.py", 1)
    assert checkpoints._switch((("f", f"/x/site-packages/{file}.py", 1), own)) == switch
