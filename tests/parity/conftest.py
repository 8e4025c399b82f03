"""Parity: each test of this folder runs twice on real PyTorch, once on torch's own allocator, once on pyalloc.

torch can have one allocator per process, so for each allocator a separate pytest runs each file, on the host-memory
runtime.  Each collected item is one such run; a line at the end counts the tests inside.

To run one by hand: python tests/parity/run.py native|pyalloc tests/parity/test_x.py [pytest options]
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dry_support import COUNTED, PATIENCE_S, ROOT, warm_python

ALLOCATOR = os.environ.get("PYALLOC_PARITY")
ALLOCATORS = ("native", "pyalloc")
ON_CARD = os.environ.get("PYALLOC_PARITY_ON") == "card"  # tests/gpu/parity_on_card.py

if ALLOCATOR is None:
    from parity.run import OPTIONS, environment

    class ParityFailure(Exception):
        """The output of the inner pytest."""

    class ParityItem(pytest.Item):
        """One file on one allocator."""

        def runtest(self) -> None:
            python = warm_python(self.path.read_text())
            done = subprocess.run(
                [python, *OPTIONS, str(self.path)],
                cwd=ROOT,
                env={**environment(self.name), "PYALLOC_PARITY_PYTHON": python},
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
            )
            for number, outcome in re.findall(
                r"(\d+) (passed|failed|skipped|xfailed|errors?)", done.stdout[-300:]
            ):
                self.user_properties.append((f"{COUNTED} on {self.name}", (int(number), outcome)))
            if done.returncode != 0:
                raise ParityFailure(f"{done.stdout[-12000:]}\n{done.stderr[-4000:]}")

        def repr_failure(
            self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
        ) -> str:
            if isinstance(excinfo.value, ParityFailure):
                return str(excinfo.value)
            return str(excinfo.getrepr())  # an error of these lines, not of the tests

        def reportinfo(self) -> tuple[Path, None, str]:
            return self.path, None, f"{self.path.name} on {self.name}"

    class ParityFile(pytest.File):
        """A test file, as its two runs."""

        def collect(self) -> Iterator[pytest.Item]:
            for name in ALLOCATORS:
                item = ParityItem.from_parent(self, name=name)
                item.add_marker("torch")
                item.add_marker("slow")
                yield item

    def pytest_pycollect_makemodule(
        module_path: Path, parent: pytest.Collector
    ) -> pytest.Collector:
        return ParityFile.from_parent(parent, path=module_path)

else:
    import gc

    import torch

    # clean_device() collects twice a test: then without looking at all of torch's own objects.
    gc.collect()
    gc.freeze()

    def is_pyalloc() -> bool:
        return ALLOCATOR == "pyalloc"

    @pytest.fixture(autouse=True)
    def clean_device() -> Iterator[None]:
        """Each test begins with no tensors, an empty cache and fresh statistics; pyalloc's invariants hold after it."""
        _clean()
        yield
        _clean()
        if is_pyalloc():
            from pyalloc import _core

            for device in range(torch.cuda.device_count()):
                assert _core.check(device) == 0

    def _clean() -> None:
        gc.collect()
        torch.cuda.set_device(0)
        if not ON_CARD:
            _runtime().pya_hostcuda_set_event_delay(0)
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(None)
        for device in range(torch.cuda.device_count()):
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.set_device(0)  # torch 2.9 leaves that call's device as the current one
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)

    def _runtime():  # type: ignore[no-untyped-def]
        import ctypes

        return ctypes.CDLL("libcuda.so.1")

    @pytest.fixture
    def runtime():  # type: ignore[no-untyped-def]
        """The host-memory runtime's control functions: event delays, call counts, live objects."""
        import ctypes

        if ON_CARD:
            pytest.skip("needs the host-memory runtime")
        library = _runtime()
        for name in ("calls", "live", "used_bytes", "launches"):
            getattr(library, f"pya_hostcuda_{name}").restype = ctypes.c_uint64
        library.pya_hostcuda_set_event_delay.argtypes = [ctypes.c_uint64]
        return library

    @pytest.fixture
    def allocator() -> str:
        return ALLOCATOR
