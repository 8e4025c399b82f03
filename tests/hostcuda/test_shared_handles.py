"""Memory of cuMemCreate as a file descriptor: in this process again, and in another."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PAGE, Cuda, Prop

POSIX_FD, FABRIC = 1, 8
INVALID, NOT_SUPPORTED = 1, 801
BYTES = 2 * PAGE
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def handle(cuda: Cuda) -> Iterator[int]:
    """Of two pages, made to be exported."""
    handle = cuda.out("cuMemCreate", BYTES, ctypes.byref(Prop(1, POSIX_FD, 1, 0)), 0)
    yield handle
    cuda.ok("cuMemRelease", handle)


def export(cuda: Cuda, handle: int) -> int:
    fd = ctypes.c_int(-1)
    cuda.ok("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FD, 0)
    return fd.value


def mapped(cuda: Cuda, handle: int) -> int:
    at = cuda.reserve(BYTES)
    cuda.ok("cuMemMap", at, BYTES, 0, handle, 0)
    assert cuda.access(at, BYTES) == 0
    return at


def unmap(cuda: Cuda, at: int) -> None:
    cuda.ok("cuMemUnmap", at, BYTES)
    cuda.ok("cuMemAddressFree", at, BYTES)


def test_the_same_bytes_under_a_second_handle(cuda: Cuda, handle: int) -> None:
    used = cuda.used()
    fd = export(cuda, handle)
    again = cuda.out("cuMemImportFromShareableHandle", fd, POSIX_FD)
    first, second = mapped(cuda, handle), mapped(cuda, again)
    assert cuda.put(first + PAGE, b"there") == 0
    assert cuda.get(second + PAGE, PAGE)[:5] == b"there"
    third = cuda.out("cuMemImportFromShareableHandle", fd, POSIX_FD)  # reading has not changed it
    os.close(fd)  # the handles do not need it any more
    cuda.ok("cuMemRelease", third)
    assert cuda.used() == used  # memory that was there before
    unmap(cuda, first)
    unmap(cuda, second)
    cuda.ok("cuMemRelease", again)


def test_imports_need_no_open_file_each(cuda: Cuda) -> None:
    files = len(os.listdir("/proc/self/fd"))
    handles = [
        cuda.out("cuMemCreate", PAGE, ctypes.byref(Prop(1, POSIX_FD, 1, 0)), 0) for _ in range(50)
    ]
    for handle in list(handles):
        fd = export(cuda, handle)
        handles.append(cuda.out("cuMemImportFromShareableHandle", fd, POSIX_FD))
        os.close(fd)
    assert (
        len(os.listdir("/proc/self/fd")) <= files + 2
    )  # the device's own, and one for all imports
    for handle in handles:
        cuda.ok("cuMemRelease", handle)
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def others_file(*words: bytes) -> int:
    """The memory of a process that shares the device: a page of each word."""
    fd = os.memfd_create("pyalloc-hostcuda-0")
    os.ftruncate(fd, BYTES)
    for i, word in enumerate(words):
        os.pwrite(fd, word, i * PAGE)
    return fd


def page_of(cuda: Cuda, fd: int, page: int) -> int:
    os.lseek(fd, page * PAGE + 1, os.SEEK_SET)
    return cuda.out("cuMemImportFromShareableHandle", fd, POSIX_FD)


def test_anothers_file_stays_open_as_long_as_something_of_it_is_here(cuda: Cuda) -> None:
    """And its ranges are those of that file, whatever others come and go here."""

    def n_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    files = n_files()
    one, two = others_file(b"one", b"more"), others_file(b"two")
    handles = [page_of(cuda, one, 0), page_of(cuda, two, 0), page_of(cuda, one, 1)]
    os.close(one)
    os.close(two)
    assert n_files() == files + 2
    cuda.ok("cuMemRelease", handles[0])
    at = cuda.reserve(PAGE)
    for handle, word in ((handles[2], b"more"), (handles[1], b"two")):
        cuda.ok("cuMemMap", at, PAGE, 0, handle, 0)
        assert cuda.access(at, PAGE) == 0
        assert cuda.get(at, len(word)) == word
        cuda.ok("cuMemUnmap", at, PAGE)
        cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", at, PAGE)
    assert n_files() == files


OTHER = """
import ctypes, sys
from tests.hostcuda.conftest import Cuda
from tests.hostcuda.test_shared_handles import POSIX_FD, mapped
from pathlib import Path
cuda = Cuda(Path(sys.argv[1]))
cuda.ok("cudaSetDevice", 0)
at = mapped(cuda, cuda.out("cuMemImportFromShareableHandle", int(sys.argv[2]), POSIX_FD))
print(cuda.get(at, 5).decode(), flush=True)
input()
print(cuda.get(at, 5).decode(), flush=True)
cuda.put(at, b"other")
"""


def test_another_process_maps_it_and_keeps_it(cuda: Cuda, libraries: Path) -> None:
    """Its bytes stay until it too releases them, whatever is made in between."""
    handle = cuda.out("cuMemCreate", BYTES, ctypes.byref(Prop(1, POSIX_FD, 1, 0)), 0)
    at = mapped(cuda, handle)
    cuda.put(at, b"words")
    fd = export(cuda, handle)
    command = [sys.executable, "-c", OTHER, str(libraries), str(fd)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        os.close(fd)
        assert child.stdout is not None
        assert child.stdout.readline() == "words\n"
        unmap(cuda, at)
        cuda.ok("cuMemRelease", handle)
        other = cuda.out("cuMemCreate", BYTES, ctypes.byref(Prop(1, 0, 1, 0)), 0)
        at = mapped(cuda, other)
        cuda.put(at, b"newer")
        assert child.communicate("\n")[0] == "words\n"
    assert child.returncode == 0
    assert cuda.get(at, 5) == b"newer"
    unmap(cuda, at)
    cuda.ok("cuMemRelease", other)


def test_what_cannot_be_exported_or_imported(cuda: Cuda, handle: int, tmp_path: Path) -> None:
    out, fd = ctypes.c_uint64(), ctypes.c_int()
    plain = cuda.handle()
    prop = Prop(1, FABRIC, 1, 0)  # torch asks for these first and accepts no refusal
    assert cuda("cuMemCreate", ctypes.byref(out), BYTES, ctypes.byref(prop), 0) == NOT_SUPPORTED
    calls = [
        (plain, POSIX_FD, 0, INVALID),  # not made for it
        (handle, FABRIC, 0, NOT_SUPPORTED),
        (handle, POSIX_FD, 1, INVALID),  # flags are zero
        (handle + 1, POSIX_FD, 0, INVALID),
    ]
    for which, kind, flags, error in calls:
        name = "cuMemExportToShareableHandle"
        assert cuda(name, ctypes.byref(fd), which, kind, flags) == error
    cuda.ok("cuMemRelease", plain)
    name = "cuMemImportFromShareableHandle"
    with (tmp_path / "file").open("w+") as file:
        file.write("some text")
        file.flush()
        assert cuda(name, ctypes.byref(out), file.fileno(), POSIX_FD) == INVALID
    assert cuda(name, ctypes.byref(out), file_that_is_closed(), POSIX_FD) == INVALID


def file_that_is_closed() -> int:
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd
