"""Plans as files: their contents, their names, whose plan is followed, and what the commands say of it."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from instrument.plan_cases import Program, only
from instrument.tools import MIB, Plan, pyalloc
from pyalloc import _core, cli, planning, trace
from pyalloc.analysis.advice import advise
from pyalloc.cli import plan as plan_command
from pyalloc.common.config import Config
from pyalloc.errors import ConfigError, PlanError


def test_files(steps: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.plan"
    pyalloc("plan", steps, "-o", target, "-q")
    assert target.stat().st_mode & 0o777 == 0o600
    made = planning.make(steps)
    assert planning.read(target) == made
    assert "--force overwrites it" in pyalloc("plan", steps, "-o", target, expect=2)
    assert "is also an input" in pyalloc("plan", steps, "-o", steps, "--force", expect=2)
    odd = shutil.copy(steps, tmp_path / "odd.plan")
    assert "is also an input" in pyalloc("plan", odd, "--force", expect=2)
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
    check_damaged(content, tmp_path)


@pytest.mark.parametrize("devices", [[], 1, None, [1]])
def test_files_without_devices(steps: Path, tmp_path: Path, devices: object) -> None:
    check_damaged(json.loads(planning.make(steps).to_json()) | {"devices": devices}, tmp_path)


ODD_NUMBERS = (
    None,
    True,
    -1,
    0,
    1,
    512,
    64 << 10,
    2**31,
    2**32,
    2**60,
    2**63 - 512,
    2**63,
    2**64 - 512,
    2**64 - 1,
    2**64,
)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_file_holds_it_is_refused_or_does_no_harm(
    steps: Path, tmp_path: Path, seed: int
) -> None:
    """Made-up numbers, overlapping places, and files that end early."""
    rng = random.Random(seed)
    whole, path = planning.make(steps).to_json(), tmp_path / "odd.plan"
    n_refused = n_followed = 0
    with trace.program(steps) as program:
        for _ in range(60):
            content = json.loads(whole)
            (part,) = content["devices"]
            for _ in range(rng.choice((1, 1, 3))):
                place = rng.choice(part["places"])
                at = rng.randrange(3)
                near = (place[at] or 0) + rng.choice((-512, 512, 2 * MIB))
                place[at] = rng.choice(
                    (near, rng.choice(part["places"])[at], rng.choice(ODD_NUMBERS))
                )
            if rng.random() < 0.2:
                name = rng.choice(("device", "period", "turns", "live_bytes", "extent_bytes"))
                part[name] = rng.choice(ODD_NUMBERS)
            text = json.dumps(content)
            path.write_text(text[: rng.randrange(len(text))] if rng.random() < 0.1 else text)
            try:
                found = planning.read(path)
            except PlanError:
                n_refused += 1
                continue
            n_followed += 1
            options = rng.choice(("", "memory:tight", "memory:fast", "limit:64MiB"))
            replayed = program.replay("pyalloc", plan=found.packed(), options=options, check=True)
            assert replayed["completed"] and replayed["n_violations"] == 0
    assert n_refused > 5 and n_followed > 5


def check_damaged(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bad.plan"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=r"is damaged: .*; make it again with pyalloc plan"):
        planning.read(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 10**5, b'{"pyalloc_plan": 1}']
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.plan"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="is not a plan, or one of another version of pyalloc"):
        planning.read(path)


def test_no_program_runs_with_what_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "no.plan"
    path.write_bytes(b"{}")
    said = pyalloc("run", "--plan", path, "python", "-c", "pass", expect=2)
    assert "make one: pyalloc plan out.pya -o FILE" in said
    assert "No such file" in pyalloc("run", "--plan", tmp_path / "none", "python", expect=2)


def test_the_binding_refuses_what_is_no_plan(steps: Path) -> None:
    packed = planning.make(steps).packed()
    for wrong in (b"", packed[:-1], packed[:-24], packed[:7], packed + packed[:-1], packed + b"0"):
        with pytest.raises(PlanError, match="the plan is cut off"):
            _core.check_plan(wrong)
    with pytest.raises(TypeError):
        _core.check_plan("text")  # type: ignore[arg-type]
    with trace.program(steps) as program, pytest.raises(PlanError):
        program.replay("pyalloc", plan=packed[:-1])


@pytest.mark.parametrize("setting", ["vmm:False", "roundup_power2_divisions:4"])
def test_settings_without_which_there_is_no_plan(setting: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"{setting} cannot be combined with a plan, because .*; leave one of them out",
    ):
        Config(setting, "out.plan")
    Config(setting)
    said = pyalloc("run", "--plan", "out.plan", "--conf", setting, "python", expect=2)
    assert f"{setting} cannot be combined with a plan" in said


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
    """The plan of the first, whether or not their recordings are complete, and whatever else a rank started."""
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
    assert "This is one of 2 ranks; another may need more." in least


def test_the_commands_that_advice_proposes_can_be_typed(steps: Path, tmp_path: Path) -> None:
    path = steps.rename(tmp_path / "my run.pya.part")
    found = trace.analyse(path)
    found.replays = {
        name: {"peak_bytes": n * MIB, "completed": True}
        for name, n in (("native", 90), ("pyalloc", 80), ("planned", 50))
    }
    (told,) = [item.text for item in advise(found) if item.kind == "plan"]
    pyalloc("plan", path)
    made = tmp_path / "my run.plan"
    assert made.exists()
    assert f"(`pyalloc plan '{path}'`, then `pyalloc run --plan '{made}'`)" in told


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
    assert "the plan covers only 22.0 MiB of the 590.0 MiB that it held" in told
    assert told.endswith(f"next: pyalloc report {path}")


def test_how_much_a_plan_has_no_place_for_is_told(plan: Plan) -> None:
    """What it called the peak was that of the requests that it has places for."""
    program = Program(plan)
    for kept in range(1, 9):
        program.step(first=kept == 1)
        program.take(40 * MIB)
    path = plan.done()
    told = " ".join(pyalloc("plan", path).split())
    assert "of the 328.0 MiB that the program held: what outlives its step" in told
    few = Plan(path.with_name("few.pya"))
    program = Program(few)
    for step in range(8):
        program.step(first=step == 0)
    assert "outlives" not in pyalloc("plan", few.done())


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
    assert "only the policy pyalloc uses --plan" in said
    said = pyalloc("replay", steps, "--conf", "vmm:False", "--plan", target, expect=2)
    assert "vmm:False cannot be combined with a plan" in said


def test_whose_plan_is_followed(
    steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks' plans each takes its own; a single plan is for all; a launcher has no memory to plan."""
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
    with pytest.raises(PlanError, match=r"out\.rank1\.plan is not a plan"):
        planning.check(given)


def test_plans_of_several_files_have_their_names(steps: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.pya", "b.pya")]
    for file in files:
        shutil.copy(steps, file)
    told = pyalloc("plan", *files, "-o", tmp_path / "x.plan", expect=2)
    assert "-o works with one file only" in told
    rows = json.loads(pyalloc("plan", *files, "--json", "-q"))
    assert [row["plan"] for row in rows] == [str(tmp_path / f"{name}.plan") for name in "ab"]
    assert planning.read(tmp_path / "a.plan") == planning.read(tmp_path / "b.plan")
    told = pyalloc("plan", *files, expect=2)
    assert "exists; --force overwrites it" in told


@pytest.mark.parametrize("more", [0, 2 * MIB, 4 * MIB])
def test_a_plan_that_needs_more_is_told(
    more: int, steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Private pools take idle pages that a plan knows nothing of: with graphs it may need more."""
    found = plan_command._replayed

    def replayed(*args: Any) -> dict[str, Any]:
        figures = found(*args)
        figures["planned"]["peak_bytes"] = figures["pyalloc"]["peak_bytes"] + more
        return figures

    monkeypatch.setattr(plan_command, "_replayed", replayed)
    assert cli.main(["plan", str(steps)]) == 0
    out, err = capsys.readouterr()
    is_told = more > 2 * MIB  # one page more or less is chance
    assert ("The program needs less memory without the plan" in out) == is_told
    assert ("next: pyalloc run --plan" not in err) == is_told
    assert "next: pyalloc run" in err


@pytest.mark.parametrize(("n_steps", "n_mib"), [(1, 0.125), (1, 4), (5, 0)])
def test_what_is_told_of_a_plan(
    n_steps: int, n_mib: float, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Program(plan)
    for _ in range(n_steps):
        program.step(first=False)
    if n_mib:
        program.take(int(n_mib * MIB), stream=7)
    assert cli.main(["plan", str(plan.done())]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("planned all 13 requests" in text) == (n_steps == 1), text
    assert ("requests: the program's beginning and one step" in text) == (n_steps == 5)
    assert ("No two consecutive steps make the same requests" in text) == (n_steps == 1)
    assert ("11 % of all bytes were requested on other streams" in text) == (n_mib == 4)
    assert ("% of all bytes" in text) == (n_mib == 4)  # a percent is not mentioned
    for name in ("native", "expandable", "pyalloc", "planned"):
        assert re.search(rf"\b{name} yes [0-9.]+ MiB", text), text


def test_a_file_without_a_plan_is_left_out(steps: Path, tmp_path: Path) -> None:
    """The second process of a rank, as a rule: those of others are made all the same."""
    good, empty = tmp_path / "out.rank0.pya", tmp_path / "out.rank0.77.pya"
    shutil.copy(steps, good)
    hand = Plan(empty)
    hand.event("step")
    hand.done()
    told = pyalloc("plan", empty, good)
    assert f"left out: {empty}: it has no requests" in told
    assert f"next: pyalloc run --plan {tmp_path / 'out.plan'}" in told
    assert not empty.with_suffix(".plan").exists()
    planning.check(tmp_path / "out.plan")
    other = tmp_path / "other.pya"
    shutil.copy(empty, other)
    told = pyalloc("plan", empty, other, expect=2)
    assert (
        told.splitlines()[-1]
        == f"pyalloc plan: {other}: it has no requests, so there is nothing to plan"
    )
