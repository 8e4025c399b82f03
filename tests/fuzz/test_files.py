"""Files of others: a fixed number of the fuzzer's inputs, and what it found, one by one."""

from __future__ import annotations

import lzma
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from dry_support import PATIENCE_S

from pyalloc import trace
from pyalloc.errors import TraceError
from pyalloc.traces import pickles

ROOT = Path(__file__).parent.parent.parent
N_INPUTS = 8000


def test_whatever_a_file_holds_it_is_read_or_refused() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests/fuzz/fuzz_files.py", "--runs", str(N_INPUTS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert " 0 read" not in done.stdout and " 0 refused" not in done.stdout


def test_a_few_bytes_cannot_ask_for_gigabytes() -> None:
    code = """
import resource
import sys
sys.path.append("tests")
from peak_memory import peak_kib
from pyalloc.traces import pickles
from pyalloc.errors import TraceError
before = resource.getrlimit(resource.RLIMIT_AS)[0]
for bomb in (b"\\x80\\x04Nr\\xff\\xff\\xff\\x1f.", b"\\x80\\x04\\x8e\\xff\\xff\\xff\\xff\\x03\\0\\0\\0abc."):
    try:
        pickles.loads(bomb)
        raise SystemExit("loaded")
    except TraceError:
        pass
assert resource.getrlimit(resource.RLIMIT_AS)[0] == before
print(peak_kib())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**18  # KiB


def test_a_small_pickle_cannot_name_one_list_for_days() -> None:
    blocks = [{"size": 512, "state": "inactive"}] * 2000
    segment = {"address": 1 << 30, "total_size": 1 << 20, "stream": 0, "blocks": blocks}
    for snapshot in ({"segments": [segment] * 2000}, [segment] * 2000):
        data = pickle.dumps(snapshot, protocol=4)
        assert len(data) < 1 << 14
        with pytest.raises(TraceError, match="more blocks and entries than it has bytes"):
            pickles.loads(data)


def test_a_small_archive_cannot_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pya.xz"
    path.write_bytes(lzma.compress(b"PYATRACE" + bytes(200 << 20), preset=1))
    assert path.stat().st_size < 1 << 18
    with pytest.raises(TraceError, match="unpacks to far more"):
        trace.analyse(path)


@pytest.mark.parametrize(
    "value",
    [
        {"segments": [], "allocator_settings": "x"},
        {"segments": [], "device_traces": 5},
        {"segments": [], "device_traces": [[]] * 65},
        {"segments": [5]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": 2**70}]]},
    ],
)
def test_snapshots_of_the_wrong_shape_are_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(TraceError, match="malformed"):
        trace.analyse(path)


def test_a_deeply_nested_pickle_is_refused() -> None:
    with pytest.raises(TraceError):
        pickles.loads(b"\x80\x04" + b"(" * 5000 + b"l" * 5000 + b".")


def test_nothing_in_a_pickle_is_called() -> None:
    with pytest.raises(TraceError, match="nothing was executed"):
        pickles.loads(b"cos\nsystem\n(S'exit 1'\ntR.")
