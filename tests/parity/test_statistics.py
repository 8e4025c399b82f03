"""torch.cuda.memory_stats and its relatives: exact counts, whoever allocates."""

from __future__ import annotations

import pytest
import torch
from parity.tensors import MIB, empty

KIB = 1024
SIZES = [
    1,
    511,
    512,
    513,
    4 * KIB,
    100_000,
    MIB - 512,
    MIB,
    MIB + 1,
    3 * MIB,
    10 * MIB,
    10 * MIB + 1,
    77 * MIB,
]
POOLED = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


def stat(key: str, device: int = 0) -> int:
    return torch.cuda.memory_stats(device)[key]


@pytest.mark.parametrize("size", SIZES)
def test_requested_bytes_are_exact(size: int) -> None:
    before = stat("requested_bytes.all.current")
    tensor = empty(size)
    assert stat("requested_bytes.all.current") == before + size
    del tensor
    assert stat("requested_bytes.all.current") == before


@pytest.mark.parametrize("size", SIZES)
def test_allocated_bytes_are_rounded_to_512(size: int) -> None:
    before = torch.cuda.memory_allocated()
    tensor = empty(size)
    grown = torch.cuda.memory_allocated() - before
    assert grown % 512 == 0
    assert grown >= size
    if size <= MIB:
        assert grown == -(-size // 512) * 512
    assert tensor.data_ptr() % 512 == 0


@pytest.mark.parametrize("size", SIZES)
def test_small_and_large_pools(size: int) -> None:
    pool = "small_pool" if -(-size // 512) * 512 <= MIB else "large_pool"
    other = "large_pool" if pool == "small_pool" else "small_pool"
    before, untouched = stat(f"allocation.{pool}.current"), stat(f"allocation.{other}.current")
    tensor = empty(size)
    assert stat(f"allocation.{pool}.current") == before + 1
    assert stat(f"allocation.{other}.current") == untouched
    assert stat("allocation.all.current") == before + untouched + 1
    del tensor


def order_of(stats: dict) -> list:
    return [
        (key, order_of(value) if isinstance(value, dict) else None) for key, value in stats.items()
    ]


def test_nested_keys_come_in_torchs_order() -> None:
    """Code that prints them, or writes them into columns, works as before."""
    empty(1)
    stats = torch.cuda.memory_stats_as_nested_dict()
    four = [(kind, None) for kind in ("current", "peak", "allocated", "freed")]
    three = [(pool, four) for pool in ("all", "small_pool", "large_pool")]
    single = [name for name, inner in order_of(stats) if inner is None]
    newer = ["num_oom_rejections"] if "num_oom_rejections" in stats else []
    assert single == [
        "num_alloc_retries",
        "num_ooms",
        "max_split_size",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        *newer,
    ]
    private = ["reserved_bytes_by_private_pools"]
    pooled = [name for name in stats if name not in single + private]
    assert pooled == [*POOLED, "oversize_allocations", "oversize_segments"]
    assert list(stats)[: len(single)] == single
    if private[0] in stats:
        assert list(stats).index(private[0]) == list(stats).index("reserved_bytes") + 1
    for name in POOLED:
        assert order_of(stats[name]) == three, name
    for name in pooled[-2:]:
        assert order_of(stats[name]) == four, name


@pytest.mark.parametrize("fraction", [float("nan"), -0.1, 1.5])
def test_a_fraction_is_one(fraction: float) -> None:
    torch.cuda.init()
    before = torch.cuda.get_per_process_memory_fraction()
    with pytest.raises((RuntimeError, ValueError), match=r"[Ii]nvalid fraction") as raised:
        torch.cuda.set_per_process_memory_fraction(fraction)
    if fraction != fraction:
        assert "invalid fraction:nan. Please set within [0, 1]." in str(raised.value)
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_keys_are_complete() -> None:
    empty(1)
    stats = torch.cuda.memory_stats()
    for name in POOLED:
        for pool in ("all", "large_pool", "small_pool"):
            for kind in ("current", "peak", "allocated", "freed"):
                assert isinstance(stats[f"{name}.{pool}.{kind}"], int)
    for name in (
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
    ):
        assert stats[name] >= 0
    assert "max_split_size" in stats
    for name in ("oversize_allocations", "oversize_segments"):
        assert stats[f"{name}.current"] == 0
    assert not [key for key in stats if key.startswith("pyalloc")]


def test_keys_are_sorted() -> None:
    empty(1)
    keys = list(torch.cuda.memory_stats())
    assert keys == sorted(keys)


def test_nested_and_flat_agree() -> None:
    tensor = empty(5000)
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated()
    assert nested["active"]["small_pool"]["peak"] == stat("active.small_pool.peak")
    del tensor


@pytest.mark.parametrize("name", POOLED)
def test_all_is_the_sum_of_both_pools(name: str) -> None:
    tensors = [empty(size) for size in SIZES]
    del tensors[::2]
    for kind in ("current", "allocated", "freed"):
        parts = stat(f"{name}.small_pool.{kind}") + stat(f"{name}.large_pool.{kind}")
        assert stat(f"{name}.all.{kind}") == parts


@pytest.mark.parametrize("name", POOLED)
def test_current_is_allocated_minus_freed(name: str) -> None:
    before = {kind: stat(f"{name}.all.{kind}") for kind in ("current", "allocated", "freed")}
    tensors = [empty(size) for size in SIZES]
    del tensors[1::3]
    after = {kind: stat(f"{name}.all.{kind}") for kind in ("current", "allocated", "freed")}
    grown = {kind: after[kind] - before[kind] for kind in after}
    assert grown["current"] == grown["allocated"] - grown["freed"]


def test_counts_of_allocations_and_frees() -> None:
    for _ in range(7):
        empty(1000)
    assert stat("allocation.all.allocated") == 7
    assert stat("allocation.all.freed") == 7
    assert stat("allocation.all.peak") - stat("allocation.all.current") == 1


def test_peak_is_kept_and_reset() -> None:
    base = torch.cuda.memory_allocated()
    tensor = empty(4 * MIB)
    top = torch.cuda.memory_allocated()
    del tensor
    assert torch.cuda.max_memory_allocated() == top
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == base


def test_peak_of_reserved_bytes() -> None:
    tensor = empty(64 * MIB)
    top = torch.cuda.memory_reserved()
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_reserved() == top
    assert torch.cuda.memory_reserved() < top
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()


def test_reset_accumulated() -> None:
    tensor = empty(1000)
    torch.cuda.reset_accumulated_memory_stats()
    assert stat("allocation.all.allocated") == 0
    assert stat("allocation.all.freed") == 0
    assert stat("allocation.all.current") >= 1
    del tensor
    assert stat("allocation.all.freed") == 1


def test_reserved_covers_allocated() -> None:
    tensors = [empty(size) for size in SIZES]
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    del tensors


def test_empty_cache_gives_memory_back() -> None:
    free = torch.cuda.mem_get_info()[0]
    tensor = empty(100 * MIB)
    assert torch.cuda.mem_get_info()[0] <= free - 100 * MIB
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def test_empty_cache_counts_as_a_wait_for_all_streams() -> None:
    kept = empty(MIB)
    before = torch.cuda.memory_stats()["num_sync_all_streams"]
    torch.cuda.empty_cache()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_stats()["num_sync_all_streams"] == before + 2
    del kept


def test_empty_cache_keeps_live_memory() -> None:
    tensor = empty(8 * MIB)
    tensor.copy_(torch.arange(8 * MIB) % 251)
    filler = empty(8 * MIB)
    del filler
    torch.cuda.empty_cache()
    assert torch.equal(tensor.cpu(), (torch.arange(8 * MIB) % 251).to(torch.uint8))


def test_freed_memory_is_used_again() -> None:
    tensor = empty(20 * MIB)
    del tensor
    reserved = torch.cuda.memory_reserved()
    for _ in range(5):
        empty(20 * MIB)
    assert torch.cuda.memory_reserved() == reserved


def test_size_zero() -> None:
    before = torch.cuda.memory_allocated()
    tensor = empty(0)
    assert tensor.data_ptr() == 0
    assert torch.cuda.memory_allocated() == before


def test_memory_summary_has_the_figures() -> None:
    tensor = empty(3 * MIB)
    text = torch.cuda.memory_summary()
    assert "PyTorch CUDA memory summary, device ID 0" in text
    assert "Allocated memory" in text
    assert "3072 KiB" in text
    assert "Active memory" in torch.cuda.memory_summary(abbreviated=True)
    del tensor


def test_host_memory_stats() -> None:
    pinned = torch.empty(1000, pin_memory=True)
    stats = torch.cuda.host_memory_stats()
    assert (
        max(value for key, value in stats.items() if "bytes" in key and key.endswith("current"))
        >= 4000
    )
    del pinned


def test_backend_has_a_name() -> None:
    assert torch.cuda.get_allocator_backend() in ("native", "pluggable")


def test_device_calls_are_counted() -> None:
    before = stat("num_device_alloc")
    tensor = empty(200 * MIB)
    assert stat("num_device_alloc") > before
    freed = stat("num_device_free")
    del tensor
    torch.cuda.empty_cache()
    assert stat("num_device_free") > freed


def test_deprecated_names() -> None:
    with pytest.warns(FutureWarning):
        assert torch.cuda.memory_cached() == torch.cuda.memory_reserved()
    with pytest.warns(FutureWarning):
        assert torch.cuda.max_memory_cached() == torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("name", ["reset_max_memory_allocated", "reset_max_memory_cached"])
def test_deprecated_resets(name: str) -> None:
    tensor = empty(30 * MIB)
    del tensor
    torch.cuda.empty_cache()
    with pytest.warns(FutureWarning):
        getattr(torch.cuda, name)()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
