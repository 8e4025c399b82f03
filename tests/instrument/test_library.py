"""The library: recordings, tables, snapshots, scalars and the pytest plugin, on the host-memory runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dry_support import PATIENCE_S, python_for

from instrument.tools import MIB, ROOT, pyalloc
from pyalloc import figures, pytest_plugin, trace
from pyalloc.errors import UsageError
from pyalloc.inside import recording

pytestmark = pytest.mark.torch


def dry(
    tmp_path: Path, source: str, *words: object, expect: int = 0, allocator: str = "native"
) -> str:
    script = tmp_path / "program.py"
    script.write_text(source)
    return pyalloc(
        "dryrun", "--memory", "4GB", "--allocator", allocator,
        python_for(source), "-W", "ignore", script, *words, expect=expect,
    )  # fmt: skip


def test_a_recording_that_cannot_be_written_is_told_and_over(tmp_path: Path) -> None:
    """A full disk (here: a limit on file sizes) ends that recording and nothing else: the next one works."""
    program = """
import resource, sys, torch, pyalloc
from pyalloc.inside import recording
recording._FLUSH_S = 1000  # the error comes where the block ends
before = resource.getrlimit(resource.RLIMIT_FSIZE)
sys.dont_write_bytecode = True  # of modules imported from now on: Python would cut them off
try:
    with pyalloc.record(sys.argv[1]):
        for n in range(20000):
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
except pyalloc.PyallocError as error:
    print("told:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
with pyalloc.record(sys.argv[2]):
    torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
"""
    said = dry(tmp_path, program, tmp_path / "a.pya", tmp_path / "b.pya", allocator="pyalloc")
    assert f"told: {tmp_path}/a.pya: File too large" in said
    assert trace.analyse(tmp_path / "b.pya").totals["is_complete"]


@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_record_with_phases_and_steps(tmp_path: Path, allocator: str) -> None:
    path = tmp_path / "out.pya"
    program = """
import sys, torch, pyalloc
before = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
with pyalloc.record(sys.argv[1], automatic=False):
    for n in range(3):
        pyalloc.step()
        with pyalloc.phase("outer"):
            a = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
            with pyalloc.phase("inner"):
                b = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
            del b
        del a
try:
    with pyalloc.record(sys.argv[1]):
        pass
except pyalloc.PyallocError as error:
    print("refused:", error)
"""
    out = dry(tmp_path, program, path, allocator=allocator)
    assert "refused: " in out and "force=True" in out
    found = trace.analyse(path)
    assert [p.name for p in found.phases] == ["outer", "inner"] * 3
    assert [step[0] for step in found.steps] == [0, 1, 2]
    assert found.totals["peak_bytes"] == 29 * MIB
    outer, inner = found.phases[:2]
    assert (outer.depth, inner.depth) == (0, 1)
    assert outer.peak_bytes == 29 * MIB and outer.end_bytes == 13 * MIB
    assert inner.n_left == 1 and inner.left_bytes == 16 * MIB
    assert found.notes["allocator"] == allocator
    names = [row.name for row in found.by_line(found.peak.blocks)]
    assert any("program.py:10" in name for name in names)


def test_a_program_that_goes_to_another_folder_is_recorded(tmp_path: Path) -> None:
    program = """
import os, sys, torch, pyalloc
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
with pyalloc.record("out.pya") as recorder:
    os.chdir("/")
    x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    assert recorder.flush().exists()
"""
    dry(tmp_path, program, tmp_path / "here", allocator="pyalloc")
    found = trace.analyse(tmp_path / "here" / "out.pya")
    assert found.totals["is_complete"] and found.totals["peak_bytes"] == 5 * MIB


def test_table_snapshot_and_scalars(tmp_path: Path) -> None:
    program = """
import sys, torch, pyalloc
from pyalloc.tables import PhaseRow
with pyalloc.memory_table() as early:  # a program may make its first phases before it uses CUDA
    with pyalloc.phase("data"):
        pyalloc.step(3)
assert not torch.cuda.is_initialized()
assert early.rows == [PhaseRow(3, "data", 0, 0, 0)]
x = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
torch.empty(100 << 20, dtype=torch.uint8, device="cuda")  # a peak before the table begins is not in it
with pyalloc.memory_table() as table:
    with pyalloc.phase("load <1>"):
        y = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
print(table)
now = pyalloc.snapshot()
assert table.rows == [PhaseRow(0, "load <1>", 36 << 20, 36 << 20, now.reserved_bytes)]
assert "load &lt;1&gt;" in table._repr_html_()
with pyalloc.phase("nobody listens"):
    pass
assert len(table.rows) == 1
assert now.allocated_bytes == 36 << 20
assert 64 << 20 <= now.largest_free_bytes <= now.reserved_bytes - now.allocated_bytes
assert "<table>" in now._repr_html_() and "36.0 MiB allocated" in str(now)
assert pyalloc.scalars()["memory/allocated_bytes.all.current"] == 36 << 20
class Writer:
    seen = {}
    def add_scalar(self, key, value, step):
        self.seen[key] = (value, step)
pyalloc.add_scalars(Writer(), 7)
assert Writer.seen["memory/allocated_bytes.all.peak"] == (36 << 20, 7)
for _ in range(2):  # replaces
    now.save(sys.argv[1])
"""
    path = tmp_path / "now.pickle"
    assert "load <1>" in dry(tmp_path, program, path)
    assert "36.0 MiB" in pyalloc("report", path, "--no-replay", "-q")


def test_table_of_another_device_than_the_current_one(tmp_path: Path) -> None:
    program = """
import torch, pyalloc
before = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
del before
with pyalloc.memory_table(device=1) as table:
    with pyalloc.phase("load"):
        x = torch.empty(16 << 20, dtype=torch.uint8, device="cuda:1")
        y = torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0")
(row,) = table.rows
assert row.allocated_bytes == row.peak_bytes == 16 << 20, row
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    pyalloc("dryrun", "--devices", "2", python_for(program), "-W", "ignore", script)


def test_event_file_is_what_tensorboard_reads() -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    import tempfile

    data = figures.event_file([(3, 1.5, {"a": 2.0}), (300, 2.5, {"a": 4.0, "b": 1e9})])
    with tempfile.NamedTemporaryFile(suffix=".tfevents") as file:
        file.write(data)
        file.flush()
        events = list(reader.EventFileLoader(file.name).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [(e.step, e.wall_time, len(e.summary.value)) for e in events[1:]] == [
        (3, 1.5, 1),
        (300, 2.5, 2),
    ]


def test_plugin_may_be_asked_for_by_name_and_loaded_by_itself() -> None:
    """pytest refuses a plugin under two names: the installed entry point has the name of `-p pyalloc.pytest_plugin`."""
    entry = '[project.entry-points.pytest11]\n"pyalloc.pytest_plugin" = "pyalloc.pytest_plugin"\n\n'
    assert entry in (ROOT / "pyproject.toml").read_text()


def test_a_program_that_is_pytest_is_not_warned_of_pyalloc(tmp_path: Path) -> None:
    """Under `pyalloc run` the package is loaded before pytest, which would rewrite the asserts of its plugins."""
    (tmp_path / "marks.py").write_text('import pytest\npytest.register_assert_rewrite("pyalloc")\n')
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    program = "import sys, pyalloc, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["-W", "error", "-q", "-p", "no:cacheprovider", "-p", "marks", "test_one.py"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_pytest(tmp_path: Path, *words: object) -> str:
    """What pytest prints in a dry run with the plugin."""
    command = [
        "dryrun", "--memory", "4GB", sys.executable, "-m", "pytest", "-q", "-p", "pyalloc.pytest_plugin",
        "-p", "no:cacheprovider", *map(str, words),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pyalloc", *command],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_pytest_plugin_limits_and_finds_leaks(tmp_path: Path) -> None:
    """Loaded by name only: the installed entry point may or may not exist."""
    tests = tmp_path / "test_memory.py"
    tests.write_text(
        """
import pytest, torch
kept = []

@pytest.mark.limit_gpu_memory("64 MB")
@pytest.mark.parametrize("mib", [60, 70])
def test_limit(mib):
    torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.limit_gpu_memory(-1)
def test_no_size(): pass

@pytest.mark.limit_gpu_memory()
def test_nothing(): pass

@pytest.mark.limit_gpu_memory("64 MB", warmups=1)
def test_of_another_mark(): pass

@pytest.mark.limit_gpu_memory(size="64 MB")
def test_by_name():
    torch.empty(72 << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.limit_gpu_memory("1 KB")
def test_small():
    torch.empty(2 << 10, dtype=torch.uint8, device="cuda")

@pytest.mark.limit_gpu_memory((72 << 20) - 1)
def test_just_above():
    torch.empty(72 << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.parametrize("keeps", [False, True])
def test_leak(keeps):
    x = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    kept.append(x if keeps else None)
"""
    )
    out = run_pytest(tmp_path, "--fail-on-leak", tests)
    assert "8 failed, 2 passed" in out, out
    assert "limit_gpu_memory: '-1' is not a size" in out
    assert 'limit_gpu_memory takes one size, e.g. "2 GB"\n' in out
    assert 'limit_gpu_memory takes one size, e.g. "2 GB", and no argument warmups\n' in out
    assert "used 70.0 MiB on device 0, the limit is 64.0 MiB" in out
    assert "used 72.0 MiB on device 0, the limit is 64.0 MiB" in out
    assert "used 2.0 KiB on device 0, the limit is 1.0 KiB" in out
    assert "used 75,497,472 bytes on device 0, the limit is 75,497,471" in out
    assert "the test left 8.0 MiB in use on device 0" in out


@pytest.mark.parametrize(
    ("option", "given", "told"),
    [
        ("--gpu-memory", "-3", "'-3' is not a number of tests (0 or more)"),
        ("--gpu-memory", "few", "'few' is not a number of tests (0 or more)"),
        ("--gpu-memory-record", "test_memory.py", "test_memory.py is not a folder"),
    ],
)
def test_options_of_the_pytest_plugin_that_cannot_be(
    tmp_path: Path, option: str, given: str, told: str
) -> None:
    (tmp_path / "test_memory.py").write_text("def test_nothing(): pass")
    out = run_pytest(tmp_path, f"{option}={given}", "test_memory.py")
    assert f"argument {option}: {told}" in out


TAKING = """
import pytest, torch
kept = []

def make(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

def test_nothing(): pass

@pytest.mark.parametrize("mib", ["3", "3/", "90"])
def test_taking(mib):
    make(int(mib.strip("/")))

def test_failing():
    x = make(50)
    raise ValueError

@pytest.mark.limit_gpu_memory("64 MB")
def test_limit():
    first = make(16)
    kept.append(make(56))

@pytest.mark.limit_gpu_leaks("2 MB")
@pytest.mark.parametrize("mib", [2, 4])
def test_leaks(mib):
    kept.append(make(mib))

@pytest.mark.limit_gpu_leaks(0, warmups=2)
def test_filling_a_cache():
    if not hasattr(make, "cache"):
        make.cache = make(8)
    make.calls = getattr(make, "calls", 0) + 1
    assert make.calls <= 3

@pytest.mark.limit_gpu_leaks("1 MB", warmups="many")
def test_no_number(): pass
"""


@pytest.mark.parametrize("where", ["here", "in another process"])
def test_pytest_tells_which_tests_take_most(tmp_path: Path, where: str) -> None:
    if where != "here":
        pytest.importorskip("xdist", reason="needs pytest-xdist: pip install pytest-xdist")
    tests, folder = tmp_path / "test_memory.py", tmp_path / "recorded"
    tests.write_text(TAKING)
    workers = ("-p", "xdist", "-n", 1) if where != "here" else ("--gpu-memory-record", folder)
    out = run_pytest(tmp_path, "--gpu-memory", 4, *workers, tests)
    assert "4 failed, 6 passed" in out, out
    assert "limit_gpu_memory: the test used 72.0 MiB on device 0, the limit is 64.0 MiB" in out
    assert "limit_gpu_leaks: the test left 4.0 MiB in use on device 0, the limit is 2.0 MiB" in out
    assert "limit_gpu_leaks: warmups='many' is not a number (0 or more)" in out
    table = out[out.index("GPU memory used by tests") :].splitlines()[1:]
    name = "test_memory.py::test"
    assert [line.split() for line in table[:6]] == [
        ["peak", "before", "left", "test"],
        ["90.0", "MiB", "0.0", "MiB", "0.0", "MiB", f"{name}_taking[90]"],
        ["72.0", "MiB", "0.0", "MiB", "56.0", "MiB", f"{name}_limit"],
        ["50.0", "MiB", "0.0", "MiB", "0.0", "MiB", f"{name}_failing"],
        ["4.0", "MiB", "58.0", "MiB", "4.0", "MiB", f"{name}_leaks[4]"],
        ["3", "more", "used", "some,", "3", "used", "none"],
    ]
    if where == "here":
        check_recordings(folder, out)


def check_recordings(folder: Path, out: str) -> None:
    names = [f"test_memory-py-test_{name}" for name in
             ("failing", "leaks-2", "leaks-4", "limit", "taking-3", "taking-3-2", "taking-90")]  # fmt: skip
    assert sorted(path.stem for path in folder.iterdir()) == names  # none of what took no memory
    found = trace.analyse(folder / f"{names[3]}.pya")
    assert found.totals["is_complete"] and found.totals["n_allocs"] >= 2
    told = " ".join(out.split())
    assert "at the peak, by line 72.0 MiB 100.0 % 2 x " in told
    assert "left in use, by line 4.0 MiB 100.0 % 1 x" in told
    assert (
        f"recorded: {folder / names[2]}.pya" in out and f"recorded: {folder / names[3]}.pya" in out
    )


def test_a_program_whose_argument_is_no_text_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "out.pya"
    program = 'import torch; torch.empty(1 << 20, dtype=torch.uint8, device="cuda")'
    pyalloc("dryrun", "--record", path, sys.executable, "-c", program, "a\udcff")
    found = trace.analyse(path)
    assert found.totals["n_allocs"] == 1
    assert found.notes["command"].endswith("'a\\udcff'")


def test_the_end_of_a_forked_child_is_quiet(tmp_path: Path) -> None:
    """Another thread ends the recording there; torch warns of anyone who did not switch its history on."""
    path, program = tmp_path / "out.pya", tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, torch\n"
        "def work(): torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(), child.join()\n"
    )
    out = pyalloc("dryrun", "--record", path, sys.executable, program)
    assert trace.analyse(path).totals["n_allocs"] == 1
    assert out.startswith("pyalloc dryrun: PyTorch"), out


def test_lines_of_a_file_whose_name_is_no_text_are_told(tmp_path: Path) -> None:
    """On pyalloc; torch's own history has no stacks with such names."""
    path, program = tmp_path / "out.pya", tmp_path / "n\udcff.py"
    program.write_text('import torch; torch.empty(1 << 20, dtype=torch.uint8, device="cuda")')
    pyalloc("dryrun", "--allocator", "pyalloc", "--record", path, sys.executable, program)
    found = trace.analyse(path)
    assert [row.name for row in found.by_line(found.peak.blocks)] == [
        f"{tmp_path.name}/n\ufffd.py:1 <module>"
    ]


def test_a_recording_that_cannot_begin_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "out.pya"
    path.write_text("of yesterday")
    with (
        pytest.raises(UsageError, match="no CUDA device"),
        recording.record(path, force=True),
    ):
        pass
    assert path.read_text() == "of yesterday"


def test_what_torch_keeps_for_cublas_is_no_leak() -> None:
    """Older versions of torch keep a workspace from the first matrix product on."""
    in_use = [40 * MIB]

    def clear() -> None:
        in_use[0] -= 32 * MIB

    torch = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 1, memory_allocated=lambda index: in_use[index]),
        _C=SimpleNamespace(_cuda_clearCublasWorkspaces=clear),
    )
    assert pytest_plugin._left(torch, [8 * MIB], MIB - 1) == [0]
    in_use[0] = 44 * MIB
    assert pytest_plugin._left(torch, [8 * MIB], MIB - 1) == [4 * MIB]
    in_use[0] = 44 * MIB
    assert pytest_plugin._left(torch, [8 * MIB], 40 * MIB) == [36 * MIB]  # which may stay
