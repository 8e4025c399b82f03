"""Devices as the driver and the runtime describe them: names, bus addresses, properties, errors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from pyalloc.outside import hostcuda

from .conftest import PAGE, Access, Cuda, Prop

INVALID, INVALID_DEVICE = 1, 101
BYTES = {12: 1032, 13: 1008}  # of cudaDeviceProp
NAME, UUID, MEMORY = 0, 256, 288  # offsets in it, in either layout
BUS = {12: 584, 13: 568}
MULTIPROCESSORS = {12: 388, 13: 384}
BUS_ATTRIBUTE, MULTIPROCESSORS_ATTRIBUTE = 33, 16
UNTOUCHED = 0x5A


def number(raw: bytes, at: int, n: int) -> int:
    return int.from_bytes(raw[at : at + n], "little")


@pytest.fixture(params=[12, 13])
def of_major(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[tuple[int, Cuda]]:
    """`cuda` is here for its checks at the end."""
    del cuda
    yield request.param, Cuda(hostcuda.LIBRARIES, request.param)


def test_properties_and_attributes_say_the_same(of_major: tuple[int, Cuda]) -> None:
    major, cuda = of_major
    buffer = ctypes.create_string_buffer(bytes([UNTOUCHED]) * 2048, 2048)
    cuda.ok("cudaGetDeviceProperties" + "_v2" * (major == 12), buffer, 0)
    raw = buffer.raw
    assert set(raw[BYTES[major] :]) == {UNTOUCHED}
    assert raw[BYTES[major] - 1] != UNTOUCHED
    name, uuid = ctypes.create_string_buffer(UUID), ctypes.create_string_buffer(16)
    cuda.ok("cuDeviceGetName", name, UUID, 0)
    cuda.ok("cuDeviceGetUuid_v2", uuid, 0)
    assert raw[NAME:UUID].split(b"\0")[0] == name.value
    assert raw[UUID : UUID + 16] == uuid.raw
    assert number(raw, MEMORY, 8) == cuda.out("cuDeviceTotalMem_v2", 0)
    for attribute, at in (
        (BUS_ATTRIBUTE, BUS[major]),
        (MULTIPROCESSORS_ATTRIBUTE, MULTIPROCESSORS[major]),
    ):
        value = cuda.out("cudaDeviceGetAttribute", attribute, 0)
        assert value == cuda.out("cuDeviceGetAttribute", attribute, 0) == number(raw, at, 4) > 0


def test_properties_of_what_is_not_there(of_major: tuple[int, Cuda]) -> None:
    _, cuda = of_major
    buffer = ctypes.create_string_buffer(2048)
    value = ctypes.c_uint64()
    for device in (-1, 1, 64):
        assert cuda("cudaGetDeviceProperties", buffer, device) == INVALID_DEVICE
        assert cuda("cudaDeviceGetAttribute", ctypes.byref(value), 1, device) == INVALID_DEVICE
        assert cuda("cuDeviceGetAttribute", ctypes.byref(value), 1, device) == INVALID_DEVICE
        cuda("cudaGetLastError")
    assert set(buffer.raw) == {0}
    assert cuda("cudaGetDeviceProperties", None, 0) == INVALID
    assert cuda("cudaDeviceGetAttribute", None, 1, 0) == INVALID
    for attribute in (0, -1):
        assert cuda("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0) == INVALID
    cuda("cudaGetLastError")


def test_a_device_is_found_by_its_place_on_the_bus(cuda: Cuda) -> None:
    place = ctypes.create_string_buffer(64)
    cuda.ok("cudaDeviceGetPCIBusId", place, 64, 0)
    domain, bus, device = place.value.split(b":")
    assert (len(domain), int(bus, 16)) == (4, cuda.out("cuDeviceGetAttribute", BUS_ATTRIBUTE, 0))
    assert device.split(b".")[1] == b"0"
    found = ctypes.c_int(7)
    cuda.ok("cudaDeviceGetByPCIBusId", ctypes.byref(found), place)
    assert found.value == 0
    same = ctypes.create_string_buffer(64)
    cuda.ok("cuDeviceGetPCIBusId", same, 64, 0)
    assert same.value == place.value
    found = ctypes.c_int(7)
    for absent in (b"0000:77:00.0", b"nonsense", b""):
        text = ctypes.create_string_buffer(absent)
        assert cuda("cudaDeviceGetByPCIBusId", ctypes.byref(found), text) != 0
        assert found.value == 7
    for device_number in (-1, 1):
        assert cuda("cudaDeviceGetPCIBusId", same, 64, device_number) == INVALID_DEVICE
        assert cuda("cuDeviceGetPCIBusId", same, 64, device_number) == INVALID_DEVICE
    room = len(place.value) + 1
    cuda.ok("cudaDeviceGetPCIBusId", same, room, 0)
    assert cuda("cudaDeviceGetPCIBusId", same, room - 1, 0) == INVALID
    cuda("cudaGetLastError")


def test_the_driver_counts_and_names_devices(cuda: Cuda) -> None:
    assert cuda.out("cuDeviceGetCount") == cuda.out("cudaGetDeviceCount") == 1
    found = ctypes.c_int(7)
    cuda.ok("cuDeviceGet", ctypes.byref(found), 0)
    assert found.value == 0
    found, size = ctypes.c_int(7), ctypes.c_uint64(7)
    name = ctypes.create_string_buffer(b"untouched", 256)
    for device in (-1, 1):
        assert cuda("cuDeviceGet", ctypes.byref(found), device) == INVALID_DEVICE
        assert cuda("cuDeviceGetName", name, 256, device) == INVALID_DEVICE
        assert cuda("cuDeviceTotalMem_v2", ctypes.byref(size), device) == INVALID_DEVICE
        assert cuda("cuDeviceGetUuid_v2", name, device) == INVALID_DEVICE
    assert (found.value, size.value, name.value) == (7, 7, b"untouched")
    cuda.ok("cuDeviceGetName", name, 256, 0)
    whole = name.value
    assert len(whole) > 8
    short = ctypes.create_string_buffer(b"untouched", 256)
    cuda.ok("cuDeviceGetName", short, 5, 0)
    assert short.raw[:10] == whole[:4] + b"\0ched\0"[:6]


def test_a_device_is_no_peer_of_its_own_nor_of_what_is_not_there(cuda: Cuda) -> None:
    can = ctypes.c_int(7)
    for pair in ((0, 1), (1, 0), (-1, 0), (0, -1)):
        assert cuda("cudaDeviceCanAccessPeer", ctypes.byref(can), *pair) == INVALID_DEVICE
    assert can.value == 7
    cuda.ok("cudaDeviceCanAccessPeer", ctypes.byref(can), 0, 0)
    assert can.value == 0
    for peer in (0, 1, -1):
        assert cuda("cudaDeviceEnablePeerAccess", peer, 0) == INVALID_DEVICE
        assert cuda("cudaDeviceDisablePeerAccess", peer) == INVALID_DEVICE
    cuda("cudaGetLastError")


def test_only_managed_memory_is_prefetched_and_advised(cuda: Cuda) -> None:
    """The whole range counts, down to its last byte."""
    managed, plain = cuda.out("cudaMallocManaged", 4 * PAGE, 1), cuda.malloc(PAGE)
    place = ctypes.c_uint64.from_buffer(Access(1, 0, 0)).value
    old = Cuda(hostcuda.LIBRARIES, 12)

    def codes(address: int, size: int) -> set[int]:
        found = {
            cuda("cudaMemPrefetchAsync", address, size, place, 0, 0),
            cuda("cudaMemAdvise", address, size, 3, place),
            old("cudaMemPrefetchAsync", address, size, 0, 0),
            old("cudaMemAdvise", address, size, 3, 0),
        }
        cuda("cudaGetLastError"), old("cudaGetLastError")
        return found

    assert codes(managed, 4 * PAGE) == codes(managed + PAGE, 3 * PAGE) == {0}
    for address, size in ((plain, PAGE), (managed, 4 * PAGE + 1), (managed + PAGE, 3 * PAGE + 1)):
        assert codes(address, size) == {INVALID}, (address - managed, size)
    cuda.ok("cudaFree", plain)
    cuda.ok("cudaFree", managed)


def test_a_handle_is_imported_with_all_its_pages(cuda: Cuda) -> None:
    """What another process sent has the size of what it exported, and its bytes, wherever they lie in its file."""
    posix = 1
    prop = Prop(1, posix, 1, 0)
    for n_pages in (1, 3):
        before = cuda.used()
        own = cuda.out("cuMemCreate", n_pages * PAGE, ctypes.byref(prop), 0)
        fd = ctypes.c_int()
        cuda.ok("cuMemExportToShareableHandle", ctypes.byref(fd), own, posix, 0)
        other = cuda.out("cuMemImportFromShareableHandle", fd.value, posix)
        os.close(fd.value)
        views = []
        for handle in (own, other):
            at = cuda.reserve(n_pages * PAGE)
            cuda.ok("cuMemMap", at, n_pages * PAGE, 0, handle, 0)
            assert cuda.access(at, n_pages * PAGE) == 0
            views.append(at)
        for page in range(n_pages):
            assert cuda.put(views[0] + page * PAGE, bytes([page + 1]) * 9) == 0
        for page in range(n_pages):
            assert cuda.get(views[1] + page * PAGE, 9) == bytes([page + 1]) * 9
        too_many = cuda.reserve((n_pages + 1) * PAGE)
        assert cuda("cuMemMap", too_many, (n_pages + 1) * PAGE, 0, other, 0) == INVALID
        cuda.ok("cuMemAddressFree", too_many, (n_pages + 1) * PAGE)
        for at, handle in zip(views, (own, other), strict=True):
            cuda.ok("cuMemUnmap", at, n_pages * PAGE)
            cuda.ok("cuMemAddressFree", at, n_pages * PAGE)
            cuda.ok("cuMemRelease", handle)
        assert cuda.used() == before


def on_two_devices(libraries: Path, program: str) -> list[str]:
    """The output of a program that has `cuda` for two devices, `Prop` and `Access`."""
    begin = "import ctypes, sys\nfrom hostcuda.conftest import PAGE, Access, Cuda, Prop\n"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{begin}from pathlib import Path\ncuda = Cuda(Path(sys.argv[1]))\n{dedent(program)}",
            str(libraries),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYALLOC_HOSTCUDA_DEVICES": "2",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
    )
    return done.stdout.split()


def test_a_reset_ends_peer_access(libraries: Path) -> None:
    found = on_two_devices(
        libraries,
        """
        cuda.ok("cudaSetDevice", 0)
        cuda.ok("cudaDeviceEnablePeerAccess", 1, 0)
        print(cuda("cudaDeviceEnablePeerAccess", 1, 0))
        cuda.ok("cudaDeviceReset")
        print(cuda("cudaDeviceDisablePeerAccess", 1), cuda("cudaDeviceEnablePeerAccess", 1, 0))
        """,
    )
    assert found == ["704", "705", "0"]


def test_a_devices_pool_is_its_own(libraries: Path) -> None:
    found = on_two_devices(
        libraries,
        """
        cuda.ok("cudaSetDevice", 0)
        props = ctypes.create_string_buffer(88)  # cudaMemPoolProps: pinned, of device 1
        props[0], props[8], props[12] = 1, 1, 1
        pool = cuda.out("cudaMemPoolCreate", props)
        print(cuda("cudaDeviceSetMemPool", 0, pool), cuda("cudaDeviceSetMemPool", 1, pool))
        """,
    )
    assert found == [str(INVALID), "0"]


def test_copies_between_devices_pass_from_one_range_of_addresses_to_the_next(
    libraries: Path,
) -> None:
    """Each page of both must be accessible to the device that copies."""
    found = on_two_devices(
        libraries,
        """
        cuda.ok("cudaSetDevice", 0)
        first = cuda.reserve(PAGE)
        second = cuda.out("cuMemAddressReserve", PAGE, 0, first + PAGE, 0)
        assert second == first + PAGE
        for start in (first, second):
            cuda.ok("cuMemMap", start, PAGE, 0, cuda.handle(device=1), 0)
            assert cuda.access(start, PAGE, device=1) == 0
        plain = cuda.malloc(2 * PAGE)
        assert cuda.put(first + PAGE - 4, b"together") == 0
        for n_open in range(3):
            print(cuda("cudaMemcpy", plain, first + PAGE - 4, 8, 3))
            if n_open < 2:
                assert cuda.access([first, second][n_open], PAGE, device=0) == 0
        print(cuda.get(plain, 8).decode())
        """,
    )
    assert found == [str(INVALID), str(INVALID), "0", "together"]


@pytest.mark.parametrize(
    ("threads", "shared", "blocks"),
    [
        (1024, 0, 2),
        (32, 0, 32),
        (128, 48 << 10, 4),
        (128, 227 << 10, 1),
        (128, 228 << 10, 0),
        (128, 2**64 - 1024, 0),
        (2048, 0, 0),
    ],
)
def test_occupancy_is_bounded_by_threads_and_shared_memory(
    of_major: tuple[int, Cuda], threads: int, shared: int, blocks: int
) -> None:
    for name in (
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    ):
        found = ctypes.c_int(-1)
        assert of_major[1](name, ctypes.byref(found), 0, threads, shared) == 0
        assert found.value == blocks
