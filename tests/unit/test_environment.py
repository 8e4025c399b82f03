"""The environment that the makefile makes: PyTorch is not fetched twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_torch_of_an_environment_is_seen(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "their own", tmp_path / "ours"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", theirs], check=True)
    (packages,) = (theirs / "lib").glob("python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text("class version:\n    cuda = '13.0'\n")
    subprocess.run([".ci/make-venv", theirs / "bin" / "python", ours], cwd=ROOT, check=True)
    seen = subprocess.run(
        [ours / "bin" / "python", "-c", "import torch; print(torch.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        env={},
        cwd=tmp_path,
    )
    assert seen.stdout.strip() == str(packages / "torch" / "__init__.py")
