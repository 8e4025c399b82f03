"""The comparison with other libraries' allocators: the parts that need none of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import building
from benchmarks.peers.__main__ import Row, _named, least, row_of, table
from benchmarks.suite import suite
from benchmarks.torch_replay import TorchReplay
from pyalloc.traces.moments import PAGE

ROOT = Path(__file__).parent.parent.parent
PLAIN = """
#include <stddef.h>
#include <sys/types.h>
int cudaMalloc(void **block, size_t bytes);
int cudaFree(void *block);
void *foreign_alloc(ssize_t bytes, int device, void *stream) {
    void *block = NULL;
    return cudaMalloc(&block, (size_t)bytes) == 0 ? block : NULL;
}
void foreign_free(void *block, ssize_t bytes, int device, void *stream) { cudaFree(block); }
"""
#: as a library that ignores what the driver returned
CARELESS = "#include <stdlib.h>" + PLAIN.replace(": NULL", ": (abort(), NULL)")


def test_least_finds_the_smallest_page() -> None:
    asked: list[int] = []

    def fits(capacity: int) -> bool:
        asked.append(capacity)
        return capacity >= 37 * PAGE

    assert least(fits, 3 * PAGE, 1000 * PAGE) == 37 * PAGE
    assert all(capacity % PAGE == 0 for capacity in asked)
    with pytest.raises(ValueError, match="do not suffice"):
        least(lambda _: False, 0, 4 * PAGE)


def test_table_means_are_geometric() -> None:
    rows = [Row("a", "x", 100, 200, 100, 10.0), Row("b", "x", 100, 800, 400, 40.0)]
    assert table(rows, ["x"]).splitlines()[-1].split() == [
        "geometric",
        "mean",
        "4.000",
        "2.000",
        "20",
    ]


def test_what_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_rmm_headers", lambda: None)
    assert building.INSTALL in str(building.why_not())
    monkeypatch.setattr(building, "_rmm_headers", lambda: tmp_path)
    monkeypatch.setattr(building, "_cuda_headers", lambda: [tmp_path])
    assert building.why_not() is None


def built(text: str, folder: Path) -> Path:
    """The library built from that source."""
    source, library = folder / "foreign.c", folder / "libforeign.so"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


@pytest.mark.torch
def test_where_a_library_ends_the_process_it_does_not_fit(tmp_path: Path) -> None:
    library = built(CARELESS, tmp_path)
    trace = suite(["two_phases"])[0]
    with TorchReplay(str(library)) as server:
        row = row_of(trace, trace.write(tmp_path), "careless", server, server)
    assert row.n_died > 0
    assert row.min_bytes >= row.live_bytes
    assert "ended the process" in table([row], ["careless"])


@pytest.mark.torch
def test_a_foreign_library_is_replayed_through_torch(tmp_path: Path) -> None:
    """cudaMalloc for each block: its peak is what was live, and every request is a device call."""
    library = built(PLAIN, tmp_path)
    trace = suite(["two_phases"])[0]
    with TorchReplay(str(library)) as server:
        answer = server.replay(trace.write(tmp_path))
    assert answer["completed"]
    assert answer["peak_bytes"] >= answer["live_bytes"]
    assert answer["calls_by_name"]["cudaMalloc"] == answer["ops"] // 2


def test_other_libraries_are_named(tmp_path: Path) -> None:
    library = tmp_path / "libother.so"
    library.touch()
    assert _named(f"other={library}") == building.Peer("other", library)
    for wrong in ("other", f"={library}", "other=/nowhere"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=FILE"):
            _named(wrong)


def test_without_rmm_the_command_says_what_to_install() -> None:
    if building.why_not() is None:
        pytest.skip("RMM's headers are installed here")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install librmm" in done.stderr or "benchmarks.peers: " in done.stderr
