"""Reads the dynamic symbols of shared libraries: what a library imports, and what it defines."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pyalloc.errors import PyallocError

_SHT_DYNSYM = 11
_SHT_DYNAMIC = 6
_DT_NULL, _DT_NEEDED = 0, 1
_STB_WEAK = 2
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<QQ")


class ElfError(PyallocError):
    """The file is not a 64-bit little-endian ELF library."""

    exit_code = 3  # no dry run is possible with it


@dataclass(frozen=True)
class Symbols:
    """Symbol names without versions.  `weak`: definitions that any other definition may replace."""

    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]
    weak: frozenset[str]


def read(path: Path) -> Symbols:
    """Reads one library.

    Raises:
        ElfError: the file cannot be read as one.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(data, path)
    except (OSError, ValueError, struct.error, IndexError) as error:
        raise ElfError(f"{path} cannot be read as a shared library: {error}") from error


def _string(data: mmap.mmap, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode("ascii", "replace")


def _parse(data: mmap.mmap, path: Path) -> Symbols:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ElfError(f"{path} is not a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, start + i * size) for i in range(count)]
    needed: list[str] = []
    undefined: set[str] = set()
    defined: set[str] = set()
    weak: set[str] = set()
    for _, kind, _, _, offset, length, link, _, _, _ in sections:
        if kind not in (_SHT_DYNSYM, _SHT_DYNAMIC):
            continue
        strings = sections[link][4]
        content = data[offset : offset + length]
        if kind == _SHT_DYNAMIC:
            entries = takewhile(lambda entry: entry[0] != _DT_NULL, _DYNAMIC.iter_unpack(content))
            needed += [_string(data, strings + at) for tag, at in entries if tag == _DT_NEEDED]
            continue
        symbols = [
            (_string(data, strings + name), info >> 4, index != 0)
            for name, info, _, index, _, _ in _SYMBOL.iter_unpack(content)
            if name != 0
        ]
        undefined.update(text for text, _, is_defined in symbols if not is_defined)
        defined.update(text for text, _, is_defined in symbols if is_defined)
        weak.update(text for text, bind, is_defined in symbols if is_defined and bind == _STB_WEAK)
    return Symbols(tuple(needed), frozenset(undefined), frozenset(defined), frozenset(weak))
