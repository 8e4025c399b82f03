"""pytest: limits on a test's GPU memory and on what it leaves behind, and a table of the tests that use most.

@pytest.mark.limit_gpu_memory("2 GB")     fails if the test's peak is higher, on any device
@pytest.mark.limit_gpu_leaks("1 MB")      fails if more stays in use; warmups=N: runs it N times before, for caches
pytest --fail-on-leak                     the same for all tests, with 1 MiB
pytest --gpu-memory=10                    a table of the ten that use most; 0: of all
pytest --gpu-memory-record=FOLDER         a recording of each; failures name the lines that hold the memory

All measure what the test adds to what was in use before it.  Without CUDA they do nothing.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pyalloc.common.units import parse_bytes, size
from pyalloc.errors import PyallocError, UsageError

_LEAK_BYTES = 1 << 20  # caches of libraries are smaller
_LAST_ERROR = ("last_exc", "last_value", "last_traceback", "last_type")
_PROPERTIES = ("gpu_memory_peak_bytes", "gpu_memory_before_bytes", "gpu_memory_left_bytes")
_ARGUMENTS = {"limit_gpu_memory": {"size"}, "limit_gpu_leaks": {"size", "warmups"}}
_NAMES = pytest.StashKey[set[str]]()  # of recordings so far
_LINES = 5  # of what holds the memory
_LONGEST_NAME = 120  # of a file


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("pyalloc")
    group.addoption(
        "--fail-on-leak",
        action="store_true",
        help="fail tests that leave 1 MiB or more of CUDA memory in use",
    )
    group.addoption(
        "--gpu-memory",
        type=_number,
        metavar="N",
        help="show the N tests that use most CUDA memory; 0 shows all that use any",
    )
    group.addoption(
        "--gpu-memory-record",
        type=_folder,
        metavar="FOLDER",
        help="record the CUDA memory of each test to a file in FOLDER, for `pyalloc report`",
    )


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tests (0 or more)")
    return int(text)


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    for line in (
        'limit_gpu_memory(size): fail if the test uses more CUDA memory than this, e.g. "2 GB"',
        'limit_gpu_leaks(size, warmups=0): fail if the test leaves more in use than this, e.g. "1 MB"',
    ):
        config.addinivalue_line("markers", line)


def _torch() -> Any:
    """torch, if the tests loaded it and it has devices."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _in_use(torch: Any) -> list[int]:
    return [int(torch.cuda.memory_allocated(index)) for index in range(torch.cuda.device_count())]


def _size_of(item: pytest.Item, name: str) -> int | None:
    """The size in bytes that a mark sets as the limit; None without the mark."""
    mark = item.get_closest_marker(name)
    if mark is None:
        return None
    sizes = [*mark.args, *(value for key, value in mark.kwargs.items() if key == "size")]
    odd = sorted(mark.kwargs.keys() - _ARGUMENTS[name])
    if len(sizes) != 1 or odd:
        more = f", and no argument {', '.join(odd)}" * bool(odd)
        pytest.fail(f'{name} takes one size, e.g. "2 GB"{more}', pytrace=False)
    (value,) = sizes
    try:
        return value if isinstance(value, int) and value >= 0 else parse_bytes(str(value))
    except UsageError as error:
        why = str(error)
    pytest.fail(f"{name}: {why}", pytrace=False)


def _warmups(item: pytest.Item) -> int:
    mark = item.get_closest_marker("limit_gpu_leaks")
    n = mark.kwargs.get("warmups", 0) if mark is not None else 0
    if not isinstance(n, int) or n < 0:
        pytest.fail(f"limit_gpu_leaks: warmups={n!r} is not a number (0 or more)", pytrace=False)
    return n


@dataclass
class _Measured:
    """One test.  limit: for its peak, in bytes; leaks: for what it leaves, set by who_leaks, a mark or an option."""

    item: pytest.Item
    limit: int | None
    leaks: int | None
    who_leaks: str
    before: list[int] = field(default_factory=list)
    recording: _Recording | None = None

    @classmethod
    def of(cls, item: pytest.Item) -> _Measured | None:
        """None if nobody asked to measure it."""
        limit, leaks = _size_of(item, "limit_gpu_memory"), _size_of(item, "limit_gpu_leaks")
        option, who = item.config.getoption, "limit_gpu_leaks"
        if leaks is None and option("--fail-on-leak"):
            leaks, who = _LEAK_BYTES - 1, "--fail-on-leak"
        folder = option("--gpu-memory-record")
        if option("--gpu-memory") is None and folder is None and limit is None and leaks is None:
            return None
        measured = cls(item, limit, leaks, who)
        if folder is not None:
            measured.recording = _Recording(item, folder)
        return measured

    def begin(self) -> None:
        """Notes what is in use now, which is not the test's."""
        torch = _torch()
        if torch is None:
            return
        for name in _LAST_ERROR:
            # pytest forgets the last failure only inside the next test, which would then seem to use less.
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()
        self.before = _in_use(torch)
        # If CUDA is not initialized yet, peaks start with the test anyway.
        for index in range(len(self.before) if torch.cuda.is_initialized() else 0):
            torch.cuda.reset_peak_memory_stats(index)
        if self.recording is not None:
            self.recording.begin(torch)

    def end(self, *, has_passed: bool) -> None:
        """Notes what the test used.

        Raises:
            pytest.fail.Exception: that was too much.
        """
        torch = _torch()
        if torch is None:
            return
        before = self.before or [0] * torch.cuda.device_count()  # the test itself loaded torch
        taken = [
            int(torch.cuda.max_memory_allocated(index)) - start
            for index, start in enumerate(before)
        ]
        most = max(range(len(taken)), key=taken.__getitem__)
        left = [0] * len(taken)
        if has_passed:  # else the error still holds the test's tensors
            left = _left(torch, before, _LEAK_BYTES - 1 if self.leaks is None else self.leaks)
        if self.recording is not None:
            self.recording.end()
        values = taken[most], before[most], max(left[most], 0)
        self.item.user_properties.extend(zip(_PROPERTIES, values, strict=True))
        if has_passed:
            self._check(taken, left)

    def _check(self, taken: list[int], left: list[int]) -> None:
        for index, n_bytes in enumerate(taken):
            if self.limit is not None and n_bytes > self.limit:
                self._fail(
                    f"limit_gpu_memory: the test used {_above(n_bytes, self.limit, f' on device {index}')}",
                    at_end=False,
                )
        for index, n_bytes in enumerate(left):
            if self.leaks is not None and n_bytes > self.leaks:
                where = f" in use on device {index}"
                is_mark = self.who_leaks[0] != "-"
                left_bytes = (
                    _above(n_bytes, self.leaks, where) if is_mark else size(n_bytes) + where
                )
                self._fail(
                    f"{self.who_leaks}: the test left {left_bytes}",
                    at_end=True,
                )

    def _fail(self, why: str, *, at_end: bool) -> None:
        more = "" if self.recording is None else self.recording.lines(at_end=at_end)
        pytest.fail(f"{why}{more}", pytrace=False)


@dataclass
class _Recording:
    """The recording of one test that uses CUDA; without phases, because the hooks that mark them may warn."""

    item: pytest.Item
    folder: Path
    recorder: Any = None
    is_over: bool = False
    n_made: int = 0  # requests of the process before the test

    def begin(self, torch: Any) -> None:
        """Starts to record now, or when the test starts CUDA."""
        torch.cuda._lazy_call(self._begin)

    def _begin(self) -> None:
        from pyalloc.inside import recording

        if self.is_over:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.n_made = _made()
            self.recorder = recording.begin(self._path(), "python", automatic=False, force=True)
        except (OSError, PyallocError) as error:
            self.item.add_report_section("call", "pyalloc", f"not recorded: {error}")

    def _path(self) -> Path:
        """Named after the test; equal names are numbered."""
        names = self.item.config.stash.setdefault(_NAMES, set())
        name = full = re.sub(r"\W+", "-", self.item.nodeid).strip("-")[:_LONGEST_NAME]
        number = 1
        while name in names:
            number += 1
            name = f"{full}-{number}"
        names.add(name)
        return self.folder / f"{name}.pya"

    def end(self) -> None:
        """Ends the recording; the file stays only if the test requested memory."""
        self.is_over = True
        if self.recorder is not None:
            self.recorder.stop()
            if _made() == self.n_made:
                self.recorder.path.unlink(missing_ok=True)
                self.recorder = None

    def lines(self, *, at_end: bool) -> str:
        """Which lines hold most, at the peak or of what is left, for a failure's message."""
        from pyalloc import trace
        from pyalloc.common import console
        from pyalloc.report import text

        if self.recorder is None:
            return ""
        path = self.recorder.path
        found = trace.analyse(path)
        moment = found.moments[max(found.moments)] if at_end else found.peak
        blocks = [b for b in moment.blocks if not at_end or b.alloc_event >= found.n_before]
        title = "left in use, by line" if at_end else "at the peak, by line"
        held = sum(block.bytes for block in blocks)
        told = text.rows(title, found.by_line(blocks), held, _LINES)
        return console.printable("\n".join(["", *told, f"recorded: {path}"]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measures the test."""
    measured = _Measured.of(item)
    if measured is None:
        yield
        return
    for _ in range(_warmups(item) if _torch() is not None else 0):
        item.runtest()
    measured.begin()
    outcome: Any = yield
    try:
        measured.end(has_passed=outcome.excinfo is None)
    except pytest.fail.Exception as error:
        outcome.force_exception(error)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints the table; reports of tests in other processes (pytest-xdist) arrive here, too."""
    n = config.getoption("--gpu-memory")
    if n is None:
        return
    reports = [each for some in terminalreporter.stats.values() for each in some]
    rows = []
    for report in reports:
        if getattr(report, "when", None) == "call":
            told = dict(report.user_properties)
            rows.append((*(told.get(name, 0) for name in _PROPERTIES), report.nodeid))
    rows.sort(key=lambda row: (-row[0], row[-1]))
    taking = [row for row in rows if row[0] > 0]
    terminalreporter.section("GPU memory used by tests, on top of what was in use before")
    if taking:
        terminalreporter.write_line(f"{'peak':>12}{'before':>12}{'left':>12}  test")
    for *sizes, name in taking[: n or None]:
        terminalreporter.write_line(f"{''.join(f'{_mib(size):>12}' for size in sizes)}  {name}")
    hidden = len(taking) - len(taking[: n or None])
    none = len(rows) - len(taking)
    rest = [f"{hidden:,} more used some"] * bool(hidden) + [f"{none:,} used none"] * bool(none)
    if rest:
        terminalreporter.write_line(", ".join(rest))


def _above(n_bytes: int, limit: int, where: str = "") -> str:
    """Both sizes, to the byte if they would read the same."""
    told = size(n_bytes), size(limit)
    if told[0] == told[1]:
        told = f"{n_bytes:,} bytes", f"{limit:,}"
    return f"{told[0]}{where}, the limit is {told[1]}"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _made() -> int:
    """Number of requests so far, on all devices."""
    from pyalloc.inside.eventsources import made

    return made()[0]


def _left(torch: Any, before: list[int], most: int) -> list[int]:
    """Bytes in use on each device beyond `before`; if more than `most`, without cuBLAS workspaces."""
    gc.collect()
    left = [end - start for start, end in zip(before, _in_use(torch), strict=True)]
    if max(left) > most:
        # torch allocates a workspace of 8 or 32 MiB for cuBLAS at the first matrix product, and keeps it.
        torch._C._cuda_clearCublasWorkspaces()
        left = [end - start for start, end in zip(before, _in_use(torch), strict=True)]
    return left
