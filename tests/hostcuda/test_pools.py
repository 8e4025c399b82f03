"""Memory pools of cudaMallocAsync: what is reused in which stream, and when memory goes back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from .conftest import Cuda

INVALID, OUT_OF_MEMORY = 1, 2
THRESHOLD, RESERVED = 4, 5
FOLLOW_EVENTS, OPPORTUNISTIC, INTERNAL = 1, 2, 3
CHUNK = 32 << 20


def test_pool_memory_is_cut_and_given_back(cuda: Cuda) -> None:
    pool = cuda.out("cudaDeviceGetDefaultMemPool", 0)
    keep = ctypes.c_uint64(2**64 - 1)
    cuda.ok("cudaMemPoolSetAttribute", pool, THRESHOLD, ctypes.byref(keep))
    pointers = [cuda.out("cudaMallocAsync", 1000, 0) for _ in range(100)]
    assert len(set(pointers)) == 100
    assert cuda.control("used_bytes", 0) >= 32 << 20
    used = ctypes.c_uint64()
    cuda.ok("cudaMemPoolGetAttribute", pool, 7, ctypes.byref(used))
    assert used.value == 100 * 1024
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    for pointer in (pointers[0], pointers[60]):
        inside = pointer + 700
        cuda.ok("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), inside)
        assert (base.value, size.value) == (pointer, 1024)
    for pointer in pointers[::2]:
        cuda.ok("cudaFreeAsync", pointer, 0)
    assert cuda("cudaFreeAsync", pointers[0], 0) == INVALID
    for pointer in pointers[1::2]:
        cuda.ok("cudaFreeAsync", pointer, 0)
    cuda.ok("cudaMemPoolTrimTo", pool, 0)
    cuda.ok("cudaMemPoolSetAttribute", pool, THRESHOLD, ctypes.byref(ctypes.c_uint64(0)))


def test_a_pool_of_ones_own_may_be_the_devices(cuda: Cuda) -> None:
    location = ctypes.create_string_buffer(88)  # cudaMemPoolProps: pinned, of device 0
    location[0], location[8] = 1, 1
    first = cuda.out("cudaDeviceGetMemPool", 0)
    own = cuda.out("cudaMemPoolCreate", location)
    assert cuda("cudaDeviceSetMemPool", 0, own + 8) == INVALID
    assert cuda.out("cudaDeviceGetMemPool", 0) == first
    cuda.ok("cudaDeviceSetMemPool", 0, own)
    assert cuda.out("cudaDeviceGetMemPool", 0) == own
    cuda.ok("cudaMemPoolDestroy", own)
    assert cuda.out("cudaDeviceGetMemPool", 0) == first
    assert cuda("cudaMemPoolDestroy", first) == INVALID


@pytest.fixture
def pool(cuda: Cuda) -> Iterator[int]:
    """A pool of device 0 that starts empty; what is left in it is trimmed."""
    location = ctypes.create_string_buffer(88)
    location[0], location[8] = 1, 1
    made = cuda.out("cudaMemPoolCreate", location)
    yield made
    cuda.ok("cudaDeviceSynchronize")
    cuda.ok("cudaMemPoolDestroy", made)


def test_trimming_leaves_as_much_as_is_to_be_kept(
    cuda: Cuda, pool: int, streams: tuple[int, int]
) -> None:
    switch(cuda, pool, THRESHOLD, 2**64 - 1)
    for pointer in [alloc(cuda, pool, streams[0]) for _ in range(3)]:
        cuda.ok("cudaFreeAsync", pointer, streams[0])
    kept = []
    for keep in (4 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK, CHUNK - 1, 1, 0):
        cuda.ok("cudaMemPoolTrimTo", pool, keep)
        kept.append(reserved(cuda, pool) // CHUNK)
    assert kept == [3, 3, 2, 1, 1, 0]


@pytest.fixture
def streams(cuda: Cuda) -> Iterator[tuple[int, int]]:
    made = tuple(cuda.out("cudaStreamCreateWithFlags", 1) for _ in range(2))
    yield made[0], made[1]
    for stream in made:
        cuda.ok("cudaStreamDestroy", stream)


def alloc(cuda: Cuda, pool: int, stream: int, size: int = CHUNK) -> int:
    return cuda.out("cudaMallocFromPoolAsync", size, pool, stream)


def switch(cuda: Cuda, pool: int, attribute: int, value: int) -> None:
    """All attributes fit in 64 bits; the switches read the first half."""
    word = ctypes.c_uint64(value)
    cuda.ok("cudaMemPoolSetAttribute", pool, attribute, ctypes.byref(word))


def reserved(cuda: Cuda, pool: int) -> int:
    word = ctypes.c_uint64()
    cuda.ok("cudaMemPoolGetAttribute", pool, RESERVED, ctypes.byref(word))
    return word.value


@pytest.mark.parametrize("by", ["stream", "event", "device"])
def test_memory_beyond_the_threshold_goes_back_when_somebody_waits(
    cuda: Cuda, pool: int, streams: tuple[int, int], by: str
) -> None:
    event = cuda.out("cudaEventCreateWithFlags", 2)
    first, second = alloc(cuda, pool, streams[0]), alloc(cuda, pool, streams[0])
    cuda.ok("cudaFreeAsync", first, streams[0])
    assert reserved(cuda, pool) == 2 * CHUNK
    assert alloc(cuda, pool, streams[0]) == first
    cuda.ok("cudaFreeAsync", first, streams[0])
    cuda.ok("cudaFreeAsync", second, streams[0])
    switch(cuda, pool, THRESHOLD, CHUNK)
    cuda.ok("cudaEventRecord", event, streams[0])
    assert reserved(cuda, pool) == 2 * CHUNK
    waits = {
        "stream": ("cudaStreamSynchronize", streams[0]),
        "event": ("cudaEventSynchronize", event),
    }
    cuda.ok(*waits.get(by, ("cudaDeviceSynchronize",)))
    assert reserved(cuda, pool) == CHUNK
    cuda.ok("cudaEventDestroy", event)


def test_other_streams_reuse_what_is_finished_or_what_they_waited_for(
    cuda: Cuda, pool: int, streams: tuple[int, int]
) -> None:
    one, other = streams
    switch(cuda, pool, THRESHOLD, 2**64 - 1)
    event = cuda.out("cudaEventCreateWithFlags", 2)
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    first = alloc(cuda, pool, one)
    cuda.ok("cudaFreeAsync", first, one)
    second = alloc(cuda, pool, other)
    assert second != first  # the free has not happened yet
    assert alloc(cuda, pool, one) == first  # in the stream's own order it has
    cuda.ok("cudaEventRecord", event, one)
    cuda.ok("cudaFreeAsync", first, one)
    cuda.ok("cudaStreamWaitEvent", other, event, 0)
    third = alloc(cuda, pool, other)
    assert third not in (first, second)  # the event was recorded before the free
    cuda.ok("cudaEventRecord", event, one)
    cuda.ok("cudaStreamWaitEvent", other, event, 0)
    switch(cuda, pool, FOLLOW_EVENTS, 0)
    fourth = alloc(cuda, pool, other)
    assert fourth not in (first, second, third)
    switch(cuda, pool, FOLLOW_EVENTS, 1)
    assert alloc(cuda, pool, other) == first
    cuda.ok("cudaFreeAsync", first, one)
    cuda.ok("cudaStreamSynchronize", one)
    assert alloc(cuda, pool, other) == first
    for pointer in (first, second, third, fourth):
        cuda.ok("cudaFreeAsync", pointer, other)
    cuda.ok("cudaEventDestroy", event)


def test_only_when_told_not_to_a_pool_does_not_look_what_is_finished(
    cuda: Cuda, pool: int, streams: tuple[int, int]
) -> None:
    one, other = streams
    first = alloc(cuda, pool, one)
    cuda.ok("cudaFreeAsync", first, one)
    assert alloc(cuda, pool, other) == first
    switch(cuda, pool, OPPORTUNISTIC, 0)
    cuda.ok("cudaFreeAsync", first, one)
    second = alloc(cuda, pool, other)
    assert second != first
    cuda.ok("cudaStreamSynchronize", one)  # also gives the free memory back: nothing may be kept
    third = alloc(cuda, pool, other)
    assert third == first and reserved(cuda, pool) == 2 * CHUNK
    for pointer in (second, third):
        cuda.ok("cudaFreeAsync", pointer, other)


def test_a_full_device_makes_a_stream_wait_for_others_memory(
    cuda: Cuda, pool: int, streams: tuple[int, int]
) -> None:
    one, other = streams
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    cuda.control("set_capacity", 0, ctypes.c_size_t(cuda.used() + 2 * CHUNK))
    pointers = [alloc(cuda, pool, one, CHUNK // 2) for _ in range(4)]
    for pointer in pointers:
        cuda.ok("cudaFreeAsync", pointer, one)
    switch(cuda, pool, INTERNAL, 0)
    found = ctypes.c_uint64()
    wanted = (ctypes.byref(found), CHUNK, pool, other)
    assert cuda("cudaMallocFromPoolAsync", *wanted) == OUT_OF_MEMORY
    switch(cuda, pool, INTERNAL, 1)
    assert alloc(cuda, pool, other) in pointers
    cuda.ok("cudaFreeAsync", pointers[2], other)
