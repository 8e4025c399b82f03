"""A torch that lacks what the bridge looks up: the rest works, and status() says what does not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from dry_support import dry_environment, run_checked, warmed

# Finds everything for everybody, but for pyalloc not what HIDDEN names.  Its last call is a jump: RTLD_NEXT means what
# comes after the caller's library.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *
dlsym(void *library, const char *name) {
    static void *(*next)(void *, const char *);
    const char *hidden = getenv("HIDDEN");
    char key[600];
    Dl_info caller;
    if (next == NULL) {
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    }
    snprintf(key, sizeof key, ",%s,", name);
    if (hidden != NULL && strstr(hidden, key) != NULL &&
        dladdr(__builtin_return_address(0), &caller) != 0 &&
        strstr(caller.dli_fname, "/_core") != NULL) {
        return NULL;
    }
    return next(library, name);
}
"""
WRAPPER = "N5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator"
STREAM = "_ZNK3c104cuda10CUDAStream6streamEv"
LOCATION = "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
PROGRAM = """
import torch, pyalloc
from pyalloc import _core

lost = [detail for _, works, detail in pyalloc.install().status().features if not works]
assert lost and any(lost[0] in line for line in pyalloc.status().lines()), pyalloc.status()
data = torch.arange(2**18)
tensor = data.cuda()
side = torch.cuda.Stream()
tensor.record_stream(side)
with torch.cuda.stream(side):
    other = torch.empty(2**22, device="cuda")
assert torch.equal(tensor.cpu(), data)
assert torch.cuda.memory_allocated() == data.nbytes + 2**24
del tensor
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = other + 1
graph.replay()
try:
    torch.empty(2**40, device="cuda")
    raise SystemExit("a terabyte was there")
except RuntimeError as error:
    assert "out of memory" in str(error), error
assert torch.cuda.memory_snapshot() and torch.cuda.memory_summary()
del other, result, graph
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0 and _core.check(0) == 0
print("done")
"""


Lacking = Callable[[list[str], str], str]


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lacking]:
    """Runs programs in which pyalloc does not find some symbols; returns their output."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    shim = tmp_path_factory.mktemp("shim") / "hide.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-o", shim, "-"]
    subprocess.run(command, input=SHIM, text=True, check=True)
    env = dry_environment()
    env["LD_PRELOAD"] = f"{shim}{os.pathsep}{env['LD_PRELOAD']}"
    with warmed(env) as python:

        def run(hidden: list[str], program: str) -> str:
            command = [python, "-W", "ignore", "-c", program]
            return run_checked(command, env={**env, "HIDDEN": f",{','.join(hidden)},"}).stdout

        yield run


@pytest.mark.torch
@pytest.mark.parametrize(
    "hidden",
    [
        [f"_ZTV{WRAPPER}E"],
        [STREAM],
        ["_ZN3c104cuda14current_deviceEv", f"_Z{WRAPPER}14shareIpcHandleEPv"],
        [f"_ZN3c10{name}C1{LOCATION}" for name in ("16OutOfMemoryError", "5Error")],
    ],
    ids=["vtable", "streams", "device", "errors"],
)
def test_symbols_of_torch(lacking: Lacking, hidden: list[str]) -> None:
    assert lacking(hidden, PROGRAM).split() == ["done"]


@pytest.mark.torch
def test_an_allocator_of_a_pool_that_is_passed_in_an_unknown_way(lacking: Lacking) -> None:
    """With a torch that is not out yet."""
    hidden = [
        f"_ZN{room}4cuda7MemPoolC1E{passed}{flags}"
        for room, passed in (
            ("3c10", "PNS0_20CUDACachingAllocator13CUDAAllocatorE"),
            ("2at", "PN3c104cuda20CUDACachingAllocator13CUDAAllocatorE"),
            ("2at", "St10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEE"),
        )
        for flags in ("b", "bb", "bbb")
    ]
    program = """
import torch, pyalloc
from pyalloc import _core

torch.zeros(1)
found = {what: (works, detail) for what, works, detail in pyalloc.install().status().features}
print(*found["MemPool(allocator)"], sep=": ")
theirs = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, "pya_torch_alloc", "pya_torch_free")
try:
    torch.cuda.MemPool(theirs.allocator())
except RuntimeError as error:
    print(error)
torch.cuda.MemPool()
"""
    assert lacking([], program).startswith("True: passed as a ")
    why = "it is unknown how this torch passes a MemPool's allocator; use MemPool() without one"
    assert lacking(hidden, program).splitlines() == [f"False: {why}", f"pyalloc: {why}"]


def test_a_checkpoint_where_there_was_no_tensor_yet(dry_python) -> None:  # type: ignore[no-untyped-def]
    """Then the layout of this torch's DataPtr is found out."""
    out = dry_python(
        """
        import torch
        torch.cuda.init()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            address = torch.cuda.caching_allocator_alloc(1 << 20)
        state = torch._C._cuda_getCheckpointState(0, pool.id)
        torch.cuda.caching_allocator_delete(address)
        torch._C._cuda_setCheckpointPoolState(0, state, [], [])
        print([block["address"] == address for part in pool.snapshot() for block in part["blocks"]][:1])
        """,
        install=True,
    ).stdout
    assert out.split() == ["[True]"]


def test_a_setter_that_torch_lacks_is_told(dry_python) -> None:  # type: ignore[no-untyped-def]
    dry_python(
        """
        import torch, pyalloc

        class Lacking:
            def __init__(self, inner):
                self.inner = inner
            def __getattr__(self, name):
                if name == "set_record_stream_fn":
                    raise AttributeError(name)
                return getattr(self.inner, name)

        known = torch.cuda.memory.CUDAPluggableAllocator.allocator
        torch.cuda.memory.CUDAPluggableAllocator.allocator = lambda self: Lacking(known(self))
        status = pyalloc.install().status()
        assert ("set_record_stream_fn", False, "torch has no such setter") in status.features
        assert "  NO  set_record_stream_fn: torch has no such setter" in status.lines()
        torch.empty(5, device="cuda")
        assert pyalloc.status().allocations == 1
        """
    )
