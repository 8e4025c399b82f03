"""Streams, delayed events, captures, limits of launches."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from .conftest import PAGE, Cuda
from .streams import (
    GLOBAL,
    IMPLICIT,
    INVALID_CONFIGURATION,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALIDATED,
    NOT_READY,
    RELAXED,
    THREAD_LOCAL,
    UNSUPPORTED,
    Config,
    Dim3,
    capture_status,
    launch,
    stream_new,
)


def end_invalid(cuda: Cuda, stream: int) -> None:
    graph = ctypes.c_uint64(1)
    assert cuda("cudaStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED
    assert graph.value == 0
    assert capture_status(cuda, stream) == 0


def test_events_complete_at_once_by_default(cuda: Cuda) -> None:
    event, stream = cuda.out("cudaEventCreateWithFlags", 2), stream_new(cuda)
    assert launch(cuda, stream) == 0
    cuda.ok("cudaEventRecord", event, stream)
    cuda.ok("cudaEventQuery", event)
    cuda.ok("cudaEventDestroy", event)
    cuda.ok("cudaStreamDestroy", stream)


def test_delayed_events_need_later_launches_or_a_synchronisation(cuda: Cuda) -> None:
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    stream, other = stream_new(cuda), stream_new(cuda)
    first, second = (cuda.out("cudaEventCreateWithFlags", 2) for _ in range(2))
    cuda.ok("cudaEventQuery", first)  # never recorded
    cuda.ok("cudaEventRecord", first, stream)
    answers = []
    for _ in range(3):
        answers.append(cuda("cudaEventQuery", first))
        assert launch(cuda, other) == 0
    assert answers == [NOT_READY] * 3
    cuda.ok("cudaEventQuery", first)
    cuda.ok("cudaEventRecord", second, stream)
    assert cuda("cudaStreamQuery", stream) == NOT_READY
    assert cuda("cudaEventQuery", second) == NOT_READY
    cuda.ok("cudaEventSynchronize", second)
    cuda.ok("cudaEventQuery", second)
    cuda.ok("cudaEventRecord", first, stream)
    cuda.ok("cudaStreamSynchronize", stream)
    cuda.ok("cudaEventQuery", first)
    cuda.ok("cudaEventRecord", first, other)
    cuda.ok("cudaDeviceSynchronize")
    cuda.ok("cudaEventQuery", first)
    for event in (first, second):
        cuda.ok("cudaEventDestroy", event)
    for each in (stream, other):
        cuda.ok("cudaStreamDestroy", each)


def test_work_of_a_destroyed_stream_ends_with_the_devices(cuda: Cuda) -> None:
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    stream, event = stream_new(cuda), cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok("cudaEventRecord", event, stream)
    cuda.ok("cudaStreamDestroy", stream)
    assert cuda("cudaEventQuery", event) == NOT_READY
    cuda.ok("cudaDeviceSynchronize")
    cuda.ok("cudaEventQuery", event)
    cuda.ok("cudaEventDestroy", event)


@pytest.mark.parametrize("delay", [3, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_an_event_that_was_waited_for_stays_complete(cuda: Cuda, delay: int) -> None:
    """However often, whatever runs later, and if its stream is gone."""
    cuda.control("set_event_delay", ctypes.c_uint64(delay))
    stream, event = stream_new(cuda), cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok("cudaEventRecord", event, stream)
    cuda.ok("cudaStreamDestroy", stream)
    assert cuda("cudaEventQuery", event) == NOT_READY
    for _ in range(4):
        cuda.ok("cudaEventSynchronize", event)
        cuda.ok("cudaEventQuery", event)
        assert launch(cuda, 0) == 0
        cuda.ok("cudaEventQuery", event)
    cuda.ok("cudaEventRecord", event, 0)
    assert cuda("cudaEventQuery", event) == NOT_READY
    cuda.ok("cudaEventDestroy", event)


def test_waiting_for_the_device_waits_for_every_stream(cuda: Cuda) -> None:
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    streams = [stream_new(cuda) for _ in range(3)]
    for stream in (*streams, 0):
        assert launch(cuda, stream) == 0
        assert cuda("cudaStreamQuery", stream) == NOT_READY
    cuda.ok("cudaDeviceSynchronize")
    for stream in (*streams, 0):
        cuda.ok("cudaStreamQuery", stream)
    for stream in streams:
        cuda.ok("cudaStreamDestroy", stream)


def test_time_between_events_is_in_milliseconds(cuda: Cuda) -> None:
    start, end, plain = (cuda.out("cudaEventCreateWithFlags", flags) for flags in (0, 0, 2))
    took = ctypes.c_float()
    assert cuda("cudaEventElapsedTime", ctypes.byref(took), start, end) == INVALID_HANDLE
    began = time.monotonic()
    cuda.ok("cudaEventRecord", start, 0)
    time.sleep(0.002)
    cuda.ok("cudaEventRecord", end, 0)
    most = (time.monotonic() - began) * 1000
    cuda.ok("cudaEventElapsedTime", ctypes.byref(took), start, end)
    assert 2 <= took.value <= most
    cuda.ok("cudaEventElapsedTime", ctypes.byref(took), end, start)
    assert took.value < 0
    cuda.ok("cudaEventRecord", plain, 0)
    assert cuda("cudaEventElapsedTime", ctypes.byref(took), start, plain) == INVALID_HANDLE
    for event in (start, end, plain):
        cuda.ok("cudaEventDestroy", event)


def test_streams_are_described(cuda: Cuda) -> None:
    stream = cuda.out("cudaStreamCreateWithPriority", 1, ctypes.c_int(-9))
    flags, priority, device = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(7)
    cuda.ok("cudaStreamGetFlags", stream, ctypes.byref(flags))
    cuda.ok("cudaStreamGetPriority", stream, ctypes.byref(priority))
    cuda.ok("cudaStreamGetDevice", stream, ctypes.byref(device))
    assert (flags.value, priority.value, device.value) == (1, -5, 0)
    cuda.ok("cudaStreamDestroy", stream)
    for name, out in (("Flags", flags), ("Priority", priority), ("Device", device)):
        assert cuda(f"cudaStreamGet{name}", stream, ctypes.byref(out)) == INVALID_HANDLE
    assert (flags.value, priority.value, device.value) == (1, -5, 0)


def test_stale_handles_are_refused(cuda: Cuda) -> None:
    stream, event = stream_new(cuda), cuda.out("cudaEventCreateWithFlags", 0)
    cuda.ok("cudaStreamDestroy", stream)
    cuda.ok("cudaEventDestroy", event)
    assert cuda("cudaStreamSynchronize", stream) == 400
    assert cuda("cudaStreamDestroy", stream) == 400
    assert cuda("cudaEventQuery", event) == 400
    assert cuda("cudaEventDestroy", event) == 400


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("cudaMalloc", (ctypes.byref(ctypes.c_uint64()), 1)),
        ("cudaFree", (0,)),
        ("cudaHostAlloc", (ctypes.byref(ctypes.c_uint64()), 1, 0)),
        ("cudaDeviceSynchronize", ()),
        ("cudaStreamSynchronize", ("stream",)),
        ("cudaStreamSynchronize", ("other",)),
        ("cudaEventQuery", ("event",)),
        ("cudaEventSynchronize", ("event",)),
        ("cudaStreamQuery", ("other",)),
        ("cudaMemPoolGetAttribute", ("pool", 5, ctypes.byref(ctypes.c_uint64()))),
        ("cudaMemPoolSetAttribute", ("pool", 4, ctypes.byref(ctypes.c_uint64()))),
    ],
)
def test_what_capture_forbids_fails_and_invalidates_it(
    cuda: Cuda, name: str, args: tuple[object, ...]
) -> None:
    known = {
        "stream": stream_new(cuda),
        "other": stream_new(cuda),
        "event": cuda.out("cudaEventCreateWithFlags", 2),
        "pool": cuda.out("cudaDeviceGetDefaultMemPool", 0),
    }
    stream = known["stream"]
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    assert cuda(name, *(known.get(a, a) if isinstance(a, str) else a for a in args)) == UNSUPPORTED
    assert capture_status(cuda, stream) == 2
    assert launch(cuda, stream) == INVALIDATED
    end_invalid(cuda, stream)
    cuda.ok("cudaStreamDestroy", stream)
    cuda.ok("cudaStreamDestroy", known["other"])
    cuda.ok("cudaEventDestroy", known["event"])


def test_capture_modes_bind_the_right_threads(cuda: Cuda) -> None:
    stream = stream_new(cuda)

    def elsewhere() -> int:
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(cuda("cudaFree", 0)))
        thread.start()
        thread.join()
        return answers[0]

    for mode, here, there in (
        (GLOBAL, UNSUPPORTED, UNSUPPORTED),
        (THREAD_LOCAL, UNSUPPORTED, 0),
        (RELAXED, 0, 0),
    ):
        for caller, expected in ((lambda: cuda("cudaFree", 0), here), (elsewhere, there)):
            cuda.ok("cudaStreamBeginCapture", stream, mode)
            assert caller() == expected
            graph = ctypes.c_uint64()
            assert cuda("cudaStreamEndCapture", stream, ctypes.byref(graph)) == (
                INVALIDATED if expected else 0
            )
            if graph.value:
                cuda.ok("cudaGraphDestroy", graph.value)
    swapped = ctypes.c_int(RELAXED)
    cuda.ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
    assert swapped.value == GLOBAL
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    cuda.ok("cudaFree", cuda.malloc(PAGE))
    cuda.ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
    graph = ctypes.c_uint64()
    cuda.ok("cudaStreamEndCapture", stream, ctypes.byref(graph))
    cuda.ok("cudaGraphDestroy", graph.value)
    cuda.ok("cudaStreamDestroy", stream)


def test_the_driver_chooses_no_context(cuda: Cuda) -> None:
    """What a new thread gets from the driver, before and after its first call of the runtime."""
    address, context = ctypes.c_uint64(), ctypes.c_void_p()
    event = cuda.out("cuEventCreate", 2)
    answers: list[int] = []

    def ask() -> None:
        cuda.ok("cuCtxGetCurrent", ctypes.byref(context))
        answers.append(context.value or 0)
        answers.append(cuda("cuMemAlloc_v2", ctypes.byref(address), PAGE))
        answers.append(cuda("cuEventRecord", event, 0))
        answers.append(cuda("cuCtxSynchronize"))
        cuda.ok("cudaFree", 0)
        answers.append(cuda("cuMemAlloc_v2", ctypes.byref(address), PAGE))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert answers == [0, INVALID_CONTEXT, INVALID_CONTEXT, INVALID_CONTEXT, 0]
    answers.clear()

    def push_and_pop() -> None:
        primary = cuda.out("cuDevicePrimaryCtxRetain", 0)
        answers.append(cuda("cuCtxPopCurrent_v2", ctypes.byref(context)))
        cuda.ok("cuCtxPushCurrent_v2", primary)
        cuda.ok("cuCtxPushCurrent_v2", primary)
        for left in (primary, 0):
            cuda.ok("cuCtxPopCurrent_v2", ctypes.byref(context))
            assert context.value == primary
            cuda.ok("cuCtxGetCurrent", ctypes.byref(context))
            assert (context.value or 0) == left
        answers.append(cuda("cuCtxPopCurrent_v2", 0))
        cuda.ok("cuCtxSetCurrent", primary)
        answers.append(cuda("cuCtxPopCurrent_v2", 0))

    thread = threading.Thread(target=push_and_pop)
    thread.start()
    thread.join()
    assert answers == [INVALID_CONTEXT, INVALID_CONTEXT, 0]
    for name in ("cuCtxSetCurrent", "cuCtxPushCurrent_v2"):
        assert cuda(name, 12345) == INVALID_CONTEXT
    cuda.ok("cudaFree", address.value)
    cuda.ok("cuEventDestroy_v2", event)


@pytest.mark.parametrize(
    "name",
    [
        "cudaEventRecord",
        "cudaStreamSynchronize",
        "launch",
        "cudaStreamWaitEvent",
        "cudaGraphLaunch",
    ],
)
def test_work_on_the_legacy_stream_ends_captures_of_blocking_streams(cuda: Cuda, name: str) -> None:
    """A query whether it captures returns the same error, and ends nothing."""
    blocking = cuda.out("cudaStreamCreateWithFlags", 0)
    event = cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok("cudaEventRecord", event, 0)
    graph = cuda.out("cudaGraphCreate", 0)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    status = ctypes.c_int()
    cuda.ok("cudaStreamBeginCapture", blocking, RELAXED)
    swapped = ctypes.c_int(RELAXED)
    cuda.ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
    assert cuda("cudaStreamIsCapturing", 0, ctypes.byref(status)) == IMPLICIT
    assert capture_status(cuda, blocking) == 1
    if name == "launch":
        assert launch(cuda, 0) == IMPLICIT
    else:
        arguments = {
            "cudaEventRecord": (event, 0),
            "cudaStreamSynchronize": (0,),
            "cudaStreamWaitEvent": (0, event, 0),
            "cudaGraphLaunch": (runnable, 0),
        }
        assert cuda(name, *arguments[name]) == IMPLICIT
    cuda.ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
    end_invalid(cuda, blocking)
    cuda.ok("cudaGraphExecDestroy", runnable)
    cuda.ok("cudaGraphDestroy", graph)
    cuda.ok("cudaStreamDestroy", blocking)
    cuda.ok("cudaEventDestroy", event)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("by", ["same thread", "other thread", "relaxed thread"])
def test_waiting_for_the_device_ends_captures_on_it_in_every_mode(
    cuda: Cuda, mode: int, by: str
) -> None:
    stream = stream_new(cuda)
    answers: list[int] = []

    def wait() -> None:
        swapped = ctypes.c_int(RELAXED)
        if by == "relaxed thread":
            cuda.ok("cudaThreadExchangeStreamCaptureMode", ctypes.byref(swapped))
        answers.append(cuda("cudaDeviceSynchronize"))

    cuda.ok("cudaStreamBeginCapture", stream, mode)
    if by == "same thread":
        wait()
    else:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert answers == [UNSUPPORTED]
    assert capture_status(cuda, stream) == 2
    end_invalid(cuda, stream)
    cuda.ok("cudaDeviceSynchronize")
    cuda.ok("cudaStreamDestroy", stream)


@pytest.mark.parametrize("call", ["cudaEventQuery", "cudaEventSynchronize"])
def test_asking_about_a_captured_event_ends_its_capture(cuda: Cuda, call: str) -> None:
    stream, event = stream_new(cuda), cuda.out("cudaEventCreateWithFlags", 2)
    cuda.ok("cudaStreamBeginCapture", stream, RELAXED)
    cuda.ok("cudaEventRecord", event, stream)
    assert cuda(call, event) == 907  # cudaErrorCapturedEvent
    assert capture_status(cuda, stream) == 2
    end_invalid(cuda, stream)
    cuda.ok("cudaEventDestroy", event)
    cuda.ok("cudaStreamDestroy", stream)


def test_waiting_for_another_device_leaves_captures_alone(libraries: Path) -> None:
    program = """
        import ctypes, sys
        cuda = ctypes.CDLL(sys.argv[1])
        stream, status = ctypes.c_void_p(), ctypes.c_int()
        codes = [
            cuda.cudaSetDevice(1),
            cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1),
            cuda.cudaStreamBeginCapture(stream, 0),
            cuda.cudaSetDevice(0),
            cuda.cudaDeviceSynchronize(),
            cuda.cudaStreamIsCapturing(stream, ctypes.byref(status)),
            status.value,
            cuda.cudaSetDevice(1),
            cuda.cudaDeviceSynchronize(),
        ]
        print(*codes)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(libraries / "libcudart.so.13")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYALLOC_HOSTCUDA_DEVICES": "2"},
    )
    assert done.stdout.split() == ["0", "0", "0", "0", "0", "0", "1", "0", str(UNSUPPORTED)]


def test_launches_beyond_a_card_are_refused(cuda: Cuda) -> None:
    module = cuda.out("cuModuleLoadData", b"")
    kernel = cuda.out("cuModuleGetFunction", module, b"kernel")
    assert cuda.out("cuModuleGetFunction", module, b"kernel") == kernel
    assert cuda.out("cuModuleGetFunction", module, b"another") != kernel

    def answer(*grid_block_shared: int) -> int:
        return cuda("cuLaunchKernel", kernel, *grid_block_shared, 0, 0, 0)

    assert answer(2**31 - 1, 65535, 65535, 16, 1, 64, 49152) == 0
    for wrong in (
        (2**31, 1, 1, 1, 1, 1, 0),
        (1, 65536, 1, 1, 1, 1, 0),
        (1, 1, 65536, 1, 1, 1, 0),
        (1, 1, 1, 2, 513, 1, 0),
        (1, 1, 1, 1, 1, 65, 0),
        (1, 1, 0, 1, 1, 1, 0),
        (1, 1, 1, 1, 1, 1, 49153),
    ):
        assert answer(*wrong) == 1, wrong
    assert cuda("cuFuncSetAttribute", kernel, 8, 232449) == 1
    cuda.ok("cuFuncSetAttribute", kernel, 8, 100_000)
    assert [answer(1, 1, 1, 1, 1, 1, n) for n in (100_000, 100_001)] == [0, 1]
    # Triton asks a driver for too much shared memory first, and sets 8 if there is none.
    for set_one, *device in (
        ("cuFuncSetAttribute",),
        ("cudaFuncSetAttribute",),
        ("cudaKernelSetAttributeForDevice", 0),
    ):
        assert [cuda(set_one, kernel, n, 3, *device) for n in (-1, 15, 16)] == [1, 0, 1], set_one
        assert cuda(set_one, kernel, 8, 232449, *device) == 1
    assert [cuda("cuKernelSetAttribute", n, 3, kernel, 0) for n in (-1, 15, 16)] == [1, 0, 1]
    cuda.ok("cudaFuncSetAttribute", kernel, 8, 200_000)
    assert [answer(1, 1, 1, 1, 1, 1, n) for n in (200_000, 200_001)] == [0, 1]


class Sizes(ctypes.Structure):
    """dim3, which is passed by value"""

    _fields_ = [(name, ctypes.c_uint) for name in "xyz"]


def test_launches_of_compiled_kernels_are_refused_too(cuda: Cuda) -> None:
    def answer(grid: tuple[int, ...], block: tuple[int, ...]) -> int:
        config = Config(Dim3(*grid), Dim3(*block), 0, None, None, 0)
        code = cuda("cudaLaunchKernelExC", ctypes.byref(config), 1, 0)
        assert cuda("cudaLaunchKernel", 1, Sizes(*grid), Sizes(*block), 0, 0, 0) == code
        return code

    assert answer((2**31 - 1, 65535, 65535), (16, 1, 64)) == 0
    one = (1, 1, 1)
    for wrong in ((2**31, 1, 1), (1, 65536, 1), (1, 1, 65536), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        assert answer(wrong, one) == INVALID_CONFIGURATION, wrong
    for wrong in ((2, 513, 1), (1, 1, 65), (65536, 65536, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)):
        assert answer(one, wrong) == INVALID_CONFIGURATION, wrong
    assert cuda("cudaGetLastError") == INVALID_CONFIGURATION
    # What torch's error says of it.
    cuda.runtime.cudaGetErrorString.restype = ctypes.c_char_p
    said = cuda.runtime.cudaGetErrorString(INVALID_CONFIGURATION)
    assert said == b"invalid configuration argument"
