"""The files of recordings: full disks, killed and interrupted programs, other processes, odd settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dry_support import PATIENCE_S, wait_until

from instrument.tools import ALLOCATORS, MIB, ROOT, Plan, pyalloc, small_trace
from pyalloc import _core, trace
from pyalloc.common import recorded
from pyalloc.errors import TraceError, UsageError
from pyalloc.inside import autorecord, recording

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("there", ["out.pya", "out.pya.part"])
def test_a_process_never_writes_over_anothers_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "out.pya"
    assert autorecord._own_path(path) == path
    (tmp_path / there).touch()
    assert autorecord._own_path(path) == tmp_path / f"out.{os.getpid()}.pya"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert autorecord._own_path(path) == tmp_path / "out.rank1.pya"


def test_force_does_not_take_a_file_from_a_recording_that_runs(tmp_path: Path) -> None:
    """It would write on into a file without a name, and have nothing at its end."""
    path = tmp_path / "out.pya"
    writer = _core.TraceWriter(path)
    with pytest.raises(UsageError, match=r"out\.pya\.part is being written by another recording"):
        autorecord.prepare(path, stacks="none", automatic=False, force=True)
    with pytest.raises(UsageError, match="name another file"):  # it began after prepare()
        autorecord.remove_earlier(path)
    writer.close()
    assert path.exists()
    autorecord.prepare(path, stacks="none", automatic=False, force=True)
    autorecord.remove_earlier(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "there"])
def test_a_folder_is_refused_before_anything_is_recorded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    import torch

    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for force in (False, True):
        with pytest.raises(UsageError, match=r"is a folder; name a file in it, such as .*out\.pya"):
            recording.record(name, force=force).__enter__()
        with pytest.raises(UsageError, match="is a folder"):
            autorecord.prepare(Path(name), stacks="none", automatic=False, force=force)


@pytest.mark.parametrize("name", [3, None, b"out.pya"])
def test_what_is_no_path_is_told_of_whom(name: str) -> None:
    with pytest.raises(TypeError, match=r"record\(\) needs the name of a file to write, not"):
        recording.record(name).__enter__()


@ALLOCATORS
def test_a_full_disk_ends_the_recording_and_not_the_program(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, allocator: str
) -> None:
    source = f"""
        import resource, signal, sys, torch, pyalloc
        from pyalloc.inside import eventsources
        torch.ones(1, device="cuda")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # of modules imported from now on: Python would cut them off
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        eventsources._TORCH_S = 0
        try:
            with pyalloc.record({str(tmp_path / "out.pya")!r}):
                for step in range(300):
                    kept = [torch.empty(100 * i, device="cuda") for i in range(100)]
                    pyalloc.step()
                    with pyalloc.phase(f"a phase of its own name, number {{step}} " * 20):
                        pass
                print("worked on")
        except pyalloc.PyallocError as error:
            print(error)
        """
    done = dry_python(source, install=allocator == "pyalloc")
    assert done.stdout == "worked on\n"
    assert done.stderr.count("the recording stopped") == 1
    assert f"{tmp_path / 'out.pya'}: File too large" in done.stderr


@ALLOCATORS
def test_a_recording_may_end_in_another_thread(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, allocator: str
) -> None:
    """Its own thread ends it when the disk is full.  torch's history then listens to the first one for ever, unless
    it was told to listen to all: it warns, and tells each annotation of a later history twice."""
    done = dry_python(
        f"""
        import threading, torch, pyalloc
        recorded = pyalloc.record({str(tmp_path / "out.pya")!r})
        recorded.__enter__()
        torch.ones(1, device="cuda")
        thread = threading.Thread(target=recorded.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        torch.cuda.memory._record_memory_history()
        with torch.profiler.record_function("mine"):
            torch.ones(1, device="cuda")
        print([each["stage"] for each in torch.cuda.memory._snapshot()["external_annotations"]])
        """,
        install=allocator == "pyalloc",
    )
    assert "Requested callback is not found" not in done.stderr
    assert done.stdout == "['START', 'END']\n"


@ALLOCATORS
def test_a_disk_that_is_full_at_the_end_is_told_in_a_line(tmp_path: Path, allocator: str) -> None:
    script, out = tmp_path / "program.py", tmp_path / "out.pya"
    script.write_text(
        "import resource, signal, sys, torch\n"
        "torch.ones(1, device='cuda')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "sys.dont_write_bytecode = True\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))\n"
        "kept = [torch.empty(100 + i % 977, device='cuda') for i in range(5000)]\n"
    )
    shown = pyalloc(
        "dryrun", "--allocator", allocator, "--record", out, sys.executable, "-W", "ignore", script
    )
    assert "Traceback" not in shown and "Exception ignored" not in shown
    assert (
        shown.count("the recording stopped") == 1
        and f"what was written so far is in {out}.part" in shown
    )


def test_a_name_that_torch_cannot_tell_is_what_ends_the_recording(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = dry_python(f"""
        import torch, pyalloc
        try:
            with pyalloc.record({str(tmp_path / "out.pya")!r}):
                exec(compile("x = torch.ones(3, device='cuda')", "a\\udcff.py", "exec"))
        except RuntimeError as error:
            print(error)
        """)
    assert "a file's name is not UTF-8; rename the file, or leave the stacks out" in done.stdout


@pytest.mark.parametrize("at_exit", [False, True])
def test_an_interrupt_at_the_end_loses_nothing(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, at_exit: bool
) -> None:
    """Somebody who waits for a program to end after Ctrl-C presses it again."""
    out = tmp_path / "out.pya"
    done = dry_python(f"""
        import os, signal, torch, pyalloc
        from pyalloc.inside import eventsources
        drain = eventsources.Torchs.drain
        def drain_and_interrupt(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            drain(*arguments)
        eventsources.Torchs.drain = drain_and_interrupt
        eventsources._TORCH_S = 1e9
        recorded = pyalloc.record({str(out)!r})
        recorded.__enter__()
        kept = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for i in range(9)]
        if {at_exit}:
            raise SystemExit
        try:
            recorded.__exit__(None, None, None)
        except KeyboardInterrupt:
            print("interrupted")
        """)
    assert done.stdout == ("" if at_exit else "interrupted\n")
    assert done.stderr == "pyalloc: finishing the recording; press Ctrl-C again to abandon it\n"
    found = trace.analyse(out)
    assert found.totals["is_complete"] and found.totals["n_allocs"] == 9


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("WORLD_SIZE", "", ""),
        (autorecord.STACKS, "pyhton", "not being recorded: stacks must be one of python"),
    ],
)
def test_odd_variables_do_not_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    out = tmp_path / "out.pya"
    for name, text in (("RANK", "0"), (autorecord.PATH, str(out)), (variable, value)):
        monkeypatch.setenv(name, text)
    source = """import torch
print("used", torch.ones(3).cuda().numel())
torch.cuda.memory._record_memory_history()
torch.cuda.memory._record_memory_history(enabled=None)"""
    shown = pyalloc("dryrun", sys.executable, "-W", "ignore", "-c", source)
    assert "used 3" in shown
    assert (
        "Requested callback is not found" not in shown
    )  # by torch, which switches history off twice
    assert told in shown and out.exists() == (told == "")


def test_a_name_that_is_taken_before_the_program_uses_cuda_is_told(tmp_path: Path) -> None:
    """By another command that was started at the same time."""
    out = tmp_path / "out.pya"
    source = f"open({str(out)!r}, 'x').close(); import torch; torch.ones(3).cuda()"
    run = [sys.executable, "-m", "pyalloc", "run", "--record", out, sys.executable, "-c", source]
    told = pyalloc("dryrun", *run)
    (own,) = set(tmp_path.glob("out*.pya")) - {out}
    assert f"pyalloc: recording to {own}, because another process took {out}\n" in told
    assert trace.totals(own)["n_allocs"] == 1


@pytest.mark.parametrize("name", ["out.oom.txt", "out.rank1.oom.txt"])
def test_what_lies_where_memory_is_explained_is_not_overwritten(tmp_path: Path, name: str) -> None:
    out, mine = tmp_path / "out.pya", tmp_path / name
    mine.write_text("mine")
    for command in ("dryrun", "run"):
        told = pyalloc(command, "--record", out, sys.executable, "-c", "", expect=2)
        assert f"{mine} already exists; --force overwrites it" in told
    if recorded.beside(out) == mine:
        with pytest.raises(UsageError, match=r"out\.oom\.txt already exists"):
            recording.check(out, "python", force=False)
    assert mine.read_text() == "mine"
    pyalloc("dryrun", "--record", out, "--force", sys.executable, "-c", "")
    assert not mine.exists()


def test_an_explanation_goes_with_the_recording_that_it_is_of(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Beside a recording that replaced it, and never ran out of memory, it would seem to belong to that."""
    out = tmp_path / "out.pya"
    dry_python(f"""
        import os, torch, pyalloc
        for asked in (1 << 45, 1):
            with pyalloc.record({str(out)!r}, force=True):
                try:
                    torch.empty(asked, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    pass
            assert os.path.exists({str(recorded.beside(out))!r}) == (asked > 1)
        """)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.pya"]


def test_an_explanation_takes_another_name_where_its_own_is_taken(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """By something that came after the recording began."""
    mine = tmp_path / "out.oom.txt"
    done = dry_python(f"""
        import os, torch, pyalloc
        with pyalloc.record({str(tmp_path / "out.pya")!r}):
            torch.empty(1, device="cuda")
            open({str(mine)!r}, "w").write("mine")
            for _ in range(2):
                try:
                    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    print(os.getpid())
        """)
    number = done.stdout.split()[0]
    assert mine.read_text() == "mine"
    (other,) = (each for each in tmp_path.glob("*.oom.txt") if each != mine)
    assert other.name == f"out.{number}.oom.txt" and "were requested" in other.read_text()
    assert str(other) in done.stderr


@ALLOCATORS
def test_a_killed_program_leaves_a_readable_trace(tmp_path: Path, allocator: str) -> None:
    script, out = tmp_path / "program.py", tmp_path / "out.pya"
    script.write_text(
        "import sys, time, torch\n"
        "kept = [torch.empty(7 << 20, dtype=torch.uint8, device='cuda') for _ in range(9)]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
    )
    words = [sys.executable, "-m", "pyalloc", "dryrun", "--allocator", allocator, "--record", out,
             sys.executable, "-W", "ignore", script]  # fmt: skip
    child = subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        part = out.with_name("out.pya.part")
        wait_until(lambda: trace.analyse(part).totals["end_bytes"] == 63 * MIB, child)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=PATIENCE_S)
        child.stdout.close()  # type: ignore[union-attr]
    found = trace.analyse(part)
    assert found.totals["end_bytes"] == 63 * MIB and not found.totals["is_complete"]
    assert "program.py:2" in found.by_line(found.peak.blocks)[0].name
    assert "The file was cut off" in pyalloc("report", part, "--no-replay")
    assert "was cut off, so read " in pyalloc("report", out, expect=2)  # the name it would have got


def test_a_recording_that_ends_while_it_is_read_is_told_by_its_name(plan: Plan) -> None:
    """A second look at the file, or one a moment too late, found none."""
    out = small_trace(plan)
    part = out.rename(recorded.part(out))
    with pytest.raises(TraceError) as caught, trace.read_once(part):
        trace.analyse(part)
        part.rename(out)
        trace.analyse(part)
    assert str(caught.value).endswith(f"; its recording has ended, so read {out}")
    assert f"; its recording has ended, so read {out}" in pyalloc("report", part, expect=2)


def test_a_program_may_go_elsewhere_while_it_is_recorded(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    dry_python(f"""
        import os, torch, pyalloc
        os.chdir({str(tmp_path)!r})
        with pyalloc.record("out.pya"):
            kept = torch.ones(1, device="cuda")
            os.chdir("elsewhere")
        """)
    assert trace.analyse(tmp_path / "out.pya").totals["is_complete"]


def test_processes_that_begin_at_once_have_a_recording_each(tmp_path: Path) -> None:
    """Each sees that there is no file yet, then both begin."""
    out = tmp_path / "out.pya"
    program = f"""
import os, time, torch
from pyalloc.inside import autorecord
own_path = autorecord._own_path
def both(path):
    chosen = own_path(path)
    open({str(tmp_path)!r} + f"/ready{{os.getpid()}}", "w").close()
    while sum(name.startswith("ready") for name in os.listdir({str(tmp_path)!r})) < 2:
        time.sleep(0.01)
    return chosen
autorecord._own_path = both
kept = torch.empty(int(os.environ["MIB"]) << 20, dtype=torch.uint8, device="cuda")
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    python = f"{sys.executable} -W ignore {script}"
    pyalloc("dryrun", "--record", out, "sh", "-c", f"MIB=3 {python} & MIB=5 {python}; wait")
    files = sorted(tmp_path.glob("out*.pya"))
    assert len(files) == 2 and out in files
    assert {trace.analyse(file).totals["peak_bytes"] for file in files} == {3 * MIB, 5 * MIB}


def test_a_recording_that_was_cut_off_is_not_lost_to_the_next(
    dry_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = str(tmp_path / "out.pya")
    done = dry_python(f"""
        import torch, pyalloc
        from pyalloc import _core
        torch.ones(1, device="cuda")
        def record(force):
            try:
                with pyalloc.record({out!r}, force=force):
                    pass
            except pyalloc.PyallocError as error:
                print(error)
        part = {out!r} + ".part"
        open(part, "w").close()
        record(False)
        record(True)
        import os; print(os.path.exists(part))
        writer = _core.TraceWriter({out!r}, overwrite=True)  # as another process has it
        record(True)
        print(os.path.exists({out!r}))
        """)
    first, second, third, fourth = done.stdout.splitlines()
    assert "out.pya.part already exists (from a recording that was cut off" in first
    assert second == "False" and "another recording is writing to it" in third
    assert fourth == "True"  # what was recorded before stays until another file is complete
