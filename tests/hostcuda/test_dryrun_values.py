"""pyalloc dryrun: programs that ask the device for values, which no kernel computed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyalloc import hostcuda, trace

from .dryrun_support import finish, program, start


def test_a_gradient_scaler_takes_every_step(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """It asks the device whether gradients overflowed, and would find there what lay there before."""
    source = """
        import torch
        ones = [torch.ones(4).cuda() for _ in range(50)]
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda")
        del ones
        scaler.scale(model(torch.ones(2, 8).cuda()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (8, 8)
    """
    script = program(tmp_path, source)
    code, _, err = finish(start(["--record", "out.pya", sys.executable, script], tmp_path))
    assert code == 0, err
    found = trace.analyse(tmp_path / "out.pya")
    lines = [row.name for row in found.by_line(found.moments[max(found.moments)].blocks)]
    assert any(name.endswith("program.py:9 <module>") for name in lines), lines
    assert not any("pyalloc" in name or "_bootstrap" in name for name in lines)
    kinds = [row.name for row in found.contributors(found.moments[max(found.moments)])]
    assert "optimizer state (SGD)" in kinds


def test_generate_goes_on_to_its_largest_length(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It asks the device whether all sequences have ended, and would never stop, or at once."""
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    source = """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2,
            bos_token_id=None, eos_token_id=5, pad_token_id=0,
        )).cuda().eval()
        ones = [torch.ones(2, dtype=torch.int64).cuda() for _ in range(50)]  # lie where torch.ones(2) will
        del ones
        prompt = torch.ones(2, 8, dtype=torch.int64).cuda()
        passes = []
        model.register_forward_hook(lambda *_: passes.append(1))
        with torch.no_grad():
            for beams in (1, 3):
                for n_new in (4, 9):
                    passes.clear()
                    model.generate(prompt, max_new_tokens=n_new, num_beams=beams, do_sample=False)
                    print(beams, len(passes), flush=True)
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert out.splitlines() == ["1 4", "1 9", "3 4", "3 9"], out


def test_distributions_take_arguments_as_valid(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Whether they are is read back from the device, where no kernel has found out."""
    source = """
        import torch
        from torch.distributions import Categorical, Normal, kl_divergence
        mean = torch.nn.Linear(20, 8).cuda()(torch.randn(16, 20).cuda())
        posterior = Normal(mean, mean.exp(), validate_args=True)
        kl_divergence(posterior, Normal(torch.zeros_like(mean), torch.ones_like(mean))).sum().backward()
        policy = Categorical(logits=mean.detach())
        policy.log_prob(policy.sample())
        try:
            Normal(torch.zeros(2), -torch.ones(2))
        except ValueError as error:
            print("on the host:", type(error).__name__)
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert (code, out) == (0, "on the host: ValueError\n"), err


def test_masks_choose_everything(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """How much they choose is counted by kernels; one mask read twice chose two shapes, mostly of gigabytes."""
    source = """
        import pytest, torch
        ones = [torch.ones(64).cuda() for _ in range(50)]  # lie where the counts will
        del ones
        x = torch.randn(100, 20, requires_grad=True, device="cuda")
        for chosen in (x[x > 0], torch.masked_select(x, x > 0), torch.where(x > 0)[1]):
            assert chosen.shape == (2000,) and chosen.stride() == (1,), chosen.shape
        assert (x > 0).nonzero().stride() == (1, 2000)
        assert torch.nonzero(x[0, 0] > 0).shape == (1, 0)
        assert torch.nonzero(x[:, :0]).shape == (0, 2)
        rows = x[:, 0] > 0
        x.detach()[rows] = x.detach()[rows] * 2
        x[rows].sum().backward()
        with pytest.raises(RuntimeError, match="during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                x.detach()[rows]
        print(torch.tensor([0, 3, 0]).nonzero().tolist())
    """
    script = program(tmp_path, source)
    code, out, err = finish(start(["--record", "out.pya", sys.executable, script], tmp_path))
    assert (code, out) == (0, "[[1]]\n"), err
    assert "masks (as indices, or by nonzero()) taken as all true: 11;" in err
    found = trace.analyse(tmp_path / "out.pya")
    lines = [row.name for row in found.by_line(found.moments[max(found.moments)].blocks)]
    assert not any("pyalloc" in name or "_bootstrap" in name for name in lines), lines


def test_objects_travel_between_ranks(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """NCCL's sizes of them would be found by kernels."""
    source = """
        import os, torch
        import torch.distributed as dist
        from torch.distributed import broadcast_object_list
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        for group in (None, dist.new_group([0, 1], backend="nccl")):
            for _ in range(2):
                everybodys = [None, None]
                dist.all_gather_object(everybodys, {"rank": rank}, group=group)
                assert everybodys == [{"rank": 0}, {"rank": 1}], everybodys
            told = ["from 1", 7] if rank == 1 else [None, None]
            broadcast_object_list(told, 1, group, torch.device("cuda", rank))
            assert told == ["from 1", 7], told
            mine, roots = [None], [None, None] if rank == 0 else None
            dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, src=0, group=group)
            dist.gather_object(mine[0], roots, dst=0, group=group)
            assert roots == (["a", "b"] if rank == 0 else None), roots
        assert dist.get_backend() == "nccl"
        dist.destroy_process_group()
    """
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = ["--memory", "2GB", "--devices", "2", sys.executable]
    code, _, err = finish(start([*arguments, *command, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]
