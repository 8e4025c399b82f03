"""Replays a trace through real torch on the host-memory CUDA runtime, one allocator at a time.

torch is loaded once, without touching CUDA; every replay is a fork of that process with a capacity of its own.
Run as a server by :class:`TorchReplay`: ``python -m benchmarks.torch_replay --serve native|expandable|pyalloc``, or
``--serve FILE.so`` for another library behind torch's pluggable allocator (foreign_alloc, foreign_free).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import hostcuda
from benchmarks.compiling import is_older, making

ROOT = Path(__file__).resolve().parent.parent
ALLOCATORS = ("native", "expandable", "pyalloc")
#: makes pyalloc go through torch's wrapper, as it does if it does not find torch's own methods
THROUGH_WRAPPER = {"PYALLOC_FAST_PATH": "0"}
#: least operations of a warm turn, so that what the turn before left cold hardly counts
TURN_OPS = 50_000
#: host-memory calls that are device calls of the allocator
MEMORY_CALLS = (
    "cudaMalloc",
    "cudaFree",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)


def build_caller() -> Path:
    """Compiles the caller of torch's interface, unless it is newer than its sources."""
    library = ROOT / "build" / "c10" / "libc10_replay.so"
    replay = ROOT / "csrc" / "replay"
    c_sources = [
        replay / name
        for name in ("op_store.c", "program.c", "trace_read.c", "trace_write.c", "varint.c")
    ]
    c_sources.append(ROOT / "csrc" / "core" / "base.c")
    c10 = ROOT / "benchmarks" / "c10"
    cpp = sorted(c10.glob("*.cpp"))
    headers = [*replay.glob("*.h"), *c10.glob("*.hpp")]
    if not is_older(library, [*cpp, *c_sources, *headers]):
        return library
    flags = ["-O2", "-g", "-fPIC", "-fvisibility=hidden"]
    with making(library) as made:
        command = ["cc", "-std=c11", *flags, "-c", *map(str, c_sources)]
        subprocess.run(command, cwd=made.parent, check=True)
        objects = [str(made.parent / f"{source.stem}.o") for source in c_sources]
        command = ["c++", "-std=c++17", *flags, "-shared", *map(str, cpp), *objects]
        subprocess.run([*command, "-o", str(made), "-lpthread", "-ldl"], check=True)
    return library


class _Result(ctypes.Structure):
    _fields_ = (
        ("n_done", ctypes.c_uint64),
        ("half_calls", ctypes.c_uint64),
        ("ns", ctypes.c_double),
        ("device_ns", ctypes.c_double),
        ("trouble", ctypes.c_char * 256),
    )


class _Speed(ctypes.Structure):
    _fields_ = (
        ("p99_ns", ctypes.c_double),
        ("worst_ns", ctypes.c_double),
        ("machine_ns", ctypes.c_double),
        ("least_share", ctypes.c_double),
        ("n", ctypes.c_uint64),
    )


class _Turns(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_uint64),
        ("wait", ctypes.CFUNCTYPE(None)),
        ("ns", ctypes.POINTER(ctypes.c_double)),
    )


def _no_wait() -> None:
    """Stands in for _wait_for_turn() in a process that measures alone."""


def _wait_for_turn(out: int) -> None:
    """In the fork: says on ``out`` that the next part is ready; returns when :func:`in_turns` starts it."""
    os.write(out, b'{"turn": true}\n')
    if not os.read(0, 1):
        os._exit(1)  # the parent has gone


def _open_cuda(allocator: str, capacity: int, n_devices: int, caller: ctypes.CDLL) -> ctypes.CDLL:
    """In the fork: starts CUDA with this capacity and allocator; returns the runtime's own functions."""
    runtime = ctypes.CDLL("libcuda.so.1")
    for name in ("peak_bytes", "used_bytes"):
        getattr(runtime, f"pya_hostcuda_{name}").restype = ctypes.c_size_t
    for name in ("calls", "live"):
        getattr(runtime, f"pya_hostcuda_{name}").restype = ctypes.c_uint64
    import torch

    for device in range(n_devices):
        if capacity and runtime.pya_hostcuda_set_capacity(device, ctypes.c_size_t(capacity)) != 0:
            raise RuntimeError(f"the capacity of device {device} could not be set")
    if allocator == "pyalloc":
        import pyalloc

        pyalloc.install()
    elif allocator not in ALLOCATORS:
        foreign = torch.cuda.memory.CUDAPluggableAllocator(
            allocator, "foreign_alloc", "foreign_free"
        )
        torch.cuda.memory.change_current_allocator(foreign)
    torch._C._cuda_init()
    why = caller.c10_open()
    if why is not None:
        raise RuntimeError(why.decode())
    torch._C._cuda_emptyCache()  # torch.cuda's does nothing before torch.cuda.init()
    return runtime


def _speed_here(
    request: dict[str, Any], allocator: str, caller: ctypes.CDLL, wait: Callable[[], None]
) -> dict[str, Any]:
    """In the fork: times one pattern (benchmarks/c10/speed.cpp)."""
    _open_cuda(allocator, request["capacity"], 1, caller)
    numbers = [request[name] for name in ("n_live", "max_bytes", "equal", "lifo", "data_ptr")]
    # struct workload: two 64-bit numbers, then three flags
    work = struct.pack("<QQiii4x", *map(int, numbers))
    out = _Speed()
    ns = (ctypes.c_double * request["turns"])()
    turns = _Turns(len(ns), ctypes.CFUNCTYPE(None)(wait), ns)
    if request["threads"]:
        caller.c10_threads(
            work,
            request["threads"],
            os.cpu_count() or 1,
            ctypes.c_double(request["seconds"]),
            ctypes.byref(turns),
            ctypes.byref(out),
        )
    else:
        n, seed, tail = request["n"], request["seed"], int(request["tail"])
        caller.c10_pairs(
            work,
            ctypes.c_uint64(n),
            ctypes.c_uint64(seed),
            tail,
            ctypes.byref(turns),
            ctypes.byref(out),
        )
    answer = {name: getattr(out, name) for name, _ in _Speed._fields_}
    return {**answer, "turn_ns": list(ns), "median_ns": statistics.median(ns)}


def _make_streams(devices: range, n: int) -> ctypes.Array[ctypes.c_uint64]:
    """Makes so many streams per device, the default first: for each the runtime's number and torch's."""
    import torch

    numbers: list[int] = []
    for device in devices:
        numbers += (0, 0)
        for _ in range(n - 1):
            stream = torch.cuda.Stream(device)
            numbers += (stream.cuda_stream, stream.stream_id)
    return (ctypes.c_uint64 * len(numbers))(*numbers)


def _pool_callback(failures: list[Exception]) -> Any:
    """For C to call when pools begin, end or are released.  Keeps errors: C then goes on without the pool."""
    import torch

    calls = (
        torch._C._cuda_beginAllocateCurrentThreadToPool,
        torch._C._cuda_endAllocateToPool,
        torch._C._cuda_releasePool,
    )

    def pool(kind: int, device: int, first: int, second: int) -> None:
        try:
            calls[kind](device, (first, second))
        except Exception as error:
            failures.append(error)

    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
    return ctypes.CFUNCTYPE(None, *numbers)(pool)


def _replay_here(
    request: dict[str, Any], allocator: str, caller: ctypes.CDLL, wait: Callable[[], None]
) -> dict[str, Any]:
    """In the fork: opens CUDA with the capacity and replays."""
    path, capacity, turns = (request[name] for name in ("path", "capacity", "turns"))

    message = ctypes.create_string_buffer(256)
    program = ctypes.c_void_p(caller.c10_load(os.fsencode(path), message, 256))
    if not program.value:
        raise RuntimeError(message.value.decode())
    n_ops, live, n_streams, n_devices, n_pools = (ctypes.c_uint64() for _ in range(5))
    caller.c10_info(program, *map(ctypes.byref, (n_ops, live, n_streams, n_devices, n_pools)))
    turns = 0 if n_pools.value else turns  # a released pool cannot be begun again
    devices = range(max(1, n_devices.value))
    runtime = _open_cuda(allocator, capacity, len(devices), caller)
    streams = _make_streams(devices, n_streams.value)
    runtime.pya_hostcuda_reset_calls()
    for device in devices:
        runtime.pya_hostcuda_reset_peak(device)

    def calls() -> dict[str, int]:
        return {name: runtime.pya_hostcuda_calls(name.encode()) for name in MEMORY_CALLS}

    failures: list[Exception] = []
    pool_callback = _pool_callback(failures)
    result = _Result()
    callback = ctypes.CFUNCTYPE(ctypes.c_uint64)(lambda: sum(calls().values()))
    caller.c10_run(program, streams, int(turns > 0), callback, pool_callback, ctypes.byref(result))
    if failures:
        raise failures[0]
    trouble = result.trouble.decode(errors="replace")
    completed = result.n_done == n_ops.value
    if not completed and " out of memory" not in trouble:
        raise RuntimeError(f"{trouble} (operation {result.n_done})")
    made = calls()
    row: dict[str, Any] = {
        "allocator": allocator,
        "ops": n_ops.value,
        "live_bytes": live.value,
        "completed": completed,
        "peak_bytes": sum(map(runtime.pya_hostcuda_peak_bytes, devices)),
        "calls_by_name": {name: n for name, n in made.items() if n},
        "calls": sum(made.values()),
        "calls_second_half": sum(made.values()) - result.half_calls if completed else None,
        "mappings_left": runtime.pya_hostcuda_live(b"mappings"),
        "ns_per_op": result.ns / max(1, n_ops.value),
    }
    row["turns"] = []

    def run_again() -> tuple[float, float, int]:
        """Nanoseconds per operation outside and inside device calls, and the number of these calls."""
        before = sum(calls().values())
        caller.c10_run(program, streams, 1, None, pool_callback, ctypes.byref(result))
        inside = result.device_ns / max(1, n_ops.value)
        return result.ns / max(1, n_ops.value) - inside, inside, sum(calls().values()) - before

    # Now everything is cached: times the allocator itself, and separately the device calls.
    for _ in range(turns if completed else 0):
        wait()
        passes = sorted(run_again() for _ in range(max(1, TURN_OPS // max(1, n_ops.value))))
        row["turns"].append(passes[len(passes) // 2])
    if row["turns"]:
        row["warm_ns_per_op"], row["warm_device_ns_per_op"], row["warm_calls"] = min(row["turns"])
    return row


def _serve(allocator: str) -> None:
    """Reads one request per line, forks for each, prints one result per line."""
    caller = ctypes.CDLL(str(build_caller()), mode=ctypes.RTLD_GLOBAL)
    caller.c10_open.restype = ctypes.c_char_p
    caller.c10_load.restype = ctypes.c_void_p
    import torch

    for name in ("libtorch_cuda.so", "libc10_cuda.so"):
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            out = os.dup(1)
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), 1
            )  # answers go there; libraries may print to standard output
            wait = partial(_wait_for_turn, out) if request["together"] else _no_wait
            try:
                here = _replay_here if "path" in request else _speed_here
                row = here(request, allocator, caller, wait)
            except Exception as error:  # the parent must get an answer, whatever it is
                row = {"error": f"{type(error).__name__}: {error}"}
            os.write(write, json.dumps(row).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
        print(data.decode() or json.dumps({"died": status}), flush=True)


@dataclass(frozen=True)
class SpeedRequest:
    """A pattern to time.

    Attributes:
        n_live: blocks alive (of each thread).
        max_bytes: sizes are uniform in 1 .. max_bytes; equal: all are max_bytes.
        lifo: always replaces the last block, else a random one.
        data_ptr: uses allocate() and the DataPtr's deleter instead of raw_alloc and raw_delete.
        n: number of timed pairs, after as many to settle.
        turns: number of parts in which they are timed, each with its own figure.
        seed: for random sizes and choices.
        tail: also measures the 99.999th percentile of single pairs.
        threads: runs so many threads for `seconds` instead of n pairs.
        capacity: bytes of device memory.
    """

    n_live: int
    max_bytes: int
    equal: bool = False
    lifo: bool = False
    data_ptr: bool = False
    n: int = 200_000
    turns: int = 1
    seed: int = 1
    tail: bool = False
    threads: int = 0
    seconds: float = 1.0
    capacity: int = 128 << 30


@dataclass(frozen=True)
class ReplayRequest:
    """A trace to replay.

    Attributes:
        path: of the trace.
        capacity: bytes of device memory; 0 is ample.
        turns: how many more times to run and time it with everything cached; a turn has as many passes as make
            TURN_OPS operations, and the median turn counts.
    """

    path: str
    capacity: int = 0
    turns: int = 0


class Died(RuntimeError):
    """The process of a replay ended without an answer."""


class TorchReplay:
    """A process with torch loaded that replays traces on request; a context manager.

    Args:
        allocator: native, expandable or pyalloc, or the file of another library (benchmarks/peers).
        conf: settings of pyalloc, as in PYALLOC_CONF.
        environment: variables besides those of the host-memory runtime.
    """

    def __init__(
        self, allocator: str, conf: str = "", environment: dict[str, str] | None = None
    ) -> None:
        env = {
            **hostcuda.environment("160GB", allocator),
            "PYALLOC_CONF": conf,
            **(environment or {}),
        }
        env["PYALLOC_HOSTCUDA_DEVICES"] = "2"
        env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # otherwise every failed mapping is a warning
        command = [sys.executable, "-m", "benchmarks.torch_replay", "--serve", allocator]
        self.process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.torch = self._answer()["torch"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the replay process ended; its messages are above")
        answer: dict[str, Any] = json.loads(line)
        if "died" in answer:
            raise Died(f"the replay died with status {answer['died']}")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def replay(self, path: Path, capacity: int = 0, turns: int = 0) -> dict[str, Any]:
        """One replay in a fresh fork; see :class:`ReplayRequest`.

        Raises:
            RuntimeError: it failed, and not by running out of memory.
        """
        return self.ask(ReplayRequest(str(path), capacity, turns))

    def speed(self, request: SpeedRequest) -> dict[str, Any]:
        """Nanoseconds for one allocation and one free together, in a fresh fork."""
        return self.ask(request)

    def ask(self, request: SpeedRequest | ReplayRequest) -> dict[str, Any]:
        """The answer of a fresh fork."""
        self._send({**asdict(request), "together": False})
        return self._answer()

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def begin(self, request: SpeedRequest | ReplayRequest) -> dict[str, Any]:
        """Runs a fresh fork up to its first turn; returns ``{"turn": True}``, or the answer if there are no turns."""
        self._send({**asdict(request), "together": True})
        return self._answer()

    def turn(self) -> dict[str, Any]:
        """Lets it take its turn; returns as begin() does."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> TorchReplay:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def in_turns(
    servers: dict[str, TorchReplay], request: SpeedRequest | ReplayRequest
) -> dict[str, dict[str, Any]]:
    """Sends the same request to several allocators, which take turns.

    So what disturbs the machine for longer than a turn disturbs all of them.
    """
    answers = {name: server.begin(request) for name, server in servers.items()}
    while any("turn" in answer for answer in answers.values()):
        for name, server in servers.items():
            if "turn" in answers[name]:
                answers[name] = server.turn()
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="ALLOCATOR", required=True)
    _serve(parser.parse_args().serve)
