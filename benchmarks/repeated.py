"""Training with fixed shapes: device calls of each step under native, expandable segments and pyalloc.

``python -m benchmarks.repeated [--plan] [--only NAME ...] [--steps N] [--json] [--device cuda]``

Real torch on the host-memory CUDA runtime, which counts the calls that take, map or free memory.  Gradients are freed
before each backward pass (``zero_grad(set_to_none=True)``, torch's default).  Columns: live: most bytes allocated;
peak/live: most device bytes over that; calls: of step 1, step 2, steps 3 to 6 and the rest; quiet from: the step after
which there were none.  Nothing here is random, but torch.autocast frees its casts in the order of a table of their
addresses, which differs between processes, so rows of bfloat16 may differ a little from run to run.

--plan adds a row for each program: pyalloc with a plan, made from four steps recorded on torch's own allocator.

--device cuda trains on the card: calls and memory then come from torch's statistics (most bytes reserved; pages and
segments created and released), and the rows have the milliseconds of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pyalloc
from benchmarks import hostcuda, trained
from benchmarks.helping import HelpFormatter
from benchmarks.memory import Progress, commit
from benchmarks.torch_replay import ALLOCATORS
from benchmarks.trained import Card, HostRuntime
from pyalloc import planning
from pyalloc.common.config import PLAN

PLANNED = "planned"  # pyalloc with a plan
N_RECORDED = 4  # steps
IMAGES = ("resnet50", "vgg16", "vit_b_16", "convnext_tiny", "swin_t", "densenet121")


@dataclass(frozen=True)
class Program:
    """A model of torchvision, ``mlp`` or ``gpt``, with its optimizer and, if asked, autocast to bfloat16."""

    name: str
    model: str
    optimizer: str
    autocast: bool = False
    fused: bool = False
    n_batches: int = 1  # per step: their gradients are accumulated


PROGRAMS = [
    Program("mlp, AdamW", "mlp", "AdamW"),
    Program("gpt, AdamW", "gpt", "AdamW"),
    Program("gpt, AdamW, bfloat16", "gpt", "AdamW", autocast=True),
    *(Program(f"{model}, AdamW", model, "AdamW") for model in IMAGES if model != "vgg16"),
    *(Program(f"{model}, SGD", model, "SGD") for model in ("resnet50", "vgg16", "densenet121")),
    Program("vit_b_16, AdamW, bfloat16", "vit_b_16", "AdamW", autocast=True),
    # Here the requests of a step's first batch are the same as those of the others.
    Program("gpt, fused, 4 batches", "gpt", "AdamW", fused=True, n_batches=4),
    Program("resnet50, SGD, 4 batches", "resnet50", "SGD", n_batches=4),
]


def _gpt() -> Any:
    from benchmarks.workloads.common import Gpt

    return Gpt(width=768, heads=12, layers=12, vocabulary=50304)


def _parts(name: str) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
    """The model on the device, a batch and its labels."""
    import torch
    from torch import nn

    if name == "mlp":
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(4096, 1000))
        batch, n_labels, n_classes = partial(torch.randn, 4096, 4096, device="cuda"), 4096, 1000
    elif name == "gpt":
        model, n_labels, n_classes = _gpt(), 8 * 512, 50304
        batch = partial(torch.randint, n_classes, (8, 512), device="cuda")
    else:
        import torchvision

        model, n_labels, n_classes = getattr(torchvision.models, name)(), 32, 1000
        batch = partial(torch.randn, 32, 3, 224, 224, device="cuda")
    return model.cuda(), batch, partial(torch.randint, n_classes, (n_labels,), device="cuda")


def _train_here(
    program: Program, allocator: str, n_steps: int, device: str, record: Path | None
) -> dict[str, Any]:
    """In a child: trains and counts; record: writes a trace there."""
    counter = trained.counter_of(device)
    if allocator == "pyalloc":
        pyalloc.install()
    with pyalloc.record(record, stacks="none") if record else contextlib.nullcontext():
        return _steps_here(program, n_steps, device, counter)


def _steps_here(
    program: Program, n_steps: int, device: str, counter: HostRuntime | Card
) -> dict[str, Any]:
    import torch

    model, batch, labels = _parts(program.model)
    options: dict[str, Any] = {"momentum": 0.9} if program.optimizer == "SGD" else {}
    options |= {"fused": True} if program.fused else {}
    optimizer = getattr(torch.optim, program.optimizer)(model.parameters(), lr=1e-3, **options)
    began = time.process_time()
    calls = [counter.n_calls()]
    ends = [time.perf_counter()]
    for _ in range(n_steps):
        for i in range(program.n_batches):
            with torch.autocast("cuda", torch.bfloat16, enabled=program.autocast):
                logits = model(batch())
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels())
            if i == 0:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        del loss, logits
        calls.append(counter.n_calls())
        if device == "cuda":  # the host-memory runtime would count it as a call
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    live = torch.cuda.max_memory_allocated()
    row = {
        "live_bytes": live,
        "peak_bytes": counter.peak_bytes(),
        "calls": [after - before for before, after in pairwise(calls)],
        "seconds": time.process_time() - began,
        "torch": torch.__version__,
        "device": trained.device_name(device),
    }
    if device == "cuda":
        row["step_ms"] = [round(1e3 * (after - before), 2) for before, after in pairwise(ends)]
    return row


def train(
    program: Program,
    allocator: str,
    n_steps: int,
    device: str = "host",
    *,
    plan: Path | None = None,
    record: Path | None = None,
) -> dict[str, Any]:
    """Trains one program under one allocator in a process of its own; record: writes a trace there.

    Raises:
        RuntimeError: the program failed; contains its last output.
    """
    env = trained.environment(device, allocator)
    env |= {PLAN: str(plan)} if plan is not None else {}
    words = ["--here", program.name, allocator, "--steps", str(n_steps), "--device", device]
    words += ["--record", str(record)] if record is not None else []
    try:
        row = trained.in_child("benchmarks.repeated", words, env)
    except trained.ChildError as error:
        raise RuntimeError(f"{program.name} on {allocator} failed: {error}") from None
    row.update(program=program.name, allocator=allocator)
    row["peak_live"] = row["peak_bytes"] / row["live_bytes"]
    row["quiet_from"] = max((step for step, n in enumerate(row["calls"], 1) if n), default=0) + 1
    return row


def train_planned(program: Program, n_steps: int, device: str) -> dict[str, Any]:
    """Like train(), on pyalloc with a plan made from a recording on torch's own allocator.

    Raises:
        RuntimeError: as train().
        PlanError: no plan can be made from it.
    """
    with tempfile.TemporaryDirectory() as folder:
        recorded, plan = Path(folder, "out.pya"), Path(folder, "out.plan")
        train(program, "native", N_RECORDED, device, record=recorded)
        plan.write_text(planning.make(recorded).to_json())
        row = train(program, "pyalloc", n_steps, device, plan=plan)
    return {**row, "allocator": PLANNED}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = f"{'live MiB':>9}{'peak/live':>10}{'step 1':>8}{'step 2':>7}{'3 to 6':>7}{'later':>7}"
    lines = [f"{'calls that take, map or free memory':38}{head}  quiet from"]
    for row in rows:
        calls = row["calls"]
        quiet = f"step {row['quiet_from']}" if row["quiet_from"] <= len(calls) else "never"
        name = row["program"] if row["allocator"] == ALLOCATORS[0] else ""
        lines.append(
            f"{name:27}{row['allocator']:11}{row['live_bytes'] / 2**20:9.0f}{row['peak_live']:10.3f}"
            f"{calls[0]:8}{sum(calls[1:2]):7}{sum(calls[2:6]):7}{sum(calls[6:]):7}  {quiet}"
        )
    for allocator in dict.fromkeys(row["allocator"] for row in rows):
        mine = [row for row in rows if row["allocator"] == allocator]
        mean = geometric_mean([row["peak_live"] for row in mine])
        n_quiet = sum(row["quiet_from"] <= len(row["calls"]) for row in mine)
        last = f"{n_quiet} of {len(mine)} quiet in the end"
        lines.append(f"{'geometric mean':27}{allocator:11}{'':9}{mean:10.3f}  {last}")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="programs whose name has one of")
    parser.add_argument("--plan", action="store_true", help="pyalloc with a plan, too")
    parser.add_argument("--steps", type=int, default=12, help="of training (default 12)")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--json", action="store_true", help="one JSON line for each result")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: a training has at least one")
    if arguments.here:
        name, allocator = arguments.here
        program = next(program for program in PROGRAMS if program.name == name)
        steps, device = arguments.steps, arguments.device
        print(json.dumps(_train_here(program, allocator, steps, device, arguments.record)))
        sys.stdout.flush()
        os._exit(0)  # nothing is measured after this
    why = hostcuda.why_not() if arguments.device == "host" else None
    if why:
        print(f"benchmarks.repeated trains with real torch: {why}", file=sys.stderr)
        return 1
    wanted = arguments.only or [""]
    chosen = [program for program in PROGRAMS if any(text in program.name for text in wanted)]
    if not chosen:
        parser.error(f"--only {' '.join(wanted)}: none of {', '.join(p.name for p in PROGRAMS)}")
    names = [*ALLOCATORS, PLANNED] if arguments.plan else list(ALLOCATORS)
    progress = Progress(len(chosen) * len(names), arguments.quiet)
    rows = []
    for program in chosen:
        for allocator in names:
            rows.append(
                train_planned(program, arguments.steps, arguments.device)
                if allocator == PLANNED
                else train(program, allocator, arguments.steps, arguments.device)
            )
            progress.step(f"{program.name}, {allocator}")
            if arguments.json:
                print(json.dumps({**rows[-1], "commit": commit()}), flush=True)
    if arguments.json:
        return 0
    print(table(rows))
    print(f"real torch {rows[0]['torch']} on {rows[0]['device']}; commit {commit()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
