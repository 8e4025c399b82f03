"""What docs/security.md promises of files and of the environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dry_support import PATIENCE_S, warmed

from pyalloc import _core, trace
from pyalloc.cli import main
from pyalloc.common import files
from pyalloc.errors import UsageError
from pyalloc.traces.convert import KINDS

ROOT = Path(__file__).parent.parent.parent
SOURCES = [
    p for suffix in ("*.py", "*.c", "*.cpp", "*.h") for top in ("pyalloc", "csrc") for p in (ROOT / top).rglob(suffix)
]  # fmt: skip


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    """What is private must not depend on the caller's umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_trace(path: Path) -> Path:
    writer = _core.TraceWriter(path)
    file, name = writer.string("/home/me/secret.py"), writer.string("secret_layer")
    stack = writer.stack(0, name, file, 7)
    writer.event(KINDS["user"], text=writer.string("command=python secret.py --key 1"), time_ns=1)
    writer.event(KINDS["user"], text=writer.string("torch=2.15"), time_ns=1)
    for i in range(3):
        writer.event(KINDS["alloc"], addr=(i + 1) << 21, bytes=1 << 20, stack=stack, time_ns=i + 2)
    writer.close()
    return path


def test_a_file_is_private_and_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "out"
    files.write(path, b"one")
    assert path.read_bytes() == b"one" and mode(path) == 0o600
    with pytest.raises(ZeroDivisionError), files.writing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_umask_that_forbids_everything_leaves_files_to_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyalloc import live

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    os.umask(0o777)
    files.write(tmp_path / "out", b"one")
    writer = _core.TraceWriter(tmp_path / "out.pya")
    parts = mode(tmp_path / "out.pya.part")
    writer.close()
    socket = live.serve()
    with files.temporary_folder("pyalloc-") as folder:
        assert mode(Path(folder)) == 0o700
    assert not Path(folder).exists()
    assert [mode(tmp_path / "out"), parts, mode(tmp_path / "out.pya")] == [0o600] * 3
    assert socket is not None and mode(socket) == 0o600


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "out"
    victim.write_bytes(b"precious")
    link.symlink_to(victim)
    files.write(link, b"new")
    assert victim.read_bytes() == b"precious"
    assert not link.is_symlink() and link.read_bytes() == b"new"


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"regular file.*pipe"):
        files.write(tmp_path / "pipe", b"")


def test_a_file_that_cannot_be_made_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"'.*/missing/out'"):
        files.write(tmp_path / "missing" / "out", b"")


def test_a_trace_is_private_and_follows_no_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "out.pya"
    victim.write_bytes(b"precious")
    Path(f"{path}.part").symlink_to(victim)
    writer = _core.TraceWriter(path)
    writer.flush()
    assert mode(Path(f"{path}.part")) == 0o600
    writer.close()
    assert mode(path) == 0o600 and victim.read_bytes() == b"precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["out.pya", "out.pya.part"])
def test_a_trace_replaces_no_pipe_and_no_folder(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    kind = stat.S_IFMT((tmp_path / name).stat().st_mode)
    with pytest.raises(UsageError, match="not a regular file"):
        _core.TraceWriter(tmp_path / "out.pya", True)
    assert stat.S_IFMT((tmp_path / name).stat().st_mode) == kind
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("words", [["stats", "x.pya", "-o"], ["run", "--record"]])
def test_names_of_the_output_stay_links(tmp_path: Path, words: list[str]) -> None:
    """Where the output goes to a file, --force was proposed, with which root would have replaced /dev/stdout."""
    with (tmp_path / "out").open("w") as file:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pyalloc",
                *words,
                "/dev/stdout",
                *["python"] * (len(words) < 3),
            ],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "/dev/stdout is not a regular file; choose another name" in done.stderr


def test_what_commands_write_is_private(tmp_path: Path) -> None:
    source = str(make_trace(tmp_path / "in.pya"))
    for words in (
        ["report", source, "--no-replay", "-o", str(tmp_path / "page.html")],
        ["report", source, "--no-replay", "--json", "-o", str(tmp_path / "report.json")],
        ["export", source, "--to", "torch", "-o", str(tmp_path / "torch.pickle")],
        ["export", source, "--to", "csv", "-o", str(tmp_path / "events.csv")],
    ):
        assert main([*words, "-q"]) == 0
    assert {mode(p) for p in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == 5


def test_nothing_writes_files_in_another_way() -> None:
    way = re.compile(r"write_text\(|write_bytes\(|open\([^)]*[\"'][wax]b?[\"']")
    # A temporary folder of its own; the way itself.
    allowed = {"pyalloc/trace.py": 1, "pyalloc/common/files.py": 1}
    found = {
        str(p.relative_to(ROOT)): len(way.findall(p.read_text()))
        for p in SOURCES
        if p.suffix == ".py" and way.search(p.read_text())
    }
    assert found == allowed


def test_nothing_makes_temporary_folders_in_another_way() -> None:
    """Others have the umask's mode, with 0777 none at all."""
    way = re.compile(r"TemporaryDirectory\(|mkdtemp\(")
    found = [p.name for p in SOURCES if p.suffix == ".py" and way.search(p.read_text())]
    assert found == ["files.py"]


def test_stacks_and_command_line_can_be_left_out(tmp_path: Path) -> None:
    source = make_trace(tmp_path / "in.pya")
    for to in ("torch", "csv", "json", "perfetto", "speedscope"):
        secret, clean = tmp_path / f"with.{to}", tmp_path / f"without.{to}"
        assert main(["export", str(source), "--to", to, "-o", str(secret), "-q"]) == 0
        assert main(["export", str(source), "--to", to, "-o", str(clean), "-q", "--no-source"]) == 0
        assert b"secret" not in clean.read_bytes() and clean.stat().st_size > 0
        assert b"secret" in secret.read_bytes() or to == "perfetto"
    trace.without_source(source, tmp_path / "again.pya")
    found = trace.analyse(tmp_path / "again.pya")
    assert found.peak.allocated_bytes == 3 << 20
    assert b"secret" not in (tmp_path / "again.pya").read_bytes()
    assert b"torch=2.15" in (tmp_path / "again.pya").read_bytes()


def test_the_socket_of_live_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyalloc import live

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = live.serve()
    assert path.parent == tmp_path
    assert stat.S_ISSOCK(path.stat().st_mode) and mode(path) & 0o077 == 0


def test_a_socket_of_another_user_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyalloc import live

    monkeypatch.setattr(live, "socket_path", lambda pid: tmp_path / str(pid))
    (tmp_path / "7").touch()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    if (tmp_path / "7").stat().st_uid == 0:
        os.chown(tmp_path / "7", 4243, -1)
    with pytest.raises(UsageError, match="another user"):
        live.ask(7)


# ---- the environment ----


def variables() -> set[str]:
    """Those that the sources read."""
    pattern = re.compile(r"\bPYALLOC_[A-Z_]+\b")
    return {name for path in SOURCES for name in pattern.findall(path.read_text())}


def test_every_variable_is_documented() -> None:
    documented = set(re.findall(r"`(PYALLOC_[A-Z_]+)`", (ROOT / "docs/security.md").read_text()))
    assert documented == variables()


def evil(folder: Path) -> tuple[Path, Path, Path]:
    """A library and a module that leave a mark when they are loaded, and the mark."""
    mark = folder / "loaded"
    source = folder / "evil.c"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void f(void) {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    library = folder / "evil.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    module = folder / "evil.py"
    module.write_text(f"open({str(mark)!r}, 'w').close()\n")
    return library, module, mark


def test_no_variable_loads_code(tmp_path: Path) -> None:
    library, module, mark = evil(tmp_path)
    subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"], check=True
    )
    assert mark.exists()
    mark.unlink()
    code = """
import contextlib, sys
import pyalloc
from pyalloc.errors import PyallocError
with contextlib.suppress(PyallocError):
    pyalloc.common.config.Config.of()
with contextlib.suppress(PyallocError):
    from pyalloc import live
    from pyalloc.inside import recording
    from pyalloc.outside import hostcuda, dryrun
from pyalloc.cli import main
try:
    main(["doctor"])
except (SystemExit, PyallocError):
    pass
"""
    env = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}/pyalloc/_bootstrap/path:{ROOT}", "HOME": str(tmp_path),
    }  # fmt: skip
    has_torch = importlib.util.find_spec("torch") is not None
    with warmed(env) if has_torch else contextlib.nullcontext(sys.executable) as python:
        for value in (
            str(library),
            str(module),
            "evil",
            f"backend:{library}",
            "__import__('evil')",
        ):
            done = subprocess.run(
                [python, "-c", code],
                env={name: value for name in variables()} | env,
                cwd="/",
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert done.returncode in (0, 1), done.stderr[-2000:]
            assert not mark.exists(), value
