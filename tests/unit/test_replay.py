"""The binding of trace files and replay: what C tests cannot see."""

from __future__ import annotations

import gc
import struct
import sys
import threading
import zlib
from pathlib import Path

import pytest

from pyalloc import _core
from pyalloc.errors import ConfigError, TraceError, UsageError
from pyalloc.traces.convert import KINDS

MIB = 1 << 20


def write(path: Path, n: int) -> None:
    """n blocks of i + 1 bytes with a stack each, of which every other is freed."""
    writer = _core.TraceWriter(path)
    text = writer.string("größe")
    stack = writer.stack(0, text, text, 7)
    for i in range(n):
        writer.event(KINDS["alloc"], addr=512 * (i + 1), bytes=i + 1, stack=stack, time_ns=i)
        if i % 2:
            writer.event(KINDS["free_requested"], addr=512 * (i + 1), time_ns=i)
    writer.close()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.pya"
    write(path, 1000)
    reader = _core.TraceReader(path)
    sizes: list[int] = []
    while (columns := reader.read(300))[0]:
        n = len(columns[0])
        assert [len(column) // n for column in columns] == [1, 1, 8, 8, 8, 8, 8, 8, 4, 4]
        sizes += [
            size
            for kind, size in zip(columns[0], struct.unpack(f"<{n}Q", columns[6]), strict=True)
            if kind == KINDS["alloc"]
        ]
    assert sizes == list(range(1, 1001))
    assert reader.is_complete()
    assert reader.text(1) == "größe"
    assert reader.frame(1) == (0, 1, 1, 7)
    assert reader.text(2) is None and reader.frame(9) is None
    at, total = reader.position()
    assert at == total == path.stat().st_size


def test_damage_is_told_after_what_was_good(tmp_path: Path) -> None:
    path = tmp_path / "a.pya"
    write(path, 100_000)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    reader = _core.TraceReader(path)
    n = 0
    told = "checksum .*; if it was copied, copy it again, otherwise record again"
    with pytest.raises(TraceError, match=told):
        while columns := reader.read():
            n += len(columns[0])
    assert n > 10_000
    with pytest.raises(TraceError, match=told):
        _core.Program(path)


def test_writer_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.pya"
    write(path, 3)
    with pytest.raises(UsageError, match="exists"):
        _core.TraceWriter(path)
    writer = _core.TraceWriter(path, overwrite=True)
    with pytest.raises(ValueError, match="kind"):
        writer.event(99)
    with pytest.raises(ValueError, match="stack"):
        writer.event(KINDS["alloc"], stack=5)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.event(KINDS["alloc"])


@pytest.mark.parametrize("what", [_core.TraceReader, _core.Program])
def test_not_a_trace(what: type, tmp_path: Path) -> None:
    path = tmp_path / "a.pya"
    path.write_bytes(b"hello, this is not a trace")
    with pytest.raises(TraceError, match="not a recording"):
        what(path)
    with pytest.raises(TraceError, match="No such file"):
        what(tmp_path / "nothing.pya")
    _core.TraceWriter(path, True).close()
    later = bytearray(path.read_bytes())
    later[8] += 1
    path.write_bytes(later)
    with pytest.raises(TraceError, match="read it with the version that wrote it"):
        what(path)


def two_sizes() -> _core.Program:
    """100 MiB, freed, then 60 and 60."""
    program = _core.Program()
    program.add(KINDS["alloc"], addr=1, bytes=100 * MIB)
    program.add(KINDS["free_requested"], addr=1)
    program.add(KINDS["alloc"], addr=2, bytes=60 * MIB)
    program.add(KINDS["alloc"], addr=3, bytes=60 * MIB)
    return program


def test_replay() -> None:
    program = two_sizes()
    assert program.info()["peak_live_bytes"] == 120 * MIB
    assert [name for name, _ in _core.replay_policies()] == ["native", "expandable", "pyalloc"]
    assert program.replay("native")["peak_bytes"] == 160 * MIB
    assert program.replay("native")["n_calls_by_kind"] == {"cudaMalloc": 2}
    assert program.replay("pyalloc", check=True)["n_violations"] == 0
    assert not program.replay("native", capacity=140 * MIB)["completed"]
    least = program.find_min("native")
    assert least is not None and least["bytes"] == least["safe_bytes"] == 160 * MIB
    assert program.find_min("expandable", capacity=100 * MIB) is None
    low, high = (program.replay("native", cost=cost)["device_ns"] for cost in ("low", "high"))
    assert low < high


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
def test_the_last_of_several_passes_is_told_apart(policy: str) -> None:
    program = two_sizes()  # two blocks outlive it: freed before the next pass
    once = program.replay(policy)
    assert once["n_calls_last_pass"] == once["n_calls"]
    assert once["device_ns_last_pass"] == once["device_ns"]
    many = program.replay(policy, passes=20, check=True)
    assert many["completed"] and many["n_violations"] == 0
    assert many["n_calls_last_pass"] == many["device_ns_last_pass"] == 0
    assert many["n_calls"] >= once["n_calls"]


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
def test_a_pass_drops_the_graphs_of_the_one_before(policy: str) -> None:
    program = _core.Program()
    for kind in ("empty_cache", "pool_begin", "alloc", "free_requested", "pool_end"):
        program.add(KINDS[kind], addr=512, bytes=100 * MIB)
    assert program.replay(policy, passes=3)["n_calls_last_pass"] > 0  # its memory was given back


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
def test_a_pass_leaves_the_pools_of_the_one_before(policy: str) -> None:
    """A recording may end while requests go to one pool, or to two."""
    program = _core.Program()
    program.add(KINDS["alloc"], addr=512, bytes=100 * MIB)
    for pool in (7, 8):
        program.add(KINDS["pool_begin"], addr=pool)
        program.add(KINDS["alloc"], addr=pool << 30, bytes=30 * MIB)
    once = program.replay(policy, check=True)
    twice = program.replay(policy, passes=2, check=True)
    assert twice["completed"] and twice["n_violations"] == 0
    assert twice["peak_bytes"] == once["peak_bytes"]


@pytest.mark.parametrize("policy", [name for name, _ in _core.replay_policies()])
@pytest.mark.parametrize(
    "kinds",
    ["pool_end", "pool_release", "pool_begin pool_begin pool_end", "pool_begin pool_end pool_end"],
)
def test_routes_to_pools_that_torch_refuses_change_nothing(policy: str, kinds: str) -> None:
    """A recording that begins late, or has a gap, lacks their other halves; torch raises, and all goes on as it was."""
    program, other = _core.Program(), _core.Program()
    for kind in (*kinds.split(), "alloc", "pool_release", "pool_release", "empty_cache"):
        program.add(KINDS[kind], addr=512, bytes=100 * MIB)
    for kind in ("pool_begin", "pool_end") * kinds.startswith("pool_begin") + (
        *("alloc", "pool_release", "empty_cache"),
    ):
        other.add(KINDS[kind], addr=512, bytes=100 * MIB)
    found = program.replay(policy, passes=2, check=True)
    assert found["completed"] and found["n_violations"] == 0
    assert found["peak_bytes"] == other.replay(policy, passes=2)["peak_bytes"]


def test_many_pools() -> None:
    program = _core.Program()
    for pool in range(1, 1000):
        for kind in ("pool_begin", "pool_end", "pool_release"):
            program.add(KINDS[kind], addr=pool)
    assert program.info()["n_pools"] == 999
    assert program.replay("pyalloc")["completed"]
    with pytest.raises(TraceError, match="4096 pools"):
        for pool in range(1000, 5000):
            program.add(KINDS["pool_begin"], addr=pool)


def test_replay_refuses() -> None:
    program = two_sizes()
    with pytest.raises(ValueError, match="policy"):
        program.replay("best")
    with pytest.raises(ValueError, match="cost"):
        program.replay("native", cost="free")
    with pytest.raises(ConfigError):
        program.replay("pyalloc", options="nonsense:1")
    with pytest.raises(TraceError, match="1 EiB"):
        program.add(KINDS["alloc"], bytes=1 << 62)


def test_reading_tells_how_far_it_is_and_may_be_stopped(tmp_path: Path) -> None:
    """With a hundred million events it takes ten seconds, in which Ctrl-C must work."""
    path = tmp_path / "a.pya"
    write(path, 200_000)
    seen: list[tuple[int, int]] = []
    program = _core.Program(path, progress=lambda *at: seen.append(at))
    assert program.info()["n_allocs"] == 200_000
    assert [0 < done <= of == path.stat().st_size for done, of in seen] == [True]

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.Program(path, progress=stop)


def test_progress_may_raise() -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two_sizes().replay("native", progress=stop)
    with pytest.raises(KeyboardInterrupt):
        two_sizes().find_min("native", progress=stop)


def test_no_use_by_two_threads() -> None:
    program = two_sizes()
    caught: list[BaseException] = []

    def add() -> None:
        try:
            program.add(KINDS["snapshot"])
        except RuntimeError as error:
            caught.append(error)

    def progress(done: int, of: int) -> None:
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()

    program.replay("native", progress=progress)
    assert len(caught) == 1


def test_a_scan_tells_of_the_events_that_were_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.pya", 6)
    scan = _core.Scan(tmp_path / "a.pya", ranges=[1, 3, 5, 6])
    assert [row[0] for row in scan.told()] == [1, 2, 5]
    for asked in ("moments", "marks", "ranges"):
        with pytest.raises(ValueError, match="ascending order"):
            _core.Scan(tmp_path / "a.pya", **{asked: [5, 3]})


def test_a_program_knows_what_a_pass_over_the_trace_does(tmp_path: Path) -> None:
    """Replays report what a trace lacks without reading it again."""
    writer = _core.TraceWriter(tmp_path / "a.pya")
    for text in ("allocator=native", "größe=1", "größe=2"):
        writer.event(KINDS["user"], text=writer.string(text))
    for device, stream in ((0, 16), (0, 32), (2, 16), (2, 16)):
        at = {"device": device, "addr": (stream + 1) << 20}
        writer.event(KINDS["alloc"], stream=stream, bytes=1000, **at)
        writer.event(KINDS["record_stream"], arg=64, **at)
    writer.close()
    program, scan = _core.Program(tmp_path / "a.pya"), _core.Scan(tmp_path / "a.pya", n_bins=2)
    info, totals = program.info(), scan.totals()
    for key in ("n_streams", "n_record_streams", "device_peak", "n_events", "is_complete"):
        assert info[key] == totals[key], key
    assert (info["n_streams"], info["n_record_streams"]) == (3, 4)
    assert info["device_peak"] == {0: 2048, 2: 1024}
    assert program.notes() == scan.notes() == ["allocator=native", "größe=1", "größe=2"]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (len(KINDS) + 1, r"made by a newer pyalloc \(event kind {}\): update this one \(near byte"),
        (0, "an event of unknown kind"),
    ],
)
def test_a_kind_of_event_that_is_not_known_yet_is_no_damage(
    tmp_path: Path, kind: int, told: str
) -> None:
    path = tmp_path / "a.pya"
    payload = bytes([kind, 0])
    head = struct.pack("<4sII", b"PYAC", len(payload), 1)
    rest = bytes(16)  # the time, and events before
    checksum = struct.pack("<I", zlib.crc32(head + rest + payload))
    path.write_bytes(b"PYATRACE\1".ljust(16, b"\0") + head + checksum + rest + payload)
    with pytest.raises(TraceError, match=told.format(kind)):
        _core.TraceReader(path).read()
    with pytest.raises(TraceError, match=told.format(kind)):
        _core.Program(path)


def test_nothing_leaks(tmp_path: Path) -> None:
    write(tmp_path / "a.pya", 10)
    kinds = (_core.TraceReader, _core.Program)
    before = [sys.getrefcount(kind) for kind in kinds]
    # An earlier test's object may be freed meanwhile; a leak would be one reference for each of the hundred.
    for _ in range(100):
        for kind in kinds:
            kind(tmp_path / "a.pya")
    gc.collect()  # without a GIL each thread counts for itself until then
    after = [sys.getrefcount(kind) for kind in kinds]
    assert all(abs(b - a) < 50 for a, b in zip(before, after, strict=True))
