"""The house style, as far as tools can tell: clang-format, clang-tidy, ruff, mypy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
C_FILES = sorted(
    path
    for folder in ("csrc", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".c", ".h", ".cpp", ".hpp"} and "build" not in path.parts
)
# clang-tidy reads what ships; the compiler's warnings and the sanitizers check the test programs.
COMPILED = [
    path for path in C_FILES if path.suffix in {".c", ".cpp"} and path.is_relative_to(ROOT / "csrc")
]

SOURCES = C_FILES + sorted(
    path
    for folder in ("pyalloc", "tests", "benchmarks", "examples", "cuda")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyi", ".cu", ".cuh"} and "lib" not in path.parts  # generated
)


def tool(name: str) -> str:
    """A tool from the environment that runs the tests; pyproject.toml pins its version."""
    done = run(".ci/find-tool", sys.executable, name)
    if done.returncode != 0:
        pytest.fail(done.stderr.strip())
    return done.stdout.strip()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_clang_format() -> None:
    done = run(
        tool("clang-format"),
        "--style=file:csrc/.clang-format",
        "--dry-run",
        "--Werror",
        *[str(path.relative_to(ROOT)) for path in C_FILES],
    )
    assert done.returncode == 0, done.stderr[-4000:]


# With more steps in one function the analyser found nothing here, and took five times as long.
ANALYSER_STEPS = 20000


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the clang-tidy that is pinned has no wheel here"
)
def test_clang_tidy() -> None:
    import sysconfig

    python = sysconfig.get_paths()["include"]
    # The wheel of clang-tidy comes without the compiler's own headers (stddef.h and the like).
    builtin = run("gcc", "-print-file-name=include").stdout.strip()

    def check(path: Path) -> str:
        standard = "-std=c++17" if path.suffix == ".cpp" else "-std=c11"
        done = run(
            tool("clang-tidy"),
            "--quiet",
            f"--config-file={ROOT / 'csrc/.clang-tidy'}",
            str(path),
            "--",
            *f"-Xclang -analyzer-config -Xclang max-nodes={ANALYSER_STEPS}".split(),
            standard,
            "-D_GNU_SOURCE",
            "-DPy_LIMITED_API=0x030A0000",
            f"-I{python}",
            "-DPYA_CUDART_MAJOR=13",
            f"-I{ROOT / 'tests/tidy'}",
            "-isystem",
            builtin,
            f"-I{ROOT / 'csrc'}",
        )
        return done.stdout + done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        complaints = [text for text in pool.map(check, COMPILED) if text]
    assert not complaints, "\n".join(complaints)[-8000:]


def test_ruff() -> None:
    for command in (["check", "."], ["format", "--check", "."]):
        done = run(tool("ruff"), *command)
        assert done.returncode == 0, done.stdout[-4000:]


def test_mypy() -> None:
    done = run(tool("mypy"))
    assert done.returncode == 0, done.stdout[-4000:]


def test_shell_scripts_parse() -> None:
    for path in sorted((ROOT / ".ci").iterdir()):
        assert run("bash", "-n", str(path)).returncode == 0, path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_length(path: Path) -> None:
    """Soft limits: a longer file says why in its first comment ("Long because ...")."""
    lines = path.read_text().splitlines()
    limit = 150 if path.suffix == ".h" else 600
    assert len(lines) <= limit or any("Long because" in line for line in lines[:12]), len(lines)
