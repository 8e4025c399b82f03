"""torch's history: the program uses it while a recording of torch's own allocator has it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, pyalloc
from pyalloc import trace
from pyalloc.reading import events

pytestmark = pytest.mark.torch

DryPython = Callable[..., subprocess.CompletedProcess[str]]
# What a program can see of its history: entries, frames, pinned memory, annotations.
SEEN = """
import sys, torch
from torch.cuda.memory import _record_memory_history as history, _snapshot as snapshot
def empty(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
def show(name):
    told = snapshot()
    for trace in told["device_traces"]:
        print(name, [
            (e["action"], e["size"], [f["line"] for f in e.get("frames", ())])
            for e in trace if e["action"] != "snapshot"
        ])
    print(len(told["host_traces"]), [e["name"] for e in told["external_annotations"]],
          torch._C._cuda_isHistoryEnabled())
def ask(*words, **more):
    try:
        history(*words, **{"stacks": "python", **more})
    except RuntimeError as error:
        print(str(error).splitlines()[0])
kept = []
def work(name):
    for mib in (3, 5):
        kept.append(empty(mib))
    empty(7)
    with torch.profiler.record_function("part"):
        empty(1)
    show(name)
ask(max_entries=12)
torch.cuda.init()
work("before CUDA was used")
ask(max_entries=100, context="alloc")
work("more entries, nothing cleared")
ask(clear_history=True, context="state", skip_actions=["free_requested"])
work("cleared, some left out")
ask("state", context=None, clear_history=True)
work("state")
for wrong in ({"context": "x"}, {"stacks": "x"}, {"enabled": "x"}, {"max_entries": "x"}):
    try:
        ask(**wrong)
    except TypeError as error:
        print(str(error).splitlines()[0])
ask(None)
work("off")
ask(record_pinned_host_memory=True, global_record_annotations=True)
pinned = torch.empty(100, pin_memory=True)
work("pinned memory, annotations")
ask(record_pinned_host_memory=True, record_cuda=False)
pinned = torch.empty(10000, pin_memory=True)
work("of the host alone")
history(True, trace_alloc_max_entries=50, trace_alloc_record_context=True)
work("as older programs")
print([bool(t) for t in torch._C._cuda_memorySnapshot((0, 0, False))["device_traces"]])
history(False)
work("off again")
"""


def test_the_program_sees_of_its_history_what_it_would_have_seen(
    record: Record, tmp_path: Path
) -> None:
    shown = [record(f"import sys\nsys.stdout = open({str(tmp_path / 'with')!r}, 'w')\n" + SEEN)]
    script = tmp_path / "alone.py"
    script.write_text(f"import sys\nsys.stdout = open({str(tmp_path / 'alone')!r}, 'w')\n" + SEEN)
    pyalloc("dryrun", "--memory", "4GB", sys.executable, "-W", "ignore", script)
    assert (tmp_path / "with").read_text() == (tmp_path / "alone").read_text()
    totals = trace.analyse(shown[0]).totals
    assert totals["n_allocs"] == 9 * 4 and totals["n_unknown_frees"] == 0
    assert totals["peak_bytes"] == (9 * 8 + 7) * MIB


def test_a_recording_without_stacks_has_none_of_the_programs(record: Record) -> None:
    path = record("""
    import torch
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    (_, alloc) = torch.cuda.memory._snapshot()["device_traces"][0]
    assert alloc["frames"]
    """, "--no-source")  # fmt: skip
    told = list(events(path))
    assert "alloc" in [event.kind for event in told]
    assert not any(event.stack for event in told)


@pytest.mark.parametrize("call", ["max_entries=2", "True, trace_alloc_max_entries=2", ""])
def test_a_programs_history_on_pyalloc_goes_on_after_a_recording(
    dry_python: DryPython, tmp_path: Path, call: str
) -> None:
    """As the program switched it on; it has no entries of before."""
    done = dry_python(f"""
        import threading, torch, pyalloc
        pyalloc.install()
        if {call!r}:
            torch.cuda.memory._record_memory_history({call})
        recording = pyalloc.record({str(tmp_path / "1.pya")!r})
        recording.__enter__()
        ending = threading.Thread(target=recording.__exit__, args=(None, None, None))
        ending.start()
        ending.join()
        kept = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (3, 4, 5)]
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        print(len(trace), torch._C._cuda_isHistoryEnabled())
        """)
    assert done.stdout.split() == (["2", "True"] if call else ["0", "False"]), done.stderr


def test_a_programs_history_goes_on_around_a_recording(
    dry_python: DryPython, tmp_path: Path
) -> None:
    """Entries from before and during the recording stay in the program's snapshots, in order, until it clears them."""
    done = dry_python(f"""
        import torch, pyalloc
        kept = []
        def empty(mib):
            kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
        def sizes():
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            return [e["size"] >> 20 for e in trace if e["action"] == "alloc"]
        own = torch._C._cuda_memorySnapshot
        torch.cuda.memory._record_memory_history(stacks="python")
        for i in (1, 2):
            empty(10 * i + 1)
            with pyalloc.record(f"{tmp_path}/{{i}}.pya"):
                empty(10 * i + 2)
                print(sizes())
            empty(10 * i + 3)
        print(sizes(), torch._C._cuda_isHistoryEnabled())
        torch.cuda.memory._record_memory_history(None)
        print(sizes())
        with pyalloc.record({str(tmp_path / "3.pya")!r}):
            empty(4)
        print(sizes(), torch._C._cuda_isHistoryEnabled(), torch._C._cuda_memorySnapshot is own)
        """)
    assert done.stdout.splitlines() == [
        "[11, 12]",
        "[11, 12, 13, 21, 22]",
        "[11, 12, 13, 21, 22, 23] True",
        "[]",
        "[] False True",
    ]
    for i, n in ((1, 2), (2, 5), (3, 7)):
        assert trace.analyse(tmp_path / f"{i}.pya").totals["n_allocs"] == n


@pytest.mark.parametrize("then", ["off", "cleared"])
def test_a_gap_is_told_by_the_program_and_by_every_command(tmp_path: Path, then: str) -> None:
    """C++ reaches the history past everything that answers the program."""
    script, out = tmp_path / "program.py", tmp_path / "out.pya"
    script.write_text(f"""
import torch
from pyalloc.inside import recording, sharing
def empty(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
kept = [empty(3) for _ in range(4)]
recording._active.recorder.drain()
kept += [empty(30) for _ in range(5)]
with sharing.ours():
    torch.cuda.memory._record_memory_history(None)
    if {then == "cleared"}:
        torch.cuda.memory._record_memory_history(max_entries=1000)
kept += [empty(50) for _ in range(6)]
recording._active.recorder.drain()
kept += [empty(2)]
""")
    shown = pyalloc("dryrun", "--record", out, sys.executable, "-W", "ignore", script)
    n = 11 if then == "off" else 5
    told = f"The recording has a gap: {n} events were lost between events "
    assert told in shown
    totals = trace.analyse(out).totals
    assert totals["n_allocs"] == 4 + 5 + 6 + 1 - n
    commands = ["report", out, "--no-replay"], ["top", out], ["replay", out], ["events", out]
    for words in (*commands, ["diff", out, out], ["plan", out, "--force"]):
        text = " ".join(pyalloc(*words, "-q").split())
        assert told in text and "may be far too low" in text, words
    assert "lost_events" in pyalloc("stats", out)
