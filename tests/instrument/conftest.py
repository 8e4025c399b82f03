"""Programs recorded on the host-memory runtime, once per session."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from dry_support import python_for

from instrument.plan_cases import Program
from instrument.tools import SEQ2SEQ, Plan, pyalloc

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Records a program given as source text; returns the trace.

    cold: in a fresh interpreter, even if it imports torch first.
    """

    def run(source: str, *options: str, expect: int | None = 0, cold: bool = False) -> Path:
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(source))
        python = sys.executable if cold else python_for(source, dryrun=True)
        out = tmp_path / "out.pya"
        pyalloc(
            "dryrun", "--memory", "4GB", "--record", out, "--force", *options,
            python, "-W", "ignore", script, expect=expect,
        )  # fmt: skip
        return out

    return run


@pytest.fixture(scope="session")
def forum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the forum thread, recorded with torch's own allocator; beside it, seq.json of the dry run."""
    out = tmp_path_factory.mktemp("forum") / "seq.pya"
    python = python_for(SEQ2SEQ.read_text(), dryrun=True)
    told = out.with_suffix(".json")
    pyalloc("dryrun", "--memory", "24GB", "--record", out, "--json", told, python, SEQ2SEQ)
    return out


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "plan.pya")


@pytest.fixture
def steps(plan: Plan) -> Path:
    """Five steps; the first requests some more."""
    program = Program(plan)
    for step in range(5):
        program.step(first=step == 0)
    return plan.done()
