"""Trains examples/seq2seq.py under torch's allocator, its expandable segments, and pyalloc; prints one table.

On the GPU where there is one, else as a dry run.  `make demo` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
STEPS = 4
EXAMPLE = Path(__file__).parent / "seq2seq.py"
ALLOCATORS = ("native", "expandable", "pyalloc")


@dataclass(frozen=True)
class Row:
    """One run; bytes."""

    allocator: str
    peak_allocated: int
    peak_reserved: int
    device_calls: int
    steps: int

    def line(self) -> str:
        """The row as printed."""
        ratio = self.peak_reserved / self.peak_allocated
        sizes = f"{self.peak_allocated / MIB:>15.1f}{self.peak_reserved / MIB:>15.1f}{ratio:>8.3f}"
        return f"{self.allocator:<12}{sizes}{self.device_calls:>14}{self.steps:>7}"


def has_gpu() -> bool:
    """Asked in a process of its own, so that this one stays without CUDA."""
    source = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return (
        subprocess.run([sys.executable, "-W", "ignore", "-c", source], check=False).returncode == 0
    )


def run(command: list[str], env: dict[str, str]) -> None:
    """Runs to the end; its output is shown only when it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nthis failed: {' '.join(command)}")


def train(allocator: str, on_gpu: bool, folder: Path) -> Row:
    """One training run; the figures are those the program and the device counted in it."""
    figures, counts = folder / f"{allocator}.json", folder / f"{allocator}.dryrun.json"
    program = [sys.executable, str(EXAMPLE), "--steps", str(STEPS), "--json", str(figures)]
    pyalloc = [sys.executable, "-m", "pyalloc"]
    env = dict(os.environ)
    if not on_gpu:
        run([*pyalloc, "dryrun", "--allocator", allocator, "--json", str(counts), *program], env)
    elif allocator == "pyalloc":
        run([*pyalloc, "run", *program], env)
    else:
        setting = "expandable_segments:" + str(allocator == "expandable")
        run(program, {**env, "PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting})
    found = json.loads(figures.read_text())
    calls = found["device_calls"] if on_gpu else json.loads(counts.read_text())["memory_calls"]
    return Row(
        allocator,
        found["peak_allocated_bytes"],
        found["peak_reserved_bytes"],
        calls,
        found["steps"],
    )


def main() -> None:
    """Three runs, one table."""
    on_gpu = has_gpu()
    where = "on the GPU" if on_gpu else "as a dry run: no GPU, nothing is computed"
    print(f"training {EXAMPLE.name} for {STEPS} steps, {where}", flush=True)
    print(
        f"{'allocator':<12}{'peak allocated':>15}{'peak reserved':>15}{'ratio':>8}{'device calls':>14}{'steps':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for allocator in ALLOCATORS:
            print(train(allocator, on_gpu, Path(folder)).line(), flush=True)
    print("MiB; ratio of the peaks; device calls: those that allocate, map or free memory")


if __name__ == "__main__":
    main()
