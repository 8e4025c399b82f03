"""The host-memory CUDA runtime: where its libraries are, and whether they fit a given PyTorch."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyalloc.common import elf, units
from pyalloc.errors import PyallocError

LIBRARIES = Path(__file__).resolve().parent.parent / "lib" / "hostcuda"
CACHE = "pyalloc-dryrun"  # a folder in the caches of Triton and torch.compile
# Names that the preloaded libraries must provide.  NVRTC stays the real one, which needs no device.
_CUDA_NAME = re.compile(
    r"^(_*cuda[A-Z]|cu[A-Z]|nvml|cublas|cudnn|cusolver|cusparse|cufft|cupti|nccl)"
)
# Real libraries that work without a device, or that torch calls only if a program asks for files or symmetric memory.
_NOT_OURS = re.compile(r"^(cuFile|cusparseLt)")
_ADDRESSES = 2**36  # the smallest window that csrc/hostcuda/region.c reserves
LIFT = "ulimit -v unlimited"
LIFT_FILES = "ulimit -f unlimited"
_FILES = 2  # times a device's size: the file with its memory may have gaps that are too small
_ANSWER_S = 300  # a loaded machine, or a Python on a slow network
# Leaves out the working directory, which `python -c` searches first: a json.py there must not be imported.
_FIND_TORCH = """
import sys
sys.path = [entry for entry in sys.path if entry]
import importlib.util, json
spec = importlib.util.find_spec("torch")
print(json.dumps(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""))
"""


class HostCudaError(PyallocError):
    """No dry run is possible with this PyTorch, or the runtime was not built."""

    exit_code = 3


@dataclass(frozen=True)
class Torch:
    """A PyTorch found on disk, not imported.  imports: CUDA entry points that its libraries need."""

    folder: Path
    version: str
    cuda_major: int
    imports: frozenset[str]


def find_torch(python: str) -> Torch:
    """The PyTorch that the interpreter `python` would import.

    Raises:
        HostCudaError: there is none, it was built without CUDA, or `python` does not say where it is.
    """
    folder = _folder_of_torch(python)
    if not folder:
        other = _other_with_torch(python)
        raise HostCudaError(
            f"{python} has no PyTorch; install the CUDA build with: {python} -m pip install torch, or start the "
            f"program with a Python that has it{f': {other}' if other else ''}"
        )
    return _describe(Path(folder))


def _folder_of_torch(python: str) -> str:
    """Where the torch of that Python is; "" if it has none.

    Raises:
        HostCudaError: it does not say.
    """
    command = [python, "-c", _FIND_TORCH]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_S
        )
    except subprocess.TimeoutExpired:
        raise HostCudaError(
            f"{python} did not say within {_ANSWER_S} s where its PyTorch is; check that this Python starts at all"
        ) from None
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == 0:
        answer = (done.stdout.strip().splitlines() or [""])[-1]
        try:
            return str(json.loads(answer) or "")
        except ValueError:  # it is no Python, or prints something of its own
            said = f"its answer was {answer!r}"
    raise HostCudaError(f"could not find out which PyTorch {python} has: {said}")


def _other_with_torch(python: str) -> str | None:
    """The Python that runs pyalloc, or one on PATH: pyalloc may be in an environment of its own (pipx, uv tool)."""
    for name in (sys.executable, "python", "python3"):
        other = shutil.which(name)
        # Compared by path: Pythons of two environments may be links to one file.
        if other is not None and os.path.abspath(other) != os.path.abspath(python):
            with contextlib.suppress(HostCudaError, OSError):
                if _folder_of_torch(other):
                    return other
    return None


def _describe(folder: Path) -> Torch:
    match = re.search(
        r"__version__ = ['\"]([^'\"]+)", (folder / "version.py").read_text(encoding="utf-8")
    )
    version = match.group(1) if match else "unknown"
    libraries = sorted((folder / "lib").glob("*.so"))
    if not (folder / "lib" / "libc10_cuda.so").exists():
        raise HostCudaError(
            f"PyTorch {version} in {folder} is built without CUDA; a dry run needs the CUDA build "
            "(on Linux: pip install torch, without a +cpu index)"
        )
    imports: set[str] = set()
    defined: set[str] = set()
    major = 0
    for library in libraries:
        symbols = elf.read(library)
        imports |= {name for name in symbols.undefined if _CUDA_NAME.match(name)}
        defined |= symbols.defined
        for needed in symbols.needed:
            if needed.startswith("libcudart.so."):
                major = int(needed.rsplit(".", 1)[1])
    return Torch(folder, version, major, frozenset(imports - defined))


def preloads(major: int, *, zeros: bool = False) -> list[Path]:
    """The libraries to preload, in order, for a PyTorch of that major version of CUDA.

    Raises:
        HostCudaError: they were not built, or that version is not supported.
    """
    names = ["libcuda.so.1", f"libcudart.so.{major}", "libnvidia-ml.so.1", "libpya_cudalibs.so"]
    if not (LIBRARIES / names[0]).exists():
        raise HostCudaError(
            f"the host-memory CUDA runtime is not in {LIBRARIES}; build it with: pip install ."
        )
    if not (LIBRARIES / names[1]).exists():
        have = sorted(path.name for path in LIBRARIES.glob("libcudart.so.*"))
        raise HostCudaError(
            f"this PyTorch needs libcudart.so.{major}, but the host-memory runtime has only {', '.join(have)}. "
            "Use a PyTorch built for one of these."
        )
    names += ["libpya_zeros.so"] * zeros
    absent = [name for name in names if not (LIBRARIES / name).exists()]
    if absent:
        raise HostCudaError(
            f"{' and '.join(absent)} is not in {LIBRARIES}; build it with: pip install ."
        )
    return [LIBRARIES / name for name in names]


def check_limits(memory: int) -> None:
    """Checks that a device's memory may have its addresses and its file; otherwise requests would run out of memory.

    Raises:
        HostCudaError: this process, and so those that it starts, may not have enough.
    """
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY and most < _ADDRESSES:
        raise HostCudaError(
            f"this process is limited to {most / 2**30:.1f} GiB of address space, and each device of a dry run needs "
            f"{_ADDRESSES >> 30} GiB or more (addresses only, not memory); lift the limit: {LIFT}"
        )
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and largest < _FILES * memory:
        raise HostCudaError(
            f"this process is limited to files of {units.size(largest)}, and a device of {units.size(memory)} needs "
            f"one of {units.size(_FILES * memory)} (in memory, as far as it is used); lift the limit: {LIFT_FILES}"
        )


def missing(torch: Torch) -> list[str]:
    """CUDA entry points that this PyTorch imports and the runtime does not provide."""
    provided: set[str] = set()
    for library in preloads(torch.cuda_major):
        symbols = elf.read(library)
        # In the driver and the runtime, a weak definition is a stub that reports that it is not provided.
        is_stub = library.name.startswith(("libcuda.", "libcudart."))
        provided |= symbols.defined - (symbols.weak if is_stub else frozenset())
    return sorted(name for name in torch.imports - provided if not _NOT_OURS.match(name))


def environment(
    env: dict[str, str], torch: Torch, *, zeros: bool = False, folder: Path | None = None
) -> dict[str, str]:
    """A copy of env with which that PyTorch runs on host memory.

    Args:
        env: the environment.
        torch: which PyTorch.
        zeros: make allocated memory start as zeros.
        folder: exists as long as the program runs; gets a link to the libraries if the loader would cut their path in
            two at a space.

    Raises:
        HostCudaError: the libraries were not built, or the loader would cut their path and no link helps.
    """
    libraries = LIBRARIES
    found = preloads(torch.cuda_major, zeros=zeros)
    # No link helps against a colon: PYTHONPATH, which brings pyalloc into the program, cannot name such a folder.
    if _is_cut(libraries) and ":" not in str(libraries) and folder and not _is_cut(folder):
        libraries = folder / "hostcuda"
        libraries.symlink_to(LIBRARIES)
    if _is_cut(libraries):
        raise HostCudaError(
            f"the dynamic loader cannot preload libraries from a path with a space or a colon: {LIBRARIES}; install "
            "pyalloc in a folder without them, or set TMPDIR to a folder without them, such as TMPDIR=/tmp"
        )
    paths = [str(libraries / path.name) for path in found]
    before = [part for part in env.get("LD_PRELOAD", "").replace(" ", ":").split(":") if part]
    return {
        **env,
        "LD_PRELOAD": ":".join(paths + [part for part in before if part not in paths]),
        "TRITON_LIBCUDA_PATH": str(libraries),
        **_caches(env),
    }


def _caches(env: dict[str, str]) -> dict[str, str]:
    """Separate caches for Triton and torch.compile: kernels that they tune here must not run on a card."""
    home = env.get("TRITON_HOME") or env.get("HOME") or os.path.expanduser("~")
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    usual = {
        "TRITON_CACHE_DIR": os.path.join(home, ".triton", "cache"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"),
    }
    found = {name: Path(env.get(name) or folder) for name, folder in usual.items()}
    return {name: str(path if path.name == CACHE else path / CACHE) for name, path in found.items()}


def _is_cut(path: Path) -> bool:
    return re.search(r"[\s:]", str(path)) is not None
