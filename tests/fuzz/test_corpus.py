"""What `make fuzz` found gets into the committed corpus."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_new_inputs_are_found(tmp_path: Path) -> None:
    """make -C changes the folder: a path from the tree's own root led nowhere there."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests" / "fuzz").mkdir(parents=True)
    (tmp_path / "build/fuzz/kept/fuzz_core").mkdir(parents=True)
    (tmp_path / "build/fuzz/kept/fuzz_core/an input").touch()
    stand_in = tmp_path / "stand-in"  # for the make of tests/fuzz: lists what it is to read
    stand_in.write_text('#!/bin/sh\ncd "$3" && echo "$6:" $(ls ${7#FROM=} 2>&1)\n')
    stand_in.chmod(0o755)
    command = ["make", "-s", f"MAKE={stand_in}", "fuzz-corpus"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "ONLY=fuzz_core: an input",
        "ONLY=fuzz_options:",
        "ONLY=fuzz_trace:",
    ]
