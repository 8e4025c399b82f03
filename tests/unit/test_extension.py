"""The built extension: what it links, what it exports."""

from __future__ import annotations

import re
import subprocess

from pyalloc import _core

ALLOWED = {"linux-vdso", "libc", "libm", "libdl", "libpthread", "ld-linux-x86-64", "libstdc++", "libgcc_s"}


def test_links_nothing_of_cuda_or_torch() -> None:
    listed = subprocess.run(["ldd", _core.__file__], capture_output=True, text=True, check=True).stdout
    names = {re.sub(r"\.so.*", "", line.split()[0].rsplit("/", 1)[-1]) for line in listed.splitlines()}
    assert names <= ALLOWED


def test_exports_only_the_module_and_the_bridge() -> None:
    command = ["nm", "-D", "--defined-only", _core.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "u" and "V"/"W": constants of the C++ library's templates, shared by every program that uses them.
    names = {line.split()[2] for line in listed.splitlines() if line.split()[1] == "T"}
    assert names == {"PyInit__core", "pya_torch_alloc", "pya_torch_free"}


def test_is_built_for_the_stable_abi() -> None:
    assert _core.__file__.endswith(".abi3.so")
