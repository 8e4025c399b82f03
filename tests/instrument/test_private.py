"""A recording made with --no-source tells nothing of the program's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dry_support import run_checked

from pyalloc import trace

pytestmark = pytest.mark.torch

PROGRAM = """
import torch
def secret_function():
    return torch.zeros(1 << 20, device="cuda")
kept = [secret_function() for _ in range(3)]
"""


@pytest.mark.parametrize("no_source", [True, False])
def test_no_source_leaves_out_all_of_the_programs_own(tmp_path: Path, no_source: bool) -> None:
    program = tmp_path / "secret_program.py"
    program.write_text(PROGRAM)
    out = tmp_path / "out.pya"
    words = ["--no-source"] if no_source else []
    command = [sys.executable, "-m", "pyalloc", "dryrun", "--record", str(out), *words]
    run_checked([*command, sys.executable, str(program)])
    content = out.read_bytes()
    assert (b"secret_function" not in content) == no_source
    assert (b"secret_program" not in content) == no_source
    assert trace.analyse(out).peak.allocated_bytes == 12 << 20
