"""What stacks cost and hold, beyond what torch's own allocator can be tested for as well."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dry_support import preloaded

from pyalloc import _core

pytestmark = pytest.mark.torch

COUNTING = """
#define _GNU_SOURCE
#include <dlfcn.h>

int n_lookups;

int
dladdr(const void *address, Dl_info *info) {
    static int (*next)(const void *, Dl_info *);
    if (next == 0) {
        next = dlvsym(RTLD_NEXT, "dladdr", "GLIBC_2.2.5");
    }
    n_lookups++;
    return next(address, info);
}
"""


def skip_without(name: str) -> None:
    """Skips if torch.cuda.memory has no such function."""
    if not hasattr(pytest.importorskip("torch").cuda.memory, name):
        pytest.skip(f"this torch has no {name}()")


@pytest.fixture
def counting(tmp_path: Path) -> dict[str, str]:
    """The environment of a program whose calls of dladdr() are counted in `n_lookups`."""
    return {"LD_PRELOAD": preloaded(COUNTING, tmp_path)}


def test_an_address_is_looked_up_once(dry_python, counting) -> None:  # type: ignore[no-untyped-def]
    """Once, however many entries, live blocks and snapshots name it: each lookup takes 0.2 ms in libtorch."""
    dry_python(
        """
        import ctypes
        import torch

        count = ctypes.c_int.in_dll(ctypes.CDLL(None), "n_lookups")

        def lookups(function):
            before = count.value
            function()
            return count.value - before

        memory = torch.cuda.memory
        memory._record_memory_history(stacks="all")
        keep = [torch.empty(1000, device="cuda") for _ in range(200)]
        snapshot = memory._snapshot()
        entries = snapshot["device_traces"][0]
        assert len(entries) > 200
        assert any(frame["name"].startswith("at::") for frame in entries[-1]["frames"])
        first = count.value
        assert 0 < first < 200, first
        # Another ran in between: the frames of a second place in the program.
        more = torch.empty(1000, device="cuda")
        assert lookups(memory._snapshot) < 50
        assert lookups(memory._snapshot) == 0
        assert lookups(torch.cuda.memory_snapshot) == 0
        if hasattr(memory, "_allocation_traceback"):  # not in torch 2.9
            assert lookups(lambda: memory._allocation_traceback(keep[5].data_ptr())) == 0
        """,
        install=True,
        env=counting,
        cold=True,
    )


def test_equal_stacks_are_one_list(dry_python) -> None:  # type: ignore[no-untyped-def]
    """So a snapshot of many steps takes no more time, and no more of a file, than its places in the program."""
    dry_python(
        """
        import torch

        def stacks():
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            return [entry["frames"] for entry in entries if "frames" in entry]

        torch.cuda.memory._record_memory_history(stacks="all")
        for _ in range(100):
            torch.empty(1000, device="cuda")
        first = stacks()
        assert len(first) >= 200 and len({id(frames) for frames in first}) < 10
        second = stacks()
        assert second[:100] == first[:100]
        # A program may change what it got: torch's own does, for graphs.
        assert {id(frame) for frame in first[-1]}.isdisjoint(id(frame) for frame in second[-1])
        """,
        install=True,
    )


def test_a_traceback_is_one_look_up(dry_python) -> None:  # type: ignore[no-untyped-def]
    """However many blocks are live."""
    skip_without("_allocation_traceback")
    dry_python(
        """
        import torch
        from pyalloc import _core

        def make():
            return torch.empty(1000, device="cuda")

        traceback = torch.cuda.memory._allocation_traceback
        before = make()
        torch.cuda.memory._record_memory_history(stacks="python")
        tensor = make()
        _core.snapshot = None  # of all blocks
        assert [frame["name"] for frame in traceback(tensor.data_ptr())][:2] == ["make", "<module>"]
        address = tensor.data_ptr()
        for other in (address + 512, 0, 12345, before.data_ptr()):
            assert traceback(other) is None, other
        del tensor
        assert traceback(address) is None
        """,
        install=True,
    )


def test_frames_of_cpp_are_the_same_in_every_process(dry_python) -> None:  # type: ignore[no-untyped-def]
    """Also static functions, whose names are not in the library; pyalloc's own frames are not among them."""
    said = [
        dry_python(
            """
            import torch

            torch.cuda.memory._record_memory_history(stacks="all")
            x = torch.empty(1000, device="cuda")
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            (frames,) = [entry["frames"] for entry in entries if entry["action"] == "alloc"]
            for frame in frames:
                print(frame["name"], frame["filename"])
            """,
            install=True,
            cold=True,  # another address for each library
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert any(re.match(r"libtorch_cuda\.so\+0x[0-9a-f]+ /", line) for line in said[0])
    assert not any(Path(_core.__file__).name in line or "Pluggable" in line for line in said[0])
    # In torch 2.9, that address has static functions of its library within.
    named = [line for line in said[0] if not line.startswith("libtorch_cpu.so+")]
    assert named[0].startswith("at::detail::empty_generic"), said[0][:3]
    assert said[0][-1].startswith("<module> ")


@pytest.mark.parametrize("context", [None, "state", "all"])
def test_labels_of_what_is_forgotten_go(dry_python, context: str | None) -> None:  # type: ignore[no-untyped-def]
    """Also if the history has no stacks, whose captures free what nobody has any more."""
    skip_without("_set_memory_metadata")
    out = dry_python(
        f"""
        import sys
        import torch
        sys.path.insert(0, "tests")
        from growth import left_by

        memory = torch.cuda.memory
        memory._record_memory_history(context={context!r}, max_entries=10)
        memory._set_memory_metadata("a label")
        print(left_by(lambda: torch.empty(1000, device="cuda")))
        """,
        install=True,
    ).stdout
    assert out.split() == ["None"]
