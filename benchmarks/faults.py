"""What a failing device call does to a PyTorch program: native, expandable segments and pyalloc, the same faults.

``python -m benchmarks.faults [--only WORD ...] [--json]``

Real PyTorch on the host-memory runtime, which makes one call fail with the error a driver would give.  For each fault a
fresh process holds tensors, meets the fault in one step (a tensor is made, the cache is emptied, a tensor that another
stream used is dropped), and then shows what is left: does the tensor it held still have its bytes, do later requests
work, and is any device memory lost once everything was freed?
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import dataclass

from benchmarks import hostcuda
from benchmarks.memory import commit
from pyalloc import _bootstrap

ALLOCATORS = ("native", "expandable", "pyalloc")
MIB = 1 << 20
OUT_OF_MEMORY, INVALID, ILLEGAL_ADDRESS = 2, 1, 700


CREATING = ("cudaMalloc", "cuMemCreate", "cuMemCreate")
RESERVE, RECORD, QUERY = "cuMemAddressReserve", "cudaEventRecord", "cudaEventQuery"


@dataclass(frozen=True)
class Fault:
    """One call that fails once.  calls: its name under each allocator; "": that one makes no such call."""

    what: str
    calls: tuple[str, str, str]
    error: int
    step: str


FAULTS = (
    Fault("creating memory: out of memory", CREATING, OUT_OF_MEMORY, "make"),
    Fault("creating memory: illegal address", CREATING, ILLEGAL_ADDRESS, "make"),
    Fault("reserving addresses", ("", RESERVE, RESERVE), OUT_OF_MEMORY, "stream"),
    Fault("mapping", ("", "cuMemMap", "cuMemMap"), INVALID, "make"),
    Fault("setting access", ("", "cuMemSetAccess", "cuMemSetAccess"), INVALID, "make"),
    Fault("unmapping", ("", "cuMemUnmap", "cuMemUnmap"), INVALID, "empty"),
    Fault("giving memory back", ("cudaFree", "cuMemRelease", "cuMemRelease"), INVALID, "empty"),
    Fault("waiting for work", ("", "cudaStreamSynchronize", "cuCtxSynchronize"), INVALID, "empty"),
    Fault("recording an event", (RECORD, RECORD, "cuEventRecord"), INVALID, "drop"),
    Fault("querying an event", (QUERY, QUERY, "cuEventQuery"), INVALID, "query"),
)

CHILD = """
import ctypes, gc, json, sys, torch
name, error, step = sys.argv[1], int(sys.argv[2]), sys.argv[3]
MIB = 1 << 20
runtime = ctypes.CDLL("libcuda.so.1")
runtime.pya_hostcuda_used_bytes.restype = ctypes.c_size_t
fail = lambda n: runtime.pya_hostcuda_fail_nth(ctypes.c_uint64(n), name.encode(), error)
empty = lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")
data = torch.arange(MIB, dtype=torch.int32)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    empty(4 * MIB)
kept = data.cuda()
torch.cuda.empty_cache()
base = runtime.pya_hostcuda_used_bytes(0)
cached = [empty(30 * MIB) for _ in range(3)]
other = torch.cuda.Stream()
shared = empty(40 * MIB)
shared.record_stream(side)
if step == "query":
    runtime.pya_hostcuda_set_event_delay(ctypes.c_uint64(1 << 40))
    del shared
    empty(MIB)
if step == "empty":
    cached.clear()
raised, text = None, ""
try:
    fail(1)
    if step == "make":
        made = empty(64 * MIB)
    elif step == "stream":
        with torch.cuda.stream(other):
            made = empty(64 * MIB)
    elif step == "empty":
        torch.cuda.empty_cache()
    elif step == "drop":
        del shared
        empty(MIB)
    elif step == "query":
        empty(MIB)
except Exception as error_:
    raised, text = type(error_).__name__, str(error_).splitlines()[0]
fired = runtime.pya_hostcuda_fail_nth(ctypes.c_uint64(0), None, 0) or 0
runtime.pya_hostcuda_set_event_delay(ctypes.c_uint64(0))
good = torch.equal(kept.cpu(), data)
try:
    works = torch.equal(data.cuda().cpu(), data) and empty(200 * MIB).numel() > 0
except Exception as error_:
    works, text = False, text + " | later: " + str(error_).splitlines()[0]
made = shared = None
cached.clear()
gc.collect()
try:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
except Exception as error_:
    works, text = False, text + " | later: " + str(error_).splitlines()[0]
lost = runtime.pya_hostcuda_used_bytes(0) - base
print(json.dumps(dict(raised=raised, text=text, good=good, works=bool(works), lost=lost)), flush=True)
"""


def run_fault(fault: Fault, allocator: str) -> dict[str, object]:
    """Runs one process; returns its answer, or how it ended."""
    name = fault.calls[ALLOCATORS.index(allocator)]
    if not name:
        return {"skipped": True}
    env = hostcuda.environment("2GB", allocator)
    if allocator == "pyalloc":
        env[_bootstrap.INSTALL] = "1"
    command = [sys.executable, "-W", "ignore", "-c", CHILD, name, str(fault.error), fault.step]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if not lines:
        return {"ended": done.returncode, "text": done.stderr.strip().splitlines()[-1:]}
    answer: dict[str, object] = json.loads(lines[-1])
    if done.returncode != 0:
        answer["ended"] = done.returncode
    return answer


def words(answer: dict[str, object]) -> str:
    """A few words for the table."""
    if answer.get("skipped"):
        return "no such call"
    if "works" not in answer:
        ended = answer["ended"]
        assert isinstance(ended, int)
        return f"process ended by {signal.Signals(-ended).name}" if ended < 0 else f"exit {ended}"
    said = f"{answer['raised']}" if answer["raised"] else "no error"
    parts = [said]
    if not answer["good"]:
        parts.append("data damaged")
    if not answer["works"]:
        parts.append("later requests fail")
    lost = answer["lost"]
    assert isinstance(lost, int)
    if lost > 0:
        parts.append(f"{lost / MIB:.0f} MiB lost")
    if "ended" in answer:
        parts.append(f"exit {answer['ended']}")
    return ", ".join(parts)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults with one of these words")
    parser.add_argument("--json", action="store_true", help="one JSON line for each cell")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not arguments.only or any(word in fault.what for word in arguments.only)
    ]
    if not arguments.json:
        print("| fault | " + " | ".join(ALLOCATORS) + " |\n|---|---|---|---|")
    for fault in chosen:
        answers = {allocator: run_fault(fault, allocator) for allocator in ALLOCATORS}
        if arguments.json:
            for allocator, answer in answers.items():
                row = {"fault": fault.what, "allocator": allocator, **answer}
                print(json.dumps({**row, "commit": commit()}), flush=True)
            continue
        cells = " | ".join(words(answers[allocator]) for allocator in ALLOCATORS)
        print(f"| {fault.what} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
