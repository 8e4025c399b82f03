"""What the benchmarks compile, for several processes at once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import torch_replay
from benchmarks.workloads import record

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("build", [torch_replay.build_caller, record.build_recorder])
def test_a_library_has_its_name_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[], Path]
) -> None:
    """Whoever began at the same time opened what the linker was still writing."""
    for name in ("csrc", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    seen: list[Path] = []

    def run(command: list[str], **_: object) -> None:
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_text("half of it")
        seen.extend(tmp_path.glob("build/*/*.so"))

    monkeypatch.setattr(torch_replay, "ROOT", tmp_path)
    monkeypatch.setattr(record, "BUILD", tmp_path / "build" / "recorder")
    monkeypatch.setattr(subprocess, "run", run)
    library = build()
    assert seen == [] and library.is_relative_to(tmp_path)
    assert list(library.parent.iterdir()) == [library]
    monkeypatch.setattr(subprocess, "run", None)
    assert build() == library  # newer than what it was made from
