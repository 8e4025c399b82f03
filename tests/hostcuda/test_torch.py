"""Real PyTorch on the host-memory runtime."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pyalloc.outside import hostcuda

from .conftest import RunTorch

TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1000, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 1000, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = 4 * sum(p.numel() for p in model.parameters())
    live = torch.cuda.memory_allocated()
    workspaces = 2 * (32 << 20)  # of cuBLAS, of this thread and of autograd's
    assert 3 * parameters + workspaces <= live <= 3 * parameters + workspaces + (1 << 20), (parameters, live)
    print("reserved", torch.cuda.max_memory_reserved())
"""


def reserved(stdout: str) -> int:
    match = re.search(r"reserved (\d+)", stdout)
    assert match is not None
    return int(match.group(1))


def test_nothing_that_torch_imports_is_missing(torch_found: hostcuda.Torch) -> None:
    assert hostcuda.missing(torch_found) == []


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "backend:cudaMallocAsync"], ids=lambda c: c or "native"
)
def test_training_runs_on_every_allocator_of_torch(
    run_torch: RunTorch, counters: Callable[[], dict[str, object]], conf: str
) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    done = run_torch(TRAIN, **variables)
    devices = counters()["devices"]
    assert isinstance(devices, list)
    assert devices[0]["peak_bytes"] == reserved(done.stdout)
    assert devices[0]["launches"] > 0


def test_tensors_survive_the_journey(run_torch: RunTorch) -> None:
    run_torch("""
        import torch
        x = torch.arange(100_000, dtype=torch.float64)
        y = x.cuda()
        z = torch.empty_like(y)
        z.copy_(y)
        assert torch.equal(z.cpu(), x)
        assert torch.equal(y[500:600].cpu(), x[500:600])
        pinned = x.pin_memory()
        assert torch.equal(pinned.cuda(non_blocking=True).cpu(), x)
    """)


def test_capacity_gives_torch_out_of_memory_and_torch_goes_on(run_torch: RunTorch) -> None:
    run_torch(
        """
        import torch
        keep = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "400.00 MiB" in str(error) and "324.00 MiB is free" in str(error), error
        else:
            raise SystemExit("1.1 GiB fitted into 1 GiB")
        more = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info() == (124 << 20, 1 << 30)
        """,
        PYALLOC_HOSTCUDA_MEMORY="1GB",
    )


def test_each_thread_has_a_workspace_of_cublas_on_each_device(run_torch: RunTorch) -> None:
    """As on a card: autograd's threads have handles of their own.  All handles were one, and so was the workspace."""
    run_torch(
        """
        import torch
        for device in range(2):
            x = torch.ones(8, 8, device=device, requires_grad=True)
            y = (x @ x).sum()
            forward = torch.cuda.memory_allocated(device)
            y.backward()
            assert 32 << 20 <= forward < 33 << 20, forward
            assert 64 << 20 <= torch.cuda.memory_allocated(device) < 65 << 20
        """,
        PYALLOC_HOSTCUDA_DEVICES="2",
        TORCH_CUBLAS_WORKSPACE_CACHE="1",
    )


def test_delayed_events_hold_recorded_blocks_back(run_torch: RunTorch) -> None:
    run_torch(
        """
        import ctypes, torch
        side = torch.cuda.Stream()
        a = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        address = a.data_ptr()
        a.record_stream(side)
        del a
        busy = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        assert busy.data_ptr() != address
        ctypes.CDLL("libcuda.so.1").pya_hostcuda_set_event_delay(ctypes.c_uint64(0))
        free = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        assert free.data_ptr() == address
        """,
        PYALLOC_HOSTCUDA_EVENT_DELAY="1000",
    )


def test_cuda_graphs_are_captured_and_replayed(run_torch: RunTorch) -> None:
    run_torch("""
        import torch
        x = torch.arange(8.0).cuda()
        y = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = torch.empty(1000, device="cuda") + 1
            y.copy_(x)
        x.copy_(torch.full((8,), 5.0))
        graph.replay()
        assert y.cpu().tolist() == [5.0] * 8
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x + 1
                torch.cuda.synchronize()
        except RuntimeError as error:
            assert "captur" in str(error), error
        else:
            raise SystemExit("a synchronisation was captured")
        torch.cuda.synchronize()
        (x + 1).cpu()
    """)


def test_resnet_trains_with_cudnn_benchmark(run_torch: RunTorch) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    run_torch("""
        import torch, torchvision
        torch.backends.cudnn.benchmark = True
        model = torchvision.models.resnet50().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() > 3 * 25_557_032 * 4
    """)


def test_attention_gru_and_linear_algebra_run(run_torch: RunTorch) -> None:
    run_torch("""
        import torch
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(2, 8, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
            torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
            assert q.grad.shape == q.shape
        layer = torch.nn.TransformerEncoderLayer(64, 4).cuda()
        layer(torch.randn(5, 3, 64, device="cuda")).sum().backward()
        a = torch.randn(8, 32, 32, device="cuda", requires_grad=True)
        torch.bmm(a, a).sum().backward()
        assert torch.linalg.qr(torch.randn(5, 5, device="cuda"))[0].shape == (5, 5)
        torch.backends.cudnn.enabled = False
        gru = torch.nn.GRU(64, 64, bidirectional=True).cuda()
        gru(torch.randn(5, 3, 64, device="cuda"))[0].sum().backward()
    """)


def test_batched_solvers_tell_that_their_arguments_were_right(libraries: Path) -> None:
    """In the caller's own number, which torch leaves as it was: torch asserts that it is zero."""
    library = ctypes.CDLL(str(libraries / "libpya_cudalibs.so"))
    for name, n_before in (("geqrf", 6), ("gels", 9), ("getrs", 9)):
        for kind in "SDCZ":
            info = ctypes.c_int(-7)
            words = [ctypes.c_uint64(0)] * n_before
            assert library[f"cublas{kind}{name}Batched"](*words, ctypes.byref(info), 2) == 0
            assert info.value == 0, name


def test_threads_of_autograd_are_known_by_name(run_torch: RunTorch) -> None:
    """Python's end would stop them inside torch's C++, which ends the process: it waits for threads of that name."""
    run_torch("""
        import torch
        from pyalloc._bootstrap import settling
        torch.ones(8, device="cuda", requires_grad=True).sum().backward()
        assert settling._look()
    """)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_runs_triton_kernels(
    run_torch: RunTorch,
    counters: Callable[[], dict[str, dict[str, int]]],
    tmp_path: Path,
    mode: str,
) -> None:
    pytest.importorskip("triton", reason="torch.compile on CUDA needs Triton")
    run_torch(
        f"""
        import torch
        @torch.compile(mode={mode!r})
        def f(x, y):
            return (x.sin() + y.cos()).sum(0) * 2
        x = torch.randn(128, 256, device="cuda", requires_grad=True)
        for _ in range(3):
            x.grad = None
            f(x, x).sum().backward()
        assert x.grad.shape == x.shape
        """,
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
    )
    calls = counters()["calls"]
    assert calls.get("cuLaunchKernelEx", 0) + calls.get("cuLaunchKernel", 0) > 0


def test_several_devices_are_separate(
    run_torch: RunTorch, counters: Callable[[], dict[str, object]]
) -> None:
    run_torch(
        """
        import torch
        assert torch.cuda.device_count() == 8
        tensors = [torch.full((n + 1 << 20,), 1.0).to(f"cuda:{n}") for n in range(8)]
        for n, tensor in enumerate(tensors):
            assert torch.cuda.memory_allocated(n) == 4 * (n + 1) << 20
        assert torch.equal(tensors[3].to("cuda:5").cpu(), torch.full((4 << 20,), 1.0))
        free, total = torch.cuda.mem_get_info(7)
        assert total == 2 << 30
        """,
        PYALLOC_HOSTCUDA_DEVICES="8",
        PYALLOC_HOSTCUDA_MEMORY="1GB,1GB,1GB,2GB",
    )
    devices = counters()["devices"]
    assert isinstance(devices, list)
    assert [device["capacity"] >> 30 for device in devices] == [1, 1, 1, 2, 2, 2, 2, 2]


def test_data_loader_workers_fork_but_may_not_touch_the_device(run_torch: RunTorch) -> None:
    run_torch("""
        import os, torch
        from torch.utils.data import DataLoader
        torch.ones(1, device="cuda")
        data = torch.arange(32.0)
        loader = DataLoader(data, batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork")
        assert sum(float(batch.cuda().cpu().sum()) for batch in loader) == 496.0
        child = os.fork()
        if child == 0:
            try:
                torch.ones(1, device="cuda")
            except RuntimeError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert torch.arange(3).cuda().cpu().tolist() == [0, 1, 2]
    """)


def test_plain_memory_is_shared_between_processes(run_torch: RunTorch) -> None:
    run_torch("""
        import torch, torch.multiprocessing as mp

        def child(queue, back):
            tensor = queue.get()
            assert tensor.cpu().tolist() == [1.0, 2.0, 3.0]
            tensor.copy_(torch.tensor([4.0, 5.0, 6.0]))
            torch.cuda.synchronize()
            del tensor
            back.put("done")

        if __name__ == "__main__":
            context = mp.get_context("spawn")
            queue, back = context.Queue(), context.Queue()
            process = context.Process(target=child, args=(queue, back))
            process.start()
            tensor = torch.tensor([1.0, 2.0, 3.0]).cuda()
            queue.put(tensor)
            assert back.get(timeout=600) == "done"
            process.join()
            assert process.exitcode == 0
            assert tensor.cpu().tolist() == [4.0, 5.0, 6.0]
    """)


def test_profiler_has_cuda_memory_columns(run_torch: RunTorch) -> None:
    run_torch("""
        import torch
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as p:
            torch.randn(1000, 1000, device="cuda")
        assert any(event.device_memory_usage >= 4_000_000 for event in p.key_averages())
    """)


def test_cudnn_recurrent_layers_keep_their_weights_apart(run_torch: RunTorch) -> None:
    """Flattening copies every weight to where cuDNN says it lies: an overlap would destroy one."""
    done = run_torch("""
        import torch
        from torch import nn
        cases = [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}, {"num_layers": 3, "dropout": 0.3}]
        for kind in (nn.GRU, nn.LSTM, nn.RNN):
            for case in cases + ([{"proj_size": 16, "num_layers": 2}] if kind is nn.LSTM else []):
                layer = kind(64, 32, **case)
                weights = [p.detach().clone() for p in layer.parameters()]
                layer.cuda()
                for moved, weight in zip(layer.parameters(), weights):
                    assert torch.equal(moved.detach().cpu(), weight), (kind, case)
                starts = sorted((p.data_ptr(), p.numel() * 4) for p in layer.parameters())
                assert all(a + n == b for (a, n), (b, _) in zip(starts, starts[1:])), (kind, case)
                x = torch.randn(5, 3, 64, device="cuda", requires_grad=True)
                out, _ = layer(x)
                out.sum().backward()
                assert x.grad.shape == x.shape
                packed = nn.utils.rnn.pack_padded_sequence(x.detach(), torch.tensor([5, 3, 2]))
                layer.eval()(packed)
    """)
    assert done.stderr.count("is an estimate") == 1


def test_special_functions_compile_at_run_time(run_torch: RunTorch) -> None:
    run_torch("""
        import torch
        x = torch.rand(100, device="cuda", requires_grad=True)
        (torch.lgamma(x) + torch.digamma(x)).sum().backward()
        assert x.grad.shape == x.shape
    """)
