"""torch.compile, plain and with CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    "mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_forward_and_backward(mode: str) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).cuda()
    compiled = torch.compile(model, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        compiled(torch.zeros(16, 64, device="cuda")).sum().backward()
    assert model[0].weight.grad is not None
    torch._dynamo.reset()


def test_without_gradients() -> None:
    @torch.compile(mode="reduce-overhead")
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu()

    x = torch.zeros(1 << 16, device="cuda")
    for _ in range(4):
        result = function(x)
    assert result.shape == x.shape
    torch._dynamo.reset()


def test_graph_trees_return_to_earlier_states() -> None:
    """Recording after a replay makes the trees rewind the pool to a checkpoint; their own checks are on."""
    import torch._inductor.config as inductor

    def compiled(factor: int):
        return torch.compile(
            lambda x: (x * factor + 1).relu() * 2, mode="reduce-overhead", dynamic=False
        )

    with inductor.patch(
        {"triton.slow_path_cudagraph_asserts": True, "triton.fast_path_cudagraph_asserts": True}
    ):
        from torch._inductor.cudagraph_trees import get_container

        first, second, third = compiled(2), compiled(3), compiled(4)
        x = torch.zeros(300_000, device="cuda")
        before = torch.cuda.memory_allocated()
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            a = first(x)
            b = second(a)
            del a
            c = second(b) if step > 1 else None
            del b, c
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            a = first(x)
            b = third(a)
            c = third(b)
            del b
            d = first(c)
            del a, c, d
        trees = get_container(0).tree_manager
        assert trees.debug_checkpointing_counter >= 2
        # While graphs live, torch 2.9 keeps two small tensors of the random generator; 2.12 and 2.13 keep two for each,
        # the trees' first, empty one included.
        n_kept = trees.new_graph_id().id + 1 if TORCH in ((2, 12), (2, 13)) else 1
        assert torch.cuda.memory_allocated() <= before + 1024 * n_kept
        torch._dynamo.reset()


@pytest.fixture
def config():
    import torch._inductor.config as config

    yield config
    torch._dynamo.reset()


def bytes_of_private_pools() -> int:
    segments = torch.cuda.memory_snapshot()
    return sum(each["total_size"] for each in segments if each["segment_pool_id"] != (0, 0))


def test_trees_record_in_what_their_pool_began_with(config) -> None:
    """Torch allocates it in the pool's first capture and frees it: recordings find it there."""
    if not hasattr(config.triton, "cudagraph_initial_mempool_allocation_gb"):
        pytest.skip("of torch 2.15 on")
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()
    mib = 1 << 20
    before = bytes_of_private_pools()
    with config.patch({"triton.cudagraph_initial_mempool_allocation_gb": 0.25}):
        function = torch.compile(lambda x: (x * 2).relu() + 1, mode="reduce-overhead")
        x = torch.zeros(10 * mib, device="cuda")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            result = function(x)
    assert 256 * mib <= bytes_of_private_pools() - before <= 260 * mib
    del result


def test_outputs_are_cloned_out_of_the_trees_pool(config) -> None:
    """Results of an earlier step stay readable then, at other addresses."""
    if not hasattr(config.triton, "cudagraph_trees_generation_cloning"):
        pytest.skip("this torch's CUDA-graph trees clone nothing")
    with config.patch({"triton.cudagraph_trees_generation_cloning": "user_visible"}):
        function = torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")
        x = torch.zeros(300_000, device="cuda")
        results = []
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            results.append(function(x))
    assert len({each.data_ptr() for each in results}) == len(results)
    for each in results:
        assert (each + 1).shape == x.shape


@pytest.mark.parametrize("pool", ["none", "intermediates", "outputs", "combined"])
def test_planned_memory_of_inductor(config, pool: str) -> None:
    """It requests one block and hands out parts of it."""
    with config.patch({"memory_planning": True, "memory_pool": pool}):
        function = torch.compile(lambda x: ((x @ x).relu() @ x + 1) @ x)
        x = torch.zeros(512, 512, device="cuda", requires_grad=True)
        for _ in range(2):
            function(x).sum().backward()
    assert x.grad is not None


def test_what_stays_in_the_trees_pool_is_told_of() -> None:
    """With an error that names the lines which made it, because a replay would overwrite it."""
    import torch._inductor.config as inductor

    if not hasattr(inductor.triton, "cudagraph_trees_history_recording"):
        pytest.skip("this torch's CUDA-graph trees keep no history")
    from torch._inductor.cudagraph_trees import get_container

    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(1000, device="cuda"))
        return x.clone()

    keeping = torch.library.custom_op("pyalloc_test::keep", keep, mutates_args=())
    keeping.register_fake(torch.clone)
    function = torch.compile(lambda x: keeping(x) + 1, mode="reduce-overhead")
    x = torch.zeros(400, device="cuda")
    with (
        inductor.patch({"triton.cudagraph_trees_history_recording": True}),
        pytest.raises(RuntimeError, match=rf"(?s){os.path.basename(__file__)}.* in keep"),
    ):
        for _ in range(3):
            function(x)
    assert kept
    get_container(0).tree_manager = None
    torch._dynamo.reset()


def test_checkpoint_calls() -> None:
    """The functions behind the trees, one by one: what is live is freed, what was live lives again."""
    pool = torch.cuda.MemPool()
    device = torch.cuda.current_device()

    def live() -> list[int]:
        return sorted(
            block["address"]
            for segment in pool.snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        )

    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(300_000, device="cuda")
        gone = torch.zeros(500_000, device="cuda")
        state = torch._C._cuda_getCheckpointState(device, pool.id)
        addresses = sorted([kept.data_ptr(), gone.data_ptr()])
        address = gone.data_ptr()
        size = gone.untyped_storage().nbytes()
        assert torch._C._cuda_checkPoolLiveAllocations(device, pool.id, set(addresses))
        del gone
        assert live() == [kept.data_ptr()]
        assert not torch._C._cuda_checkPoolLiveAllocations(device, pool.id, set(addresses))
        later = torch.zeros(400_000, device="cuda")
        assert later.data_ptr() == address
    torch._C._cuda_setCheckpointPoolState(device, state, [later.untyped_storage()._cdata], [])
    assert live() == addresses
    storage = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cuda", device), size
    )
    assert storage.nbytes() == size
    del later, storage  # neither frees: their deleters are gone
    assert live() == addresses
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    assert live() == [kept.data_ptr()]
    del kept
    assert live() == []


def test_a_pool_that_nobody_knows_has_no_state() -> None:
    pool = torch.cuda.MemPool()
    known = pool.id
    outside = torch.zeros(1000, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(1000, device="cuda")
    del pool
    assert torch._C._cuda_getCheckpointState(0, known) is not None
    assert torch._C._cuda_checkPoolLiveAllocations(0, known, {kept.data_ptr()})
    del kept
    torch.cuda.empty_cache()
    for unknown in (known, (0, 0), (9, 9)):
        with pytest.raises(RuntimeError):
            torch._C._cuda_getCheckpointState(0, unknown)
        with pytest.raises(RuntimeError):
            torch._C._cuda_checkPoolLiveAllocations(0, unknown, {outside.data_ptr()})


PLAIN = """
import torch
function = torch.compile(lambda x: (x * 2).relu() + 1, mode="reduce-overhead")
x = torch.zeros(1 << 16, device="cuda")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    assert function(x).shape == x.shape
print("trees", torch._inductor.config.triton.cudagraph_trees)
"""


def test_plain_graphs_where_trees_cannot_be_had() -> None:
    """Without the methods that the trees need, pyalloc says once that plain graphs are used.  torch's allocator has
    them all."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN],
        env={**os.environ, "PYALLOC_FAST_PATH": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    is_pyalloc = os.environ["PYALLOC_PARITY"] == "pyalloc"
    assert done.stdout.split() == ["trees", str(not is_pyalloc)]
    assert done.stderr.count("torch.compile uses plain CUDA graphs") == is_pyalloc
