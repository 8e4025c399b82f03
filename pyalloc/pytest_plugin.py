"""pytest: a limit on a test's GPU memory, and tests that leave memory behind.

@pytest.mark.limit_gpu_memory("2 GB")     fails when the test's peak is above, on any device
pytest --fail-on-leak                     fails tests after which more memory is in use than before

Both see what the test adds to what was in use before it.  Without CUDA they do nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_LEAK_BYTES = 1 << 20  # caches of libraries are smaller


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --fail-on-leak."""
    group = parser.getgroup("pyalloc")
    group.addoption(
        "--fail-on-leak",
        action="store_true",
        help="fail tests that leave 1 MiB or more of CUDA memory in use",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers", 'limit_gpu_memory(size): fail when the test takes more, e.g. "2 GB"'
    )


def _torch() -> Any:
    """torch, if the tests loaded it and it has devices."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _in_use(torch: Any) -> list[int]:
    return [int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count())]


def _limit(item: pytest.Item) -> int | None:
    from pyalloc.dryrun import parse_bytes
    from pyalloc.errors import UsageError

    mark = item.get_closest_marker("limit_gpu_memory")
    if mark is None:
        return None
    if len(mark.args) != 1:
        pytest.fail('limit_gpu_memory takes one size, e.g. "2 GB"', pytrace=False)
    value = mark.args[0]
    try:
        return value if isinstance(value, int) and value >= 0 else parse_bytes(str(value))
    except UsageError as error:
        why = str(error)
    pytest.fail(f"limit_gpu_memory: {why}", pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measures around the test."""
    limit, leaks = _limit(item), bool(item.config.getoption("--fail-on-leak"))
    torch = _torch() if limit is not None or leaks else None
    before: list[int] = []
    if torch is not None:
        gc.collect()
        before = _in_use(torch)
        # Where CUDA is not up yet, peaks begin with the test anyway.
        for index in range(len(before) if torch.cuda.is_initialized() else 0):
            torch.cuda.reset_peak_memory_stats(index)
    outcome: Any = yield
    torch = _torch() if limit is not None or leaks else None
    if torch is None or outcome.excinfo is not None:
        return
    before = before or [0] * torch.cuda.device_count()  # the test itself loaded torch
    try:
        if limit is not None:
            _check_limit(torch, before, limit)
        if leaks:
            _check_leak(torch, before)
    except pytest.fail.Exception as error:
        outcome.force_exception(error)


def _check_limit(torch: Any, before: list[int], limit: int) -> None:
    for index, start in enumerate(before):
        taken = int(torch.cuda.max_memory_allocated(index)) - start
        if taken > limit:
            pytest.fail(
                f"limit_gpu_memory: device {index} needed {taken / 2**20:.1f} MiB, "
                f"the limit is {limit / 2**20:.1f} MiB",
                pytrace=False,
            )


def _check_leak(torch: Any, before: list[int]) -> None:
    gc.collect()
    if _left(torch, before):
        # torch makes cuBLAS a workspace at the first matrix product and keeps it for the next: 8 MiB or 32.
        torch._C._cuda_clearCublasWorkspaces()
    for index, left in _left(torch, before):
        pytest.fail(
            f"--fail-on-leak: the test left {left / 2**20:.1f} MiB in use on device {index}",
            pytrace=False,
        )


def _left(torch: Any, before: list[int]) -> list[tuple[int, int]]:
    """Devices with so many more bytes in use."""
    pairs = enumerate(zip(before, _in_use(torch), strict=True))
    return [(index, end - start) for index, (start, end) in pairs if end - start >= _LEAK_BYTES]
