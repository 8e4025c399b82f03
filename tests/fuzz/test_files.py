"""Files of others: a fixed number of the fuzzer's inputs, and what it found, one by one."""

from __future__ import annotations

import lzma
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dry_support import PATIENCE_S

from pyalloc import _core, trace
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
    whole = {"address": 1 << 30, "total_size": 1 << 20, "stream": 0, "blocks": blocks}
    for snapshot in ({"segments": [whole] * 2000}, [whole] * 2000):
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


def segment(*, device: int = 0, address: object = 1 << 30, **block: object) -> dict[str, Any]:
    """With one block."""
    whole = {"size": 1 << 20, "state": "active_allocated"} | block
    return {"address": address, "total_size": 1 << 20, "device": device, "blocks": [whole]}


@pytest.mark.parametrize(
    "value",
    [
        5,
        {"segments": 3},
        {"segments": [5]},
        {"segments": [{"address": 0}]},
        {"segments": [segment(address=-1)]},
        {"segments": [segment(address="a")]},
        {"segments": [segment(device=-1)]},
        {"segments": [segment(device=_core.MAX_DEVICES)]},
        {"segments": [segment() | {"stream": 2**64}]},
        {"segments": [segment(size=-1)]},
        {"segments": [segment(requested_size="1")]},
        {"segments": [segment(state=1)]},
        {"segments": [segment(frames=[{"line": "1"}])]},
        {"segments": [], "allocator_settings": "x"},
        {"segments": [], "external_annotations": [{"name": 3, "stage": "END", "time_us": 1}]},
        {"segments": [], "external_annotations": [{"name": "a", "stage": "END", "time_us": 2**53}]},
        {"segments": [], "device_traces": 5},
        {"segments": [], "device_traces": [[]] * (_core.MAX_DEVICES + 1)},
        {"segments": [], "device_traces": [[{"addr": 1, "size": 4}]]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": 4, "frames": [5]}]]},
        {"segments": [], "device_traces": [[{"action": "snapshot", "size": -1}]]},
        {"segments": [], "device_traces": [[{"action": "snapshot", "stream": 2**64}]]},
        {"segments": [], "device_traces": [[{"action": "snapshot", "time_us": 2**53}]]},
        {"segments": [], "device_traces": [[{"action": "oom", "device_free": 2**64}]]},
        {"segments": [], "device_traces": [[{"action": 4, "addr": 1, "size": 4}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": 2**70}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1 << 80, "size": 4}]]},
    ],
)
def test_snapshots_of_the_wrong_shape_are_refused(value: object) -> None:
    """Before anything reads them."""
    with pytest.raises(TraceError, match=r"malformed|not a memory snapshot"):
        pickles.loads(pickle.dumps(value))


def test_a_snapshot_of_as_many_devices_as_there_can_be(tmp_path: Path) -> None:
    n = _core.MAX_DEVICES
    path = tmp_path / "snapshot.pickle"
    segments = [segment(device=i) for i in range(n)]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[]] * n}))
    assert trace.analyse(path).totals["peak_bytes"] == n << 20
    assert trace.analyse(path, device=n - 1).totals["peak_bytes"] == 1 << 20


def test_a_deeply_nested_pickle_is_refused() -> None:
    with pytest.raises(TraceError):
        pickles.loads(b"\x80\x04" + b"(" * 5000 + b"l" * 5000 + b".")


def test_nothing_in_a_pickle_is_called() -> None:
    with pytest.raises(TraceError, match="nothing was executed"):
        pickles.loads(b"cos\nsystem\n(S'exit 1'\ntR.")
