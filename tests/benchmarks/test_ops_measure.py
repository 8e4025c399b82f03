"""What the benchmarks of the ops make of a card that does not answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.card import smi
from benchmarks.ops import __main__ as program
from benchmarks.ops.measure import Bench


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


def test_a_peer_that_cannot_be_run_is_left_out(tmp_path: Path) -> None:
    """Like a compiled one without its compiler; what is known is in the file at once."""

    def compiled() -> None:
        raise RuntimeError("no C compiler")

    bench = Bench("cpu", rounds=1, compile=False, seed=0, path=tmp_path / "rows.json")
    ours = peer = lambda: sum(range(1000))
    bench.compare("first", ours, {"compiled": compiled, "eager": peer}, target=None)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["fastest_peer"] == "eager" and list(row["peers_ms"]) == ["eager"]
    assert row["failed_peers"] == {"compiled": "RuntimeError: no C compiler"}
    assert bench.compare("second", ours, {"compiled": compiled}, target=1) is None
    row = json.loads((tmp_path / "rows.json").read_text())[1]
    assert row["ours_ms"] and row["ratio"] is row["met"] is row["fastest_peer"] is None


def test_a_wrong_answer_leaves_the_other_parts_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(bench: Bench) -> None:
        raise SystemExit("spherical: wrong answer")

    parts = {"spherical": wrong, "additive": lambda bench: bench.row("additive", ratio=2)}
    monkeypatch.setattr(program, "PARTS", parts)
    path = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["ops", "--json", str(path), "--only", *parts])
    with pytest.raises(SystemExit, match="failed: spherical"):
        program.main()
    first, second = json.loads(path.read_text())
    assert first["failed"] == "SystemExit: spherical: wrong answer" and second["ratio"] == 2
