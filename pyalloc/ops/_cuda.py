"""The CUDA kernels: found or compiled once, loaded per device, launched on torch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pyalloc._core import op_call
from pyalloc.common import files
from pyalloc.errors import OpError
from pyalloc.ops._library import Call, address, library, packer

_SEAL = hashlib.sha256().digest_size
SOURCE = Path(__file__).parent.parent / "lib" / "ops.cu"
FAMILIES = ("ps", "additive", "attention")  # each compiles without the others


class Target(ctypes.Structure):
    """struct pya_ops_target."""

    _fields_ = [
        ("module", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


_pack_target = packer(Target)


def on_device(x: Tensor) -> bool:
    """Whether x's op is launched on a GPU rather than called on the CPU.

    Raises:
        OpError: x is on neither of them; its kernel would read memory that does not exist.
    """
    if x.is_cuda:
        return True
    if not x.is_cpu:
        raise OpError(f"pyalloc.ops run on CPU and CUDA tensors; move the inputs, got {x.device}")
    return False


def serves(x: Tensor, family: str) -> bool:
    """Whether a family's kernels can take x: float32 on a device that could load them."""
    return x.dtype == torch.float32 and has_kernels(x, family)


def has_kernels(x: Tensor, family: str) -> bool:
    """Whether x is on a device that could load a family's kernels."""
    return x.is_cuda and _module(x.device.index or 0, family) is not None


@functools.cache
def has_kernel(device: int, family: str, name: bytes) -> bool:
    """Whether a device has loaded this kernel of a family.

    Raises:
        OpError: the family is not loaded, and cannot be while a graph is captured.
    """
    found = _module(device, family)
    if found is None:
        return False
    has = library().pya_ops_cuda_has
    has.restype = ctypes.c_bool
    with torch.cuda.device(device):
        return bool(has(ctypes.byref(Target(found[0], None, found[1])), name))


def is_direct(family: str, *inputs: Tensor) -> bool:
    """Whether an op can bypass the dispatcher: on the CPU, or if the family's kernels serve.

    inputs: tensors that must not be empty, because nothing is launched then.
    """
    first = inputs[0]
    return first.is_cpu or (serves(first, family) and all(x.numel() > 0 for x in inputs))


def declines(x: Tensor, family: str) -> bool:
    """Whether plain torch has to serve x, which is on a CUDA device."""
    return x.is_cuda and not serves(x, family)


def refuse_dropout(dropout: float) -> None:
    if dropout > 0:
        raise OpError(
            "scaled_attention: dropout on CUDA needs the float32 kernels, which cannot serve this call"
        )


def refuse_captured_dropout(dropout: float, like: Tensor) -> None:
    """The seed is an argument of the launch, so every replay would drop what the capture did."""
    if dropout > 0 and like.is_cuda and is_captured(like.device):
        raise OpError(
            "scaled_attention: a captured graph would drop the same probabilities at every replay; "
            "set dropout=0, or leave this call out of the graph"
        )


def is_captured(device: torch.device) -> bool:
    """Whether a graph is captured on the current device or on this one; torch answers only for the current one."""
    if torch.cuda.is_current_stream_capturing():
        return True
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


def room(op: str, args: bytes) -> int:
    """How many numbers of workspace a launch with this structure needs."""
    ask = getattr(library(), f"pya_ops_cuda_{op}_room")
    ask.restype = ctypes.c_int64
    return int(ask(args))


def perform(call: Call, like: Tensor, *tensors: Tensor | int | None) -> None:
    """Launches the call or computes it on the CPU, as planned."""
    if call.family:
        launch(call, like, *tensors)
    else:
        call.compute(*tensors)


def launch(call: Call, like: Tensor, *tensors: Tensor | int | None) -> None:
    """Launches a call on torch's current stream of like's device."""
    where = target(like, call.family)
    status = op_call(address(call.name), call.args, call.places, where, *tensors)
    if status == 0:
        return
    name = call.name.removeprefix("pya_ops_cuda_")
    if status == 2:
        raise OpError(f"{name}: the launch exceeds the device's limits; split the batch")
    raise OpError(f"{name}: {_error(library())}")


def target(like: Tensor, family: str) -> bytes:
    """Struct pya_ops_target: a family's loaded module, and torch's current stream of like's device."""
    device = like.get_device()
    module, context = _module(device, family) or (0, None)
    return _pack_target(module, _raw_stream(device), context or 0)


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# What torch's compiled programs call: takes a tenth of the time, but not every version has it.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def _error(lib: ctypes.CDLL) -> str:
    lib.pya_ops_cuda_error.restype = ctypes.c_char_p
    return str(lib.pya_ops_cuda_error().decode())


@functools.cache
def _module(device: int, family: str) -> tuple[int, int | None] | None:
    """A family's module in a device's primary context, and that context; None, after a warning, if loading fails."""
    if is_captured(torch.device("cuda", device)):
        raise OpError(
            "pyalloc.ops: the CUDA kernels cannot be loaded while a graph is captured; "
            f"call the op once on device {device} before the capture"
        )
    try:
        lib = library()
        if lib.pya_ops_cuda_open(None) != 0:
            raise OpError(_error(lib))
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context exist and current
            loaded = load(lib, torch.cuda.get_device_capability(device), family)
            for name in kernel_names(SOURCE.read_bytes(), family):  # now: a capture could not
                lib.pya_ops_cuda_has(ctypes.byref(loaded), name)
        return int(loaded.module), loaded.context
    except (OpError, OSError) as error:
        warnings.warn(
            f"pyalloc.ops: no CUDA kernels on device {device} ({error}); using plain torch instead",
            stacklevel=2,
        )
        return None


def load(lib: ctypes.CDLL, capability: tuple[int, int], family: str) -> Target:
    """Loads a family's kernels into the thread's context, from the first image that the driver accepts.

    Raises:
        OpError: the driver accepts none, or there is none.
    """
    loaded = Target()
    for image in images_for(capability, family):
        if lib.pya_ops_cuda_load(image, ctypes.byref(loaded)) == 0:
            return loaded
    raise OpError(_error(lib))


def kernel_names(text: bytes, family: str = "") -> list[bytes]:
    """The kernels in a source, or of one family; those ending in _tensor exist only where tensor cores pay."""
    kernel = rf'extern "C" __global__ [^;{{]*\b(pya_{family}\w+)\(struct \w+ \w+\) {{'
    return re.findall(kernel.encode(), text)


def images_for(capability: tuple[int, int], family: str) -> Iterator[bytes]:
    """Machine code for a device: the fatbin of all kernels, if built (the driver may be too old for it); then NVRTC's.

    Raises:
        OpError: the source or NVRTC is missing, or NVRTC rejects the source.
    """
    if not SOURCE.exists():
        raise OpError(f"{SOURCE} is missing; reinstall pyalloc")
    text = SOURCE.read_bytes()
    fatbin = SOURCE.parent / f"ops-{hashlib.sha256(text).hexdigest()[:16]}.fatbin"
    if fatbin.exists():
        yield fatbin.read_bytes()
    yield _compiled(alone(text, family), family, capability)


def alone(text: bytes, family: str) -> bytes:
    """The source of one family alone, without warnings about common code that only the others use."""
    others = (f"#define PYA_WITHOUT_{other}\n" for other in FAMILIES if other != family)
    return f"#pragma nv_diag_suppress 177\n{''.join(others)}".encode() + text


def _compiled(text: bytes, family: str, capability: tuple[int, int]) -> bytes:
    """Machine code from the cache, or compiled now; if several ranks start at once, one compiles for all."""
    arch = f"sm_{capability[0]}{capability[1]}"
    what = f"{family} kernels for {arch}"
    directory = _cache_directory()
    if directory is None:
        _tell_of_compiling(what, "in each process, as there is no private folder to keep them in")
        return compile_text(text, arch)
    # A home may be shared with machines whose drivers are of an older major version and reject newer code.
    digest = hashlib.sha256(text).hexdigest()[:16]
    cached = directory / f"ops-{family}-{digest}-{arch}-cuda{_cuda_major()}.cubin"
    found = read_cached(cached)
    if found is None:
        with _locked(directory):
            found = read_cached(cached)
            if found is None:
                _tell_of_compiling(what, f"once; kept in {directory}")
                found = compile_text(text, arch)
                write_cached(cached, found)
    return found


def _tell_of_compiling(what: str, how_often: str) -> None:
    print(
        f"pyalloc.ops: compiling the CUDA {what} takes between a few seconds and half a minute, {how_often}",
        file=sys.stderr,
        flush=True,
    )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock; does without where the file system has no locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)  # closing unlocks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _cache_directory() -> Path | None:
    """In the home, or among temporary files: a container's user may have no home, or a read-only one."""
    candidates = [Path(tempfile.gettempdir()) / f"pyalloc-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        candidates.insert(0, Path(base) / "pyalloc")
    return next(filter(_is_ours, candidates), None)


def _is_ours(directory: Path) -> bool:
    """Makes the directory; returns whether this user, and nobody else, can keep files there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat(follow_symlinks=False)
    except OSError:
        return False
    is_private = stat.S_ISDIR(info.st_mode) and info.st_mode & 0o022 == 0
    return is_private and info.st_uid == os.getuid() and os.access(directory, os.W_OK | os.X_OK)


def read_cached(path: Path) -> bytes | None:
    """The content after the seal, if the seal matches it and the file is the user's own; else None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(handle)
            data = file.read()
    except OSError:
        return None
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        return None
    return data[_SEAL:] if seal(path, data[_SEAL:]) == data[:_SEAL] else None


def seal(path: Path, content: bytes) -> bytes:
    """SHA-256 of the file's name (source and architecture) and of its content."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()


def write_cached(path: Path, content: bytes) -> None:
    """Writes under a temporary name and renames; ignores a cache that cannot be written."""
    with contextlib.suppress(OSError):
        files.write(path, seal(path, content) + content)


def _cuda_major() -> str:
    """The major version of torch's CUDA: the driver runs its code, but perhaps not that of a newer one."""
    return (torch.version.cuda or "").partition(".")[0]


def _nvrtc() -> ctypes.CDLL:
    """The NVRTC that came with torch, else the system's; of torch's own CUDA version if there is one."""
    found: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec is not None else []:
        found += sorted(str(path) for path in Path(root).glob("*/lib/libnvrtc.so.*"))
    found += ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for name in sorted(found, key=lambda name: not name.endswith(f".so.{_cuda_major()}")):
        with contextlib.suppress(OSError):
            _open_builtins(Path(name))
            return ctypes.CDLL(name)
    raise OpError(
        "libnvrtc was not found; install nvidia-cuda-nvrtc, or run `make cuda` where nvcc is installed"
    )


def _open_builtins(nvrtc: Path) -> None:
    """Loads NVRTC's second library: NVRTC opens it by name alone, and 13.0's does not search its own folder."""
    for path in nvrtc.parent.glob("libnvrtc-builtins.so.*") if nvrtc.is_absolute() else ():
        ctypes.CDLL(str(path))


def compile_text(text: bytes, arch: str) -> bytes:
    """CUDA C++ to machine code for one architecture, as nvcc would.

    Raises:
        OpError: NVRTC is missing or rejects the text; the message contains its log.
    """
    return compile_with_log(text, arch)[0]


def compile_with_log(text: bytes, arch: str, *more: str) -> tuple[bytes, str]:
    """The machine code, and the log of NVRTC and ptxas: warnings, and what further options print."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"ops.cu", 0, None, None) != 0:
        raise OpError("nvrtcCreateProgram failed")
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", *map(str.encode, more)]
        array = (ctypes.c_char_p * len(options))(*options)
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array) != 0
        log = _nvrtc_text(nvrtc, program).decode()
        if failed:
            raise OpError(f"NVRTC cannot compile for {arch}: {log}")
        return _nvrtc_text(nvrtc, program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str = "ProgramLog") -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
