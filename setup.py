"""Builds the extension and the shared libraries; downloads nothing.

One extension, `pyalloc._core`, holds the allocator, the devices, the replay and the two bridges.  It uses Python's
stable ABI, so one wheel serves Python 3.10 and newer.  Free-threaded Python has no stable ABI before 3.15: there the
wheel only fits the version that builds it.  The host-memory CUDA runtime, the ops, and the library preloaded into gdb
have makefiles of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
DIRECTORIES = ("csrc/core", "csrc/device", "csrc/ipc", "csrc/replay")
# Folders with a makefile that takes OUT and CC, and where each library goes.
LIBRARIES = {
    "csrc/hostcuda": "pyalloc/lib/hostcuda",
    "csrc/ops": "pyalloc/lib",
    "csrc/gdb": "pyalloc/lib",
}
# -fexceptions: torch's exceptions pass through our C frames when a device callback raises.
FLAGS = [
    "-O2",
    "-g",
    "-fvisibility=hidden",
    "-fexceptions",
    "-ffile-prefix-map=" + str(ROOT) + "=.",
]
HAS_STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
C_FLAGS = ["-std=c11"]
CXX_FLAGS = ["-std=c++17", "-fvisibility-inlines-hidden"]

# pip ensures the version, except with --no-build-isolation.  An older setuptools would print pyproject.toml's schema.
OLDEST = re.search(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
if OLDEST and int(setuptools.__version__.split(".")[0]) < int(OLDEST[1]):
    raise SystemExit(
        f"building pyalloc needs setuptools {OLDEST[1]} or newer, but {setuptools.__version__} is installed: "
        f"pip install 'setuptools>={OLDEST[1]}', or leave out --no-build-isolation"
    )


def sources() -> list[str]:
    patterns = ("csrc/*.c", "csrc/*.cpp", *(f"{directory}/*.c" for directory in DIRECTORIES))
    return [
        str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))
    ]


class BuildAll(build_ext):
    """Compiles file by file in parallel, then runs the libraries' makefiles."""

    def run(self) -> None:
        config = sysconfig.get_config_var
        tools = {"make", os.environ.get("CC", "cc")}
        tools |= {os.environ.get(name) or config(name) for name in ("CC", "CXX")}
        missing = sorted(name for name in tools if shutil.which(shlex.split(name)[0]) is None)
        if missing:
            raise SystemExit(
                f"building pyalloc needs {' and '.join(missing)}; on Debian and Ubuntu: apt-get install gcc g++ make"
            )
        base = (
            ROOT
            if self.inplace or getattr(self, "editable_mode", False)
            else Path(self.build_lib).absolute()
        )
        makes = [
            self.spawn_make(ROOT / directory, base / out) for directory, out in LIBRARIES.items()
        ]
        try:
            self.run_compiler()
            for make in makes:
                if make.wait() != 0:
                    raise SystemExit(f"building failed: {shlex.join(make.args)}")
        finally:
            for make in makes:  # end the others if one failed
                make.terminate()
                make.wait()

    def run_compiler(self) -> None:
        # Imported late: an old setuptools lacks it, and is refused above.
        from setuptools.errors import CompileError

        try:
            super().run()
        except CompileError:
            if any(Path(folder, "Python.h").exists() for folder in self.include_dirs):
                raise
            raise SystemExit(
                "building pyalloc needs Python's headers (Python.h); on Debian and Ubuntu: apt-get install python3-dev"
            ) from None

    def spawn_make(self, directory: Path, out: Path) -> subprocess.Popen[bytes]:
        out.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC", "cc")
        # Relative to make's folder: make would split an absolute path at a space.
        target = os.path.relpath(out, directory)
        command = ["make", "-s", "-j2", "-C", str(directory), f"OUT={target}", f"CC={compiler}"]
        return subprocess.Popen(command)

    def build_extension(self, ext: Extension) -> None:
        plain_compile = self.compiler.compile

        def compile_each(files: list[str], *args: object, **kwargs: object) -> list[str]:
            extra = list(kwargs.pop("extra_postargs", None) or [])

            def one(name: str) -> list[str]:
                own = C_FLAGS if name.endswith(".c") else CXX_FLAGS
                return plain_compile([name], *args, extra_postargs=extra + own, **kwargs)

            with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
                return [name for names in pool.map(one, files) for name in names]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = plain_compile


setup(
    ext_modules=[
        Extension(
            "pyalloc._core",
            sources=sources(),
            depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h")],
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if HAS_STABLE_ABI else [],
            extra_compile_args=FLAGS,
            libraries=["dl", "pthread", "m"],
            py_limited_api=HAS_STABLE_ABI,
        )
    ],
    cmdclass={"build_ext": BuildAll},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_STABLE_ABI else {},
)
