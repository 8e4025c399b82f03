"""Two live blocks in one page, under two addresses: every byte is read back, on memory that really aliases."""

from __future__ import annotations

import json
import sys

import pytest
from dry_support import ROOT, dry_environment, run_checked

pytestmark = pytest.mark.torch


def test_bytes_survive_in_shared_pages() -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/programs/shared_pages.py"), "250"]
    found = json.loads(run_checked(command, env=dry_environment()).stdout)
    assert found["shared_ranges"] >= 10
    assert found["times_full"] >= 20
    assert found["peak_live"] <= found["peak_reserved"] <= found["limit"]
    assert found["peak_live"] > 0.96 * found["limit"]
