"""Arguments of other types and of devices that do not exist: the errors have torch's own types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

NOT_THERE = (RuntimeError, UnicodeDecodeError)  # torch's own text has the number as a character
PUBLIC = {
    **dict.fromkeys(("cuda:0", "cuda", 0, None), None),
    **dict.fromkeys((-1, 2, 64, 127, 128, 2**31, 2**64, "cuda:7", "nonsense", ""), NOT_THERE),
    **dict.fromkeys((torch.device("cuda:9"),), NOT_THERE),
    **dict.fromkeys(("cpu", torch.device("cpu"), "meta"), (ValueError,)),
}
OF_THE_ACCELERATOR = (
    "memory_stats",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
)
OF_A_DEVICE = (*OF_THE_ACCELERATOR, "memory_stats_as_nested_dict", "memory_summary")
NO_NUMBERS = (None, 1.5, float("nan"), "a", "cuda:0", b"0", torch.device("cuda:0"), [], (0, 0), {})


class Index:
    """Objects that convert to a number."""

    def __index__(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _has_cuda() -> None:
    torch.zeros(1, device="cuda")


def check(
    expected: tuple[type[BaseException], ...] | None, call: Callable[..., Any], *args: Any
) -> None:
    """The call raises one of these; None: nothing."""
    if expected is None:
        call(*args)
        return
    with pytest.raises(expected):
        call(*args)


@pytest.mark.parametrize("name", OF_A_DEVICE)
def test_devices(name: str) -> None:
    for device, expected in PUBLIC.items():
        check(expected, getattr(torch.cuda, name), device)
    check((RuntimeError,), getattr(torch.cuda, name), True)


def test_devices_of_a_fraction() -> None:
    ask = torch.cuda.get_per_process_memory_fraction
    for device, expected in PUBLIC.items():
        check((ValueError,) if device == "cuda" else expected, ask, device)
    check(None, ask, True)


@pytest.mark.parametrize("name", OF_THE_ACCELERATOR)
def test_devices_of_the_accelerator(name: str) -> None:
    ask = getattr(pytest.importorskip("torch.accelerator.memory"), name)
    for device, expected in PUBLIC.items():
        is_long = isinstance(device, int) and device >= 128
        check((TypeError,) if is_long else expected, ask, device)


@pytest.mark.parametrize(
    "name", ["memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats"]
)
def test_numbers_of_devices(name: str) -> None:
    """What torch's own Python, and other libraries too, ask of torch._C."""
    ask = getattr(torch._C, "_cuda_" + name)
    for odd in (*NO_NUMBERS, True, Index(), torch.tensor(0)):
        check((RuntimeError,), ask, odd)
    check(None, ask, 1)
    numpy = pytest.importorskip("numpy")
    check(None, ask, numpy.int64(1))
    check(NOT_THERE, ask, numpy.int64(2))


@pytest.mark.parametrize(
    "name",
    [
        "_cuda_getMemoryFraction",
        "_accelerator_getDeviceStats",
        "_accelerator_resetPeakStats",
        "_accelerator_resetAccumulatedStats",
    ],
)
def test_numbers_of_devices_of_newer_functions(name: str) -> None:
    """These also take whatever converts to a number."""
    ask = getattr(torch._C, name, None)
    if ask is None:
        pytest.skip("this torch has none")
    for odd in NO_NUMBERS:
        check((TypeError,), ask, odd)
    for fine in (0, True, Index(), torch.tensor(0)):
        check(None, ask, fine)
    check((TypeError,), ask, torch.zeros(2))


def test_snapshots_of_pools() -> None:
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < (2, 14):
        pytest.skip("what was checked here was another")
    ask = torch._C._cuda_memorySnapshot
    for odd in (0, 1.5, "a", "cuda", b"x", [], [0, 0], {}, (), (1,), ("a", "b"), (True, 0)):
        check((RuntimeError,), ask, odd)
    for odd in (None, 0, 1, "a", 1.5):
        check((RuntimeError,), ask, (0, 0, odd))
    check((ValueError,), ask, (2**64, 0))
    for fine in (None, (0, 0), (1, 2), (0, 0, True), (0, 0, False), (-1, 0)):
        check(None, ask, fine)
    check((RuntimeError,), torch.cuda.memory_snapshot, "cuda")
    check((RuntimeError,), torch.cuda.memory_snapshot, (0, 0), 1)


@pytest.mark.parametrize("is_on", [False, True])
def test_addresses_of_tracebacks(is_on: bool) -> None:
    ask = getattr(torch.cuda.memory, "_allocation_traceback", None)
    if ask is None:
        pytest.skip("this torch has none")
    torch.cuda.memory._record_memory_history("all" if is_on else None)
    try:
        for odd in NO_NUMBERS:
            check((TypeError,), ask, odd)
        check((OverflowError,), ask, 2**64)
        for fine in (-1, 0, 1, 2**63, True):
            check(None, ask, fine)
    finally:
        torch.cuda.memory._record_memory_history(None)


def test_lengths_and_actions_of_a_history() -> None:
    record = torch.cuda.memory._record_memory_history
    try:
        for entries in (9, True, Index(), torch.tensor(9)):
            record(max_entries=entries)
            x = torch.zeros(3, device="cuda")
            del x
            assert any(torch.cuda.memory._snapshot()["device_traces"])
        for odd in (1.5, "a", -1, 2**64):
            check((TypeError,), lambda odd=odd: record(max_entries=odd))
        for odd in itertools.chain(NO_NUMBERS[1:6], (torch.zeros(2), 5, [5])):
            check((TypeError,), lambda odd=odd: record(skip_actions=odd))
    finally:
        record(None)
