"""What the benchmarks of the ops make of a card that does not answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.ops.measure import smi


@pytest.mark.parametrize(
    ("answer", "code", "known"),
    [
        ("1980 MHz", 0, "1980 MHz"),
        ("[N/A]", 0, None),
        ("[Not Supported]", 0, None),
        ("NVIDIA-SMI has failed", 9, None),
    ],
)
def test_what_a_card_does_not_say(
    answer: str, code: int, known: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert smi("clocks.max.sm") == known
