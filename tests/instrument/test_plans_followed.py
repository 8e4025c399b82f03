"""Programs of torch that run with a plan."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from dry_support import RunPython

from instrument.conftest import Record
from instrument.plan_cases import only, training
from instrument.tools import MIB, pyalloc
from pyalloc import planning


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
        import torch, pyalloc
        pyalloc.install(plan={str(target)!r})
        {textwrap.indent(textwrap.dedent(program), 8 * " ").strip()}
        print([pyalloc.stats(device)["pyalloc_planned"] for device in (0, 1)])
        """,
        devices=2,
    )
    assert done.stdout.strip() == str(n_placed)


@pytest.mark.torch
@pytest.mark.parametrize(("allocator", "batches"), [("native", 1), ("pyalloc", 4)])
def test_training_with_a_plan(
    record: Record, dry_python: RunPython, tmp_path: Path, allocator: str, batches: int
) -> None:
    """Every request gets its place, on whichever allocator it was recorded, and no device call comes after step 2."""
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
        import torch, pyalloc
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
    """If a program requests something else than was recorded, each tensor keeps what was written into it."""
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
        import torch, pyalloc
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
        assert (
            "missing.plan: No such file or directory; --plan, install(plan=...) or PYALLOC_PLAN names"
            in said
        )
        assert "Traceback" not in said
