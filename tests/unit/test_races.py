"""What the extension does without the GIL, under ThreadSanitizer: the tests of threads, on a build of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MADE = ROOT / "build/c/extension"


def library() -> Path:
    """gcc names it, or repeats the name if there is none."""
    if shutil.which("gcc") is None or shutil.which("make") is None:
        return Path()
    command = ["gcc", "-print-file-name=libtsan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.slow
@pytest.mark.skipif(not library().is_absolute(), reason="needs gcc with libtsan")
@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="this Python's own atomics would count as races: it was built without ThreadSanitizer",
)
def test_threads_race_nowhere(tmp_path: Path) -> None:
    make = ["make", "-s", "-j2", "-C", str(ROOT / "tests/c"), "extension"]
    subprocess.run([*make, f"PYTHON={sys.executable}"], check=True)
    package = tmp_path / "pyalloc"
    package.mkdir()
    for path in (ROOT / "pyalloc").iterdir():
        if not path.name.startswith("_core."):
            (package / path.name).symlink_to(path)
    shutil.copy(MADE / "_core.abi3.so", package)
    tests = [str(HERE / "test_threads.py"), "-m", "not torch", "-p", "no:cacheprovider", "-n0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(ROOT), *tests],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ
        | {
            "LD_PRELOAD": str(library()),
            "PYTHONPATH": str(tmp_path),
            "TSAN_OPTIONS": f"exitcode=66 log_path={tmp_path}/races",
        },
    )
    told = [done.stdout, done.stderr, *(log.read_text() for log in tmp_path.glob("races.*"))]
    assert done.returncode == 0, "\n".join(told)[-8000:]
    assert " passed" in done.stdout
