"""Files of ours: whole, cut off, damaged, hostile, oddly named; and those that are none."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from instrument.tools import Plan, pyalloc, small_trace
from pyalloc import errors, trace


def test_every_cut_of_a_trace_is_read_or_refused(plan: Plan, tmp_path: Path) -> None:
    whole = small_trace(plan).read_bytes()
    cut = tmp_path / "cut.pya"
    for n in range(0, len(whole), 7):
        cut.write_bytes(whole[:n])
        try:
            found = trace.analyse(cut)
        except errors.TraceError:
            continue
        assert not found.totals["is_complete"]


def test_every_damaged_byte_is_noticed_or_harmless(plan: Plan, tmp_path: Path) -> None:
    whole = bytearray(small_trace(plan).read_bytes())
    damaged = tmp_path / "damaged.pya"
    refused = 0
    for at in range(len(whole)):
        copy = bytearray(whole)
        copy[at] ^= 0x41
        damaged.write_bytes(copy)
        try:
            trace.analyse(damaged)
        except errors.TraceError:
            refused += 1
    assert refused > len(whole) * 0.9  # the padding of the header is nobody's


def test_a_huge_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.pya"
    path.write_bytes(
        b"PYATRACE" + struct.pack("<II", 1, 0) + struct.pack("<4s7I", b"PYAC", *[0xFFFFFFF0] * 7)
    )
    with pytest.raises(errors.TraceError):
        trace.analyse(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80", b"PYATRACE", b"\xfd7zXZ\x00nonsense"])
def test_other_files_are_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    out = pyalloc("report", path, expect=2)
    assert "other" in out and "Traceback" not in out
    assert "No such file" in pyalloc("report", tmp_path / "absent", expect=2)


def test_names_of_files_need_not_be_text(plan: Plan, tmp_path: Path) -> None:
    path, page = tmp_path / "a\udcff.pya", tmp_path / "page.html"
    small_trace(plan).rename(path)
    pyalloc("report", path, "-o", page)
    assert "<title>a\\udcff.pya" in page.read_text()
