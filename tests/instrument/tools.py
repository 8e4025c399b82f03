"""What the tests of the instrument share."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from dry_support import PATIENCE_S

from pyalloc import _core, cli, trace
from pyalloc.analysis.advice import advise
from pyalloc.traces.convert import KINDS
from pyalloc.traces.facts import Advice

ROOT = Path(__file__).parent.parent.parent
SEQ2SEQ = ROOT / "examples" / "seq2seq.py"
MIB = 2**20
ALLOCATORS = pytest.mark.parametrize("allocator", ["native", "pyalloc"])

# A training loop that follows this calls train_step().
LOOP = """
    import torch
    from torch import nn
    torch.backends.cudnn.enabled = False
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss
"""


# Commands that only read and write files, and help, run in this process: Python's start would take most of their time.
_READERS = [[name] for name in ("diff", "events", "export", "plan", "replay", "report", "top")]


def pyalloc(
    *words: object, expect: int | None = 0, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> str:
    """Output of `pyalloc ...`, both streams."""
    arguments = [str(word) for word in words]
    is_reader = arguments[:1] in _READERS or arguments[1:] == ["--help"]
    if is_reader and env is None:
        code, out, err = _here(arguments, cwd)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "pyalloc", *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    if expect is not None and code != expect:
        pytest.fail(f"exit code {code}: {out[-3000:]}{err[-3000:]}")
    return out + err


def _here(arguments: list[str], cwd: Path) -> tuple[int, str, str]:
    before = Path.cwd()
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        os.chdir(cwd)
        try:
            code = cli.main(arguments)
        except SystemExit as end:  # argparse's
            assert isinstance(end.code, int)
            code = end.code
        finally:
            os.chdir(before)
    return code, out.getvalue(), err.getvalue()


class Plan:
    """A trace written by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = _core.TraceWriter(path)
        self.time = 0

    def event(self, kind: str, text: str = "", **fields: int) -> None:
        self.time += 1000
        number = self.writer.string(text) if text else 0
        self.writer.event(KINDS[kind], text=number, time_ns=self.time, **fields)

    def stack(self, line: int, name: str = "work", file: str = "/home/me/model.py") -> int:
        return self.writer.stack(0, self.writer.string(name), self.writer.string(file), line)

    def done(self) -> Path:
        self.writer.close()
        return self.path


def small_trace(plan: Plan) -> Path:
    line = plan.stack(3)
    plan.event("segment_alloc", addr=1 << 30, bytes=20 * MIB, stack=line)
    for step in range(6):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=4 * MIB, stack=line)
        plan.event("alloc", addr=(1 << 30) + 4 * MIB, bytes=3 * MIB, stack=plan.stack(4))
        plan.event("phase_end", "forward")
        plan.event("free_requested", addr=1 << 30)
        plan.event("free_completed", addr=1 << 30)
        plan.event("free_requested", addr=(1 << 30) + 4 * MIB)
        plan.event("free_completed", addr=(1 << 30) + 4 * MIB)
    plan.event("alloc", addr=(1 << 30) + 8 * MIB, bytes=MIB, stack=line)
    return plan.done()


def written(plan: Plan, story: str) -> Path:
    """Phases begin and end (`forward ... forward.`), and blocks of so many MiB are made and freed (`+a40 -a`)."""
    places: dict[str, int] = {}
    for number, word in enumerate(story.split()):
        if word == "step":
            plan.event("step", "step", arg=number)
        elif word[0] == "+":
            places[word[1]] = (number + 1) << 30
            plan.event("alloc", addr=places[word[1]], bytes=int(word[2:]) * MIB)
        elif word[0] == "-":
            plan.event("free_requested", addr=places[word[1]])
        else:
            plan.event("phase_end" if word[-1] == "." else "phase_begin", word.rstrip("."))
    return plan.done()


def kinds(path: Path) -> dict[str, Advice]:
    """The advice for a trace."""
    return {item.kind: item for item in advise(trace.analyse(path))}
