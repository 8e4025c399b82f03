"""The runtime as a C project: it builds by itself, and its threads do not race."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
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


def environment(**variables: str) -> dict[str, str]:
    """Our environment, without the caller's settings of the runtime."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name != "CUDA_VISIBLE_DEVICES" and not name.startswith("PYALLOC_")
    }
    return {**own, **variables}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the runtime, built once for each variant."""

    @cache
    def build(sanitize: str) -> Path:
        out = tmp_path_factory.mktemp("runtime")
        make(out, *([f"SANITIZE={sanitize}"] if sanitize else []))
        return out

    return build


@pytest.mark.parametrize(
    "sanitize", ["", "address,undefined", "thread"], ids=lambda s: s or "plain"
)
def test_threads_leave_nothing_and_break_nothing(
    built: Callable[[str], Path], sanitize: str
) -> None:
    folder = built(sanitize)
    binary = folder / "stress"
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
            str(folder / "libcuda.so.1"),
            f"-Wl,-rpath,{folder}",
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
        env=environment(PYALLOC_HOSTCUDA_MEMORY="4GB"),
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_runtime_names_carry_the_version_of_their_major(built: Callable[[str], Path]) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    folder = built("")
    for major in (12, 13):
        listed = subprocess.run(
            [readelf, "--dyn-syms", "--wide", str(folder / f"libcudart.so.{major}")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f"cudaMalloc@@libcudart.so.{major}" in listed
    listed = subprocess.run(
        [readelf, "--dyn-syms", "--wide", str(folder / "libcuda.so.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "@" not in "".join(line for line in listed.splitlines() if "cuMemCreate" in line)


def settings_program(folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    source = folder / "settings.c"
    source.write_text("""
        #include "hostcuda.h"
        #include <stdio.h>
        int cuMemAlloc_v2(unsigned long *, size_t), cuDeviceGetCount(int *);
        int cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
        int main(void) {
            unsigned long at = 0;
            void *context = NULL;
            int n = 0;
            (void)cuDevicePrimaryCtxRetain(&context, 0);
            (void)cuCtxSetCurrent(context);
            int first = cuMemAlloc_v2(&at, 2 << 20);
            int second = cuMemAlloc_v2(&at, 2 << 20);
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

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(folder / "settings")],
            capture_output=True,
            text=True,
            check=True,
            env=environment(**variables),
        )

    return run


def test_environment_sets_devices_memory_and_failures(built: Callable[[str], Path]) -> None:
    run = settings_program(built(""))
    cases = [
        ({}, "1 0 0"),
        ({"PYALLOC_HOSTCUDA_DEVICES": "3"}, "3 0 0"),
        ({"PYALLOC_HOSTCUDA_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,2"}, "2 0 0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "0 201 201"),
        *(
            ({"PYALLOC_HOSTCUDA_MEMORY": text}, "1 0 2")
            for text in ("2MiB", "2m", "2048KB", "2097152", "0.002G", "2MB,80GB")
        ),
        ({"PYALLOC_HOSTCUDA_MEMORY": "4097K"}, "1 0 0"),
        ({"PYALLOC_HOSTCUDA_FAIL": "4"}, "1 0 2"),
        ({"PYALLOC_HOSTCUDA_FAIL": "1:cuMemAlloc_v2:719"}, "1 719 0"),
        ({"PYALLOC_HOSTCUDA_FAIL": "1:cuMemFree_v2"}, "1 0 0"),
        ({"PYALLOC_HOSTCUDA_FAIL": "every:cuMemAlloc_v2:719"}, "1 719 719"),
        ({"PYALLOC_HOSTCUDA_FAIL": "every"}, "0 2 2"),
    ]
    for variables, expected in cases:
        done = run(**variables)
        assert (done.stdout, done.stderr) == (expected, ""), variables
    done = run(CUDA_VISIBLE_DEVICES="3,1", PYALLOC_HOSTCUDA_DEVICES="2")
    assert done.stdout == "2 0 0"
    assert "CUDA_VISIBLE_DEVICES names device 3, but there are 2" in done.stderr
    assert "(pyalloc dryrun --devices 4)" in done.stderr
    for name, text in (
        ("DEVICES", "17"),
        ("DEVICES", "two"),
        ("MEMORY", "much"),
        ("MEMORY", "80 "),
        ("FAIL", "first"),
        ("FAIL", "every1"),
        ("EVENT_DELAY", "-1"),
    ):
        done = run(**{f"PYALLOC_HOSTCUDA_{name}": text})
        assert done.stdout == "1 0 0"
        assert f"PYALLOC_HOSTCUDA_{name}={text} is not understood" in done.stderr
