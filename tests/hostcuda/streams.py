"""What tests of streams and of graphs share: the runtime's numbers, a launch, a stream."""

from __future__ import annotations

import ctypes

from .conftest import Cuda

INVALID_CONFIGURATION, INVALID_HANDLE = 9, 400
INVALID_CONTEXT, NOT_READY, UNSUPPORTED, INVALIDATED, IMPLICIT = 201, 600, 900, 901, 906
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
Dim3 = ctypes.c_uint32 * 3


class Config(ctypes.Structure):
    """cudaLaunchConfig_t"""

    _fields_ = [
        ("grid", Dim3),
        ("block", Dim3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("n_attrs", ctypes.c_uint),
    ]


def launch(cuda: Cuda, stream: int) -> int:
    config = Config(Dim3(1, 1, 1), Dim3(1, 1, 1), 0, stream, None, 0)
    return cuda("cudaLaunchKernelExC", ctypes.byref(config), 1, 0)


def stream_new(cuda: Cuda) -> int:
    return cuda.out("cudaStreamCreateWithFlags", 1)


def capture_status(cuda: Cuda, stream: int) -> int:
    status = ctypes.c_int()
    cuda.ok("cudaStreamIsCapturing", stream, ctypes.byref(status))
    return status.value
