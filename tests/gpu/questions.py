"""What only a card can answer (README.md): each question in a process of its own, one JSON line each.

questions.py                  all of them, on torch's own allocator and on pyalloc
questions.py NAME ALLOCATOR   one of them, in this process
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
LIMIT_S = 60
ALLOCATORS = ("native", "pyalloc")
Answer = dict[str, Any]


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def ms_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return round(1e3 * (time.perf_counter() - began), 3)


def sleep_here(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * 1.9e9))  # cycles; an H200 runs at 1.98 GHz


def unmapping() -> Answer:
    """Does empty_cache() wait for kernels, and do other streams wait for it?"""
    busy, third = torch.cuda.Stream(), torch.cuda.Stream()
    x = empty(MIB).fill_(0)
    idle = empty(4 * GIB)
    # CUDA loads a kernel at its first launch, and may wait for all others then: not while time is measured.
    x.add_(1)
    sleep_here(0)
    torch.cuda.synchronize()
    del idle
    with torch.cuda.stream(busy):
        sleep_here(1)
    took: list[float] = []
    other = threading.Thread(target=lambda: took.append(ms_of(torch.cuda.empty_cache)))
    other.start()
    slowest = 0.0
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        with torch.cuda.stream(third):
            slowest = max(slowest, ms_of(lambda: (x.add_(1), third.synchronize())))
    other.join()
    waited = ms_of(torch.cuda.synchronize)
    return {
        "empty_cache_ms": took[0],
        "slowest_of_third_stream_ms": slowest,
        "sleep_went_on_ms": waited,
    }


def captures() -> Answer:
    """A capture that needs new memory, in each mode, beside a thread that allocates."""
    found: Answer = {}
    for mode in ("global", "thread_local", "relaxed"):
        stop = threading.Event()
        failed: list[str] = []

        def allocate(stop: threading.Event = stop, failed: list[str] = failed) -> None:
            kept = []
            try:
                while not stop.is_set() and len(kept) < 100:
                    kept.append(empty(21 * MIB))
                    time.sleep(0.001)
            except RuntimeError as error:
                failed.append(str(error).splitlines()[0])

        x = torch.ones(64 * MIB, device="cuda")
        y = x + 1  # the capture must not be what loads the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        other = threading.Thread(target=allocate)
        other.start()
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(5):
                    y = x + 1
                    time.sleep(0.01)
            stop.set()
            other.join()
            graph.replay()
            found[mode] = "right" if bool((y == 2).all()) else "wrong"
        except RuntimeError as error:
            found[mode] = str(error).splitlines()[0]
        finally:
            stop.set()
            other.join()
        found[f"{mode}, the other thread"] = failed or "no error"
    return found


def addresses() -> Answer:
    """The first allocation on each of 32 streams and in each of 32 pools."""
    empty(1)
    streams = [torch.cuda.Stream() for _ in range(32)]
    pools = [torch.cuda.MemPool() for _ in range(32)]
    kept = []

    def on(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            kept.append(empty(3 * MIB))

    def within(pool: torch.cuda.MemPool) -> None:
        with torch.cuda.use_mem_pool(pool):
            kept.append(empty(3 * MIB))

    of_streams = [ms_of(lambda s=s: on(s)) for s in streams]
    of_pools = [ms_of(lambda p=p: within(p)) for p in pools]
    return {
        "stream_ms": [min(of_streams), max(of_streams)],
        "pool_ms": [min(of_pools), max(of_pools)],
        "different": len({x.data_ptr() for x in kept}) == len(kept),
    }


def destroyed_streams() -> Answer:
    """Streams of another library that were destroyed: the process must not end."""
    runtime = ctypes.CDLL(None)  # torch has loaded it for all
    side = torch.cuda.Stream()
    for _ in range(200):
        handle = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        foreign = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(foreign):
            x = empty(5 * MIB).fill_(1)
        x.record_stream(side)
        foreign.synchronize()
        del x
        assert runtime.cudaStreamDestroy(handle) == 0
        with torch.cuda.stream(side):
            empty(5 * MIB).fill_(2)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {"reserved_mib_in_the_end": torch.cuda.memory_reserved() // MIB}


def full_card() -> Answer:
    """Another process takes 99 %; then out of memory, and the work goes on."""
    free, _ = torch.cuda.mem_get_info()
    taken = (
        "import sys, torch; kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda')"
    )
    command = [sys.executable, "-W", "ignore", "-c", f"{taken}; print(flush=True); input()"]
    with subprocess.Popen(
        [*command, str(int(free * 0.99))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None and other.stdin is not None
            assert other.stdout.readline() == b"\n"
            kept = []
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    kept.append(empty(37 * MIB).fill_(3))
            n_full = len(kept)
            del kept[::2]
            empty(30 * MIB).fill_(4)
            good = all(bool((x == 3).all()) for x in kept)
            return {"blocks_of_37_mib": n_full, "bytes_kept": good}
        finally:
            other.communicate(b"\n")


QUESTIONS = {
    function.__name__: function
    for function in (unmapping, captures, addresses, destroyed_streams, full_card)
}


def ask(name: str, allocator: str) -> Answer:
    """One question in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, name, allocator]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LIMIT_S} s"}
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}: {done.stderr[-600:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def wrong_alone(ours: Answer, native: Answer) -> list[str]:
    """What pyalloc's answer should not be, unless torch's own allocator excuses it.

    A failure excuses a failure, wrong results only the same results, and an error of the question itself nothing.
    """
    fine = (True, "right", "no error")

    def is_excused(key: str) -> bool:
        theirs = native.get(key)
        return theirs == ours[key] if ours[key] in (False, "wrong") else theirs not in fine

    told = [key for key, value in ours.items() if isinstance(value, bool | str)]
    told += [key for key in ours if key.endswith("other thread") and key not in told]
    wrong = [key for key in told if ours[key] not in fine]
    return [key for key in wrong if key == "error" or not is_excused(key)]


def main() -> int:
    if len(sys.argv) == 3:
        if sys.argv[2] == "pyalloc":
            if (ROOT / "pyalloc" / "_core.abi3.so").exists():  # otherwise an installed one
                sys.path.insert(0, str(ROOT))
            import pyalloc

            pyalloc.install()
        print(json.dumps(QUESTIONS[sys.argv[1]]()))
        return 0
    good = True
    for name in QUESTIONS:
        found = {allocator: ask(name, allocator) for allocator in ALLOCATORS}
        for allocator, answer in found.items():
            print(json.dumps({"question": name, "allocator": allocator, **answer}), flush=True)
        if wrong := wrong_alone(found["pyalloc"], found["native"]):
            print(f"{name}: on pyalloc alone: {', '.join(wrong)}", flush=True)
            good = False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
