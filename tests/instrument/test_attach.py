"""`pyalloc attach`: real programs running on the host-memory runtime, asked over their socket and through gdb."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dry_support import PATIENCE_S, dry_environment, python_for, wait_until

from instrument.tools import MIB, pyalloc
from pyalloc import live, trace

pytestmark = pytest.mark.torch
COMMAND = (sys.executable, "-m", "pyalloc", "attach")
GDB = pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb: apt install gdb")
WAYS = pytest.mark.parametrize("way", ["socket", pytest.param("gdb", marks=GDB)])
# pyalloc cannot be imported: only the copy of whoever attaches remains.
HIDDEN = """
import sys, torch
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "pyalloc":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hide())
assert not any(name.startswith("pyalloc") for name in sys.modules)
"""
INSTALLED = """
import sys, torch, pyalloc
pyalloc.install()
"""
TRAINING = """
import os, select
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
def step():
    optimizer.zero_grad()
    model(torch.ones(64, 512, device="cuda")).sum().backward()
    optimizer.step()
step()
before = None
before = set(globals())
print("ready", os.getpid(), flush=True)
while not select.select([0], [], [], 0)[0]:
    step()
print("left", sorted(set(globals()) - before))
"""
BEGIN = {
    "attach": "begin",
    "stacks": "python",
    "marks": True,
    "force": False,
    "duration_s": None,
}


@dataclass
class Program:
    """A program that runs until it is told to end."""

    child: subprocess.Popen[str]
    pid: int = 0

    def end(self) -> tuple[str, str]:
        """What it printed after its pid, on both streams."""
        out, err = self.child.communicate("\n", timeout=PATIENCE_S)
        assert self.child.returncode == 0, err
        return out, err


@contextlib.contextmanager
def running(source: str, **variables: str) -> Iterator[Program]:
    source = textwrap.dedent(source)
    child = subprocess.Popen(
        [python_for(source, variables), "-W", "ignore", "-c", source],
        env={**dry_environment(devices=1), "PYTHONWARNINGS": "ignore", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    program = Program(child)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("ready"):
            pytest.fail(child.communicate()[1])
        program.pid = int(line.split()[1])
        yield program
    finally:
        child.kill()
        child.communicate()


def served(way: str) -> dict[str, str]:
    return {live.ENABLE: "1"} if way == "socket" else {}


def wait_for_events(path: Path, program: Program) -> None:
    """Until the recording has more than its beginning."""
    part = path.with_name(path.name + ".part")
    first = part.stat().st_size
    wait_until(lambda: part.stat().st_size > first + 1000, program.child)
    wait_until(
        lambda: trace.analyse(part).totals["peak_bytes"] > 0, program.child
    )  # not marks alone


@WAYS
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_a_training_that_runs_is_recorded(tmp_path: Path, allocator: str, way: str) -> None:
    out, two = tmp_path / "out.pya", tmp_path / "two.pya"
    head = INSTALLED if allocator == "pyalloc" else HIDDEN if way == "gdb" else "import torch\n"
    with running(head + TRAINING, **served(way)) as program:
        pid = program.pid
        assert live.socket_path(pid).exists() == (way == "socket")
        assert "is not being recorded" in pyalloc("attach", pid, "--stop", expect=2)
        refused = live.request(
            pid, {**BEGIN, "path": str(tmp_path / "none" / "out.pya")}, PATIENCE_S
        )
        assert refused is None if way == "gdb" else "No such file" in str(refused)
        said = pyalloc("attach", pid, "-o", out)
        whose = "pyalloc" if allocator == "pyalloc" else "torch's own allocator"
        assert f"  {whose}; " in said and "were already in use, by unknown lines" in said
        assert f"next: pyalloc live {pid}, or pyalloc attach {pid} --stop" in said
        assert "was not running Python code" not in said
        wait_for_events(out, program)
        assert "is already being recorded" in pyalloc("attach", pid, "-o", out, expect=2)
        assert "is already being recorded" in pyalloc("attach", pid, "-o", two, expect=2)
        shown = " ".join(pyalloc("live", pid, "--count", 1).split())
        assert "allocated" in shown and f"recorded to {out}" in shown
        if way == "gdb":
            live.socket_path(pid).unlink()  # as whatever sweeps old files would
        assert f"next: pyalloc report {out}" in pyalloc("attach", pid, "--stop")
        assert "it is not being recorded" in pyalloc("attach", pid, "--stop", expect=2)
        assert "exists; --force" in pyalloc("attach", pid, "-o", out, expect=2)
        assert f"recorded: {two}" in pyalloc("attach", pid, "-o", two, "--duration", "0.5s")
        printed, complained = program.end()
    assert printed == "left []\n" and complained == ""
    for path in (out, two):
        check(path, allocator)


def check(path: Path, allocator: str) -> None:
    analysis = trace.analyse(path)
    told = " ".join(analysis.caveats)
    assert analysis.notes["allocator"] == allocator
    assert "begins when memory was already in use" in told and "lost" not in told
    names = {phase.name for phase in analysis.phases}
    assert {"forward", "backward", "optimizer"} <= names and len(analysis.steps) > 1
    report, top = pyalloc("report", path, "--no-replay"), pyalloc("top", path)
    for shown in (report, top):
        words = " ".join(shown.split())
        assert "The recording begins when memory was already in use" in words
        assert "in use from before the history to its end" in words


IDLE = """
import os, sys, torch
block = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
{more}
print("ready", os.getpid(), flush=True)
{wait}
block = None
"""
AT_WORK = """
import threading
done = threading.Event()
def work():
    while not done.is_set():
        torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
        done.wait(0.01)
worker = threading.Thread(target=work)
worker.start()
def end():
    sys.stdin.readline()
    done.set()
threading.Thread(target=end).start()
"""


@GDB
@pytest.mark.parametrize(
    ("more", "wait"), [("", "sys.stdin.readline()"), (AT_WORK, "worker.join()")]
)
def test_a_main_thread_that_waits(tmp_path: Path, more: str, wait: str) -> None:
    """It does nothing by itself; others may be at work meanwhile."""
    out = tmp_path / "out.pya"
    with running(IDLE.format(more=more, wait=wait)) as program:
        said = " ".join(pyalloc("attach", program.pid, "-o", out, "--wait", "5m").split())
        assert (
            "The main thread was not running Python code, so the recording began from another"
            in said
        )
        pyalloc("attach", program.pid, "--stop")
        program.end()
    analysis = trace.analyse(out)
    assert analysis.totals["peak_bytes"] in (30 * MIB, 35 * MIB)


IN_C = """
import ctypes, os, torch
torch.empty(1, device="cuda")
print("ready", os.getpid(), flush=True)
ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)   # keeps Python's lock
print("left", [name for name in __import__("sys").modules if name.startswith("pyalloc")])
"""


@GDB
def test_a_process_that_does_not_come_to_it_is_left_as_it_was(tmp_path: Path) -> None:
    with running(IN_C) as program:
        out = tmp_path / "out.pya"
        # Long enough to be tried in the middle of its wait too, which must not happen: it holds Python's lock.
        said = pyalloc("attach", program.pid, "-o", out, "--wait", "4s", expect=2)
        assert "has run no Python code" in said and "No recording was started" in said
        printed, complained = program.end()
    assert printed == "left []\n" and complained == ""
    assert list(tmp_path.iterdir()) == []


@GDB
def test_a_process_that_ends_meanwhile(tmp_path: Path) -> None:
    with running(IN_C) as program:
        child = subprocess.Popen(
            [*COMMAND, str(program.pid), "-o", str(tmp_path / "out.pya"), "--wait", "1h"],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: list(tmp_path.glob("*/script")), child)
        os.kill(program.pid, 9)
        said = child.communicate(timeout=PATIENCE_S)[1]
    assert child.returncode == 2 and f"process {program.pid} has ended in the meantime" in said
    assert list(tmp_path.iterdir()) == []


LATER = """
import os, sys, torch
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
print("used", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_has_not_used_cuda_yet(tmp_path: Path) -> None:
    out = tmp_path / "out.pya"
    with running(LATER, **served("socket")) as program:
        pid, child = program.pid, program.child
        assert child.stdin is not None and child.stdout is not None
        assert "It has not used CUDA yet" in pyalloc("attach", pid, "-o", out)
        assert "will already be recorded once it uses CUDA" in pyalloc(
            "attach", pid, "-o", out, expect=2
        )
        assert "it never used CUDA" in pyalloc("attach", pid, "--stop")
        pyalloc("attach", pid, "-o", out)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "used\n"
        program.end()  # and with it the recording
    assert trace.analyse(out).totals["peak_bytes"] == 30 * MIB
    assert trace.analyse(out).caveats == []


def test_what_the_program_records_itself_is_not_ended_from_outside(tmp_path: Path) -> None:
    source = f"""
    import os, sys, torch, pyalloc
    with pyalloc.record({str(tmp_path / "own.pya")!r}):
        torch.empty(1, device="cuda")
        print("ready", os.getpid(), flush=True)
        sys.stdin.readline()
    """
    with running(source, **served("socket")) as program:
        for words in (["-o", tmp_path / "out.pya"], ["--stop"]):
            said = pyalloc("attach", program.pid, *words, expect=2)
            assert "own.pya" in said and "you can read what is there so far at any time" in said
        program.end()
    assert [path.name for path in tmp_path.iterdir()] == ["own.pya"]


def test_a_killed_process_leaves_what_was_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out.pya"
    with running("import torch\n" + TRAINING, **served("socket")) as program:
        child = subprocess.Popen(
            [*COMMAND, str(program.pid), "-o", str(out), "--duration", "1h"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        assert child.stderr.readline().startswith("recording process")
        part = out.with_name("out.pya.part")
        wait_for_events(out, program)
        os.kill(program.pid, 9)
        said = child.communicate(timeout=PATIENCE_S)[1]
    assert (
        child.returncode == 2
        and f"was killed; to see what was recorded: pyalloc report {part}" in said
    )
    assert trace.analyse(part).totals["peak_bytes"] > 0


def test_who_watches_waits_until_the_file_has_its_name(tmp_path: Path) -> None:
    out = tmp_path / "out.pya"
    slowly = """
import threading
from pyalloc.inside import attached, recording
ends = threading.Event()
asked = threading.Semaphore(0)
def state(state=attached.state):
    if ends.is_set():
        asked.release()
    return state()
def end(recorder, end=recording.Recorder._end):
    end(recorder)
    ends.set()
    for _ in range(2):  # who believed the first answer is gone before the second
        asked.acquire()
attached.state = state
recording.Recorder._end = end
"""
    with running(INSTALLED + slowly + TRAINING, **served("socket")) as program:
        said = pyalloc("attach", program.pid, "-o", out, "--duration", "0.5s")
        assert f"recorded: {out}" in said
        program.end()


def test_a_recording_that_ended_by_itself_is_not_told_as_a_killed_process(tmp_path: Path) -> None:
    out = tmp_path / "out.pya"
    full = """
from pyalloc.inside import recording
def drain(recorder, at_mark=False):
    raise OSError(28, "No space left on device")
recording.Recorder.drain = drain
"""
    with running(INSTALLED + full + TRAINING, **served("socket")) as program:
        said = pyalloc("attach", program.pid, "-o", out, "--duration", "1h", expect=2)
        assert "ended its recording early and printed the reason on its standard error" in said
        assert f"pyalloc report {out}.part" in said and "was killed" not in said
        assert "the recording stopped: [Errno 28] No space left" in program.end()[1]
