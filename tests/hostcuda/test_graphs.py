"""Graphs: replays, side streams, nested graphs, memory and objects that end with them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from .conftest import PAGE, Cuda
from .streams import (
    GLOBAL,
    INVALID_HANDLE,
    NOT_READY,
    RELAXED,
    capture_status,
    launch,
    stream_new,
)

INVALID, ILLEGAL_STATE = 1, 401


def test_graphs_replay_copies_and_fills(cuda: Cuda) -> None:
    a, b, stream = cuda.malloc(PAGE), cuda.malloc(PAGE), stream_new(cuda)
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    assert launch(cuda, stream) == 0
    cuda.ok("cudaMemcpyAsync", b, a, 100, 3, stream)
    cuda.ok("cudaMemsetAsync", b + 50, 9, 10, stream)
    graph, n = cuda_end(cuda, stream), ctypes.c_size_t()
    cuda.ok("cudaGraphGetNodes", graph, 0, ctypes.byref(n))
    assert n.value == 3
    assert cuda.put(a, b"a" * 100) == 0
    assert cuda.get(b, 100) == bytes(100)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    cuda.ok("cudaGraphDestroy", graph)
    launches = cuda.control("launches", 0)
    cuda.ok("cudaGraphLaunch", runnable, stream)
    assert cuda.get(b, 100) == b"a" * 50 + b"\t" * 10 + b"a" * 40
    assert cuda.control("launches", 0) == launches + 1
    cuda.ok("cudaGraphExecDestroy", runnable)
    for pointer in (a, b):
        cuda.ok("cudaFree", pointer)
    cuda.ok("cudaStreamDestroy", stream)


def test_values_written_by_a_stream_are_written_when_a_graph_is_launched(cuda: Cuda) -> None:
    a, stream = cuda.malloc(PAGE), stream_new(cuda)
    cuda.ok("cuStreamWriteValue32_v2", stream, a, 0x44434241, 0)
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    cuda.ok("cuStreamWriteValue32_v2", stream, a, 0x64636261, 0)
    cuda.ok("cuStreamWriteValue64_v2", stream, a + 8, 0x3837363534333231, 0)
    graph = cuda_end(cuda, stream)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    assert cuda.get(a, 16) == b"ABCD" + bytes(12)
    cuda.ok("cudaGraphLaunch", runnable, stream)
    assert cuda.get(a, 16) == b"abcd" + bytes(4) + b"12345678"
    assert cuda("cuStreamWriteValue32_v2", stream, a + 2, 1, 0) == INVALID
    cuda.ok("cudaGraphExecDestroy", runnable)
    cuda.ok("cudaGraphDestroy", graph)
    cuda.ok("cudaFree", a)
    cuda.ok("cudaStreamDestroy", stream)


def test_a_graphs_reads_from_the_device_are_counted(cuda: Cuda) -> None:
    """When it is launched, as often as it is launched."""
    a, stream, host = cuda.malloc(PAGE), stream_new(cuda), ctypes.create_string_buffer(8)
    copies, size = cuda.control("dtoh_copies"), cuda.control("dtoh_bytes")
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    cuda.ok("cudaMemcpyAsync", host, a, 8, 2, stream)
    graph = cuda_end(cuda, stream)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    assert cuda.control("dtoh_copies") == copies
    for _ in range(2):
        cuda.ok("cudaGraphLaunch", runnable, stream)
    assert cuda.control("dtoh_copies") == copies + 2
    assert cuda.control("dtoh_bytes") == size + 16
    cuda.ok("cudaGraphExecDestroy", runnable)
    cuda.ok("cudaGraphDestroy", graph)
    cuda.ok("cudaFree", a)
    cuda.ok("cudaStreamDestroy", stream)


def test_a_graph_launched_in_a_capture_is_part_of_the_new_graph(cuda: Cuda) -> None:
    """As it was then, and as long as the new one lives."""
    a, b, stream = cuda.malloc(PAGE), cuda.malloc(PAGE), stream_new(cuda)

    def captured(work: Callable[[], None]) -> int:
        cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
        work()
        graph = cuda_end(cuda, stream)
        runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
        cuda.ok("cudaGraphDestroy", graph)
        return runnable

    def copy() -> None:
        assert launch(cuda, stream) == 0
        cuda.ok("cudaMemcpyAsync", b, a, 4, 3, stream)

    def copy_twice() -> None:
        for _ in range(2):
            cuda.ok("cudaGraphLaunch", inner, stream)
        cuda.ok("cudaMemsetAsync", b + 3, 9, 1, stream)

    def all_of_it() -> None:
        cuda.ok("cudaGraphLaunch", middle, stream)

    inner = captured(copy)
    middle = captured(copy_twice)
    outer = captured(all_of_it)
    for graph in (inner, middle):
        cuda.ok("cudaGraphExecDestroy", graph)
    assert cuda.put(a, b"abcd") == 0
    assert cuda.get(b, 4) == bytes(4)
    launches = cuda.control("launches", 0)
    cuda.ok("cudaGraphLaunch", outer, stream)
    assert cuda.get(b, 4) == b"abc\t"
    assert cuda.control("launches", 0) == launches + 2
    cuda.ok("cudaGraphExecDestroy", outer)
    for pointer in (a, b):
        cuda.ok("cudaFree", pointer)
    cuda.ok("cudaStreamDestroy", stream)


def cuda_end(cuda: Cuda, stream: int) -> int:
    graph = ctypes.c_uint64()
    cuda.ok("cudaStreamEndCapture", stream, ctypes.byref(graph))
    return graph.value


def test_side_streams_join_a_capture_and_must_come_back(cuda: Cuda) -> None:
    main, side = stream_new(cuda), stream_new(cuda)
    fork, join = (cuda.out("cudaEventCreateWithFlags", 2) for _ in range(2))
    for comes_back in (True, False):
        cuda.ok("cudaStreamBeginCapture", main, GLOBAL)
        cuda.ok("cudaEventRecord", fork, main)
        cuda.ok("cudaStreamWaitEvent", side, fork, 0)
        assert capture_status(cuda, side) == 1
        assert launch(cuda, side) == 0
        if comes_back:
            cuda.ok("cudaEventRecord", join, side)
            cuda.ok("cudaStreamWaitEvent", main, join, 0)
            cuda.ok("cudaGraphDestroy", cuda_end(cuda, main))
        else:
            assert cuda("cudaStreamEndCapture", main, ctypes.byref(ctypes.c_uint64())) == 904
        assert capture_status(cuda, side) == 0
    assert cuda("cudaEventQuery", fork) == 907
    for event in (fork, join):
        cuda.ok("cudaEventDestroy", event)
    for stream in (main, side):
        cuda.ok("cudaStreamDestroy", stream)


def test_a_capture_tells_what_the_next_node_depends_on(cuda: Cuda) -> None:
    """Two events of one stream name the same node once; its edges are the graph's."""
    main, side = stream_new(cuda), stream_new(cuda)
    events = [cuda.out("cudaEventCreateWithFlags", 2) for _ in range(3)]
    status, n = ctypes.c_int(), ctypes.c_size_t()
    nodes, graph = ctypes.POINTER(ctypes.c_uint64)(), ctypes.c_uint64()

    def tell() -> list[int]:
        cuda.ok(
            "cuStreamGetCaptureInfo_v2",
            main,
            ctypes.byref(status),
            0,
            ctypes.byref(graph),
            ctypes.byref(nodes),
            ctypes.byref(n),
        )
        return nodes[: n.value]

    cuda.ok("cudaStreamBeginCapture", main, GLOBAL)
    assert tell() == [] and status.value == 1
    cuda.ok("cudaEventRecord", events[0], main)
    cuda.ok("cudaStreamWaitEvent", side, events[0], 0)
    assert launch(cuda, main) == 0
    assert launch(cuda, side) == 0
    for event in events[1:]:
        cuda.ok("cudaEventRecord", event, side)
        cuda.ok("cudaStreamWaitEvent", main, event, 0)
    before = tell()
    assert len(before) == len(set(before)) == 2
    assert launch(cuda, main) == 0
    (last,) = tell()
    assert cuda_end(cuda, main) == graph.value
    found = (ctypes.c_uint64 * 9)()
    n.value = 9
    cuda.ok("cudaGraphGetNodes", graph.value, found, ctypes.byref(n))
    assert set(found[: n.value]) == {*before, last}
    n.value = 1
    cuda.ok("cudaGraphGetNodes", graph.value, found, ctypes.byref(n))
    assert n.value == 1
    cuda.ok("cudaGraphDestroy", graph.value)
    for event in events:
        cuda.ok("cudaEventDestroy", event)
    for stream in (main, side):
        cuda.ok("cudaStreamDestroy", stream)


def test_what_the_next_node_depends_on_is_of_the_captured_graph(cuda: Cuda) -> None:
    stream = stream_new(cuda)
    graph, other = cuda.out("cudaGraphCreate", 0), cuda.out("cudaGraphCreate", 0)
    own, foreign = ctypes.c_uint64(), ctypes.c_uint64()
    cuda.ok("cudaGraphAddEmptyNode", ctypes.byref(own), graph, 0, 0)
    cuda.ok("cudaGraphAddEmptyNode", ctypes.byref(foreign), other, 0, 0)

    def update(node: int, flags: int = 1) -> int:
        nodes = (ctypes.c_uint64 * 1)(node)
        return cuda("cudaStreamUpdateCaptureDependencies", stream, nodes, 0, 1, flags)

    def begin(node: int) -> int:
        nodes = (ctypes.c_uint64 * 1)(node)
        return cuda("cudaStreamBeginCaptureToGraph", stream, graph, nodes, 0, 1, RELAXED)

    assert update(own.value) == ILLEGAL_STATE
    assert begin(foreign.value) == INVALID
    assert capture_status(cuda, stream) == 0
    assert begin(own.value) == 0
    for flags in (0, 1):
        assert update(foreign.value, flags) == update(own.value + 8, flags) == INVALID
        assert update(own.value, flags) == 0
    assert update(own.value, 2) == INVALID
    assert cuda("cudaStreamUpdateCaptureDependencies", stream, 0, 0, 1, 1) == INVALID
    assert cuda_end(cuda, stream) == graph
    for each in (graph, other):
        cuda.ok("cudaGraphDestroy", each)
    cuda.ok("cudaStreamDestroy", stream)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_graph_is_not_destroyed_while_it_is_captured(cuda: Cuda, is_own: bool) -> None:
    stream = stream_new(cuda)
    status, captured = ctypes.c_int(), ctypes.c_uint64()
    if is_own:
        cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    else:
        into = cuda.out("cudaGraphCreate", 0)
        cuda.ok("cudaStreamBeginCaptureToGraph", stream, into, 0, 0, 0, RELAXED)
    cuda.ok(
        "cuStreamGetCaptureInfo_v2",
        *(stream, ctypes.byref(status), 0, ctypes.byref(captured), 0, 0),
    )
    assert cuda("cudaGraphDestroy", captured.value) == INVALID
    for _ in range(65):  # more than a graph has room for at first
        assert launch(cuda, stream) == 0
    assert cuda_end(cuda, stream) == captured.value
    cuda.ok("cudaGraphDestroy", captured.value)
    cuda.ok("cudaStreamDestroy", stream)


def test_bodies_of_a_conditional_node_live_as_long_as_its_graph(cuda: Cuda) -> None:
    """Or as a capture into them."""
    stream, graph, node = stream_new(cuda), cuda.out("cudaGraphCreate", 0), ctypes.c_uint64()
    words = (ctypes.c_uint64 * 32)()
    words[0] = 13  # a conditional node; its number of bodies is in the upper half of words[3]
    add = ("cudaGraphAddNode", ctypes.byref(node), graph, 0, 0, 0, words)
    assert cuda(*add) == INVALID
    words[3] = 2 << 32
    cuda.ok(*add)
    bodies = ctypes.cast(int(words[4]), ctypes.POINTER(ctypes.c_uint64))[:2]
    assert len({graph, *bodies}) == 3
    for body in bodies:
        cuda.ok("cudaStreamBeginCaptureToGraph", stream, body, 0, 0, 0, RELAXED)
        assert launch(cuda, stream) == 0
        assert cuda_end(cuda, stream) == body
    cuda.ok("cudaStreamBeginCaptureToGraph", stream, bodies[1], 0, 0, 0, RELAXED)
    cuda.ok("cudaGraphDestroy", graph)
    for _ in range(65):  # more than a graph has room for at first
        assert launch(cuda, stream) == 0
    cuda_end(cuda, stream)
    cuda.ok("cudaStreamDestroy", stream)


def test_nodes_are_added_to_graphs_behind_their_own(cuda: Cuda) -> None:
    graph, other = cuda.out("cudaGraphCreate", 0), cuda.out("cudaGraphCreate", 0)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    node, n = ctypes.c_uint64(), ctypes.c_size_t()

    def add(to: int, *deps: int) -> int:
        behind = (ctypes.c_uint64 * len(deps))(*deps)
        return cuda("cudaGraphAddEmptyNode", ctypes.byref(node), to, behind, len(deps))

    for _ in range(2):  # where the executable graph shares no node, and one
        assert add(runnable) == 1
        assert cuda("cudaGraphGetNodes", runnable, 0, ctypes.byref(n)) == 1
        assert cuda("cudaGraphInstantiateWithFlags", ctypes.byref(node), runnable, 0) == 1
        assert add(graph) == 0
        cuda.ok("cudaGraphExecDestroy", runnable)
        runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    first = node.value
    assert add(graph, first) == 0
    assert add(graph, first, 4096) == add(other, first) == 1
    assert cuda("cudaGraphAddEmptyNode", ctypes.byref(node), graph, 0, 1) == 1
    cuda.ok("cudaGraphGetNodes", graph, 0, ctypes.byref(n))
    assert n.value == 3
    cuda.ok("cudaGraphExecDestroy", runnable)
    for each in (graph, other):
        cuda.ok("cudaGraphDestroy", each)


def test_the_drivers_own_calls_answer_alike(cuda: Cuda) -> None:
    cuda.control("set_event_delay", ctypes.c_uint64(3))
    event, stream = cuda.out("cuEventCreate", 2), cuda.out("cuStreamCreate", 1)
    cuda.ok("cuEventRecord", event, stream)
    assert cuda("cuEventQuery", event) == NOT_READY
    assert cuda("cuStreamQuery", stream) == NOT_READY
    cuda.ok("cuStreamSynchronize", stream)
    cuda.ok("cuEventQuery", event)
    cuda.ok("cuEventDestroy_v2", event)
    cuda.ok("cuStreamDestroy_v2", stream)
    assert cuda("cuEventQuery", event) == INVALID_HANDLE
    assert cuda("cuStreamQuery", stream) == INVALID_HANDLE
    assert cuda("cuMemFreeHost", 4096) == 1


def test_memory_freed_in_a_graph_stays_its_own(cuda: Cuda) -> None:
    stream = stream_new(cuda)
    used = cuda.used()
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    pointer = cuda.out("cudaMallocAsync", 1000, stream)
    cuda.ok("cudaFreeAsync", pointer, stream)
    assert cuda.out("cudaMallocAsync", 1000, stream) != pointer
    graph = cuda_end(cuda, stream)
    assert cuda.used() > used
    other = pointer + 1024
    cuda.ok("cudaFreeAsync", other, stream)
    cuda.ok("cudaGraphDestroy", graph)
    cuda.ok("cudaMemPoolTrimTo", cuda.out("cudaDeviceGetDefaultMemPool", 0), 0)
    cuda.ok("cudaStreamDestroy", stream)


@pytest.mark.parametrize("n", [1, 100])
def test_user_objects_die_with_the_graph(cuda: Cuda, n: int) -> None:
    died: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: died.append(data or 0))
    graph = cuda.out("cudaGraphCreate", 0)
    for i in range(n):
        thing = ctypes.c_uint64()
        cuda.ok("cudaUserObjectCreate", ctypes.byref(thing), 42 + i, callback, 1, 1)
        cuda.ok("cudaGraphRetainUserObject", graph, thing.value, 1, 1)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)
    cuda.ok("cudaGraphDestroy", graph)
    assert died == []
    cuda.ok("cudaGraphExecDestroy", runnable)
    assert sorted(died) == [42 + i for i in range(n)]


def test_user_objects_die_with_a_capture_that_failed(cuda: Cuda) -> None:
    died: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: died.append(data or 0))
    stream, thing = stream_new(cuda), cuda.out("cudaUserObjectCreate", 42, callback, 1, 1)
    status, graph = ctypes.c_int(), ctypes.c_uint64()
    cuda.ok("cudaStreamBeginCapture", stream, GLOBAL)
    cuda.ok(
        "cuStreamGetCaptureInfo_v2",
        *(stream, ctypes.byref(status), 0, ctypes.byref(graph), 0, 0),
    )
    cuda.ok("cudaGraphRetainUserObject", graph.value, thing, 1, 1)
    assert cuda("cudaStreamSynchronize", stream) != 0
    assert died == []
    assert cuda("cudaStreamEndCapture", stream, ctypes.byref(graph)) != 0
    assert died == [42]
    cuda("cudaGetLastError")
    cuda.ok("cudaStreamDestroy", stream)


def test_graphs_of_another_kind_or_gone_are_refused(cuda: Cuda) -> None:
    stream, made, n = stream_new(cuda), ctypes.c_uint64(7), ctypes.c_size_t()
    graph = cuda.out("cudaGraphCreate", 0)
    runnable = cuda.out("cudaGraphInstantiateWithFlags", graph, 0)

    def refused(name: str, *args: object) -> None:
        assert cuda(name, *args) == INVALID, name
        assert cuda("cudaGetLastError") == INVALID

    refused("cudaGraphLaunch", graph, stream)
    refused("cudaGraphLaunch", 12345, stream)
    refused("cudaGraphInstantiateWithFlags", ctypes.byref(made), runnable, 0)
    refused("cudaGraphInstantiateWithFlags", ctypes.byref(made), 12345, 0)
    refused("cudaGraphInstantiateWithFlags", None, graph, 0)
    refused("cudaGraphGetNodes", 12345, 0, ctypes.byref(n))
    cuda.ok("cudaGraphLaunch", runnable, stream)
    cuda.ok("cudaStreamDestroy", stream)
    assert cuda("cudaGraphLaunch", runnable, stream) != 0
    cuda("cudaGetLastError")
    cuda.ok("cudaGraphDestroy", graph)
    refused("cudaGraphDestroy", graph)
    cuda.ok("cudaGraphLaunch", runnable, 0)  # it has what it needs of the graph
    cuda.ok("cudaGraphExecDestroy", runnable)
    refused("cudaGraphExecDestroy", runnable)
    refused("cudaGraphLaunch", runnable, 0)
    assert made.value == 7


def test_user_objects_live_as_long_as_somebody_has_them(cuda: Cuda) -> None:
    died: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: died.append(data or 0))
    thing = ctypes.c_uint64(7)
    assert cuda("cudaUserObjectCreate", ctypes.byref(thing), 42, callback, 0, 1) == INVALID
    assert cuda("cudaUserObjectCreate", ctypes.byref(thing), 42, None, 1, 1) == INVALID
    assert thing.value == 7
    cuda.ok("cudaUserObjectCreate", ctypes.byref(thing), 42, callback, 3, 1)
    graph = cuda.out("cudaGraphCreate", 0)
    cuda.ok("cudaGraphRetainUserObject", graph, thing.value, 2, 0)  # its own: 3 and 2
    assert cuda("cudaUserObjectRelease", thing.value, 0) == INVALID
    assert cuda("cudaUserObjectRelease", thing.value, 6) == INVALID
    cuda.ok("cudaUserObjectRelease", thing.value, 2)
    cuda.ok("cudaGraphRetainUserObject", graph, thing.value, 1, 1)  # the last one, which moves
    assert died == []
    assert cuda("cudaGraphRetainUserObject", graph, 12345, 1, 0) == INVALID
    assert cuda("cudaGraphRetainUserObject", 12345, thing.value, 1, 0) == INVALID
    cuda.ok("cudaGraphDestroy", graph)
    assert died == [42]
    assert cuda("cudaUserObjectRelease", thing.value, 1) == INVALID
    cuda("cudaGetLastError")
