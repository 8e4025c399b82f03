"""Two live blocks in one page, under two addresses: every byte is read back, on memory that really aliases."""

from __future__ import annotations

import json

import pytest
from dry_support import ROOT, dry_environment, python_for, run_checked

pytestmark = pytest.mark.torch


def run(*arguments: str) -> dict[str, int]:
    program = ROOT / "tests/programs/shared_pages.py"
    command = [python_for(program.read_text()), "-W", "ignore", str(program), *arguments]
    found: dict[str, int] = json.loads(run_checked(command, env=dry_environment()).stdout)
    assert found["times_full"] >= 20
    assert found["peak_live"] <= found["peak_reserved"] <= found["limit"]
    return found


def test_bytes_survive_in_shared_pages() -> None:
    found = run("250")
    assert found["shared_ranges"] >= 10
    assert found["peak_live"] > 0.96 * found["limit"]


def test_bytes_survive_in_parts_of_grains() -> None:
    found = run("170", "--grains")
    assert found["stitches"] >= 8
    assert found["peak_live"] > 0.9 * found["limit"]
