"""Records the workloads: ``python -m benchmarks.workloads.record [NAME ...] [--force] [--list]``.

Each runs in a process of its own, with real torch on the host-memory CUDA runtime and a pluggable allocator that writes
the trace (recorder.c).  The result is benchmarks/traces/NAME.pya.xz; an existing one is kept unless --force is given.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import hostcuda
from benchmarks.compiling import is_older, making
from benchmarks.helping import HelpFormatter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRACES = HERE.parent / "traces"
BUILD = ROOT / "build" / "recorder"
MODULES = ("language", "vision", "other", "unseen")
#: virtual host memory to record in; what kernels would write to is never touched
ARENA_BYTES = 1 << 40
KIND_STEP, KIND_USER = 17, 21


def build_recorder() -> Path:
    """Compiles the recorder unless it is newer than its sources."""
    library = BUILD / "librecorder.so"
    sources = [
        HERE / "recorder.c",
        *(ROOT / "csrc" / "replay" / name for name in ("trace_write.c", "varint.c")),
    ]
    sources.append(ROOT / "csrc" / "core" / "base.c")
    if is_older(library, sources):
        command = ["cc", "-std=c11", "-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden"]
        with making(library) as made:
            command += ["-o", str(made), *map(str, sources), "-lpthread", "-ldl"]
            subprocess.run(command, check=True)
    return library


def names() -> dict[str, str]:
    """Workloads and their modules, without importing torch: finds functions decorated with workload()."""
    found = {}
    for module in MODULES:
        tree = ast.parse((HERE / f"{module}.py").read_text())
        for node in tree.body:
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            if any(isinstance(m, ast.Call) and ast.unparse(m.func) == "workload" for m in marks):
                assert isinstance(node, ast.FunctionDef)
                found[node.name] = module
    return found


def record_here(name: str, path: str, times: int) -> None:
    """In the child: runs one workload, with its steps `times` over, and writes its trace."""
    library = build_recorder()
    recorder = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        str(library), "recorder_alloc", "recorder_release"
    )
    hooks = allocator.allocator()
    for setter, symbol in (
        ("set_record_stream_fn", "recorder_record_stream"),
        ("set_reset_fn", "recorder_reset"),
    ):
        getattr(hooks, setter)(ctypes.cast(getattr(recorder, symbol), ctypes.c_void_p).value)
    torch.cuda.memory.change_current_allocator(allocator)
    if recorder.recorder_open(os.fsencode(path), ctypes.c_size_t(ARENA_BYTES)) != 0:
        raise SystemExit("the recorder could not be opened: is the host-memory runtime loaded?")

    importlib.import_module(f"benchmarks.workloads.{names()[name]}")
    from benchmarks.workloads.common import WORKLOADS, Run

    work = WORKLOADS[name]
    recorder.recorder_count.restype = ctypes.c_uint64

    def mark(kind: int, number: int, text: str) -> None:
        recorder.recorder_mark(kind, ctypes.c_uint64(number), text.encode())

    for text in (
        f"workload={name}",
        f"about={work.about}",
        f"torch={torch.__version__}",
        "clock=events",
    ):
        mark(KIND_USER, 0, text)
    torch.manual_seed(1)
    run = Run(
        rng=random.Random(1),
        mark_step=lambda number: mark(KIND_STEP, number, "step"),
        times=times,
    )
    work.body(run)
    n = recorder.recorder_count()
    if recorder.recorder_close() != 0:
        raise SystemExit("the trace could not be written")
    print(f"{name}: {n} events", flush=True)
    # Tensors freed with the interpreter would call an allocator whose trace is closed.
    os._exit(0)


def record(name: str, target: Path) -> None:
    """In the parent: runs the child and compresses its trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.pya"
        command = [sys.executable, "-m", "benchmarks.workloads.record", "--child", name, str(path)]
        began = time.monotonic()
        subprocess.run(command, check=True, env=hostcuda.environment(), cwd=ROOT)
        data = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        part = target.with_suffix(".part")
        part.write_bytes(data)
        part.replace(target)
        print(f"{name}: {len(data) / 1e3:.0f} kB, {time.monotonic() - began:.0f} s", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="workloads to record (default: all)"
    )
    parser.add_argument("--force", action="store_true", help="record again where a trace exists")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, path = arguments.child
        record_here(name, path, arguments.times)
    if arguments.list:
        print("\n".join(names()))
        return 0
    missing = hostcuda.why_not()
    unknown = set(arguments.names) - set(names())
    if missing or unknown:
        print(
            missing or f"unknown: {', '.join(sorted(unknown))}; --list prints the names",
            file=sys.stderr,
        )
        return 1
    TRACES.mkdir(exist_ok=True)
    build_recorder()
    failed = []
    for name in arguments.names or names():
        target = TRACES / f"{name}.pya.xz"
        if target.exists() and not arguments.force:
            print(f"{name}: kept, {target.stat().st_size / 1e3:.0f} kB (--force records again)")
            continue
        try:
            record(name, target)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: failed with {error.returncode}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
