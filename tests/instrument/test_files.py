"""Our files: whole, cut off, damaged, hostile, oddly named; and files that are none of ours."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest

from instrument.tools import Plan, pyalloc, small_trace
from pyalloc import _core, errors, trace
from pyalloc.analysis import leaks
from pyalloc.common import console, ranked
from pyalloc.report import html
from pyalloc.traces import source


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
    assert refused > len(whole) * 0.9  # the padding of the header belongs to nobody


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


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Opening one waits for somebody who writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with path.open("rb+", 0) as writer:
        writer.write(trace.MAGIC)
        assert "write it to a file first" in pyalloc("stats", path, expect=2)
        with pytest.raises(errors.TraceError, match="is a pipe"):  # like the shell's <(...)
            trace.totals(Path(f"/dev/fd/{writer.fileno()}"))


def test_what_cannot_be_read_is_named_not_what_might_be_beside_it(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 300}.pya"  # as in a folder that must not be looked into
    with pytest.raises(errors.TraceError, match=r"\.pya: File name too long$"):
        trace.analyse(path)


def test_names_of_files_need_not_be_text(plan: Plan, tmp_path: Path) -> None:
    path, page = tmp_path / "a\udcff.pya", tmp_path / "page.html"
    small_trace(plan).rename(path)
    pyalloc("report", path, "-o", page)
    assert "<title>a\\udcff.pya" in page.read_text()


def test_a_page_of_a_trace_that_is_called_as_its_parts_are(plan: Plan) -> None:
    path = small_trace(plan).rename(plan.path.with_name("__DATA__ of __EVENTS__.pya"))
    (title,) = re.findall("<title>(.*)</title>", html.page(trace.analyse(path)))
    assert title.startswith(path.name)


@pytest.mark.parametrize("words", [["export", "--to", "csv"], ["plan"], ["report"]])
def test_a_folder_is_told_to_be_one(words: list[str], tmp_path: Path) -> None:
    for folder in (".", "/"):
        said = pyalloc(*words, folder, expect=2, cwd=tmp_path)
        assert said == f"pyalloc {words[0]}: {folder} is a folder; name a file in it\n"


def test_a_terminal_gets_nothing_that_it_obeys(plan: Plan) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\r\u202e\x9b2J name"
    plan.event("user", f"allocator={evil}")
    plan.event("step", "step")
    plan.event("phase_begin", evil)
    plan.event("alloc", addr=1 << 30, bytes=20 << 20, stack=plan.stack(3, evil, f"/home/{evil}.py"))
    plan.event("category", evil, addr=1 << 30)
    plan.event("oom", bytes=1 << 40, stack=plan.stack(4, evil))
    plan.event("step", "step", arg=1)
    path = plan.done()
    for words in (
        ["report"],
        ["top"],
        ["top", "--over-time"],
        ["top", "--by", "category"],
        ["diff"],
    ):
        shown = pyalloc(words[0], path, *words[1:], "-q")
        assert "name" in shown and not set(shown) & set("\x1b\x07\r\u202e\x9b"), words
    assert console.printable("\x1b[1mbold\x1b[0m\n\x1b[3m") == "\x1b[1mbold\x1b[0m\n?[3m"


def test_only_sources_are_read(tmp_path: Path) -> None:
    """File names come from the trace: /dev/zero has no end, and a file that is no source must not be quoted."""
    for name, is_read in (("program.py", True), ("secret.txt", False)):
        path = tmp_path / name
        path.write_text("first\nsecond\n")
        assert source.text_of(source.Place(str(path), 2, "f")) == ("second" if is_read else "")
    assert source.text_of(source.Place(str(tmp_path / "program.py"), 3, "f")) == ""


def test_endless_stacks_are_read_in_part(plan: Plan) -> None:
    texts = [plan.writer.string(text) for text in ("work", "/home/me/model.py")]
    stack = 0
    for line in range(1, 1001):
        stack = plan.writer.stack(stack, *texts, line)
    plan.event("alloc", addr=1 << 30, bytes=1 << 20, stack=stack)
    found = trace.analyse(plan.done())
    assert [line for *_, line in found.frames(stack)] == list(range(1000, 744, -1))


def test_fewer_states_are_kept_of_very_many_blocks(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(100):
        plan.event("alloc", addr=(i + 1) << 20, bytes=1 << 20)
    for i in range(50):
        plan.event("free_requested", addr=(i + 1) << 20)
    path = plan.done()
    assert len(trace.analyse(path, moments=24).moments) == 24  # 23 and the end
    monkeypatch.setattr(trace, "_MOST_BLOCKS", 1000)
    found = trace.analyse(path, moments=24)
    assert len(found.moments) == 11 and found.totals["n_live_at_most"] == 100


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("plan.pya", data)
    return file.getvalue()


def test_compressed_files_are_read_and_told_by_their_own_name(plan: Plan, tmp_path: Path) -> None:
    whole = small_trace(plan).read_bytes()
    packed = gzip.compress(whole)
    path = tmp_path / "plan.pya.gz"
    path.write_bytes(packed)
    assert trace.totals(path) == trace.totals(plan.path)
    for data, why in (
        (packed[:-20], "ends too early; copy it again"),
        (packed[:60] + b"\xff" * 500, ""),
        (gzip.compress(packed), "neither a recording"),  # some archives unpack to themselves
        (gzip.compress(b"PYATRACE" + bytes(200 << 20), 9), "unpacks to far more"),
        (lzma.compress(b"nothing of ours"), "neither a recording"),
        (b"\x28\xb5\x2f\xfd" + whole, "compressed by zstd; unpack it first"),
        (bz2.compress(whole), "compressed by bzip2; unpack it first"),
        (zipped(whole), "a zip archive, such as torch.save"),
    ):
        path.write_bytes(data)
        with pytest.raises(errors.TraceError, match=f"^{re.escape(str(path))}: .*{why}"):
            trace.totals(path)


def test_only_moments_that_are_looked_at_become_rows(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 400,000 live blocks each state takes a hundred megabytes; growth is reported without it."""
    asked: list[int] = []

    class Scan:
        def __init__(self, *args: Any, **keywords: Any) -> None:
            self.scan = made(*args, **keywords)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.scan, name)

        def blocks(self, moment: int) -> list[tuple[Any, ...]]:
            asked.append(moment)
            return self.scan.blocks(moment)

    path, made = small_trace(plan), _core.Scan
    monkeypatch.setattr(_core, "Scan", Scan)
    found = trace.analyse(path)
    assert leaks.verdict(found).startswith("no leak") and len(found.moments) == 9
    assert len(asked) == 3  # the peak, and the two large blocks that it was made into
    html.page(found)
    assert len(asked) == 4  # though it shows all of them: the one when most was reserved
    assert found.peak.allocated_bytes == 7 << 20
    assert sum(size for size, _ in found.peak.by_stack.values()) == 7 << 20
    assert sum(n for _, n in found.peak.by_stack.values()) == len(found.peak.blocks)
    for moment in found.moments.values():
        assert list(moment.blocks) == sorted(moment.blocks, key=lambda b: (b.device, b.address))
        assert sum(block.bytes for block in moment.blocks) == moment.allocated_bytes


def test_files_of_ranks_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are several; in the words of launchers."""
    path = tmp_path / "out.pya"
    for rank, size, name in (
        *((None, None, "out.pya"), ("0", None, "out.pya"), ("0", "1", "out.pya")),
        *(("", "2", "out.pya"), ("0", "many", "out.pya"), ("3", "8", "out.rank3.pya")),
    ):
        for variable, value in (("RANK", rank), ("WORLD_SIZE", size)):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        assert ranked.own(path).name == name
    files = [tmp_path / f"out.rank{i}.pya" for i in range(9)]
    for each in reversed(files):
        each.touch()
    for other in ("out.pya", "out.rank0.77.pya", "out.rank1.plan", "outer.rank1.pya"):
        (tmp_path / other).touch()
    assert ranked.existing(path) == files
    assert {ranked.common(each) for each in [path, *files]} == {path}
    assert [each.name for each in tmp_path.iterdir() if ranked.is_second(each)] == [
        "out.rank0.77.pya"
    ]
