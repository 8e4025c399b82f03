"""libpyalloc_ops by ctypes: its structures, its status codes, the choice of instruction set."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyalloc._core import op_call
from pyalloc.errors import OpError

LIBRARY = Path(__file__).parent.parent / "lib" / "libpyalloc_ops.so"
ISA_NAMES = ("scalar", "avx2", "avx512", "amx")

# Numbered as pya_ops_status and pya_ops_dtype in csrc/ops/ops.h; ISA_NAMES as pya_ops_isa.
_STATUS = {1: "out of host memory", 2: "the library refused the arguments", 3: "the driver failed"}
_DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.float64: 1}
SOMEWHERE = 1  # in place of a pointer that op_call fills in
WORK_OF_A_THREAD = 200_000  # multiply-adds: waking another thread costs about as much


class View(ctypes.Structure):
    """struct pya_ops_view: a pointer and the element strides of its two batch indices."""

    _fields_ = [("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("t", ctypes.c_int64)]


class PowerSphericalArgs(ctypes.Structure):
    """struct pya_ops_ps."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n_l", "n_m", "n_t", "dim")),
        *((name, View) for name in ("value", "loc", "scale", "log_weights")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out_l", "out_m", "out_t")),
        ("grad", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("grad_l", "grad_m", "grad_t")),
        *((name, View) for name in ("d_value", "d_loc", "d_scale", "d_log_weights")),
        ("workspace", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("n_threads", ctypes.c_int32),
    ]


class AdditiveArgs(ctypes.Structure):
    """struct pya_ops_additive."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n_b", "n_q", "n_s", "n_h", "n_e")),
        *((name, View) for name in ("query", "keys", "values")),
        ("v", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_b", ctypes.c_int64),
        ("mask_s", ctypes.c_int64),
        ("probs", ctypes.c_void_p),
        *((name, View) for name in ("context", "grad", "grad_probs")),
        *((name, View) for name in ("d_query", "d_keys", "d_values")),
        ("d_v", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n_parts", "n_kept")),
        *((name, ctypes.c_int32) for name in ("accumulate", "dtype", "n_threads")),
    ]


class Heads(ctypes.Structure):
    """struct pya_ops_heads."""

    _fields_ = [("p", ctypes.c_void_p), *((name, ctypes.c_int64) for name in "bhs")]


class Scores(ctypes.Structure):
    """struct pya_ops_scores."""

    _fields_ = [("p", ctypes.c_void_p), *((name, ctypes.c_int64) for name in "bhqk")]


class AttentionArgs(ctypes.Structure):
    """struct pya_ops_attention."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n_b", "n_h", "n_kv", "n_q", "n_k", "dim", "dim_v")),
        *((name, Heads) for name in ("q", "k", "v", "out")),
        ("stats", ctypes.c_void_p),
        *((name, Scores) for name in ("bias", "mask")),
        ("scale", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        *((name, Heads) for name in ("grad", "d_q", "d_k", "d_v")),
        ("d_bias", Scores),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("d_bias_add", "causal", "dtype", "n_threads")),
        ("owns_bias", ctypes.c_int32),
    ]


_CODES = {
    ctypes.c_void_p: "P",
    ctypes.c_int64: "q",
    ctypes.c_uint64: "Q",
    ctypes.c_double: "d",
    ctypes.c_int32: "i",
}


def _codes(structure: type[ctypes.Structure]) -> str:
    kinds = [field[1] for field in structure._fields_]
    return "".join(_codes(k) if issubclass(k, ctypes.Structure) else _CODES[k] for k in kinds)


def packer(structure: type[ctypes.Structure]) -> Callable[..., bytes]:
    """A function that packs all numbers of a structure, in order, into its bytes.

    Takes a tenth of the time that ctypes needs to fill the structure field by field.
    """
    packed = struct.Struct(f"{_codes(structure)}0q")  # padded as in an array
    assert packed.size == ctypes.sizeof(structure)
    return packed.pack


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; it shares torch's OpenMP threads because torch is loaded first."""
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise OpError(
            f"the CPU kernels of pyalloc.ops cannot be loaded ({error}); "
            "reinstall pyalloc, or in a checkout run: make -C csrc/ops OUT=$PWD/pyalloc/lib"
        ) from error


@functools.cache
def address(name: str) -> int:
    """The address of a function of the library."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def places(structure: type[ctypes.Structure], *names: str) -> bytes:
    """The offsets of these pointers in a structure, as op_call takes them."""
    offsets = (getattr(structure, name).offset for name in names)
    return b"".join(offset.to_bytes(2, sys.byteorder) for offset in offsets)


class Call(NamedTuple):
    """A call of a function of the library with one structure, in which only pointers are missing."""

    name: str
    args: bytes
    places: bytes
    family: str  # whose kernels it launches; empty: a function of the CPU

    @classmethod
    def of(cls, family: str, what: str, args: bytes, places: bytes, *, on_device: bool) -> Call:
        """A call of the launcher of a family's op, or of its function on the CPU."""
        where = "cuda_" if on_device else ""
        return cls(f"pya_ops_{where}{family}_{what}", args, places, family if on_device else "")

    def compute(self, *tensors: Tensor | int | None) -> None:
        """Calls the CPU function; tensors: for each place a tensor, another value to write there, or None.

        Raises:
            OpError: it fails.
        """
        status = op_call(address(self.name), self.args, self.places, None, *tensors)
        if status != 0:
            raise OpError(f"{self.name}: {_STATUS.get(status, f'status {status}')}")


def resolved(x: Tensor) -> Tensor:
    """x.resolve_neg(), without the call where there is nothing to do."""
    return x.resolve_neg() if x.is_neg() else x


def dense_rows(x: Tensor) -> Tensor:
    """X as the kernels read it: rows without gaps, and no negation that torch has put off."""
    x = resolved(x)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def threads(work: int) -> int:
    """How many threads to use for so many multiply-adds."""
    available: int = torch.get_num_threads()
    return max(1, min(available, work // WORK_OF_A_THREAD))


def dtype_code(dtype: torch.dtype) -> int:
    return _DTYPES[dtype]


def cpu_isa() -> str:
    """The instruction set the CPU kernels use: scalar, avx2, avx512 or amx.

    AMX serves large shapes of scaled_attention; everything else uses AVX-512 there.
    """
    return ISA_NAMES[library().pya_ops_isa_current()]


def has_vectors() -> bool:
    """Whether the CPU kernels use vectors here: there are none for arm64, nor for x86 without AVX2."""
    try:
        return bool(library().pya_ops_isa_best() > 0)
    except OpError:
        return True  # told when a kernel is called


def has_matrix_units() -> bool:
    """Whether this processor has AMX, which torch's kernels use for half precision."""
    return bool(library().pya_ops_isa_best() == ISA_NAMES.index("amx"))


def set_cpu_isa(name: str) -> None:
    """Makes the CPU kernels use a narrower instruction set than the machine has (measurements, tests).

    Args:
        name: "scalar", "avx2", "avx512" or "amx"; for the whole process, from the next call on.

    Raises:
        OpError: it is none of these, or the machine or this build lacks it.
    """
    if name not in ISA_NAMES or library().pya_ops_isa_select(ISA_NAMES.index(name)) != 0:
        there = ISA_NAMES[: library().pya_ops_isa_best() + 1]
        raise OpError(f"instruction set {name!r} is not available here, only {', '.join(there)}")
