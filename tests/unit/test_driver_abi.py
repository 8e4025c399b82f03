"""The driver's types, numbers and parameters in csrc/device, against NVIDIA's header if one is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "c++")


def headers() -> Iterator[Path]:
    """cuda.h of the toolkit whose nvcc is found, and of Python's packages: they may be of several versions."""
    nvcc = shutil.which("nvcc")
    places = [] if nvcc is None else [Path(nvcc).resolve().parent.parent / "include"]
    for name, inside in (("nvidia", "*/include"), ("triton", "backends/nvidia/include")):
        spec = importlib.util.find_spec(name)
        for root in spec.submodule_search_locations or [] if spec is not None else []:
            places += sorted(Path(root).glob(inside))
    return (place for place in places if (place / "cuda.h").exists())


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")
def test_the_drivers_interface_is_nvidias() -> None:
    found = list(headers())
    if not found:
        pytest.skip("needs cuda.h: nvcc, or the CUDA build of PyTorch")
    for place in found:
        command = [COMPILER, "-std=c++17", "-fsyntax-only", f"-I{HERE.parents[1] / 'csrc'}"]
        command += ["-isystem", str(place), str(HERE / "driver_abi.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{place}\n{done.stderr[-4000:]}"
