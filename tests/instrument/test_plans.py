"""Plans: places computed from a recording."""

from __future__ import annotations

import json
import pickle
import random
import re
import textwrap
from array import array
from pathlib import Path

import pytest
from dry_support import RunPython

from instrument.plan_cases import KIB, Program, only, training
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import _core, planning, replaying, trace
from pyalloc.common import units
from pyalloc.errors import PlanError


def lives(path: Path, n: int) -> list[tuple[int, int, int]]:
    """Size, birth and death of the first n requests, in events; read independently of planning.py."""
    reader = _core.TraceReader(path)
    kinds, _, _, _, _, addresses, sizes, *_ = reader.read(10**5)
    alive: dict[int, int] = {}
    found: list[list[int]] = []
    names = {number: name for name, number, _, _ in _core.trace_kinds()}
    columns = zip(kinds, memoryview(addresses).cast("Q"), memoryview(sizes).cast("Q"), strict=True)
    for at, (kind, address, size) in enumerate(columns):
        if names[kind] == "alloc":
            alive[address] = len(found)
            found.append([size, at, 10**9])
        elif names[kind] == "free_requested":
            found[alive.pop(address)][2] = at
    return [(size, born, died) for size, born, died in found[:n]]


def check_places(path: Path, made: planning.Part) -> None:
    """No byte is under two blocks that live at the same time."""
    blocks = lives(path, len(made.places))
    for i, (size, born, died) in enumerate(blocks):
        place = made.places[i]
        assert 0 <= place.size - size < 512
        for k in range(i):
            other = made.places[k]
            if place.offset is None or other.offset is None:
                continue
            if born < blocks[k][2] and blocks[k][1] < died:
                assert (
                    place.offset + place.size <= other.offset
                    or other.offset + other.size <= place.offset
                )


def test_the_step_is_found(steps: Path) -> None:
    made = only(planning.make(steps))
    per_step = 4 + 1 + 8
    assert made.period == per_step
    assert len(made.places) == per_step + 4 + per_step  # the first step has four more
    check_places(steps, made)
    # 18 MiB kept and 4 beside them, 8 of the first step that stay, some KiB.
    assert made.live_bytes < 31 * MIB
    assert made.extent_bytes <= -(-made.live_bytes // (2 * MIB)) * 2 * MIB
    never_back = [place for place in made.places[-per_step:] if place.offset is None]
    assert [place.size for place in never_back] == [512]


def test_replayed_with_it_nothing_is_lost(steps: Path) -> None:
    made = planning.make(steps)
    with trace.program(steps) as program:
        found = replaying.compare(program, ["pyalloc"], plan=made.packed())["pyalloc"]
    assert found["peak_bytes"] <= -(-only(made).extent_bytes // (2 * MIB)) * 2 * MIB + 2 * MIB
    assert found["n_calls_second_half"] == 0


def drawn(hand: Plan, *, alike: bool) -> Path:
    """Five steps, drawn once or each anew."""
    program = Program(hand)
    for step in range(5):
        rng = random.Random(7 if alike else step)
        live: list[int] = []
        for _ in range(120):
            if live and (len(live) > 25 or rng.random() < 0.45):
                program.give(live.pop(rng.randrange(len(live))))
            else:
                halves = rng.choice([1, 3, 5, 7, 9, 12])
                live.append(program.take(halves * MIB // 2 + rng.randrange(300) * KIB))
        for number in live:
            program.give(number)
    return hand.done()


def test_the_report_says_what_a_plan_would_save(plan: Plan) -> None:
    path = drawn(plan, alike=True)
    told = json.loads(pyalloc("report", path, "--json", "-q"))
    replays = told["replay"]
    planned, unplanned, native = (
        replays[name]["peak_bytes"] for name in ("planned", "pyalloc", "native")
    )
    made = planning.make(path, needs_steps=True)
    assert only(made).live_bytes <= planned <= only(made).extent_bytes + 2 * MIB
    assert planned < 0.99 * unplanned
    item = next(item for item in told["advice"] if item["kind"] == "plan")
    assert item["saved_bytes"] == native - planned
    had, alone = units.size(native), units.size(unplanned)
    assert f"instead of {had} ({alone} without the plan)" in item["text"]
    assert f"pyalloc plan {path}`" in item["text"] and "plan.plan" in item["text"]
    policy = next(item["text"] for item in told["advice"] if item["kind"] == "policy")
    assert "pyalloc run" in policy and "planned" not in policy  # another allocator is advised
    named = json.loads(pyalloc("plan", path, "--json", "-q"))
    assert named["replayed"]["planned"]["peak_bytes"] == planned
    words = ("replay", path, "--policy", "pyalloc", "--find-min", "--json", "-q")
    without, with_plan = (
        json.loads(pyalloc(*words, *options))
        for options in ((), ("--plan", path.with_suffix(".plan")))
    )
    peaks = [each["policies"]["pyalloc"]["peak_bytes"] for each in (without, with_plan)]
    assert peaks == [unplanned, planned]
    least = [each["find_min"]["pyalloc"]["bytes"] for each in (without, with_plan)]
    assert least[1] != least[0] and least[1] <= planned, least


def test_a_plan_is_measured_by_what_the_program_had(plan: Plan) -> None:
    """Recorded on an allocator that took no more than a plan: nothing is gained, whatever pyalloc takes without."""
    plan.event("segment_alloc", addr=1 << 50, bytes=60 * MIB)
    told = json.loads(pyalloc("report", drawn(plan, alike=True), "--json", "-q"))
    planned = told["replay"]["planned"]["peak_bytes"]
    assert planned >= 60 * MIB and planned < 0.99 * told["replay"]["pyalloc"]["peak_bytes"]
    assert not [item for item in told["advice"] if item["kind"] == "plan"]


def test_the_report_has_no_plan_where_no_step_repeats(plan: Plan) -> None:
    path = drawn(plan, alike=False)
    with pytest.raises(PlanError, match="no two consecutive steps make the same requests"):
        planning.make(path, needs_steps=True)
    told = json.loads(pyalloc("report", path, "--json", "-q"))
    assert "planned" not in told["replay"]
    assert "plan" not in {item["kind"] for item in told["advice"]}


@pytest.mark.parametrize("seed", range(6))
def test_any_program(plan: Plan, seed: int) -> None:
    """Also one that does not repeat itself: its plan covers everything it did."""
    rng = random.Random(seed)
    program, live = Program(plan), list[int]()
    for _ in range(300):
        if live and rng.random() < 0.5:
            program.give(live.pop(rng.randrange(len(live))))
        else:
            live.append(program.take(rng.choice([400, 9000, 70 * KIB, MIB, 5 * MIB])))
    path = plan.done()
    made = planning.make(path)
    assert only(made).period == 0
    assert len(only(made).places) == program.n
    check_places(path, only(made))
    with trace.program(path) as replayed:
        found = replayed.replay("pyalloc", plan=made.packed(), check=True)
    assert found["completed"] and found["n_violations"] == 0


def test_looking_for_steps_tells_how_far_it_is(steps: Path) -> None:
    told: list[tuple[int, int]] = []
    planning.make(steps, searching=lambda done, total: told.append((done, total)))
    assert told == sorted(set(told))
    assert told[-1][0] == told[-1][1] > 0


def test_placing_can_be_ended() -> None:
    """A long step takes seconds: what is called meanwhile may raise, as Ctrl-C does."""
    rng = random.Random(1)
    numbers = array("Q")
    for _ in range(6000):
        begin = rng.randrange(10_000)
        numbers.extend((512 * rng.randrange(1, 4000), begin, begin + rng.randrange(1, 3000), 0, 0))
    told: list[tuple[int, int]] = []

    def end(n_done: int, n_all: int) -> None:
        told.append((n_done, n_all))
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.place_blocks(numbers.tobytes(), 2000, end)
    done = [n_done for n_done, _ in told]
    assert done == sorted(done) and 0 < done[0] < done[-1] < told[0][1]


def test_other_streams_and_pools_are_left_out(plan: Plan) -> None:
    program = Program(plan)
    for _ in range(4):
        program.step(first=False)
        program.give(program.take(MIB, stream=7))
        plan.event("pool_begin", addr=1, arg=0)
        program.give(program.take(MIB))
        plan.event("pool_end", addr=1, arg=0)
        program.give(program.take(32 * KIB, device=1), device=1)
    path = plan.done()
    made = only(planning.make(path))  # device 1 needs less than a percent
    assert made.period == 13
    # One step has 3 + 8 + 2 + 5 + 4 * 4 MiB and 28 KiB here, 2 elsewhere.
    assert made.elsewhere == pytest.approx(2 / 36, abs=0.003)
    assert len(only(planning.make(path, device=1)).places) == 4
    said = pyalloc("plan", path, "-o", path.with_suffix(".plan"))
    assert "6 % of all bytes were requested on other streams" in said


@pytest.mark.parametrize(
    "odd", [("pool_end",), ("pool_begin", "pool_begin", "pool_end"), ("pool_release",)]
)
def test_pools_that_torch_refuses_to_begin_or_end(plan: Plan, odd: tuple[str, ...]) -> None:
    """As replays see it: these are no events, and requests go where they went."""
    for kind in odd:
        plan.event(kind, addr=1, arg=0)
    program = Program(plan)
    for _ in range(4):
        program.step(first=False)
        plan.event("pool_begin", addr=1, arg=0)
        program.give(program.take(MIB))
        plan.event("pool_end", addr=1, arg=0)
    made = only(planning.make(plan.done()))
    assert made.period == 13
    assert made.elsewhere == pytest.approx(1 / 35, abs=0.003)


def test_a_recording_is_not_loaded_to_be_planned(plan: Plan) -> None:
    """A program that is ready for replay has no room for so many streams, nor memory for all events."""
    program = Program(plan)
    for stream in range(1, 5000):
        program.give(program.take(MIB, stream=stream))
    program.take(2 * MIB)
    made = only(planning.make(plan.done(), needs_steps=False))
    assert (made.live_bytes, len(made.places)) == (MIB, 1)
    assert made.elsewhere > 0.99


def test_devices_of_one_process_have_their_own(plan: Plan) -> None:
    """Planned together as each would be alone; each of them follows and replays it."""
    program = Program(plan)
    for step in range(5):
        program.step(first=step == 0)
        for number in [program.take(size * MIB, device=1) for size in (6, 1, 3, 2, 4, 1)]:
            program.give(number, device=1)
    path = plan.done()
    made = planning.make(path)
    assert [part.device for part in made.parts] == [0, 1]
    assert [part.period for part in made.parts] == [13, 6]
    alone = [planning.make(path, device=device).parts for device in (0, 1)]
    assert made.parts == alone[0] + alone[1]
    with trace.program(path) as replayed:
        found = replayed.replay("pyalloc", plan=made.packed(), check=True)
    assert found["completed"] and found["n_violations"] == 0
    extents = sum(-(-part.extent_bytes // (2 * MIB)) * 2 * MIB for part in made.parts)
    assert found["peak_bytes"] <= extents + 2 * MIB
    target = path.with_suffix(".plan")
    said = " ".join(pyalloc("plan", path).split())
    assert planning.read(target) == made
    for device, n in enumerate((13, 6)):
        beginning = r"planned \d+ requests: the program's beginning and one step"
        assert re.search(rf"device {device}: {beginning} \({n} requests\)", said)


def test_what_outlives_the_next_of_its_kind_has_no_place(plan: Plan) -> None:
    """However long it takes: steps are alike all the same."""
    program, held = Program(plan), list[int]()
    for step in range(8):
        program.step(first=False)
        held.append(program.take(6 * MIB))
        while len(held) > 2 + step % 2:
            program.give(held.pop(0))
    made = only(planning.make(plan.done()))
    assert made.period == len(made.places) == 14  # from the first step on
    (place,) = [each for each in made.places if each.size == 6 * MIB]
    assert place.offset is None


def test_what_waits_for_the_next_of_its_kind_lies_in_two_places_in_turns(plan: Plan) -> None:
    """Results in a variable stay until it gets the next ones."""
    program, result = Program(plan), None
    for size in range(1, 9):  # before the first step
        program.give(program.take(size * MIB))
    for _ in range(6):
        made = [program.take(size * MIB) for size in (3, 8, 2, 5)]
        old, result = result, program.take(9 * MIB)
        for number in [*reversed(made), *([old] if old is not None else [])]:
            program.give(number)
    path = plan.done()
    plans = planning.make(path)
    part = only(plans)
    assert part.turns == 2 and part.period == 10
    places = {place.offset for place in part.places if place.size == 9 * MIB}
    assert len(places) == 2 and None not in places
    assert part.live_bytes == part.extent_bytes == (3 + 8 + 2 + 5 + 9 + 9) * MIB
    check_places(path, part)
    with trace.program(path) as replayed:
        found = replayed.replay("pyalloc", plan=plans.packed(), check=True)
    assert found["n_violations"] == 0 and found["n_calls_second_half"] == 0
    assert found["peak_bytes"] == part.extent_bytes
    assert "the program's beginning and 2 steps (10 requests)" in " ".join(
        pyalloc("plan", path).split()
    )


def test_a_step_begins_with_a_large_request(plan: Plan) -> None:
    program = Program(plan)
    for _ in range(6):
        for small in [program.take(n * KIB) for n in range(1, 10)]:
            program.give(small)
        program.step(first=False)
    made = only(planning.make(plan.done()))
    assert made.period == 22 and made.places[-22].size >= _core.PLAN_FROM


def test_a_loop_within_the_program_is_no_step(plan: Plan) -> None:
    program, rng = Program(plan), random.Random(1)
    sizes = [n * MIB for n in range(1, 21)] * 3
    sizes += [rng.randrange(1, 1000) * KIB for _ in range(500)]
    for size in sizes:
        program.give(program.take(size))
    assert only(planning.make(plan.done())).period == 0


def test_what_is_there_first_lies_lowest(plan: Plan) -> None:
    """Memory is made up to the highest block."""
    program = Program(plan)
    for size in (2 * MIB, 4 * MIB, 30 * MIB):
        program.take(size)
    offsets = [place.offset for place in only(planning.make(plan.done())).places]
    assert offsets == sorted(offsets, key=lambda offset: offset or 0)


def test_a_block_that_waits_for_a_stream_lives_until_then(plan: Plan) -> None:
    plan.event("alloc", addr=1 << 30, bytes=4 * MIB)
    plan.event("free_requested", addr=1 << 30)
    plan.event("alloc", addr=2 << 30, bytes=4 * MIB)
    plan.event("free_completed", addr=1 << 30)
    plan.event("alloc", addr=3 << 30, bytes=4 * MIB)
    made = only(planning.make(plan.done()))
    offsets = [place.offset for place in made.places]
    assert offsets[0] != offsets[1] and offsets[2] == offsets[0]


def test_a_free_that_is_not_in_the_recording(plan: Plan) -> None:
    for size in (MIB, 2 * MIB, 3 * MIB):
        plan.event("alloc", addr=1 << 30, bytes=size)
    made = only(planning.make(plan.done()))
    assert made.extent_bytes == 3 * MIB
    assert [place.life for place in made.places] == [1, 1, 0]


@pytest.mark.torch
def test_of_a_snapshot_of_torchs(dry_python: RunPython, tmp_path: Path) -> None:
    """With a history from the beginning on; otherwise it is refused."""
    whole, late = tmp_path / "whole.pickle", tmp_path / "late.pickle"
    program = textwrap.indent(textwrap.dedent(training(4)), 8 * " ").strip()
    dry_python(
        f"""
        import torch
        torch.cuda.memory._record_memory_history()
        {program}
        torch.cuda.memory._dump_snapshot({str(whole)!r})
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history()
        torch.ones(9, device="cuda")
        torch.cuda.memory._dump_snapshot({str(late)!r})
        """
    )
    made = only(planning.make(whole))
    assert made.period > 0
    assert made.extent_bytes < made.live_bytes * 1.01 + 2 * MIB
    with pytest.raises(PlanError, match="begins when memory was already in use"):
        planning.make(late)


def test_what_cannot_be_planned(plan: Plan, tmp_path: Path) -> None:
    plan.event("step", "step")
    empty = plan.done()
    with pytest.raises(PlanError, match="it has no requests, so there is nothing to plan"):
        planning.make(empty)
    nothing = tmp_path / "nothing.pickle"
    nothing.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(PlanError, match="it has no requests, so there is nothing to plan"):
        planning.make(nothing)
    late = Plan(tmp_path / "late.pya")
    late.event("user", "before=1")
    late.event("alloc", addr=1 << 30, bytes=MIB)
    late.event("alloc", addr=2 << 30, bytes=MIB)
    said = pyalloc("plan", late.done(), expect=2)
    assert "begins when memory was already in use" in said
    assert "pyalloc run --record out.pya python train.py" in said
    long = Program(Plan(tmp_path / "long.pya"))
    for i in range(_core.PLAN_MOST + 1):
        long.give(long.take((i + 128) * 512))
    with pytest.raises(
        PlanError, match="would need all 16,001 requests; a plan holds at most 16,000 of"
    ):
        planning.make(long.hand.done())
    with pytest.raises(PlanError, match="device 3 has no request"):
        planning.make(long.hand.path, device=3)
