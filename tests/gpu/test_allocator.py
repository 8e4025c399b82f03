"""The allocator on a card: results as on native, bytes in shared pages, streams, graphs, processes, out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"


def python(*command: str) -> str:
    # In a folder without pyalloc's sources: an installed pyalloc is found if the checkout's is not built.
    built = [str(ROOT)] if (ROOT / "pyalloc" / "_core.abi3.so").exists() else []
    found = os.pathsep.join(filter(None, [*built, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=PROGRAMS,
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def both(source: str) -> None:
    """The same program prints the same on native and on pyalloc."""
    source = textwrap.dedent(source)
    native = python("-c", source)
    ours = python("-c", "import pyalloc; pyalloc.install()\n" + source)
    assert native == ours
    assert native


def test_bytes_survive_in_shared_pages() -> None:
    found = json.loads(python(str(PROGRAMS / "shared_pages.py"), "3000", "--kernels"))
    assert found["shared_ranges"] >= 100
    assert found["peak_reserved"] <= found["limit"]


def test_bytes_survive_in_parts_of_grains() -> None:
    found = json.loads(python(str(PROGRAMS / "shared_pages.py"), "1500", "--kernels", "--grains"))
    assert found["stitches"] >= 100
    assert found["peak_reserved"] <= found["limit"]


def test_training_gives_the_same_numbers() -> None:
    both(
        """
        import torch
        torch.manual_seed(0)
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.GELU(), torch.nn.Linear(700, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(30):
            x = torch.randn(17 + 13 * (step % 7), 300, device="cuda")
            loss = model(x).logsumexp(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{loss.item():.9e}")
        """
    )


def test_stitched_memory_through_kernels() -> None:
    """Blocks that only fit as stitched ranges, multiplied against a result computed before."""
    source = """
        import torch
        torch.backends.cuda.matmul.allow_tf32 = False
        import pyalloc
        from pyalloc import _core
        pyalloc.install(limit=2**30)
        parts = [torch.empty(7 * 2**20, device="cuda", dtype=torch.uint8) for _ in range(130)]
        del parts[::2]
        a = torch.randn(6000, 6000).cuda()
        assert _core.stats(0)["pyalloc_stitches"] + _core.stats(0)["pyalloc_page_moves"] > 0
        x = torch.randn(6000, 1).cuda()
        exact = (a.cpu().double() @ x.cpu().double()).squeeze()
        error = (torch.mv(a, x.squeeze()).cpu().double() - exact).norm() / exact.norm()
        assert error < 1e-5, error
        print("ok")
        """
    assert python("-c", textwrap.dedent(source)).strip() == "ok"


def test_reuse_across_streams_waits_for_the_work() -> None:
    both(
        """
        import torch
        side = torch.cuda.Stream()
        wrong = 0
        for round in range(50):
            x = torch.full((2**22,), round, device="cuda", dtype=torch.float32)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                y = x + 1
            x.record_stream(side)
            del x
            z = torch.full((2**22,), -1.0, device="cuda")
            torch.cuda.current_stream().wait_stream(side)
            wrong += int((y != round + 1).sum())
            del y, z
        print(wrong)
        """
    )


def test_graphs_replay_into_their_own_memory() -> None:
    both(
        """
        import torch
        x = torch.zeros(1000, 1000, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                (x @ x + 1).sum()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x + 1) * 2
        others = [torch.full((1000, 1000), 7.0, device="cuda") for _ in range(20)]
        x.fill_(4)
        graph.replay()
        torch.cuda.synchronize()
        print(y.mean().item(), all(bool((o == 7).all()) for o in others))
        """
    )


def test_work_goes_on_after_out_of_memory() -> None:
    both(
        """
        import torch
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(2**30 / total)
        kept = [torch.ones(100 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(9)]
        try:
            torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
            print("no error")
        except torch.OutOfMemoryError:
            print("out of memory")
        del kept[0], kept[3]
        torch.empty(190 * 2**20, dtype=torch.uint8, device="cuda").fill_(3)
        # not their sums: torch would make 64-bit integers of the bytes first, 800 MiB each
        print([int(x) for k in kept for x in k.aminmax()])
        """
    )


def test_tensors_go_to_another_process() -> None:
    program = str(PROGRAMS / "share_tensors.py")
    assert python(program) == python(program, "--pyalloc") == "shared\n"
