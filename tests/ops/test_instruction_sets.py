"""Which instruction set the CPU kernels use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyalloc.errors import OpError
from pyalloc.ops import cpu_isa, set_cpu_isa

from .conftest import available_isas

# Linux refuses the tiles of AMX, as it does where a thread's signal stack is too small for them.
REFUSAL = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

long
syscall(long number, ...) {
    long result = 0, a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(args, long);
    }
    va_end(args);
    if (number == SYS_arch_prctl) {
        errno = EPERM;
        return -1;
    }
    register long r10 __asm__("r10") = a[3];
    register long r8 __asm__("r8") = a[4];
    register long r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}
"""

PROGRAM = """
import torch
from pyalloc.ops import cpu_isa, scaled_attention
x = torch.randn(1, 2, 256, 64)
scaled_attention(x, x, x)
print(cpu_isa())
"""


def test_unknown_instruction_set():
    before = cpu_isa()
    for name in ("sse9", "AVX2", None):
        with pytest.raises(OpError, match=f"{name!r} is not available here, only scalar"):
            set_cpu_isa(name)
    assert cpu_isa() == before


def test_avx512_where_linux_refuses_tiles(tmp_path: Path):
    if "amx" not in available_isas():
        pytest.skip("this machine or build has no amx")
    source, library = tmp_path / "refusal.c", tmp_path / "refusal.so"
    source.write_text(REFUSAL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = {}
    for name, extra in (("given", {}), ("refused", {"LD_PRELOAD": str(library)})):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env={**os.environ, **extra}, capture_output=True, text=True, check=True
        )
        found[name] = done.stdout.strip()
    assert found == {"given": "amx", "refused": "avx512"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_kernels_of_amx_have_its_tiles(tmp_path: Path, compiler: str):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    source, kernel = Path(__file__).parents[2] / "csrc/ops", tmp_path / "attention_amx_forward.o"
    command = ["make", "-s", "-C", source, f"OBJ={tmp_path}", f"CC={compiler}", kernel]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No rule to make target" in made.stderr:
        pytest.skip(f"this {compiler} does not know AMX")
    assert (made.returncode, made.stderr) == (0, "")
    names = subprocess.run(["nm", kernel], capture_output=True, text=True, check=True).stdout
    assert "pya_attention_forward_amx" in names
    assert "amx_tile" not in names, "they are in plain C, as for tests"
