"""Shared by benchmarks.repeated and benchmarks.training: one process per training, and what it used."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import time
from typing import Any

from benchmarks import hostcuda
from benchmarks.torch_replay import MEMORY_CALLS, ROOT

HOST_MEMORY = "the host-memory runtime"
#: of the host-memory runtime: an H100's
CAPACITY = "80GB"
ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


class HostRuntime:
    """What the host-memory runtime counted."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.pya_hostcuda_peak_bytes.restype = ctypes.c_size_t
        self._library.pya_hostcuda_calls.restype = ctypes.c_uint64

    def n_calls(self) -> int:
        return sum(self._library.pya_hostcuda_calls(name.encode()) for name in MEMORY_CALLS)

    def peak_bytes(self) -> int:
        return int(self._library.pya_hostcuda_peak_bytes(0))


class Card:
    """What torch's statistics tell about a card."""

    def n_calls(self) -> int:
        import torch

        stats = torch.cuda.memory_stats()
        return int(stats["num_device_alloc"] + stats["num_device_free"])

    def peak_bytes(self) -> int:
        import torch

        return int(torch.cuda.max_memory_reserved())


def counter_of(device: str) -> HostRuntime | Card:
    """In a child: the counter for a device, host or cuda."""
    return Card() if device == "cuda" else HostRuntime()


def device_name(device: str) -> str:
    """In a child: the card's name, or that of the host-memory runtime."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else HOST_MEMORY


def environment(device: str, allocator: str) -> dict[str, str]:
    """The environment of a child that trains on this device."""
    if device == "cuda":
        return hostcuda.of_allocator(allocator)
    return hostcuda.environment(CAPACITY, allocator)


class ChildError(RuntimeError):
    """A training failed.

    Attributes:
        reason: one line: the error's own, or the last line of output.
        said: its last lines on standard error.
    """

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(f"{reason}: {said}")
        self.reason, self.said = reason, said


def _reason(said: str, code: int) -> str:
    """The line that names the error; the last lines of a CUDA error are advice."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if ERROR.match(line)]
    return (named or lines or [f"exit code {code}"])[-1]


def in_child(
    module: str, words: list[str], env: dict[str, str], limit_s: float | None = None
) -> dict[str, Any]:
    """Runs ``python -m module words``; returns the row that it prints last, with the seconds of the whole process.

    Raises:
        ChildError: it failed, or took longer than limit_s.
    """
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        raise ChildError(f"took longer than {limit_s:g} s", said[-2000:]) from None
    if done.returncode != 0:
        raise ChildError(_reason(done.stderr, done.returncode), done.stderr[-2000:])
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**row, "process_s": round(time.perf_counter() - began, 2)}
