"""Separate processes: eight devices, spawned children, torchrun with two ranks, memory of peers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from parity.programs import PYTHON, run

MIB = 2**20
IS_PYALLOC = os.environ["PYALLOC_PARITY"] == "pyalloc"


EIGHT = """
import threading, torch
from torch.cuda import memory_allocated, memory_reserved, set_per_process_memory_fraction
MIB = 2**20
assert torch.cuda.device_count() == 8

def work(device):
    torch.cuda.set_device(device)
    for step in range(200):
        tensors.append(torch.empty((device + 1) * MIB + step * 512, dtype=torch.uint8, device="cuda"))
        if step % 3:
            tensors.pop(0)

tensors = []
threads = [threading.Thread(target=work, args=(device,)) for device in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
live = [sum(t.numel() for t in tensors if t.device.index == device) for device in range(8)]
for device in range(8):
    stats = torch.cuda.memory_stats(device)
    assert stats["requested_bytes.all.current"] == live[device], (device, stats)
    assert stats["allocation.all.allocated"] == 200
tensors.clear()
torch.cuda.empty_cache()
assert [memory_reserved(device) for device in range(8)] == [0] * 8
set_per_process_memory_fraction(0.25, 5)
try:
    torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:5")
except torch.OutOfMemoryError as error:
    assert "GPU 5" in str(error), error
else:
    raise AssertionError("the limit of device 5 did not hold")
tensors = [torch.empty(3 * 2**30, dtype=torch.uint8, device=f"cuda:{d}") for d in (0, 4, 6, 7)]
x = torch.arange(1000)
for device in range(8):
    x = x.to(f"cuda:{device}")
assert torch.equal(x.cpu(), torch.arange(1000))
print("eight", torch.cuda.get_allocator_backend())
"""


def test_eight_devices() -> None:
    said = run("-c", EIGHT, PYALLOC_HOSTCUDA_DEVICES="8", PYALLOC_HOSTCUDA_MEMORY="4GB")
    assert said.stdout.split() == ["eight", "pluggable" if IS_PYALLOC else "native"]


SPAWN = """
import sys, torch, torch.multiprocessing as mp

def child(rank, ask):
    assert torch.cuda.get_allocator_backend() == sys.argv[1], torch.cuda.get_allocator_backend()
    x = torch.full((1000,), float(rank)).to(f"cuda:{rank}")
    assert torch.cuda.memory_allocated(rank) == 4096
    ask.put((rank, x.cpu().sum().item()))

if __name__ == "__main__":
    mine = torch.ones(1000, device="cuda")
    ask = mp.get_context("spawn").SimpleQueue()
    mp.spawn(child, (ask,), nprocs=2)
    assert sorted(ask.get() for _ in range(2)) == [(0, 0.0), (1, 1000.0)]
    print("spawned")
"""


def test_spawned_children(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWN)
    assert run(str(program), "pluggable" if IS_PYALLOC else "native").stdout.split() == ["spawned"]


ENDS = """
import torch

class Cycle:
    pass

cycle, pool, graph = Cycle(), torch.cuda.MemPool(), torch.cuda.CUDAGraph()
cycle.tensor, cycle.itself = torch.zeros(1000, device="cuda"), cycle
torch.cuda.memory._record_memory_history()
cycle.tensor.record_stream(torch.cuda.Stream())
with torch.cuda.graph(graph):
    result = cycle.tensor + 1
torch.kept = torch.zeros(1000, device="cuda")
block = torch.cuda.use_mem_pool(pool)
block.__enter__()
inside = torch.zeros(1000, device="cuda")
print("ends", flush=True)
"""


def test_a_program_ends_with_all_of_it_in_use() -> None:
    """Tensors, a graph, and a pool that requests still go to."""
    assert run("-c", ENDS).stdout.split() == ["ends"]


RANKS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(rank)
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
assert total.item() == 3
model = torch.nn.Linear(300, 200).cuda()
wrapped = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.Adam(wrapped.parameters())
for _ in range(3):
    wrapped(torch.zeros(16, 300, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch.cuda.memory_allocated(rank) > 0
assert torch.cuda.memory_allocated(1 - rank) == 0
with open(os.environ["RESULT"] + str(rank), "w") as file:
    file.write(torch.cuda.get_allocator_backend())
dist.destroy_process_group()
os._exit(0)  # Python 3.11 may abort while it shuts down right after a backward pass
"""


def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RANKS)
    run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(program),
        PYTHON_EXEC=PYTHON,
        RESULT=str(tmp_path / "rank"),
        OMP_NUM_THREADS="1",
    )
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert said == ["pluggable" if IS_PYALLOC else "native"] * 2


NCCL = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(
    "nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1, device_id=torch.device("cuda", 0)
)
x = torch.arange(4.0).cuda()
dist.all_reduce(x)
dist.barrier()
assert x.cpu().tolist() == [0, 1, 2, 3]
wrapped = DistributedDataParallel(torch.nn.Linear(300, 200).cuda(), device_ids=[0])
wrapped(torch.zeros(16, 300, device="cuda")).sum().backward()
other = dist.new_group([0])
dist.all_reduce(x, group=other)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    y = torch.zeros(1000, device="cuda")
try:
    dist.group.WORLD._get_backend(torch.device("cuda")).register_mem_pool(pool)
    refused = ""
except RuntimeError as error:
    refused = str(error)
assert ("register_mem_pool" in refused) == (torch.cuda.get_allocator_backend() != "native"), refused
dist.all_reduce(y)
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # Python 3.11 may abort while it shuts down right after a backward pass
"""


@pytest.mark.parametrize("hook", ["0", "1"])
def test_nccl_process_group(tmp_path: Path, hook: str) -> None:
    """Its watcher of segments takes a snapshot through C++.  hook: asked for by name too, which older torches need."""
    variables = {
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": hook,
        "TORCH_DIST_USE_NCCL2": str(1 - int(hook)),
    }
    assert run("-c", NCCL, str(tmp_path / "store"), **variables).stdout.split() == ["done"]


TRACED = """
import torch
from torch.cuda import _gpu_trace, _sanitizer

torch._C._activate_gpu_trace()
made, gone = [], []
_gpu_trace.register_callback_for_memory_allocation(made.append)
_gpu_trace.register_callback_for_memory_deallocation(gone.append)
tensors = [torch.empty(size, device="cuda") for size in (1, 0, 1 << 20)]
addresses = [tensors[0].data_ptr(), tensors[2].data_ptr()]
assert (made, gone) == (addresses, []), (made, gone)
try:
    raise KeyError
except KeyError:
    del tensors
assert sorted(gone) == sorted(addresses), gone
try:
    torch.cuda.caching_allocator_delete(addresses[0])
except RuntimeError:
    assert len(gone) == 2, gone  # what is nobody's is not freed
else:
    raise AssertionError

_sanitizer.enable_cuda_sanitizer()
with torch.cuda.stream(torch.cuda.Stream()):
    earlier = torch.zeros(1 << 20, device="cuda")
del earlier
torch.cuda.empty_cache()
later = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
print("traced")
"""


TRACED_UNCACHED = """
import torch
from torch.cuda import _gpu_trace

torch._C._activate_gpu_trace()
made, gone = [], []
_gpu_trace.register_callback_for_memory_allocation(made.append)
_gpu_trace.register_callback_for_memory_deallocation(gone.append)
tensor = torch.empty(1000, device="cuda")
address = tensor.data_ptr()
assert (made, gone) == ([address], []), (made, gone)
del tensor
assert (made, gone) == ([address], [address]), (made, gone)
print("traced")
"""


def test_the_gpu_trace_is_told_of_uncached_memory() -> None:
    """The sanitizer learns that an address belongs to another tensor from now on."""
    done = run("-c", TRACED_UNCACHED, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert done.stdout.split() == ["traced"]


def test_the_gpu_trace_is_told() -> None:
    """So the sanitizer does not take reused memory for a race."""
    assert run("-c", TRACED).stdout.split() == ["traced"]


@pytest.mark.parametrize("step", [1, 3])
def test_copies_between_peers(step: int) -> None:
    """A strided copy is made by a kernel that reaches into the peer's memory."""
    assert torch.cuda.can_device_access_peer(0, 1)
    old = torch.arange(3 * 2**18, device="cuda:0")
    target = torch.zeros(3 * 2**18, dtype=torch.int64, device="cuda:1")
    target[::step].copy_(old[::step])
    new = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda:0")
    there = new.to("cuda:1")
    assert there.device.index == 1
    torch.cuda.synchronize(1)
    assert torch.cuda.memory_allocated(1) >= target.nbytes + 5 * MIB


def test_contiguous_copies_between_devices_carry_the_bytes() -> None:
    data = torch.arange(2**18)
    around = data.cuda(0).to("cuda:1").to("cuda:0").to("cuda:1")
    assert torch.equal(around.cpu(), data)


def test_storages_without_tensors() -> None:
    before = torch.cuda.memory_allocated()
    storage = torch.UntypedStorage(3 * MIB, device="cuda")
    assert torch.cuda.memory_allocated() == before + 3 * MIB
    storage.resize_(7 * MIB)
    assert torch.cuda.memory_allocated() == before + 7 * MIB
    del storage
    assert torch.cuda.memory_allocated() == before
