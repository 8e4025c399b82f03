"""The runtime as a C project: it builds by itself, and threads do not race in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from dry_support import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
COMPILER = os.environ.get("CC", "cc")

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which("make") is None,
    reason="needs a C compiler and make",
)


def make(out: Path, *settings: str) -> None:
    done = subprocess.run(
        [
            "make",
            "-s",
            "-j2",
            "-C",
            str(ROOT / "csrc/hostcuda"),
            f"OUT={out}",
            f"BUILD={out}/objects",
            f"CC={COMPILER}",
            "WERROR=1",
            *settings,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "sanitize", ["", "address,undefined", "thread"], ids=lambda s: s or "plain"
)
def test_threads_leave_nothing_and_break_nothing(tmp_path: Path, sanitize: str) -> None:
    make(tmp_path, *([f"SANITIZE={sanitize}"] if sanitize else []))
    binary = tmp_path / "stress"
    flags = ["-g", "-O1", *([f"-fsanitize={sanitize}"] if sanitize else [])]
    subprocess.run(
        [
            COMPILER,
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            *flags,
            f"-I{ROOT / 'csrc/hostcuda'}",
            str(Path(__file__).parent / "stress.c"),
            str(tmp_path / "libcuda.so.1"),
            f"-Wl,-rpath,{tmp_path}",
            "-lpthread",
            "-o",
            str(binary),
        ],
        check=True,
    )
    done = subprocess.run(
        [str(binary)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, "PYALLOC_HOSTCUDA_MEMORY": "4GB"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_runtime_names_carry_the_version_of_their_major(tmp_path: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    make(tmp_path)
    for major in (12, 13):
        listed = subprocess.run(
            [readelf, "--dyn-syms", "--wide", str(tmp_path / f"libcudart.so.{major}")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"cudaMalloc@@libcudart.so.{major}" in listed
    listed = subprocess.run(
        [readelf, "--dyn-syms", "--wide", str(tmp_path / "libcuda.so.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "@" not in "".join(line for line in listed.splitlines() if "cuMemCreate" in line)


def settings_program(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    source = folder / "settings.c"
    source.write_text("""
        #include "hostcuda.h"
        #include <stdio.h>
        int cuMemAlloc_v2(unsigned long *, size_t), cuDeviceGetCount(int *);
        int main(void) {
            unsigned long at = 0;
            int n = 0;
            int first = cuMemAlloc_v2(&at, 1);
            int second = cuMemAlloc_v2(&at, 1);
            (void)cuDeviceGetCount(&n);
            printf("%d %d %d", n, first, second);
            return 0;
        }
    """)
    subprocess.run(
        [
            COMPILER,
            f"-I{ROOT / 'csrc/hostcuda'}",
            str(source),
            str(folder / "libcuda.so.1"),
            f"-Wl,-rpath,{folder}",
            "-o",
            str(folder / "settings"),
        ],
        check=True,
    )
    return subprocess.run(
        [str(folder / "settings")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **variables},
    )


def test_environment_sets_devices_memory_and_failures(tmp_path: Path) -> None:
    make(tmp_path)
    cases = [
        ({}, "1 0 0"),
        ({"PYALLOC_HOSTCUDA_DEVICES": "3"}, "3 0 0"),
        ({"PYALLOC_HOSTCUDA_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,2"}, "2 0 0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "0 100 100"),
        ({"PYALLOC_HOSTCUDA_MEMORY": "2MiB"}, "1 0 2"),
        ({"PYALLOC_HOSTCUDA_FAIL": "2"}, "1 0 2"),
        ({"PYALLOC_HOSTCUDA_FAIL": "1:cuMemAlloc_v2:719"}, "1 719 0"),
        ({"PYALLOC_HOSTCUDA_FAIL": "1:cuMemFree_v2"}, "1 0 0"),
    ]
    for variables, expected in cases:
        done = settings_program(tmp_path, **variables)
        assert (done.stdout, done.stderr) == (expected, ""), variables
    for name, text in (
        ("DEVICES", "17"),
        ("DEVICES", "two"),
        ("MEMORY", "much"),
        ("FAIL", "first"),
        ("EVENT_DELAY", "-1"),
    ):
        done = settings_program(tmp_path, **{f"PYALLOC_HOSTCUDA_{name}": text})
        assert done.stdout == "1 0 0"
        assert f"PYALLOC_HOSTCUDA_{name}={text} is not understood" in done.stderr
