"""The built extension: what it links, what it exports."""

from __future__ import annotations

import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
from dry_support import RunPython
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

from pyalloc import _core

ROOT = Path(__file__).parent.parent.parent
# What `import pyalloc` runs before it needs the extension.
FIRST_IMPORTED = [
    ROOT / "pyalloc" / name
    for name in ("__init__.py", "common/__init__.py", "common/starting.py", "common/config.py")
]
IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
ALLOWED = {
    "linux-vdso",
    "libc",
    "libm",
    "libdl",
    "libpthread",
    "ld-linux-x86-64",
    "libstdc++",
    "libgcc_s",
}


def test_links_nothing_of_cuda_or_torch() -> None:
    listed = subprocess.run(
        ["ldd", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    names = {
        re.sub(r"\.so.*", "", line.split()[0].rsplit("/", 1)[-1]) for line in listed.splitlines()
    }
    assert names <= ALLOWED


def test_exports_only_the_module_and_the_bridge() -> None:
    command = ["nm", "-D", "--defined-only", _core.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "u" and "V"/"W": constants of the C++ library's templates, shared by every program that uses them.
    names = {line.split()[2] for line in listed.splitlines() if line.split()[1] == "T"}
    assert names == {"PyInit__core", "pya_torch_alloc", "pya_torch_free"}


def test_is_built_for_the_stable_abi_where_there_is_one() -> None:
    own = str(sysconfig.get_config_var("EXT_SUFFIX"))
    assert _core.__file__.endswith(own if IS_FREE_THREADED else ".abi3.so")


@pytest.mark.parametrize("is_free_threaded", [False, True])
def test_free_threaded_python_gets_a_build_of_its_own(
    monkeypatch: pytest.MonkeyPatch, is_free_threaded: bool
) -> None:
    """It has no stable ABI before 3.15; all others share one wheel."""
    of_python = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig,
        "get_config_var",
        lambda name: is_free_threaded if name == "Py_GIL_DISABLED" else of_python(name),
    )
    asked: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", asked.update)
    runpy.run_path(str(ROOT / "setup.py"))
    (extension,) = asked["ext_modules"]
    assert extension.py_limited_api is not is_free_threaded
    assert ("Py_LIMITED_API" in dict(extension.define_macros)) is not is_free_threaded
    wheel = {} if is_free_threaded else {"bdist_wheel": {"py_limited_api": "cp310"}}
    assert asked["options"] == wheel


@pytest.mark.skipif(not IS_FREE_THREADED, reason="this Python has a GIL")
def test_importing_does_not_bring_the_gil_back(run_python: RunPython) -> None:
    run_python("import sys, pyalloc; assert not sys._is_gil_enabled()", env={"PYTHON_GIL": ""})


def test_may_be_built_by_a_newer_python_than_it_runs_on() -> None:
    # Headers of 3.13 call functions that refuse lengths ("s#") on earlier Pythons.
    for path in (ROOT / "csrc").glob("module*.c"):
        assert re.findall(r'"[^"\n]*[szyu]#[^"\n]*",', path.read_text()) == [], path.name


def test_sources_that_are_not_built_say_so(tmp_path: Path) -> None:
    # In a checkout, after `pip install .`.
    for path in FIRST_IMPORTED:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(path, copy)
    # -S: without what an environment knows of another pyalloc.
    command = [sys.executable, "-S", "-c", "import pyalloc"]
    done = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: pyalloc's C part is not in ")
    assert "start Python in another folder" in done.stderr


def test_a_zip_file_says_that_it_has_to_be_installed(tmp_path: Path) -> None:
    # zipapp, shiv and the like: no system loads a library from one.
    archive = tmp_path / "tool.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import pyalloc")
        for path in FIRST_IMPORTED:
            file.write(path, path.relative_to(ROOT))
    command = [sys.executable, "-S", str(archive)]
    done = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: pyalloc's C part is not in ")
    assert "pip install -e" not in last and "install pyalloc with pip" in last


def test_a_source_distribution_has_all_that_the_repository_has(tmp_path: Path) -> None:
    """What is built, and what README, which is in it, links and names."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Deprecat" not in done.stderr  # setuptools', which will refuse what it now warns of
    listed = set((tmp_path / "pyalloc.egg-info/SOURCES.txt").read_text().splitlines())
    needed = {
        str(path.relative_to(ROOT))
        for top in (".ci", "benchmarks", "csrc", "cuda", "docs", "examples", "tests")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    needed |= {"CHANGELOG.md", "LICENSE", "Makefile", "README.md"}
    assert needed <= listed, sorted(needed - listed)[:20]


def test_compiles_where_glibc_shows_names_only_to_who_asks(tmp_path: Path) -> None:
    # Like glibc 2.31 of Debian 11; newer ones show these to all.
    header = "#include_next <dlfcn.h>\n#ifndef __USE_GNU\n#undef RTLD_DEFAULT\n#undef RTLD_NEXT\n#endif\n"
    (tmp_path / "dlfcn.h").write_text(header)
    include = sysconfig.get_path("include")
    flags = ["-std=c11", "-fsyntax-only", f"-I{tmp_path}", f"-I{include}", "-Icsrc"]
    users = [path for path in ROOT.glob("csrc/*.c") if "dlfcn.h" in path.read_text()]
    assert users
    command = ["cc", *flags, *map(str, users)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["csrc/hostcuda", "csrc/ops", "csrc/gdb"])
def test_makes_the_libraries_in_a_folder_whose_name_has_spaces(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # make cannot name a target in such a folder by its full path; no recipe runs here (-n).
    here = tmp_path / "a folder für alles"
    here.mkdir()
    for name in ("setup.py", "pyproject.toml", "csrc", "cuda"):
        (here / name).symlink_to(ROOT / name)
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setenv("MAKEFLAGS", "n")
    build = runpy.run_path(str(here / "setup.py"))["BuildAll"]
    assert build.spawn_make(None, here / library, here / "build").wait() == 0
    assert capfd.readouterr().err == ""


def test_an_old_setuptools_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # It would print the whole schema of pyproject.toml.
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    with pytest.raises(SystemExit, match="needs setuptools 77 or newer, but 65"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_headers_of_python_that_are_missing_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    names = runpy.run_path(str(ROOT / "setup.py"))
    build, n_builds = names["BuildAll"](setuptools.Distribution()), 2 * len(names["LIBRARIES"])

    def fail(_: object) -> None:
        raise CompileError("command 'gcc' failed with exit code 1")

    monkeypatch.setattr(build_ext, "run", fail)
    makes = []

    def sleep(*_: object) -> subprocess.Popen[bytes]:
        makes.append(subprocess.Popen(["sleep", "600"]))
        return makes[-1]

    monkeypatch.setattr(build, "spawn_make", sleep)
    monkeypatch.setattr(build, "editable_mode", True)
    build.include_dirs = [str(tmp_path)]
    with pytest.raises(SystemExit, match="python3-dev"):
        build.run()
    (tmp_path / "Python.h").touch()
    with pytest.raises(CompileError):
        build.run()
    assert [make.poll() for make in makes] == [-signal.SIGTERM] * n_builds
