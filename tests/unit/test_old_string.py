"""std::string as torch's older wheels have it, made and taken by a build of ours that has the newer one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX", "c++")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler")
def test_strings_of_either_kind_go_both_ways(tmp_path: Path) -> None:
    base = [COMPILER, "-std=c++17", "-g", "-fsanitize=address,undefined", f"-I{CSRC}"]
    base += ["-fno-sanitize-recover=all"]
    objects = []
    for source, kind in (("old_string", 0), ("old_string", 1), ("torch_old_string", 1)):
        folder = CSRC if source.startswith("torch") else HERE
        objects.append(str(tmp_path / f"{source}{kind}.o"))
        how = [f"-D_GLIBCXX_USE_CXX11_ABI={kind}", "-c", str(folder / f"{source}.cpp")]
        subprocess.run([*base, *how, "-o", objects[-1]], check=True)
    symbols = tmp_path / "symbols.o"
    command = [os.environ.get("CC", "cc"), "-c", str(CSRC / "torch_symbols.c"), "-o", str(symbols)]
    subprocess.run([*command, f"-I{CSRC}"], check=True)
    program = str(tmp_path / "program")
    subprocess.run([*base, *objects, str(symbols), "-ldl", "-o", program], check=True)
    subprocess.run([program], check=True)
