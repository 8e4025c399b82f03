"""Plans: places worked out from a recording, and programs that run with them."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import sys
import textwrap
from array import array
from pathlib import Path
from typing import Any

import pytest
from conftest import RunPython

from instrument.conftest import Record
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import _core, advice, cli, planning, replaying, trace
from pyalloc.cli import plan as plan_command
from pyalloc.config import Config
from pyalloc.errors import ConfigError, PlanError

KIB = 1024

TRAINING = """
    import torch
    torch.manual_seed(1)
    layers = [torch.nn.Linear(700 + 64 * i, 700 + 64 * (i + 1)) for i in range(6)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    grown = []
    for step in range(STEPS):
        for batch in range(BATCHES):
            loss = model(torch.randn(900, 700, device="cuda")).square().mean()
            if batch == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
"""


def training(steps: int, batches: int = 1) -> str:
    return TRAINING.replace("STEPS", str(steps)).replace("BATCHES", str(batches))


class Program:
    """Requests and frees of a trace written by hand; addresses are never used twice."""

    def __init__(self, hand: Plan) -> None:
        self.hand = hand
        self.n = 0
        self.sizes: dict[int, int] = {}

    def take(self, size: int, **fields: int) -> int:
        self.n += 1
        self.hand.event("alloc", addr=self.n << 40, bytes=size, **fields)
        self.sizes[self.n] = size
        return self.n

    def give(self, number: int, **fields: int) -> None:
        self.hand.event("free_requested", addr=number << 40, **fields)
        self.hand.event("free_completed", addr=number << 40, **fields)

    def step(self, first: bool) -> None:
        kept = [self.take(size * MIB) for size in (3, 8, 2, 5)]
        self.take(16)  # a loss that is never given back
        for number in reversed(kept):
            extra = self.take(4 * MIB)
            small = self.take(7 * KIB)
            self.give(number)
            self.give(extra)
            self.give(small)
            if first:
                self.take(2 * MIB)


@pytest.fixture
def steps(plan: Plan) -> Path:
    program = Program(plan)
    for step in range(5):
        program.step(first=step == 0)
    return plan.done()


def lives(path: Path, n: int) -> list[tuple[int, int, int]]:
    """Size, birth and death of the first n requests, in events; read anew, without planning.py."""
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


def only(made: planning.Plan) -> planning.Part:
    """That of the one device there is."""
    (part,) = made.parts
    assert part.device is None
    return part


def check_places(path: Path, made: planning.Part) -> None:
    """No byte is under two blocks that live at one time."""
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
    had, alone = advice.size(native), advice.size(unplanned)
    assert f"instead of {had} ({alone} without the plan)" in item["text"]
    assert f"pyalloc plan {path.name}" in item["text"] and "plan.plan" in item["text"]
    named = json.loads(pyalloc("plan", path, "--json", "-q"))
    assert named["replayed"]["planned"]["peak_bytes"] == planned


def test_a_plan_is_measured_by_what_the_program_had(plan: Plan) -> None:
    """Recorded on an allocator that took no more than a plan: nothing is gained, whatever pyalloc takes without."""
    plan.event("segment_alloc", addr=1 << 50, bytes=60 * MIB)
    told = json.loads(pyalloc("report", drawn(plan, alike=True), "--json", "-q"))
    planned = told["replay"]["planned"]["peak_bytes"]
    assert planned >= 60 * MIB and planned < 0.99 * told["replay"]["pyalloc"]["peak_bytes"]
    assert not [item for item in told["advice"] if item["kind"] == "plan"]


def test_the_report_has_no_plan_where_no_step_repeats(plan: Plan) -> None:
    path = drawn(plan, alike=False)
    with pytest.raises(PlanError, match="no step asks for the same as the next one"):
        planning.make(path, needs_steps=True)
    told = json.loads(pyalloc("report", path, "--json", "-q"))
    assert "planned" not in told["replay"]
    assert "plan" not in {item["kind"] for item in told["advice"]}


@pytest.mark.parametrize("seed", range(6))
def test_any_program(plan: Plan, seed: int) -> None:
    """Also one that does not repeat itself: its plan is of all it did."""
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
    """A long step takes some seconds: what is called meanwhile may raise, as Ctrl-C does."""
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
    made = only(planning.make(path))  # device 1 is asked for less than a percent
    assert made.period == 13
    # Of one step 3 + 8 + 2 + 5 + 4 * 4 MiB and 28 KiB here, 2 elsewhere.
    assert made.elsewhere == pytest.approx(2 / 36, abs=0.003)
    assert len(only(planning.make(path, device=1)).places) == 4
    said = pyalloc("plan", path, "-o", path.with_suffix(".plan"))
    assert "6 % of all bytes were asked for on other streams" in said


def test_devices_of_one_process_have_their_own(plan: Plan) -> None:
    """Planned together as each would be alone; followed, replayed, by each of them."""
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
    said = pyalloc("plan", path)
    assert planning.read(target) == made
    for device, n in enumerate((13, 6)):
        assert re.search(rf"device {device}: places for the [^:]* which\s+has {n}\n", said)


@pytest.mark.torch
def test_one_process_trains_on_two_devices(
    record: Record, dry_python: RunPython, tmp_path: Path
) -> None:
    """Every request on either device gets its place."""
    program = """
        import torch
        halves = [torch.nn.Linear(900, 1100 - 300 * i).to(f"cuda:{i}") for i in range(2)]
        optimizer = torch.optim.AdamW([p for half in halves for p in half.parameters()])
        for step in range(5):
            optimizer.zero_grad()
            for i, half in enumerate(halves):
                x = torch.randn(700, 900, device=f"cuda:{i}")
                torch.nn.functional.gelu(half(x)).square().mean().backward()
            optimizer.step()
    """
    recorded = record(program, "--devices", "2")
    target = tmp_path / "out.plan"
    pyalloc("plan", recorded, "-o", target, "-q")
    n_placed = [
        sum(place.offset is not None for place in part.places)
        for part in planning.read(target).parts
    ]
    assert len(n_placed) == 2
    done = dry_python(
        f"""
        import pyalloc
        pyalloc.install(plan={str(target)!r})
        {textwrap.indent(textwrap.dedent(program), 8 * " ").strip()}
        print([pyalloc.stats(device)["pyalloc_planned"] for device in (0, 1)])
        """,
        devices=2,
    )
    assert done.stdout.strip() == str(n_placed)


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
    """With a history from the beginning on; else it is refused."""
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
    with pytest.raises(PlanError, match="begins when memory was in use already"):
        planning.make(late)


def test_what_cannot_be_planned(plan: Plan, tmp_path: Path) -> None:
    plan.event("step", "step")
    empty = plan.done()
    with pytest.raises(PlanError, match="no request is in it, so there is nothing to plan"):
        planning.make(empty)
    nothing = tmp_path / "nothing.pickle"
    nothing.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    with pytest.raises(PlanError, match="no request is in it, so there is nothing to plan"):
        planning.make(nothing)
    late = Plan(tmp_path / "late.pya")
    late.event("user", "before=1")
    late.event("alloc", addr=1 << 30, bytes=MIB)
    late.event("alloc", addr=2 << 30, bytes=MIB)
    said = pyalloc("plan", late.done(), expect=2)
    assert "begins when memory was in use already" in said
    assert "pyalloc run --record out.pya python train.py" in said
    long = Program(Plan(tmp_path / "long.pya"))
    for i in range(_core.PLAN_MOST + 1):
        long.give(long.take((i + 128) * 512))
    with pytest.raises(PlanError, match="a plan holds 16,000 of 64 KiB and more"):
        planning.make(long.hand.done())
    with pytest.raises(PlanError, match="device 3 has no request"):
        planning.make(long.hand.path, device=3)


def test_files(steps: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.plan"
    pyalloc("plan", steps, "-o", target, "-q")
    assert target.stat().st_mode & 0o777 == 0o600
    made = planning.make(steps)
    assert planning.read(target) == made
    assert "--force overwrites it" in pyalloc("plan", steps, "-o", target, expect=2)
    assert "is what is read" in pyalloc("plan", steps, "-o", steps, "--force", expect=2)
    data = json.loads(pyalloc("plan", steps, "-o", target, "--force", "--json", "-q"))
    assert [part["extent_bytes"] for part in data["devices"]] == [only(made).extent_bytes]
    assert set(data["replayed"]) == {"native", "expandable", "pyalloc", "planned"}


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.pop("places"),
        lambda part: part["places"].append([512, 0]),
        lambda part: part["places"].append([513, 0, 0]),
        lambda part: part["places"].append([512, -512, 0]),
        lambda part: part["places"].append([512, 2**70, 0]),
        lambda part: part["places"].append([512, "0", 0]),
        lambda part: part["places"].append([None, 0, 0]),
        lambda part: part["places"].extend([[512, 0, 0]] * (_core.PLAN_MOST + 1)),
        lambda part: part.update(period=10**6),
        lambda part: part.update(period=-1),
        lambda part: part.update(period=True),
        lambda part: part.update(elsewhere=[]),
        lambda part: part.update(device=-1),
        lambda part: part.update(device=64),
        lambda part: part.update(device="0"),
        lambda part: part.clear(),
    ],
)
def test_damaged_files(steps: Path, tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(planning.make(steps).to_json())
    change(content["devices"][0])
    path = tmp_path / "bad.plan"
    for damaged in (content, content | {"devices": []}, content | {"devices": 1}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(PlanError, match=r"is damaged: .*; make it again with pyalloc plan"):
            planning.read(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 10**5, b'{"pyalloc_plan": 1}']
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.plan"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is no plan that this pyalloc knows"):
        planning.read(path)
    said = pyalloc("run", "--plan", path, "python", "-c", "pass", expect=2)
    assert "make one: pyalloc plan out.pya -o FILE" in said
    assert "No such file" in pyalloc("run", "--plan", tmp_path / "none", "python", expect=2)


def test_the_binding_refuses_what_is_no_plan(steps: Path) -> None:
    packed = planning.make(steps).packed()
    for wrong in (b"", packed[:-1], packed[:7]):
        with pytest.raises(PlanError, match="a plan was cut off"):
            _core.check_plan(wrong)
    with pytest.raises(TypeError):
        _core.check_plan("text")  # type: ignore[arg-type]
    with trace.program(steps) as program, pytest.raises(PlanError):
        program.replay("pyalloc", plan=packed[:-1])


@pytest.mark.parametrize("setting", ["vmm:False", "roundup_power2_divisions:4"])
def test_settings_without_which_there_is_no_plan(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} and a plan: .*; leave one of the two out"):
        Config(setting, "out.plan")
    Config(setting)
    said = pyalloc("run", "--plan", "out.plan", "--conf", setting, "python", expect=2)
    assert f"{setting} and a plan" in said


@pytest.mark.torch
@pytest.mark.parametrize(("allocator", "batches"), [("native", 1), ("pyalloc", 4)])
def test_training_with_a_plan(
    record: Record, dry_python: RunPython, tmp_path: Path, allocator: str, batches: int
) -> None:
    """Every request gets its place, whichever allocator it was recorded on, and no device call comes after step 2."""
    recorded = record(training(4, batches), "--allocator", allocator)
    target = tmp_path / "out.plan"
    pyalloc("plan", recorded, "-o", target)
    made = only(planning.read(target))
    assert made.period > 0
    program = training(7, batches).replace(
        "        optimizer.step()\n",
        "        optimizer.step()\n"
        "        grown.append(torch.cuda.memory_stats()['num_device_alloc'])\n",
    )
    done = dry_python(
        f"""
        import pyalloc
        pyalloc.install(plan={str(target)!r})
        {textwrap.indent(textwrap.dedent(program), 8 * " ").strip()}
        stats = torch.cuda.memory_stats()
        ours = pyalloc.stats()
        print(grown[1], grown[-1], ours["pyalloc_planned"], stats["reserved_bytes.all.peak"])
        print(ours["pyalloc_stitches"])
        print(pyalloc.status())
        """
    )
    figures, stitches, *told = done.stdout.splitlines()
    second, last, planned, reserved = map(int, figures.split())
    assert second == last
    assert planned == sum(place.offset is not None for place in made.places)
    assert reserved <= -(-made.extent_bytes // (2 * MIB)) * 2 * MIB + 2 * MIB
    assert int(stitches) == 0
    assert f"plan: {target}" in told


@pytest.mark.torch
def test_contents_stay_apart(record: Record, dry_python: RunPython, tmp_path: Path) -> None:
    """Of a program that asks for something else than was recorded, each tensor keeps what was written into it."""
    recorded = record(training(4))
    target = tmp_path / "out.plan"
    pyalloc("plan", recorded, "-o", target, "-q")
    done = dry_python(
        f"""
        import random, torch, pyalloc
        pyalloc.install(plan={str(target)!r})
        rng = random.Random(1)
        sizes = [place[0] for place in __import__("json").load(open({str(target)!r}))["devices"][0]["places"]]
        live = []
        for i in range(3000):
            if live and rng.random() < 0.5:
                tensor, value = live.pop(rng.randrange(len(live)))
                assert (tensor.cpu() == value).all(), i
            else:
                n = sizes[len(sizes) * i // 6000] if i % 3 else rng.randrange(1, 2**20)
                value = rng.randrange(256)
                live.append((torch.full((n,), value, dtype=torch.uint8).cuda(), value))
        print("apart")
        """,
        memory="16GB",
    )
    assert done.stdout.split() == ["apart"]


@pytest.mark.torch
def test_by_run_and_by_environment(record: Record, tmp_path: Path, dry_python: RunPython) -> None:
    recorded = record(training(4))
    target = tmp_path / "a plan"
    pyalloc("plan", recorded, "-o", target, "-q")
    shutil.copy(target, tmp_path / "other")
    source = f"""
        import pyalloc
        pyalloc.install()
        assert pyalloc.status().config.plan == {str(target)!r}
        pyalloc.install(plan={str(target)!r})
        try:
            pyalloc.install(plan={str(tmp_path / "other")!r})
        except pyalloc.InstallError as error:
            print(error)
        pyalloc.uninstall()
        try:
            pyalloc.install(plan="/nowhere")
        except pyalloc.PlanError as error:
            print(error)
        assert not pyalloc.status().installed
    """
    done = dry_python(source, env={"PYALLOC_PLAN": str(target)})
    assert f"plan: {target}, not {tmp_path / 'other'}" in done.stdout
    assert "/nowhere: No such file or directory" in done.stdout
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['PYALLOC_PLAN'])")
    for words in (["run"], ["dryrun", "--allocator", "pyalloc"]):
        said = pyalloc(*words, "--plan", target, sys.executable, program)
        assert str(target) in said.splitlines()
    said = pyalloc("dryrun", "--plan", target, "python", program, expect=2)
    assert "add --allocator pyalloc" in said


RANKS = """
    import os, sys, torch
    import torch.distributed as dist
    import pyalloc
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    width = 900 + 300 * rank  # as in a pipeline, ranks are not alike
    layers = [torch.nn.Linear(700, width), torch.nn.Linear(width, 700)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(900, 700, device="cuda")).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    planned = pyalloc.stats()["pyalloc_planned"] if len(sys.argv) > 1 else 0
    told = [line for line in str(pyalloc.status()).splitlines() if line.startswith("plan:")]
    print(f"rank {rank} {planned} {' '.join(told)}\\n", end="", file=sys.stderr)  # at once
"""


@pytest.mark.torch
@pytest.mark.slow
def test_each_rank_follows_its_own(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(RANKS))
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    dry = ["dryrun", "--memory", "2GB", "--devices", "2"]
    out = tmp_path / "out.pya"
    pyalloc(*dry, "--record", out, *ranks, script)
    recorded = [tmp_path / f"out.rank{rank}.pya" for rank in (0, 1)]
    told = pyalloc("plan", *recorded)
    assert f"next: pyalloc run --plan {tmp_path / 'out.plan'} " in told
    plans = [tmp_path / f"out.rank{rank}.plan" for rank in (0, 1)]
    n_placed = [
        sum(place.offset is not None for place in only(planning.read(plan)).places)
        for plan in plans
    ]
    follow = [*dry, "--allocator", "pyalloc", "--plan"]
    told = pyalloc(*follow, tmp_path / "out.plan", *ranks, script, "planned")
    for rank in (0, 1):
        assert f"rank {rank} {n_placed[rank]} plan: {plans[rank]}" in told
    assert f"next: pyalloc run --plan {tmp_path / 'out.plan'} " in told


def ranks_of(folder: Path, steps: Path, *names: str) -> list[Path]:
    """Recordings of two ranks' processes: the same, under these names."""
    folder.mkdir()
    found = []
    for name in names:
        hand = Plan(folder / name)
        for text in ("rank=0", "world_size=2", "command=python -u /my/train.py --deep"):
            hand.event("user", text)
        program = Program(hand)
        for step in range(5):
            program.step(first=step == 0)
        found.append(hand.done())
    return found


def test_plans_of_ranks_have_one_name(steps: Path, tmp_path: Path) -> None:
    """That of the first, whether their recordings are whole or not, and whatever else a rank started."""
    follow = "next: pyalloc run --plan {} torchrun --nproc-per-node 2 /my/train.py --deep"
    whole = ranks_of(tmp_path / "a", steps, "out.rank0.pya", "out.rank0.77.pya", "out.rank1.pya")
    told = pyalloc("plan", *sorted(whole)).splitlines()
    assert [line for line in told if line.startswith("next: ")] == [
        follow.format(tmp_path / "a" / "out.plan")
    ]
    cut = ranks_of(tmp_path / "b", steps, "out.rank0.pya", "out.rank1.pya")
    parts = [path.rename(path.with_name(path.name + ".part")) for path in cut]
    assert follow.format(tmp_path / "b" / "out.plan") in pyalloc("plan", *parts)
    assert all((tmp_path / "b" / f"out.rank{rank}.plan").exists() for rank in (0, 1))
    one = pyalloc("plan", parts[1], "--force")
    assert follow.format(tmp_path / "b" / "out.rank1.plan") in one
    least = pyalloc("replay", whole[0], "--find-min", "--policy", "pyalloc")
    assert re.search(r"--devices 2 --allocator pyalloc torchrun --nproc-per-node 2 /my", least)
    assert "It is one of 2 ranks, of which another may need more." in least


def test_plans_of_several_programs(steps: Path, tmp_path: Path) -> None:
    """Each has its own next command; two that would be one file are refused before any work."""
    other = tmp_path / "other.pya"
    shutil.copy(steps, other)
    told = pyalloc("plan", steps, other).splitlines()
    follow = [line for line in told if line.startswith("next: ")]
    assert [
        f"--plan {path.with_suffix('.plan')} " in line
        for path, line in zip((steps, other), follow, strict=True)
    ]
    assert len(follow) == 2
    same = tmp_path / "other.snap"
    shutil.copy(steps, same)
    said = pyalloc("plan", other, same, "--force", expect=2)
    assert f"{other} and {same} would both be {tmp_path / 'other.plan'}" in " ".join(said.split())


def test_a_plan_of_little_of_what_ran_out_of_memory_is_not_proposed(plan: Plan) -> None:
    """The loop that repeats itself is one within the first step."""
    program = Program(plan)
    for _ in range(5):
        program.step(first=False)
    for i in range(20):
        program.take((20 + i) * MIB)
    plan.event("oom", bytes=1 << 30)
    path = plan.done()
    told = " ".join(pyalloc("plan", path).split())
    assert "the plan is of 22.0 MiB of the 590.0 MiB that it held" in told
    assert told.endswith(f"next: pyalloc report {path}")


def test_a_recording_that_ran_out_of_memory(plan: Plan) -> None:
    program = Program(plan)
    for step in range(5):
        program.step(first=step == 0)
    plan.event("oom", bytes=1 << 40)
    path = plan.done()
    told = pyalloc("plan", path)
    assert "The program ran out of memory while it was recorded" in told
    assert f"next: pyalloc run --plan {path.with_suffix('.plan')} " in told
    told = pyalloc("replay", path, "--find-min", "--policy", "pyalloc")
    assert f"next: pyalloc report {path}" in told  # with what was enough it would fail again


def test_a_replay_without_the_plan_it_was_given(steps: Path) -> None:
    target = steps.with_suffix(".plan")
    pyalloc("plan", steps, "-q")
    said = pyalloc("replay", steps, "--policy", "native", "--plan", target, expect=2)
    assert "a plan is followed by pyalloc alone" in said
    said = pyalloc("replay", steps, "--conf", "vmm:False", "--plan", target, expect=2)
    assert "vmm:False and a plan" in said


@pytest.mark.torch
def test_the_environments_plan_is_found_from_any_folder(steps: Path, tmp_path: Path) -> None:
    """Relative to where the command was given, and checked there."""
    pyalloc("plan", steps, "-o", tmp_path / "out.plan", "-q")
    program = tmp_path / "program.py"
    program.write_text(
        "import os; os.chdir('/'); import torch, pyalloc; print(pyalloc.status().config.plan)"
    )
    for words in (["run"], ["dryrun", "--allocator", "pyalloc"]):
        env = {"PYALLOC_PLAN": "out.plan"}
        if words == ["run"]:
            program.write_text("import os; print(os.environ['PYALLOC_PLAN'])")
        told = pyalloc(*words, sys.executable, program, cwd=tmp_path, env=env)
        assert str(tmp_path / "out.plan") in told.splitlines()
        env = {"PYALLOC_PLAN": "missing.plan"}
        said = pyalloc(*words, sys.executable, program, cwd=tmp_path, env=env, expect=2)
        assert "missing.plan: No such file or directory; it is what --plan" in said
        assert "Traceback" not in said


def test_whose_plan_is_followed(
    steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks' plans each takes its own, of one all of them that; a launcher has no memory to plan."""
    given, own = tmp_path / "out.plan", tmp_path / "out.rank1.plan"
    assert Config.of(plan=given).plan == str(given)  # to be told that there is none
    own.write_text(planning.make(steps).to_json())
    assert Config.of(plan=given).plan == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert Config.of(plan=given).plan == str(own)
    shutil.copy(own, given)
    monkeypatch.setenv("RANK", "0")
    assert Config.of(plan=given).plan == str(given)
    planning.check(given)
    own.write_text("{}")
    with pytest.raises(PlanError, match=r"out\.rank1\.plan is no plan"):
        planning.check(given)


def test_plans_of_several_files_have_their_names(steps: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.pya", "b.pya")]
    for file in files:
        shutil.copy(steps, file)
    told = pyalloc("plan", *files, "-o", tmp_path / "x.plan", expect=2)
    assert "-o is for one file" in told
    rows = json.loads(pyalloc("plan", *files, "--json", "-q"))
    assert [row["plan"] for row in rows] == [str(tmp_path / f"{name}.plan") for name in "ab"]
    assert planning.read(tmp_path / "a.plan") == planning.read(tmp_path / "b.plan")
    told = pyalloc("plan", *files, expect=2)
    assert "exists; --force overwrites it" in told


@pytest.mark.parametrize("more", [0, 2 * MIB, 4 * MIB])
def test_a_plan_that_needs_more_is_told(
    more: int, steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Private pools take pages that lie idle, and a plan knows nothing of them: with graphs it may need more."""
    found = plan_command._replayed

    def replayed(*args: Any) -> dict[str, Any]:
        figures = found(*args)
        figures["planned"]["peak_bytes"] = figures["pyalloc"]["peak_bytes"] + more
        return figures

    monkeypatch.setattr(plan_command, "_replayed", replayed)
    assert cli.main(["plan", str(steps)]) == 0
    out, err = capsys.readouterr()
    is_told = more > 2 * MIB  # a page more or less is chance
    assert ("Without the plan it needs less: leave it out" in out) == is_told
    assert ("next: pyalloc run --plan" not in err) == is_told
    assert "next: pyalloc run" in err


def test_a_file_without_a_plan_is_left_out(steps: Path, tmp_path: Path) -> None:
    """The second process of a rank, as a rule: those of others are made all the same."""
    good, empty = tmp_path / "out.rank0.pya", tmp_path / "out.rank0.77.pya"
    shutil.copy(steps, good)
    hand = Plan(empty)
    hand.event("step")
    hand.done()
    told = pyalloc("plan", empty, good)
    assert f"left out: {empty}: no request is in it" in told
    assert f"next: pyalloc run --plan {tmp_path / 'out.plan'}" in told
    assert not empty.with_suffix(".plan").exists()
    planning.check(tmp_path / "out.plan")
    other = tmp_path / "other.pya"
    shutil.copy(empty, other)
    told = pyalloc("plan", empty, other, expect=2)
    assert (
        told.splitlines()[-1]
        == f"pyalloc plan: {other}: no request is in it, so there is nothing to plan"
    )
