"""Virtual memory management: pages, addresses, mappings, access."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from .conftest import PAGE, Access, Cuda, Prop

INVALID, NOMEM, INVALID_DEVICE = 1, 2, 101


def test_two_mappings_of_a_handle_share_bytes(cuda: Cuda) -> None:
    handles = [cuda.handle() for _ in range(3)]
    home, alias = cuda.reserve(3 * PAGE), cuda.reserve(2 * PAGE)
    for i, handle in enumerate(handles):
        cuda.ok("cuMemMap", home + i * PAGE, PAGE, 0, handle, 0)
    for i, handle in enumerate((handles[2], handles[0])):
        cuda.ok("cuMemMap", alias + i * PAGE, PAGE, 0, handle, 0)
    assert cuda.access(home, 3 * PAGE) == 0
    assert cuda.access(alias, 2 * PAGE) == 0
    cuda.ok("cudaMemcpy", alias + PAGE - 4, b"12345678", 8, 1)
    assert cuda.get(home + 3 * PAGE - 4, 4) == b"1234"
    assert cuda.get(home, 4) == b"5678"
    cuda.ok("cuMemUnmap", alias, 2 * PAGE)
    assert cuda.get(home, 4) == b"5678"
    cuda.ok("cuMemUnmap", home, 3 * PAGE)
    for handle in handles:
        cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", home, 3 * PAGE)
    cuda.ok("cuMemAddressFree", alias, 2 * PAGE)


def test_released_handle_lives_until_its_last_unmap(cuda: Cuda) -> None:
    before = cuda.used()
    start, handle = cuda.reserve(PAGE), cuda.handle()
    cuda.ok("cuMemMap", start, PAGE, 0, handle, 0)
    cuda.ok("cuMemRelease", handle)
    assert cuda.used() - before == PAGE
    assert cuda("cuMemRelease", handle) == INVALID
    retained = cuda.out("cuMemRetainAllocationHandle", start)
    assert retained == handle
    cuda.ok("cuMemUnmap", start, PAGE)
    assert cuda.used() - before == PAGE
    cuda.ok("cuMemRelease", retained)
    assert cuda.used() == before
    assert cuda("cuMemRelease", retained) == INVALID
    cuda.ok("cuMemAddressFree", start, PAGE)


def test_mapped_memory_needs_access(cuda: Cuda) -> None:
    start, handle = cuda.reserve(2 * PAGE), cuda.handle(2 * PAGE)
    cuda.ok("cuMemMap", start, 2 * PAGE, 0, handle, 0)
    assert cuda.put(start, b"x") == INVALID
    assert cuda.access(start, 2 * PAGE, flags=1) == 0
    assert cuda.put(start, b"x") == INVALID
    assert cuda.get(start, 1) == b"\0"
    assert cuda.access(start, PAGE) == INVALID  # of whole mappings only
    assert cuda.access(start + PAGE, PAGE) == INVALID
    assert cuda.put(start, b"x") == INVALID
    assert cuda.access(start, 2 * PAGE) == 0
    assert cuda.put(start + PAGE - 1, b"xy") == 0
    assert cuda.access(start, 2 * PAGE, flags=0) == 0
    assert cuda.put(start, b"x") == INVALID
    cuda.ok("cuMemUnmap", start, 2 * PAGE)
    assert cuda.access(start, 2 * PAGE) == INVALID
    cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", start, 2 * PAGE)


def test_who_has_access_is_told(cuda: Cuda) -> None:
    start, handle = cuda.reserve(2 * PAGE), cuda.handle()
    place, flags = Access(1, 0, 0), ctypes.c_ulonglong(7)

    def access_at(address: int) -> int:
        return cuda("cuMemGetAccess", ctypes.byref(flags), ctypes.byref(place), address)

    assert access_at(start) == INVALID  # nothing is mapped
    cuda.ok("cuMemMap", start, PAGE, 0, handle, 0)
    for given in (0, 1, 3):
        assert cuda.access(start, PAGE, flags=given) == 0
        assert access_at(start + PAGE - 1) == 0
        assert flags.value == given
    assert access_at(start + PAGE) == INVALID
    place.device = 1
    assert access_at(start) == INVALID_DEVICE
    place.device, place.location_type = 0, 2
    assert access_at(start) == INVALID
    assert flags.value == 3
    cuda.ok("cuMemUnmap", start, PAGE)
    cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", start, 2 * PAGE)


def test_pages_are_of_two_mebibytes(cuda: Cuda) -> None:
    size, prop = ctypes.c_size_t(), Prop(1, 0, 1, 0)
    for option in (0, 1):
        cuda.ok("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(prop), option)
        assert size.value == PAGE
    for option in (-1, 2):
        code = cuda(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(prop),
            ctypes.c_int(option),
        )
        assert code == INVALID


def test_addresses_can_be_asked_for_and_are_given_once(cuda: Cuda) -> None:
    """If they are taken, or are not page addresses, others are given."""
    sizes = (2, 6, 2)
    low, middle, high = (cuda.reserve(n * PAGE) for n in sizes)
    cuda.ok("cuMemAddressFree", middle, 6 * PAGE)

    def reserve_at(want: int, n: int) -> int:
        return cuda.out("cuMemAddressReserve", n * PAGE, 0, want, 0)

    inside = reserve_at(middle + 2 * PAGE, 2)
    assert inside == middle + 2 * PAGE
    before, after = reserve_at(middle, 2), reserve_at(middle + 4 * PAGE, 2)
    assert (before, after) == (middle, middle + 4 * PAGE)
    others = [reserve_at(want, 2) for want in (low, middle + PAGE, high, middle + 512, 12345)]
    all_of_them = sorted([low, before, inside, after, high, *others])
    assert all(b - a >= 2 * PAGE for a, b in pairwise(all_of_them))
    behind = max(all_of_them) + (1 << 30)  # nobody has been there
    far = [reserve_at(behind, 2), reserve_at(behind + 2 * PAGE, 2)]
    assert far == [behind, behind + 2 * PAGE]
    assert cuda("cuMemAddressReserve", ctypes.byref(ctypes.c_uint64()), 1 << 45, 0, 0, 0) == NOMEM
    for address in all_of_them + far:
        cuda.ok("cuMemAddressFree", address, 2 * PAGE)


def test_wrong_maps_and_unmaps_are_refused(cuda: Cuda) -> None:
    start, handle, other = cuda.reserve(4 * PAGE), cuda.handle(2 * PAGE), cuda.handle()
    wrong = [
        (start, PAGE, 0, handle),  # half of the handle
        (start, 2 * PAGE, PAGE, handle),  # an offset
        (start + 512, 2 * PAGE, 0, handle),  # between pages
        (start + 3 * PAGE, 2 * PAGE, 0, handle),  # past the reservation
        (start, 2 * PAGE, 0, handle + 1),  # no such handle
        (start + 4 * PAGE, PAGE, 0, other),  # not reserved
    ]
    for address, size, offset, what in wrong:
        assert cuda("cuMemMap", address, size, offset, what, 0) == INVALID
    cuda.ok("cuMemMap", start, 2 * PAGE, 0, handle, 0)
    assert cuda("cuMemMap", start + PAGE, PAGE, 0, other, 0) == INVALID
    assert cuda("cuMemUnmap", start, PAGE) == INVALID
    assert cuda("cuMemUnmap", start, 4 * PAGE) == INVALID
    assert cuda("cuMemAddressFree", start, 4 * PAGE) == INVALID
    assert cuda("cudaFree", start) == INVALID
    cuda.ok("cuMemMap", start + 2 * PAGE, PAGE, 0, other, 0)
    cuda.ok("cuMemUnmap", start, 3 * PAGE)
    assert cuda("cuMemUnmap", start, PAGE) == INVALID
    assert cuda("cuMemAddressFree", start, PAGE) == INVALID
    cuda.ok("cuMemAddressFree", start, 4 * PAGE)
    assert cuda("cuMemAddressFree", start, 4 * PAGE) == INVALID
    cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemRelease", other)


def test_reused_pages_are_clean(cuda: Cuda) -> None:
    start = cuda.reserve(PAGE)
    for _ in range(2):
        handle = cuda.handle()
        cuda.ok("cuMemMap", start, PAGE, 0, handle, 0)
        assert cuda.access(start, PAGE) == 0
        assert cuda.get(start, 8) == bytes(8)
        assert cuda.put(start, b"old data") == 0
        cuda.ok("cuMemUnmap", start, PAGE)
        cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", start, PAGE)


def test_many_pages_stay_within_the_limit_of_mappings(cuda: Cuda) -> None:
    n = 20_000  # 40 GiB of address space; separate mappings would exceed vm.max_map_count twice over
    start = cuda.reserve(n * PAGE)
    handles = [cuda.handle() for _ in range(n)]
    for i, handle in enumerate(handles):
        cuda.ok("cuMemMap", start + i * PAGE, PAGE, 0, handle, 0)
    assert cuda.access(start, n * PAGE) == 0
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert sum(1 for line in maps if "pyalloc-hostcuda" in line) < 100
    cuda.ok("cuMemUnmap", start, n * PAGE)
    for handle in handles:
        cuda.ok("cuMemRelease", handle)
    cuda.ok("cuMemAddressFree", start, n * PAGE)


def test_too_few_addresses_are_told(libraries: Path) -> None:
    """Under `ulimit -v` nothing can be allocated, and torch would only say that the device is full."""
    source = f"""
import ctypes, resource
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
driver = ctypes.CDLL("{libraries}/libcuda.so.1")
driver.cuInit(0)
start = ctypes.c_uint64()
for _ in range(2):
    print(driver.cuMemAddressReserve(ctypes.byref(start), *map(ctypes.c_uint64, (2 << 20, 0, 0, 0))))
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2\n2\n"
    assert done.stderr.count("ulimit -v unlimited") == 1


def test_files_that_may_only_be_small_hold_what_fits(libraries: Path) -> None:
    """Under `ulimit -f`: a device's memory is a file, which need not be as large as it could get."""
    source = f"""
import ctypes, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, 9 << 20))
driver = ctypes.CDLL("{libraries}/libcuda.so.1")
driver.cuInit(0)
context, start = ctypes.c_void_p(), ctypes.c_uint64()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
for size in (8 << 20, 2 << 20):
    print(driver.cuMemAlloc_v2(ctypes.byref(start), ctypes.c_size_t(size)))
ctypes.memset(start.value, 1, 8 << 20)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n2\n"
