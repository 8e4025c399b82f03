"""Limits, reservations, trimming and callbacks on real PyTorch.  Where torch has the same function, both must pass."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from parity.tensors import GIB, MIB, empty

import pyalloc
from pyalloc import _core, adapters

pyalloc_only = pytest.mark.skipif(
    os.environ.get("PYALLOC_PARITY") != "pyalloc", reason="native torch has no such thing"
)


def own(key: str) -> int:
    return pyalloc.stats()["pyalloc_" + key]


@pytest.fixture(autouse=True)
def no_limits() -> Iterator[None]:
    yield
    if os.environ.get("PYALLOC_PARITY") == "pyalloc":
        pyalloc.set_limit(None)
        pyalloc.set_limit(None, soft=True)
        pyalloc.reserve(0)
        assert _core.pressure_callbacks == []


# ---- both ----


def test_fraction_and_cached_memory_of_other_sizes() -> None:
    """Cached memory above the limit is reused or given back, whatever its sizes were."""
    torch.cuda.set_per_process_memory_fraction(0.25)
    for size in (300, 500, 700, 900, 1100, 1500):
        tensors = [empty(size * MIB) for _ in range(1800 // size)]
        del tensors
    assert torch.cuda.memory_reserved() <= 2 * GIB
    assert torch.cuda.memory_stats()["num_ooms"] == 0


def test_after_out_of_memory_everything_is_as_before() -> None:
    keep = [empty(size * MIB) for size in (3, 30, 300)]
    data = torch.arange(100000)
    kept = data.cuda()
    before = torch.cuda.memory_stats()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            empty(100 * GIB)
    after = torch.cuda.memory_stats()
    for key, value in before.items():
        if key.startswith(("allocat", "active", "requested")):
            assert after[key] == value, key
    assert torch.equal(kept.cpu(), data)
    del keep


# ---- pyalloc ----


@pyalloc_only
def test_trim_to_a_target() -> None:
    keep = empty(100 * MIB)
    tensors = [empty(200 * MIB) for _ in range(5)]
    del tensors
    reserved = torch.cuda.memory_reserved()
    pyalloc.trim(reserved - 300 * MIB)
    assert reserved - 304 * MIB <= torch.cuda.memory_reserved() <= reserved - 300 * MIB
    pyalloc.trim("500MiB")
    assert torch.cuda.memory_reserved() <= 500 * MIB
    pyalloc.trim()
    assert 100 * MIB <= torch.cuda.memory_reserved() <= 110 * MIB
    del keep


@pyalloc_only
def test_reserve_keeps_and_serves() -> None:
    pyalloc.reserve("1GiB")
    assert torch.cuda.memory_reserved() >= GIB
    made = own("growths")
    tensor = empty(900 * MIB)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = empty(100 * MIB)
    assert own("growths") == made
    del tensor, other
    torch.cuda.empty_cache()
    pyalloc.trim()
    assert torch.cuda.memory_reserved() >= GIB
    pyalloc.reserve(0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@pyalloc_only
def test_reserving_too_much_changes_nothing() -> None:
    before = torch.cuda.memory_reserved()
    with pytest.raises(
        pyalloc.AllocatorError,
        match=r"cannot reserve 102400 MiB on device 0; nothing was changed\. Of its 8192 MiB, \d+ are free and "
        r"\d+ are cached here\. Reserve less",  # without a limit, none is reported
    ):
        pyalloc.reserve("100GiB")
    assert torch.cuda.memory_reserved() == before
    pyalloc.set_limit("1GiB")
    with pytest.raises(
        pyalloc.AllocatorError, match=r"the limit is 1024\. Reserve less, or raise the limit"
    ):
        pyalloc.reserve("2GiB")


@pyalloc_only
def test_hard_limit() -> None:
    pyalloc.set_limit("1GiB")
    assert pyalloc.get_limit() == GIB
    tensor = empty(900 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        empty(200 * MIB)
    text = str(caught.value)
    assert "1024.00 MiB allowed; " in text
    assert "but the limit is 1024.00 MiB: raise it" in text
    del tensor
    pyalloc.set_limit(None)
    assert pyalloc.get_limit() is None
    assert empty(2 * GIB).numel() == 2 * GIB


@pyalloc_only
def test_setting_a_limit_gives_back_what_is_above_it() -> None:
    tensor = empty(2 * GIB)
    del tensor
    pyalloc.set_limit("512MiB")
    assert torch.cuda.memory_reserved() <= 512 * MIB


@pyalloc_only
def test_soft_limit_never_refuses() -> None:
    pyalloc.set_limit("256MiB", soft=True)
    assert pyalloc.get_limit(soft=True) == 256 * MIB
    assert empty(GIB).numel() == GIB


@pyalloc_only
def test_soft_limit_reuses_what_is_free() -> None:
    kept, gaps = [], []
    for _ in range(40):
        gaps.append(empty(4 * MIB))
        kept.append(empty(4 * MIB))
    gaps.clear()
    pyalloc.set_limit("300MiB", soft=True)
    reserved = torch.cuda.memory_reserved()
    joined = own("stitches") + own("page_moves")
    tensor = empty(100 * MIB)
    assert own("stitches") + own("page_moves") > joined
    assert torch.cuda.memory_reserved() <= reserved
    del tensor


@pyalloc_only
def test_limit_of_a_pool() -> None:
    with pyalloc.pool(limit="256MiB") as pool:
        inside = empty(200 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"the pool is limited to 256\.00 MiB"):
            empty(100 * MIB)
        pyalloc.set_limit("512MiB", pool=pool)
        more = empty(100 * MIB)
    outside = empty(GIB)
    assert outside.numel() == GIB
    del inside, more, outside


def test_a_pool_of_another_device_is_that_devices() -> None:
    with pyalloc.pool(device="cuda:1") as pool:
        inside = torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
        assert pool.use_count() == 2  # its own and the block's
    assert {segment["device"] for segment in pool.snapshot()} == {1}
    assert pool.use_count() == 1
    del inside, pool


def test_a_torch_without_pools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "MemPool")
    with pytest.raises(pyalloc.AllocatorError, match=r"torch 2\.5 and later"), pyalloc.pool():
        pass


def test_when_memory_of_a_pool_goes_back() -> None:
    before = torch.cuda.memory_reserved()
    with pyalloc.pool() as pool:
        inside = empty(64 * MIB)
        del inside
    assert torch.cuda.memory_reserved() >= before + 64 * MIB
    del pool
    assert torch.cuda.memory_reserved() <= before
    with pyalloc.pool():
        inside, between = empty(64 * MIB), empty(32 * MIB)
        del between
    assert before + 64 * MIB <= torch.cuda.memory_reserved() < before + 96 * MIB
    del inside
    assert torch.cuda.memory_reserved() >= before + 64 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pyalloc_only
def test_limit_of_a_pool_nobody_uses() -> None:
    with pytest.raises(pyalloc.AllocatorError, match="not in use"):
        pyalloc.set_limit("1GiB", pool=(0, 987654))


@pyalloc_only
@pytest.mark.parametrize("size", ["many", -1, "1XB", 0, "-5MiB"])
def test_sizes_that_are_none(size: int | str) -> None:
    with pytest.raises(pyalloc.ConfigError):
        pyalloc.set_limit(size)


@pyalloc_only
def test_devices_by_name_and_devices_that_are_not_there() -> None:
    current = torch.cuda.current_device()
    assert pyalloc.stats(f"cuda:{current}").keys() == pyalloc.stats(torch.device("cuda")).keys()
    for wrong in (99, -1, "cuda:99"):
        for call in (pyalloc.stats, pyalloc.get_limit, pyalloc.reserve, pyalloc.trim):
            arguments = (0, wrong) if call in (pyalloc.reserve, pyalloc.trim) else (wrong,)
            with pytest.raises(pyalloc.ConfigError, match="there is no CUDA device"):
                call(*arguments)
    for wrong in ("cpu", "gpu0", 1.5):
        with pytest.raises(pyalloc.ConfigError, match="cuda:1"):
            pyalloc.set_limit("1GiB", wrong)


@pyalloc_only
def test_what_is_no_size_no_pool_and_no_callback_is_said_at_once() -> None:
    for wrong in ("many", "1GiB,memory:tight"):
        with pytest.raises(pyalloc.ConfigError, match="is not a size"):
            pyalloc.set_limit(wrong)
    for odd in (7, (1, 2, 3), ("a", "b")):
        with pytest.raises(pyalloc.ConfigError, match="is not a pool"):
            pyalloc.set_limit("1GiB", pool=odd)
    with pytest.raises(TypeError, match="a function of"):
        pyalloc.on_pressure(3)


@pyalloc_only
def test_a_pool_has_no_soft_limit() -> None:
    with pytest.raises(pyalloc.ConfigError, match="soft"):
        pyalloc.set_limit("1GiB", soft=True, pool=(0, 1))


@pyalloc_only
@pytest.mark.parametrize("freed", [True, None])
def test_callback_frees_and_the_request_succeeds(freed: bool | None) -> None:
    """It reports that, or nothing."""
    spare = [empty(3 * GIB), empty(3 * GIB)]
    asked = []

    def free_one(device: int, size: int) -> bool | None:
        asked.append((device, size))
        empty(MIB)  # it may allocate
        if not spare:
            return False
        spare.pop()
        return freed

    with pyalloc.on_pressure(free_one):
        assert empty(5 * GIB).numel() == 5 * GIB
    assert asked == [(0, 5 * GIB)]
    assert len(spare) == 1
    assert own("saved_by_callback") >= 1


@pyalloc_only
def test_callback_that_raises_is_reported_and_the_error_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_type))

    def broken(device: int, size: int) -> None:
        raise KeyError(size)

    kept = empty(GIB)
    with pyalloc.on_pressure(broken), pytest.raises(torch.OutOfMemoryError):
        empty(8 * GIB)
    assert seen == [KeyError] and kept.numel() == GIB


@pyalloc_only
def test_callback_that_runs_out_of_memory_itself_does_not_recurse() -> None:
    depth = []

    def greedy(device: int, size: int) -> None:
        depth.append(size)
        with pytest.raises(torch.OutOfMemoryError):
            empty(90 * GIB)

    kept = empty(GIB)
    with pyalloc.on_pressure(greedy), pytest.raises(torch.OutOfMemoryError, match=r"8\.00 GiB"):
        empty(8 * GIB)
    assert depth == [8 * GIB] and kept.numel() == GIB


@pyalloc_only
def test_callbacks_are_not_called_for_more_than_the_card_has() -> None:
    calls = []
    with (
        pyalloc.on_pressure(lambda device, size: calls.append(size)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        empty(9 * GIB)
    assert calls == []


@pyalloc_only
def test_callback_removed_while_it_runs() -> None:
    calls = []

    def once(device: int, size: int) -> bool:
        calls.append(size)
        handle.remove()
        handle.remove()
        return False

    kept = empty(GIB)
    handle = pyalloc.on_pressure(once)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            empty(8 * GIB)
    assert len(calls) == 1 and kept.numel() == GIB


@pyalloc_only
def test_the_error_names_who_holds_the_memory() -> None:
    keep = empty(2 * GIB)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = empty(GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        empty(7 * GIB)
    text = str(caught.value)
    assert "Held: 2.00 GiB in 1 block by the default pool on the default stream; " in text
    assert "1024.00 MiB in 1 block by the default pool on stream 0x" in text
    assert "Next: " in text
    del keep, other


@pyalloc_only
def test_the_error_names_the_places_where_stacks_are_recorded() -> None:
    torch.cuda.memory._record_memory_history()

    def make_weights() -> list[torch.Tensor]:
        return [empty(GIB) for _ in range(2)]

    keep = make_weights()
    other = torch.zeros(300 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        empty(7 * GIB)
    held = str(caught.value).split("Held: ")[1].split(". Next")[0].split("; ")
    assert held[0].startswith("2.00 GiB in 2 blocks by tensors.py:")
    assert held[0].endswith(" in empty")
    assert held[1].startswith("300.00 MiB in 1 block by test_limits.py:")
    del keep, other
    gc.collect()


@pyalloc_only
def test_the_error_names_no_line_of_pyallocs() -> None:
    """What it requests for other libraries, as here, or for its ops is the program's."""
    torch.cuda.memory._record_memory_history()
    address = adapters._allocate(300 * MIB, 0, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        empty(8 * GIB - 200 * MIB)
    adapters._free(address)
    held = str(caught.value).split("Held: ")[1]
    assert held.startswith("300.00 MiB in 1 block by test_limits.py:")


@pyalloc_only
def test_a_stream_that_is_busy_keeps_its_memory(runtime) -> None:  # type: ignore[no-untyped-def]
    """Under a soft limit nothing waits, and memory in use elsewhere stays mapped and correct."""
    side = torch.cuda.Stream()
    pyalloc.set_limit("64MiB", soft=True)
    data = torch.arange(MIB, dtype=torch.int32)
    waits = torch.cuda.memory_stats()["num_sync_all_streams"]
    runtime.pya_hostcuda_set_event_delay(1 << 40)
    kept = []
    for i in range(20):
        with torch.cuda.stream(side):
            kept.append((data + i).cuda())
            scratch = empty(8 * MIB)
        empty((9 + i) * MIB)
        del scratch
    runtime.pya_hostcuda_set_event_delay(0)
    for i, tensor in enumerate(kept):
        assert torch.equal(tensor.cpu(), data + i)
    assert torch.cuda.memory_stats()["num_sync_all_streams"] == waits
