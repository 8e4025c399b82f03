"""Plain memory: return values, errors, bytes; what is counted, and failures on request."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from uuid import UUID

import pytest

from pyalloc.common import elf
from pyalloc.outside import hostcuda

from .conftest import LIVE, PAGE, Access, Cuda, Prop

INVALID, OUT_OF_MEMORY, INVALID_SYMBOL, INVALID_DEVICE = 1, 2, 13, 101
INVALID_HANDLE, NOT_READY, REGISTERED = 400, 600, 712


def test_malloc_counts_whole_pages_and_is_aligned(cuda: Cuda) -> None:
    before = cuda.used()
    pointers = [cuda.malloc(size) for size in (1, PAGE // 2, PAGE, PAGE + 1)]
    assert cuda.used() - before == 5 * PAGE
    assert all(pointer % 512 == 0 for pointer in pointers)
    for pointer in pointers:
        cuda.ok("cudaFree", pointer)


def test_small_mallocs_share_pages(cuda: Cuda) -> None:
    before = cuda.used()
    pointers = [cuda.malloc(size) for size in (1, 512, 513)]
    pointers += [cuda.malloc(1) for _ in range(PAGE // 512 - len(pointers) - 1)]
    assert cuda.used() - before == PAGE
    cuda.control("set_capacity", 0, ctypes.c_size_t(cuda.used()))
    assert cuda("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 1) == OUT_OF_MEMORY
    cuda.ok("cudaFree", pointers.pop())
    pointers.append(cuda.malloc(1))
    cuda.control("set_capacity", 0, ctypes.c_size_t(80 << 30))
    pointers.append(cuda.malloc(1))
    assert cuda.used() - before == 2 * PAGE
    while pointers:
        assert cuda.used() - before == (1 + (len(pointers) >= PAGE // 512)) * PAGE
        cuda.ok("cudaFree", pointers.pop())


def test_malloc_of_nothing_is_null_and_freeing_null_is_fine(cuda: Cuda) -> None:
    assert cuda.malloc(0) == 0
    cuda.ok("cudaFree", 0)


@pytest.mark.parametrize("offset", [512, PAGE, 12345])
def test_freeing_what_was_not_allocated_is_refused(cuda: Cuda, offset: int) -> None:
    pointer = cuda.malloc(PAGE)
    assert cuda("cudaFree", pointer + offset) == INVALID
    cuda.ok("cudaFree", pointer)
    assert cuda("cudaFree", pointer) == INVALID
    assert cuda("cudaGetLastError") == INVALID
    assert cuda("cudaGetLastError") == 0


def test_capacity_ends_memory_and_mem_get_info_is_true(cuda: Cuda) -> None:
    cuda.control("set_capacity", 0, ctypes.c_size_t(cuda.used() + 3 * PAGE))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    first = cuda.malloc(2 * PAGE)
    cuda.ok("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    assert free.value == PAGE
    assert cuda("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 2 * PAGE) == OUT_OF_MEMORY
    handle = cuda.handle()
    assert cuda("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 1) == OUT_OF_MEMORY
    cuda.ok("cuMemRelease", handle)
    second = cuda.malloc(1)
    cuda.ok("cudaFree", first)
    cuda.ok("cudaFree", second)


def test_nvml_says_the_same(cuda: Cuda, libraries: Path) -> None:
    nvml = ctypes.CDLL(str(libraries / "libnvidia-ml.so.1"))
    device, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
    text, uuid = ctypes.create_string_buffer(48), ctypes.create_string_buffer(16)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetUUID(device, text, 48) == 0
    cuda.ok("cuDeviceGetUuid_v2", uuid, 0)
    assert text.value.decode() == f"GPU-{UUID(bytes=uuid.raw)}"
    assert nvml.nvmlDeviceGetUUID(device, text, 40) == 7  # too short
    pointer = cuda.malloc(3 * PAGE)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for more in (5 * PAGE, 0, -PAGE):  # the last one: less than is in use
        cuda.control("set_capacity", 0, ctypes.c_size_t(cuda.used() + more))
        cuda.ok("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
        assert list(memory) == [total.value, free.value, cuda.used()]
        assert free.value == max(more, 0)
    cuda.ok("cudaFree", pointer)


def test_nvml_shows_an_idle_card(cuda: Cuda, libraries: Path) -> None:
    """What programs log, such as torch.cuda.utilization()."""
    nvml = ctypes.CDLL(str(libraries / "libnvidia-ml.so.1"))
    device, values = ctypes.c_void_p(), (ctypes.c_uint * 3)()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    for name, arguments, zeros in (
        ("UtilizationRates", (), [0, 1]),
        ("Temperature", (0,), [0]),
        ("TemperatureV", (), [2]),
        ("PowerUsage", (), [0]),
        ("TotalEnergyConsumption", (), [0, 1]),
        ("ClockInfo", (1,), [0]),
    ):
        values[:] = [7, 7, 7]
        get = getattr(nvml, f"nvmlDeviceGet{name}")
        assert get(device, *arguments, values) == 0
        assert list(values) == [0 if i in zeros else 7 for i in range(3)], name
        assert get(None, *arguments, values) == 2
    memory, longer = (ctypes.c_uint64 * 3)(), (ctypes.c_uint64 * 5)(2)
    assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
    assert nvml.nvmlDeviceGetMemoryInfo_v2(device, longer) == 0
    assert list(longer) == [2, memory[0], 0, memory[1], memory[2]]


def test_an_error_is_remembered_until_it_is_asked_for(cuda: Cuda) -> None:
    assert cuda("cudaFree", 12345) == INVALID
    cuda.ok("cudaFree", cuda.malloc(1))
    assert cuda("cudaPeekAtLastError") == INVALID
    assert cuda("cudaGetLastError") == INVALID
    cuda.ok("cudaGetLastError")


def test_errors_have_the_names_of_whoever_is_asked(cuda: Cuda) -> None:
    cuda.runtime.cudaGetErrorName.restype = ctypes.c_char_p
    assert cuda.runtime.cudaGetErrorName(OUT_OF_MEMORY) == b"cudaErrorMemoryAllocation"
    assert cuda.runtime.cudaGetErrorName(54321) == b"unrecognized error code"
    said = ctypes.c_char_p()
    for name, expected in (("Name", b"CUDA_ERROR_OUT_OF_MEMORY"), ("String", b"out of memory")):
        cuda.ok(f"cuGetError{name}", OUT_OF_MEMORY, ctypes.byref(said))
        assert said.value == expected
        assert cuda(f"cuGetError{name}", 54321, ctypes.byref(said)) == INVALID
        assert said.value is None


def test_copies_and_fills_are_real(cuda: Cuda) -> None:
    a, b = cuda.malloc(PAGE), cuda.malloc(PAGE)
    data = bytes(range(256)) * 4096
    cuda.ok("cudaMemcpy", a, data, len(data), 1)
    cuda.ok("cudaMemcpy", b, a, len(data), 3)
    assert cuda.get(b, len(data)) == data
    cuda.ok("cudaMemset", b, 7, 1000)
    assert cuda.get(b, 1001) == b"\7" * 1000 + data[1000:1001]
    cuda.ok("cudaMemset", b, 0, PAGE)
    assert cuda.get(b, PAGE) == bytes(PAGE)
    cuda.ok("cudaFree", a)
    cuda.ok("cudaFree", b)


def test_time_inside_device_calls_grows_in_them_and_nowhere_else(cuda: Cuda) -> None:
    timed = ("cudaMalloc", "cudaFree", "cuMemCreate", "cuMemRelease", "cudaEventCreate")
    cuda.control("reset_calls")
    assert cuda.device_ns() == 0 and all(cuda.device_ns(name) == 0 for name in timed)
    # Neither waiting outside device calls nor calls that do not concern an allocator count.
    current = ctypes.c_int()
    time.sleep(0.05)
    cuda.ok("cudaGetDevice", ctypes.byref(current))
    assert cuda.control("calls", b"cudaGetDevice") == 1
    assert cuda.device_ns() == 0 and cuda.device_ns("cudaGetDevice") == 0

    began = time.monotonic_ns()
    pointers = [cuda.malloc(PAGE) for _ in range(50)]
    taken = cuda.device_ns("cudaMalloc")
    for pointer in pointers:
        cuda.ok("cudaFree", pointer)
    cuda.ok("cuMemRelease", cuda.handle())
    event = cuda.out("cudaEventCreate")
    cuda.ok("cudaEventDestroy", event)
    took = time.monotonic_ns() - began
    # Soon after the start, each question converts ticks into nanoseconds anew: a little may come or go.
    assert taken > 0 and abs(cuda.device_ns("cudaMalloc") - taken) <= taken // 100 + 1
    parts = [cuda.device_ns(name) for name in (*timed, "cudaEventDestroy")]
    assert all(part > 0 for part in parts)
    assert abs(sum(parts) - cuda.device_ns()) <= cuda.device_ns() // 100 + len(parts)
    assert cuda.device_ns() <= took + took // 100
    # A refused call is a call.
    cuda.control("reset_calls")
    assert cuda.device_ns() == 0
    assert cuda("cudaFree", 12345) == INVALID
    assert cuda.device_ns("cudaFree") > 0
    assert cuda("cudaGetLastError") == INVALID
    cuda.control("reset_calls")
    assert cuda.device_ns() == 0


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("value", [0, 0x21])
def test_fills_write_what_they_are_asked_for_and_no_more(
    cuda: Cuda, width: int, value: int
) -> None:
    start = cuda.malloc(PAGE)
    assert cuda.put(start, b"\xff" * 100) == 0
    cuda.ok(f"cuMemsetD{8 * width}_v2", start + 8, value, 5)
    filled = value.to_bytes(width, "little") * 5
    assert cuda.get(start, 100) == b"\xff" * 8 + filled + b"\xff" * (92 - len(filled))
    assert cuda(f"cuMemsetD{8 * width}_v2", start + PAGE - width, value, 2) == INVALID
    if width > 1:
        assert cuda(f"cuMemsetD{8 * width}_v2", start + 1, value, 1) == INVALID
    cuda.ok("cudaFree", start)


def test_fills_write_host_memory_that_the_device_knows(cuda: Cuda) -> None:
    pinned, own = cuda.out("cudaHostAlloc", 100, 0), ctypes.create_string_buffer(b"\xff" * 99)
    cuda.ok("cudaMemset", pinned, 0x21, 100)
    cuda.ok("cudaMemset", pinned + 1, 0, 98)
    assert ctypes.string_at(pinned, 100) == b"!" + bytes(98) + b"!"
    assert cuda("cudaMemset", pinned, 0, PAGE) == INVALID
    assert cuda("cudaMemset", own, 0, 100) == INVALID
    cuda.ok("cudaHostRegister", own, 100, 0)
    cuda.ok("cudaMemset", own, 0x21, 50)
    assert own.raw == b"!" * 50 + b"\xff" * 49 + b"\0"
    cuda.ok("cudaHostUnregister", own)
    cuda.ok("cudaFreeHost", pinned)


def test_large_copies_keep_holes_and_data_apart(cuda: Cuda) -> None:
    size = 4 * PAGE
    a, b = cuda.malloc(size), cuda.malloc(size)
    cuda.ok("cudaMemset", b, 255, size)
    for at in (0, 5000, PAGE - 3, 3 * PAGE + 77):
        cuda.ok("cudaMemcpy", a + at, b"island", 6, 1)
    expected = bytearray(size)
    for at in (0, 5000, PAGE - 3, 3 * PAGE + 77):
        expected[at : at + 6] = b"island"
    cuda.ok("cudaMemcpy", b + 100, a + 100, size - 200, 3)
    got = cuda.get(b, size)
    assert got[:100] == got[-100:] == b"\xff" * 100
    assert got[100:-100] == bytes(expected[100:-100])
    cuda.ok("cudaFree", a)
    cuda.ok("cudaFree", b)


def test_copies_past_the_end_are_refused(cuda: Cuda) -> None:
    pointer = cuda.malloc(PAGE)
    assert cuda("cudaMemcpy", pointer + PAGE - 4, b"12345678", 8, 1) == INVALID
    cuda.ok("cudaFree", pointer)
    assert cuda.put(pointer, b"12345678") == INVALID


def test_copies_of_rows(cuda: Cuda) -> None:
    """Each at its own distance from the next; those that do not wait leave the stream with work."""
    pointer, host = cuda.malloc(PAGE), ctypes.create_string_buffer(b"abcdefgh", 8)
    cuda.control("set_event_delay", ctypes.c_uint64(1))
    try:
        cuda.ok("cudaMemcpy2DAsync", pointer, 100, host, 4, 3, 2, 1, 0)
        assert cuda("cudaStreamQuery", 0) == NOT_READY
        cuda.ok("cudaMemcpy2D", pointer + 200, 10, pointer, 100, 3, 2, 3)
        assert cuda("cudaStreamQuery", 0) == 0
    finally:
        cuda.control("set_event_delay", ctypes.c_uint64(0))
    assert cuda.get(pointer, 103) == b"abc" + bytes(97) + b"efg"
    assert cuda.get(pointer + 200, 13) == b"abc" + bytes(7) + b"efg"
    cuda.ok("cudaFree", pointer)


def test_variables_of_kernels(cuda: Cuda) -> None:
    """As compiled programs register them, any number; each has memory of its own."""
    host = ctypes.create_string_buffer(300)
    symbols = [ctypes.addressof(host) + i for i in range(300)]
    register = getattr(cuda.runtime, "__cudaRegisterVar")
    for i, symbol in enumerate(symbols):
        pointer = ctypes.c_void_p(symbol)
        register(None, pointer, None, b"name", 0, ctypes.c_size_t(i + 1))
    places = [cuda.out("cudaGetSymbolAddress", symbol) for symbol in symbols]
    assert len(set(places)) == 300
    assert places == [cuda.out("cudaGetSymbolAddress", symbol) for symbol in symbols]
    assert [cuda.out("cudaGetSymbolSize", symbol) for symbol in symbols] == list(range(1, 301))
    unknown = symbols[-1] + 1
    assert cuda("cudaGetSymbolAddress", ctypes.byref(ctypes.c_uint64()), unknown) == INVALID_SYMBOL


def test_reads_from_the_device_are_counted(cuda: Cuda) -> None:
    pointer = cuda.malloc(PAGE)
    copies, size = cuda.control("dtoh_copies"), cuda.control("dtoh_bytes")
    cuda.get(pointer, 100)
    assert cuda.control("dtoh_copies") - copies == 1
    assert cuda.control("dtoh_bytes") - size == 100
    cuda.ok("cudaFree", pointer)


def test_pointers_are_described(cuda: Cuda) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("device", ctypes.c_int),
            ("device_pointer", ctypes.c_void_p),
            ("host_pointer", ctypes.c_void_p),
            ("reserved", ctypes.c_long * 8),
        ]

    pinned = cuda.out("cudaHostAlloc", 100, 0)
    plain = cuda.malloc(100)
    found = Attributes()
    for pointer, kind in ((pinned, 1), (plain, 2), (plain + 50, 2), (id(found), 0)):
        cuda.ok("cudaPointerGetAttributes", ctypes.byref(found), pointer)
        assert found.type == kind
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    cuda.ok("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), plain + 50)
    for name in ("cudaHostGetDevicePointer", "cuMemHostGetDevicePointer_v2"):
        assert cuda.out(name, pinned + 8, 0) == pinned + 8
        for wrong in ((pinned, 1), (plain, 0), (id(found), 0), (0, 0)):
            assert cuda(name, ctypes.byref(base), *wrong) == INVALID
    cuda("cudaGetLastError")
    cuda.ok("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), plain + 50)
    assert (base.value, size.value) == (plain, 100)
    assert cuda("cudaFree", pinned) == INVALID
    cuda.ok("cudaFreeHost", pinned)
    assert cuda("cudaFreeHost", pinned) == INVALID
    cuda.ok("cudaFree", plain)


def test_what_is_registered_already_is_not_registered_again(cuda: Cuda) -> None:
    """Also if it lies within, and neither end of the range is known."""
    memory = ctypes.create_string_buffer(3 * 4096)
    start = ctypes.addressof(memory)
    cuda.ok("cudaHostRegister", start + 4096, 4096, 0)
    for first, size in ((0, 3), (0, 2), (1, 1), (1, 2)):
        assert cuda("cudaHostRegister", start + first * 4096, size * 4096, 0) == REGISTERED
    for first in (0, 2):
        cuda.ok("cudaHostRegister", start + first * 4096, 4096, 0)
    for first in range(3):
        cuda.ok("cudaHostUnregister", start + first * 4096)
    cuda("cudaGetLastError")


def test_a_pointer_that_is_none_has_no_attributes(cuda: Cuda) -> None:
    """Asked for several at once, CUDA returns none of them and no error; asked for one, an error."""
    memory_type, device_pointer, ordinal, range_start, capable = 2, 3, 9, 11, 10
    attributes = (memory_type, device_pointer, ordinal, range_start, capable)
    plain = cuda.malloc(PAGE)
    n = len(attributes)
    found = (ctypes.c_uint64 * n)()
    places = (ctypes.c_void_p * n)(*(ctypes.addressof(found) + 8 * i for i in range(n)))

    def ask(address: int) -> list[int]:
        found[:] = [2**64 - 1] * n
        cuda.ok("cuPointerGetAttributes", n, (ctypes.c_int * n)(*attributes), places, address)
        return list(found)

    upper, most = 0xFFFFFFFF << 32, (2**64 - 1) & ~0xFF
    assert ask(plain + 512) == [upper | 2, plain + 512, upper, plain, most | 1]
    assert ask(ctypes.addressof(found)) == [upper, 0, upper, 0, most]
    assert cuda("cuPointerGetAttribute", found, memory_type, ctypes.addressof(found)) == INVALID
    cuda.ok("cudaFree", plain)


def test_managed_memory_may_be_larger_than_the_device(cuda: Cuda) -> None:
    """It moves to the device page by page when a kernel touches it: no kernel does."""
    used = cuda.used()
    cuda.control("set_capacity", 0, ctypes.c_size_t(used + PAGE))
    for name, free in (("cudaMallocManaged", "cudaFree"), ("cuMemAllocManaged", "cuMemFree_v2")):
        pointer = cuda.out(name, 4 * PAGE, 1)
        assert cuda.used() == used
        assert cuda.put(pointer + PAGE, b"seen by both") == 0
        assert ctypes.string_at(pointer + PAGE, 12) == b"seen by both"
        cuda.ok(free, pointer)
    assert cuda.used() == used


def test_paged_optimizers_may_move_their_memory(cuda: Cuda) -> None:
    """bitsandbytes requests it, and ends the process if it is refused."""
    pointer, stream = cuda.out("cudaMallocManaged", 4 * PAGE, 1), 0
    cuda12 = Cuda(hostcuda.LIBRARIES, 12)
    cuda12.ok("cudaMemPrefetchAsync", pointer, PAGE, 0, stream)
    cuda12.ok("cudaMemAdvise", pointer, PAGE, 3, 0)
    location = Access(1, 0, 0)  # begins with a cudaMemLocation, which is passed by value
    place = ctypes.c_uint64.from_buffer(location).value
    for code in (
        cuda("cudaMemPrefetchAsync", pointer, PAGE, place, 0, stream),
        cuda("cudaMemAdvise", pointer, PAGE, 3, place),
    ):
        assert code == 0
    plain = cuda.malloc(PAGE)
    assert cuda("cudaMemPrefetchAsync", plain, PAGE, place, 0, stream) == INVALID
    cuda.ok("cudaFree", plain)
    cuda.ok("cudaFree", pointer)


@pytest.mark.parametrize("name", ["cudaDeviceReset", "cuDevicePrimaryCtxReset_v2"])
def test_a_reset_ends_what_the_program_has_on_the_device(cuda: Cuda, name: str) -> None:
    """But not what belongs to no device's context: handles and addresses of virtual memory."""
    handle, before = cuda.handle(), cuda.used()
    plain, pinned = cuda.malloc(PAGE), cuda.out("cudaHostAlloc", 100, 0)
    cuda.out("cudaMallocManaged", PAGE, 1)
    pooled = cuda.out("cudaMallocAsync", 1000, 0)
    stream = cuda.out("cudaStreamCreateWithFlags", 1)
    event = cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok(name, *([0] if name.startswith("cu") and not name.startswith("cuda") else []))
    assert cuda.used() == before
    left = [cuda.live(what) for what in ("plain", "pinned", "streams", "events", "handles")]
    assert left == [0, 0, 0, 0, 1]
    assert cuda("cudaFree", plain) == cuda("cudaFreeAsync", pooled, 0) == INVALID
    assert cuda("cudaFreeHost", pinned) == INVALID
    assert cuda("cudaStreamDestroy", stream) == cuda("cudaEventDestroy", event) == INVALID_HANDLE
    cuda.ok("cuMemRelease", handle)
    again = cuda.out("cudaMallocAsync", 1000, 0)  # everything begins anew
    cuda.ok("cudaFreeAsync", again, 0)
    cuda.ok("cudaDeviceSynchronize")


def test_every_failure_of_a_sequence_leaves_nothing(cuda: Cuda) -> None:
    """The nth call fails for every n: undoing what succeeded leaves nothing behind."""
    names = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    for n in range(1, len(names) + 2):
        start, handle = ctypes.c_uint64(), ctypes.c_uint64()
        steps: list[Callable[[], int]] = [
            lambda out=start: cuda(names[0], ctypes.byref(out), PAGE, 0, 0, 0),
            lambda out=handle: cuda(
                names[1], ctypes.byref(out), PAGE, ctypes.byref(Prop(1, 0, 1, 0)), 0
            ),
            lambda at=start, what=handle: cuda(names[2], at.value, PAGE, 0, what.value, 0),
            lambda at=start: cuda.access(at.value, PAGE),
        ]
        undo: list[Callable[[], int]] = [
            lambda at=start: cuda("cuMemAddressFree", at.value, PAGE),
            lambda what=handle: cuda("cuMemRelease", what.value),
            lambda at=start: cuda("cuMemUnmap", at.value, PAGE),
        ]
        before = [cuda.live(what) for what in LIVE]
        cuda.control("fail_nth", ctypes.c_uint64(n), None, OUT_OF_MEMORY)
        codes = []
        while len(codes) < len(steps) and not any(codes):
            codes.append(steps[len(codes)]())
        cuda.control("fail_nth", ctypes.c_uint64(0), None, 0)
        done = codes.count(0)
        assert done == min(n - 1, len(steps))
        assert codes[done:] == [OUT_OF_MEMORY] * (n <= len(steps))
        for step in reversed(undo[:done]):
            assert step() == 0
        assert [cuda.live(what) for what in LIVE] == before


def test_failures_can_be_aimed_at_a_function(cuda: Cuda) -> None:
    cuda.control("fail_nth", ctypes.c_uint64(2), b"cudaMalloc", 719)
    first = cuda.malloc(1)
    cuda.ok("cudaFree", first)
    assert cuda("cudaMalloc", ctypes.byref(ctypes.c_uint64()), 1) == 719
    assert cuda("cudaPeekAtLastError") == 719
    assert cuda("cudaGetLastError") == 719
    cuda.ok("cudaFree", cuda.malloc(1))


@pytest.mark.parametrize("library", ["libcuda.so.1", "libcudart.so.13"])
def test_every_entry_point_counts_and_can_be_failed(
    cuda: Cuda, libraries: Path, library: str
) -> None:
    """Except those that ask about versions, errors and names, which concern no device."""
    quiet = ("Version", "Error", "ProcAddress", "EntryPoint")
    symbols = elf.read(libraries / library)
    offered = symbols.defined - symbols.weak  # these are stubs
    names = [n for n in offered if n.startswith("cu") and not any(word in n for word in quiet)]
    assert len(names) > 80
    for name in sorted(names):
        before = cuda.control("calls", name.encode())
        cuda.control("fail_nth", ctypes.c_uint64(1), name.encode(), 719)
        assert cuda(name, *[0] * 12) == 719, name  # without a look at its arguments
        assert cuda.control("calls", name.encode()) == before + 1, name
        if library == "libcudart.so.13":
            assert cuda("cudaGetLastError") == 719, name


def test_calls_are_counted_by_name(cuda: Cuda) -> None:
    before = cuda.control("calls", b"cudaMalloc")
    cuda.ok("cudaFree", cuda.malloc(1))
    assert cuda.control("calls", b"cudaMalloc") == before + 1
    assert cuda.control("calls", b"noSuchCall") == 0


def test_unknown_entry_points_report_themselves(
    cuda: Cuda, capfd: pytest.CaptureFixture[str]
) -> None:
    found, status = ctypes.c_void_p(), ctypes.c_int()
    name = b"cuDoesNotExistYet"
    cuda.ok(
        "cudaGetDriverEntryPointByVersion",
        name,
        ctypes.byref(found),
        13000,
        0,
        ctypes.byref(status),
    )
    assert status.value == 0
    entry = ctypes.CFUNCTYPE(ctypes.c_int)(found.value)
    assert entry() == entry() == 801
    assert cuda("cudaGraphicsMapResources", 0, 0, 0) == 801
    said = capfd.readouterr().err
    assert said.count("cuDoesNotExistYet") == 1
    assert said.count("cudaGraphicsMapResources") == 1


def test_counters_are_their_owners_whatever_the_umask(cuda: Cuda, tmp_path: Path) -> None:
    """A dry run's command reads them after the program has ended."""
    path = tmp_path / "device.json"
    before = os.umask(0o777)
    try:
        assert cuda.control("write_counters", os.fsencode(path)) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_why_counters_cannot_be_written_is_told(libraries: Path, tmp_path: Path) -> None:
    """With a full temporary folder, a dry run says only that the process was killed."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "device.json"
    source = f"import ctypes; ctypes.CDLL({str(libraries / 'libcuda.so.1')!r}).cuInit(0)"
    env = {**os.environ, "PYALLOC_HOSTCUDA_COUNTERS": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True
    )
    told = f"pyalloc hostcuda: cannot write the counters to {path}: Not a directory\n"
    assert done.stderr == told


def test_memory_of_another_process_is_of_the_same_device(libraries: Path) -> None:
    """However either process numbers them; what is not visible cannot be opened."""
    start = """
        import ctypes, sys
        class Handle(ctypes.Structure):
            _fields_ = [("words", ctypes.c_uint64 * 8)]
        cuda = ctypes.CDLL(sys.argv[1])
        pointer, handle, found = ctypes.c_void_p(), Handle(), (ctypes.c_int * 40)()
    """
    giver = """
        cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1))
        cuda.cudaIpcGetMemHandle(ctypes.byref(handle), pointer)
        print(*handle.words, flush=True)
        input()
    """
    taker = """
        handle.words[:] = [int(word) for word in sys.argv[2:]]
        code = cuda.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, 0)
        cuda.cudaPointerGetAttributes(ctypes.byref(found), pointer)
        again, first = ctypes.c_void_p(), pointer.value
        codes = [code]
        if code == 0:  # one address, until it is closed as often
            codes += [cuda.cudaIpcOpenMemHandle(ctypes.byref(again), handle, 0), again.value != first]
            codes += [cuda.cudaIpcCloseMemHandle(pointer) for _ in range(3)]
        print(codes, found[1])
    """
    library = str(libraries / "libcudart.so.13")
    env = {**os.environ, "PYALLOC_HOSTCUDA_DEVICES": "3"}

    def run(source: str, visible: str, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", dedent(start) + dedent(source), library, *words],
            env={**env, "CUDA_VISIBLE_DEVICES": visible},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with run(giver, "1") as first:
        assert first.stdout is not None
        words = first.stdout.readline().split()
        answers = {each: run(taker, each, *words).communicate()[0] for each in ("0,1", "1", "2,0")}
        first.communicate("\n")
    opened = [0, 0, False, 0, 0, INVALID]
    assert answers == {
        "0,1": f"{opened} 1\n",
        "1": f"{opened} 0\n",
        "2,0": f"{[INVALID_DEVICE]} -2\n",
    }


def test_a_group_of_transfers_is_as_long_as_a_program_makes_it(cuda: Cuda, libraries: Path) -> None:
    """Also while another is there, which begins anew."""
    nccl = ctypes.CDLL(str(libraries / "libpya_cudalibs.so"))
    comm = ctypes.c_void_p()
    n, byte, stream = 200, 0, None
    assert nccl.ncclCommInitAll(ctypes.byref(comm), 1, None) == 0
    sent = (ctypes.c_uint8 * n)(*range(n))
    for _ in range(2):
        got = (ctypes.c_uint8 * (n * n))()
        assert nccl.ncclGroupStart() == 0
        for i in range(n):
            at = ctypes.c_void_p(ctypes.addressof(got) + i * n)
            assert nccl.ncclSend(sent, ctypes.c_size_t(i + 1), byte, 0, comm, stream) == 0
            assert nccl.ncclRecv(at, ctypes.c_size_t(i + 1), byte, 0, comm, stream) == 0
        assert nccl.ncclGroupEnd() == 0
        assert all(bytes(got[i * n : i * n + i + 1]) == bytes(sent[: i + 1]) for i in range(n))
    assert nccl.ncclCommDestroy(comm) == 0
