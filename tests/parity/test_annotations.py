"""What surrounds a history entry: ranges of record_function, compiled regions, pools, pinned memory."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity.programs import run
from parity.tensors import MIB, empty
from torch.cuda.memory import _record_memory_history, _snapshot
from torch.profiler import record_function

HAS_POOL_IDS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def annotations() -> list[tuple[str, str]]:
    return [(note["name"], note["stage"]) for note in _snapshot()["external_annotations"]]


def entries_of(tensor_address: int) -> list[dict[str, Any]]:
    return [
        entry for entry in _snapshot()["device_traces"][0] if entry.get("addr") == tensor_address
    ]


@pytest.fixture(autouse=True)
def stop() -> Iterator[None]:
    empty(1)
    yield
    _record_memory_history(None)


def test_ranges_of_record_function() -> None:
    _record_memory_history("all", context=None)
    with record_function("outer"), record_function("inner"):
        empty(1000)
    assert annotations() == [
        ("outer", "START"),
        ("inner", "START"),
        ("inner", "END"),
        ("outer", "END"),
    ]


def test_ranges_enclose_their_entries() -> None:
    _record_memory_history("all", context=None)
    with record_function("range"):
        address = empty(3 * MIB).data_ptr()
    snapshot = _snapshot()
    begin, end = (note["time_us"] for note in snapshot["external_annotations"])
    times = [
        entry["time_us"]
        for entry in snapshot["device_traces"][0]
        if entry.get("addr") == address and entry["action"] == "alloc"
    ]
    assert begin - 1000 <= times[-1] <= end + 1000
    assert snapshot["external_annotations"][0]["device"] == 0


@pytest.mark.parametrize("everywhere", [False, True])
def test_ranges_of_other_threads(everywhere: bool) -> None:
    _record_memory_history("all", context=None, global_record_annotations=everywhere)

    def work() -> None:
        with record_function("elsewhere"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    expected = [("elsewhere", "START"), ("elsewhere", "END")] if everywhere else []
    assert annotations() == expected


def test_no_ranges_without_history() -> None:
    with record_function("before"):
        pass
    _record_memory_history("all", context=None)
    assert annotations() == []
    _record_memory_history(None)
    with record_function("after"):
        pass
    assert annotations() == []


def test_compile_context() -> None:
    function = torch.compile(lambda x: x + 1, dynamic=False)
    x = torch.zeros(1 << 20, device="cuda")
    function(x)
    _record_memory_history("all", context=None, compile_context=True)
    outside = empty(1000)
    inside = function(x)
    after = empty(1000)
    found = [
        entries_of(tensor.data_ptr())[-1]["compile_context"] for tensor in (outside, inside, after)
    ]
    assert found == ["N/A", "Torch-Compiled Region: 0/0", "N/A"]
    torch._dynamo.reset()


def test_lines_of_the_model_in_frames_of_compiled_code() -> None:
    """torch looks them up by the frames of a snapshot."""
    from torch.fx.experimental import _config

    if not hasattr(_config, "enrich_profiler_metadata"):
        pytest.skip("this torch cannot")

    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return doubled.relu()

    with _config.patch("enrich_profiler_metadata", True):
        _record_memory_history()
        result = torch.compile(function, backend="aot_eager")(torch.zeros(1000, device="cuda"))
        snapshot = _snapshot(augment_with_fx_traces=True)
    frames = [
        frame
        for entry in snapshot["device_traces"][0]
        for frame in entry.get("frames", [])
        if "fx_node_op" in frame
    ]
    assert {frame["fx_node_name"] for frame in frames} >= {"mul", "relu"}
    assert any("doubled = x * 2" in frame["fx_original_trace"] for frame in frames)
    del result
    torch._dynamo.reset()


def test_entries_carry_their_pool() -> None:
    if not HAS_POOL_IDS:
        pytest.skip("this torch's entries have no pool")
    _record_memory_history("all", context=None)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = empty(5 * MIB)
    outside = empty(5 * MIB)
    addresses = inside.data_ptr(), outside.data_ptr()
    pool_id = pool.id
    del inside, outside, pool
    torch.cuda.empty_cache()
    assert {entry["pool_id"] for entry in entries_of(addresses[0])} == {pool_id}
    assert {entry["pool_id"] for entry in entries_of(addresses[1])} == {(0, 0)}


def test_the_entry_of_a_pools_snapshot_carries_the_pool() -> None:
    if not HAS_POOL_IDS:
        pytest.skip("this torch's entries have no pool")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = empty(5 * MIB)
    outside = empty(3 * MIB)
    _record_memory_history("all", context=None)
    pool.snapshot()
    _snapshot()
    entries = [
        (entry["pool_id"], entry["size"])
        for entry in _snapshot()["device_traces"][0]
        if entry["action"] == "snapshot"
    ]
    active = torch.cuda.memory_stats()["active_bytes.all.current"]
    assert entries == [(pool.id, inside.numel()), ((0, 0), active)]
    assert active >= inside.numel() + outside.numel()


def test_notes_carry_pool_and_stream() -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_annotate_tensor"):
        pytest.skip("this torch has no annotations")
    _record_memory_history("all", stacks="python")
    pool = torch.cuda.MemPool()
    stream = torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        tensor = empty(1000)
    memory._annotate_tensor(tensor, "note")
    (note,) = [entry for entry in entries_of(tensor.data_ptr()) if entry["action"] == "annotate"]
    assert note["pool_id"] == pool.id
    assert note["user_metadata"] == "note"
    assert note["size"] == 1000  # as requested
    assert note["frames"][0]["name"] == "_annotate_tensor"


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
def test_a_note_on_what_is_no_live_block_is_an_error(is_on: bool) -> None:
    """The same whether a history is recorded or not; a live block has none."""
    memory = torch.cuda.memory
    if not hasattr(memory, "_annotate_tensor"):
        pytest.skip("this torch has no annotations")
    if is_on:
        _record_memory_history("all", context=None)
    tensor, live = empty(1000), empty(5 * MIB)
    freed = tensor.data_ptr()
    memory._annotate_tensor(tensor[100:], "note")  # of the storage
    del tensor
    with memory.caching_allocator_disabled():
        uncached = empty(10)
    places = {
        0: "0",
        freed: hex(freed),
        live.data_ptr() + 4: hex(live.data_ptr() + 4),
        uncached.data_ptr(): hex(uncached.data_ptr()),
    }
    for address, shown in places.items():
        with pytest.raises(RuntimeError) as raised:
            torch._C._cuda_annotateMemory(address, "note")
        words = str(raised.value).splitlines()[0]
        assert words == f"annotateMemory: no live allocation found at pointer {shown}"
    with pytest.raises(RuntimeError):
        memory._annotate_tensor(empty(0), "note")
    notes = [each for each in _snapshot()["device_traces"][0] if each["action"] == "annotate"]
    assert len(notes) == is_on


TEXTS = [
    "phase",
    "a\0b",
    "\0",
    "\u00e9\U0001f600",
    b"bytes",
    b"b\0c",
    bytearray(b"array"),
    "x" * 70000,
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_metadata_is_any_text(text: str | bytes | bytearray) -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_annotate_tensor"):
        pytest.skip("this torch has no annotations")
    shown = text if isinstance(text, str) else text.decode()
    _record_memory_history("all", context=None)
    memory._set_memory_metadata(text)
    assert memory._get_memory_metadata() == shown
    tensor = empty(1000)
    memory._set_memory_metadata("")
    assert memory._get_memory_metadata() == ""
    memory._annotate_tensor(tensor, text)
    entries = entries_of(tensor.data_ptr())
    assert [each["action"] for each in entries][-2:] == ["alloc", "annotate"]
    assert [each["user_metadata"] for each in entries[-2:]] == [shown, shown]


def test_metadata_of_a_dict() -> None:
    """Torch 2.15 makes JSON of it."""
    memory = torch.cuda.memory
    if torch.__version__ < (2, 15):
        pytest.skip("of torch 2.15 on")
    _record_memory_history("all", context=None)
    memory._set_memory_metadata({"step": 1, "of": ["loss"]})
    text = memory._get_memory_metadata()
    tensor = empty(1000)
    memory._set_memory_metadata("")
    assert text == '{"step":1,"of":["loss"]}'
    assert entries_of(tensor.data_ptr())[-1]["user_metadata"] == text


@pytest.mark.parametrize("wrong", [5, None, "\ud800", ["text"]])
def test_metadata_is_nothing_else(wrong: object) -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_annotate_tensor"):
        pytest.skip("this torch has no annotations")
    tensor = empty(1000)
    with pytest.raises(TypeError):
        memory._set_memory_metadata(wrong)
    with pytest.raises(TypeError):
        memory._annotate_tensor(tensor, wrong)
    assert memory._get_memory_metadata() == ""


@pytest.mark.parametrize("context", [None, "state", "all"])
def test_metadata_needs_no_stacks(context: str | None) -> None:
    memory = torch.cuda.memory
    if not hasattr(memory, "_set_memory_metadata"):
        pytest.skip("this torch has no memory metadata")
    _record_memory_history("all", context=context, stacks="python")
    memory._set_memory_metadata("phase")
    tensor = empty(1000)
    memory._set_memory_metadata("")
    (entry,) = [entry for entry in entries_of(tensor.data_ptr()) if entry["action"] == "alloc"]
    assert entry["user_metadata"] == "phase"
    assert ("frames" in entry) is (context == "all")


def test_metadata_of_a_snapshot() -> None:
    """Its entry shows the setting when it is taken, and no stack at any level."""
    memory = torch.cuda.memory
    if not hasattr(memory, "_set_memory_metadata"):
        pytest.skip("this torch has no memory metadata")
    _record_memory_history("all", stacks="python")
    tensor = empty(1000)
    memory._set_memory_metadata("here")
    _snapshot()
    memory._set_memory_metadata("")
    _snapshot()
    del tensor
    entries = [each for each in _snapshot()["device_traces"][0] if each["action"] == "snapshot"]
    assert [each["user_metadata"] for each in entries[-2:]] == ["here", ""]
    assert not any("frames" in each for each in entries)


@pytest.mark.parametrize("now", ["", "later"])
@pytest.mark.parametrize("context", [None, "state", "alloc", "all"])
def test_metadata_of_a_free_is_that_of_its_moment(context: str | None, now: str) -> None:
    """Its frames are those of the allocation, if it has none of its own."""
    memory = torch.cuda.memory
    if not hasattr(memory, "_set_memory_metadata"):
        pytest.skip("this torch has no memory metadata")
    _record_memory_history("all", context=context, stacks="python")
    memory._set_memory_metadata("before")
    tensor = empty(1000)
    address = tensor.data_ptr()
    memory._set_memory_metadata(now)
    del tensor
    memory._set_memory_metadata("")
    freed = [each for each in entries_of(address) if each["action"].startswith("free")][-2:]
    assert [each["user_metadata"] for each in freed] == [now, now]
    assert [bool(each.get("frames")) for each in freed] == [context in ("alloc", "all")] * 2


def takes(argument: str) -> bool:
    return argument in inspect.signature(_record_memory_history).parameters


def test_pinned_memory() -> None:
    if not takes("record_pinned_host_memory"):
        pytest.skip("this torch records no pinned memory")
    _record_memory_history("all", context=None, record_pinned_host_memory=True)
    pinned = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    tensor = empty(1000)
    snapshot = _snapshot()
    assert pinned.data_ptr() in [entry["addr"] for entry in snapshot["host_traces"]]
    assert pinned.data_ptr() in [segment["address"] for segment in snapshot["host_segments"]]
    assert entries_of(tensor.data_ptr())


def test_pinned_memory_only() -> None:
    if not takes("record_cuda"):
        pytest.skip("this torch records no pinned memory")
    _record_memory_history("all", context=None, record_pinned_host_memory=True, record_cuda=False)
    pinned = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    empty(1000)
    snapshot = _snapshot()
    assert pinned.data_ptr() in [entry["addr"] for entry in snapshot["host_traces"]]
    assert snapshot["device_traces"][0] == []


def test_before_cuda_is_used_a_snapshot_has_the_same_keys() -> None:
    """Nor does the question start CUDA."""
    program = """
import torch
from torch.cuda.memory import _snapshot
before = _snapshot()
assert not torch.cuda.is_initialized() and before["segments"] == []
torch.empty(1, device="cuda")
after = _snapshot()
assert before.keys() == after.keys(), (before.keys(), after.keys())
assert before["allocator_settings"] == after["allocator_settings"], (before, after)
"""
    run("-c", program)


def test_settings_are_torchs() -> None:
    settings = _snapshot()["allocator_settings"]
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == ""
    assert settings["garbage_collection_threshold"] == 0.0
    assert "roundup_power2_divisions" in settings
