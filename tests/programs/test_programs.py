"""Real programs, unchanged, with `pyalloc run`: the same requests to the byte as native, no more memory allocated."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dry_support import dry_environment, run_checked, warm_python

pytestmark = [pytest.mark.torch, pytest.mark.slow]
HERE = Path(__file__).parent
NEEDS = {
    "resnet": "torchvision",
    "huggingface": "transformers",
    "batch_size": "accelerate",
    "lightning_fit": "lightning",
}


def peaks(program: str, install: bool, output: Path) -> dict[str, Any]:
    run = [
        sys.executable if install else warm_python("torch.optim"),
        "-W",
        "ignore",
        str(HERE / "measure.py"),
        str(output),
        str(HERE / f"{program}.py"),
    ]
    command = [sys.executable, "-m", "pyalloc", "run", *run] if install else run
    env = dry_environment()
    env["HF_HUB_OFFLINE"] = "1"
    run_checked(command, env=env)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize(
    "program", ["gpt_amp", "prefetch", "resnet", "huggingface", "batch_size", "lightning_fit"]
)
def test_same_requests_as_native(program: str, tmp_path: Path) -> None:
    needed = NEEDS.get(program)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}: pip install {needed}")
    native = peaks(program, False, tmp_path / "native.json")
    ours = peaks(program, True, tmp_path / "pyalloc.json")
    assert (native["backend"], ours["backend"]) == ("native", "pluggable")
    assert ours["requested_bytes.all.peak"] == native["requested_bytes.all.peak"]
    assert ours["allocated_bytes.all.peak"] <= native["allocated_bytes.all.peak"]
    assert ours["num_ooms"] == native["num_ooms"]
