"""pyalloc dryrun: what it finds before the program starts, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyalloc.common import elf
from pyalloc.outside import hostcuda

from .dryrun_support import ROOT, finish, start


def test_settings_that_would_leave_pyalloc_out_are_refused_first(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    command = ["--allocator", "pyalloc", sys.executable, "-c", "print('ran')"]
    for name, value, code in (
        ("PYALLOC_CONF", "memroy:tight", 2),
        ("PYTORCH_ALLOC_CONF", "backend:native", 3),
    ):
        ended, out, err = finish(start(command, tmp_path, **{name: value}))
        assert (ended, out) == (code, ""), err
    for options in (["--json", "no/where.json"], ["--record", "no/where.pya"], ["--memory", "24"]):
        ended, out, err = finish(start([*options, *command[2:]], tmp_path))
        assert (ended, out) == (2, ""), err
        assert "Traceback" not in err


def test_a_cpu_build_is_refused_with_the_reason(tmp_path: Path) -> None:
    fake = tmp_path / "torch"
    (fake / "lib").mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "version.py").write_text("__version__ = '9.9.9+cpu'\n")
    code, _, err = finish(
        start(
            [sys.executable, "-c", "pass"],
            tmp_path,
            PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
        )
    )
    assert code == 3
    assert "9.9.9+cpu" in err
    assert "built without CUDA" in err


def test_a_torch_that_was_copied_in_part_is_no_end_of_the_program(tmp_path: Path) -> None:
    """1 would be the program's own exit code."""
    fake = tmp_path / "torch"
    (fake / "lib").mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "version.py").write_text("__version__ = '9.9.9'\n")
    (fake / "lib/libc10_cuda.so").write_bytes(b"\x7fELF\x02\x01")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, _, err = finish(start([sys.executable, "-c", "pass"], tmp_path, PYTHONPATH=path))
    assert code == 3, err
    assert "libc10_cuda.so cannot be read" in err


def test_where_no_library_can_be_preloaded_is_said(
    torch_found: hostcuda.Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostcuda, "preloads", lambda *_, **__: [Path("/my programs/libcuda.so.1")])
    for libraries, folder in (
        ("/my programs", None),
        ("/my programs", "/tmp/my own"),
        ("/c:/programs", "/tmp"),  # PYTHONPATH cannot name it either
    ):
        monkeypatch.setattr(hostcuda, "LIBRARIES", Path(libraries))
        with pytest.raises(hostcuda.HostCudaError, match=f"space or a colon: {libraries}"):
            hostcuda.environment({}, torch_found, folder=Path(folder) if folder else None)


def test_runs_from_a_folder_whose_name_has_spaces(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    here = tmp_path / "my programs"
    shutil.copytree(ROOT / "pyalloc", here / "pyalloc")
    source = "import torch; torch.empty(1 << 20, device='cuda')"
    code, _, err = finish(
        start(
            ["--allocator", "pyalloc", sys.executable, "-c", source],
            here,
            PYTHONPATH=str(here),
        )
    )
    assert code == 0 and "peak allocated   4.0 MiB" in err, err


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="this Python imports no extension module from such a folder"
)
def test_a_dry_run_needs_no_name_of_its_folder(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """In a locale without the words for it, torch refused a library of operators that is made there."""
    here = tmp_path / "größe"
    shutil.copytree(ROOT / "pyalloc", here / "pyalloc")
    source = "import sys, torch; torch.ones(4, device='cuda').nonzero(); print(sys.getfilesystemencoding())"
    variables = {"PYTHONPATH": str(here), "LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    code, out, err = finish(start([sys.executable, "-c", source], here, **variables))
    assert (code, out) == (0, "ascii\n"), err


def test_a_python_without_torch_is_named_beside_the_one_that_has_it(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho '\"\"'\n")
    other.chmod(0o755)
    code, _, err = finish(start([str(other), "x.py"], tmp_path))
    assert code == 3
    assert f"{other} has no PyTorch" in err and sys.executable in err
    other.write_text("#!/bin/sh\necho 'ImportError: no luck' >&2\nexit 1\n")
    code, _, err = finish(start([str(other), "x.py"], tmp_path))
    assert code == 3
    assert f"could not find out which PyTorch {other} has: ImportError: no luck" in err


@pytest.mark.parametrize("has_it", [True, False])
def test_the_python_of_the_environment_is_named_to_a_pyalloc_outside_of_it(
    has_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pipx or uv, pyalloc has an environment of its own, without torch."""
    own, theirs = tmp_path / "own", tmp_path / "python"
    shared = tmp_path / "base"
    shared.write_text(
        f"#!/bin/sh\ncase $0 in {theirs}) echo '\"{'/torch' * has_it}\"';; *) echo '\"\"';; esac\n"
    )
    shared.chmod(0o755)
    for path in (own, theirs):  # as venv makes them
        path.symlink_to(shared)
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hostcuda.HostCudaError) as caught:
        hostcuda.find_torch(str(own))
    end = f"has it: {theirs}" if has_it else "has it"
    assert str(caught.value).endswith(
        f"-m pip install torch, or start the program with a Python that {end}"
    )


def test_a_python_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostcuda, "_ANSWER_S", 0.01)
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexec sleep 60\n")
    other.chmod(0o755)
    with pytest.raises(hostcuda.HostCudaError, match="did not say within"):
        hostcuda.find_torch(str(other))


@pytest.mark.parametrize(("says", "quoted"), [("exit 0", "''"), ("echo hello", "'hello'")])
def test_a_python_that_answers_something_else_is_named(
    says: str, quoted: str, tmp_path: Path
) -> None:
    other = tmp_path / "python3"
    other.write_text(f"#!/bin/sh\n{says}\n")
    other.chmod(0o755)
    with pytest.raises(hostcuda.HostCudaError, match=f"{other} has: its answer was {quoted}"):
        hostcuda.find_torch(str(other))


def test_files_of_the_working_directory_do_not_hide_torch(
    torch_found: hostcuda.Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -c` looks there first; the program itself, elsewhere, never would."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert hostcuda.find_torch(sys.executable).folder == torch_found.folder


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            f"-Sv {20 << 20}",
            "this process is limited to 20.0 GiB of address space, and each device of a dry run needs 64 GiB or more",
        ),
        (
            f"-Sf {20 << 20}",
            "this process is limited to files of 20.00 GiB, and a device of 12.00 GiB needs one of 24.00 GiB",
        ),
    ],
)
def test_limits_of_the_process_are_told_before_the_program_starts(
    torch_found: hostcuda.Torch, tmp_path: Path, limit: str, told: str
) -> None:
    """Batch systems set such limits.  The program was said to have died of memory, of which it had taken none."""
    run = f"{sys.executable} -m pyalloc dryrun --memory 12GB {sys.executable} -c 'print(1)'"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f"ulimit {limit}; exec {run}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert told in " ".join(done.stderr.split())
    assert f"ulimit {limit[0]}{limit[2]} unlimited" in done.stderr


def test_addresses_that_the_program_itself_uses_up_are_told_in_the_summary(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Enough for the smallest window, too little for window and program: it "did not fit" 80 GiB with nothing held."""
    source = (
        "import mmap; kept = mmap.mmap(-1, 8 << 30); import torch; torch.ones(1, device='cuda')"
    )
    limited = ["bash", "-c", f'ulimit -Sv {70 << 20}; exec {sys.executable} -c "$0"', source]
    code, _, err = finish(start(limited, tmp_path))
    told = " ".join(err.split())
    assert code == 1, err
    assert (
        "verdict unknown: this process may not reserve enough address space for a device's memory"
        in told
    )
    assert "first: lift the limit: ulimit -v unlimited" in told


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(start(["no-such-program"], tmp_path))
    assert code == 2
    assert "'no-such-program' was not found" in err
    code, _, err = finish(start([], tmp_path))
    assert code == 2
    assert "no program given" in err


def test_elf_reader_agrees_with_what_the_libraries_are_for(libraries: Path) -> None:
    runtime = elf.read(libraries / "libcudart.so.13")
    assert "libcuda.so.1" in runtime.needed
    assert {"cudaMalloc", "__cudaRegisterFatBinary"} <= runtime.defined - runtime.weak
    assert "cudaGraphicsMapResources" in runtime.weak
    assert "pya_hc_memory_alloc" in runtime.undefined
    with pytest.raises(elf.ElfError, match=Path(__file__).name):
        elf.read(Path(__file__))
