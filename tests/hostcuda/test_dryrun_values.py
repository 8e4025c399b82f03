"""pyalloc dryrun: programs that ask the device for values, which no kernel computed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyalloc import trace
from pyalloc.outside import dryrun, hostcuda

from .dryrun_support import end_well, finish, program, start


def test_a_gradient_scaler_takes_every_step(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """It asks the device whether gradients overflowed, and would find whatever lay there before."""
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
        assert scaler.get_scale() == 2.0**16
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            scaled = torch.amp.GradScaler("cuda").scale(torch.ones((), device="cuda"))
        assert scaled.shape == ()
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


def test_lbfgs_keeps_its_directions(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """It asks the device whether each is of use, and kept none, which is most of its memory."""
    source = """
        import torch
        model = torch.nn.Linear(1000, 1000, bias=False).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=6, history_size=10, line_search_fn="strong_wolfe")
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 1000, device="cuda")).sum()
            loss.backward()
            return loss
        for _ in range(3):
            optimizer.step(closure)
        kept = optimizer.state[model.weight]
        assert [len(kept[name]) for name in ("old_dirs", "old_stps", "ro")] == [10, 10, 10]
        assert torch.cuda.memory_allocated() > 20 * 4_000_000
        from torch.optim.lbfgs import _cubic_interpolate
        assert _cubic_interpolate(0, 1.0, 0.0, 0, 1.0, 0.0) == 0  # divided by 0
    """
    end_well(tmp_path, source)


def test_generate_goes_on_to_its_largest_length(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It asks the device whether all sequences have ended, and would never stop, or stop at once."""
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
                    made = model.generate(prompt, max_new_tokens=n_new, num_beams=beams, do_sample=False)
                    print(beams, len(passes), *made.shape, flush=True)
            names = dict(return_dict_in_generate=True, output_scores=True, num_return_sequences=2)
            made = model.generate(prompt, max_new_tokens=4, num_beams=3, **names)
            assert made.sequences.shape == (4, 12) and made.beam_indices.shape == (4, 4), made
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert code == 0, err
    assert out.splitlines() == ["1 4 2 12", "1 9 2 17", "3 4 2 12", "3 9 2 17"], out


def test_all_is_well_where_nothing_else_is_known(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Assertions failed, operators found their arguments invalid, loops until all are done never ended."""
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
        x = torch.randn(6, 6, device="cuda")
        assert torch.isfinite(x).all() and torch.equal(x, x) and torch.allclose(x, x)
        assert not torch.isnan(x).any()
        loss = torch.nn.functional.mse_loss(mean, torch.ones_like(mean))
        if not torch.isfinite(loss):
            raise ValueError("not finite")
        assert torch.isfinite(torch.tensor([1.0, float("inf")]).cuda()).tolist() == [True, False]
        compiled = torch.compile(lambda x: torch.isfinite(x).all(-1), backend="eager", fullgraph=True)
        assert compiled(x.detach().requires_grad_()).tolist() == [True] * 6
        torch.linalg.eig(x)
        torch.cov(x, fweights=torch.ones(6, dtype=torch.int64, device="cuda"))
        torch.segment_reduce(x[0], "sum", lengths=torch.randint(3, 4, (2,), device="cuda"))
        done, n = torch.zeros(4, dtype=torch.bool, device="cuda"), 0
        while not done.all():
            done, n = done | (x[:4, 0] > 0), n + 1
            assert n < 100
        told = torch.tensor([[1, 0], [1, 1]]).cuda()
        assert not told.all() and told.all(1).tolist() == [False, True]
        assert told.all((0,), keepdim=True).tolist() == [[True, False]]
        assert (x > 0).all((0, 1)).shape == () and told.byte().all().dtype == torch.uint8
        assert torch.ones(3 << 20, device="cuda").all()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            finite = torch.isfinite(x).all()
        assert finite
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert (code, out) == (0, "on the host: ValueError\n"), err


def test_masks_choose_everything(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Kernels count how many they choose: one mask read twice chose two shapes, mostly of gigabytes.

    But not masks that the program made on the host.
    """
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
        told = torch.tensor([[True, False], [True, True]]).cuda()
        assert told.nonzero().tolist() == [[0, 0], [1, 0], [1, 1]] and told.nonzero().stride() == (1, 3)
        x = torch.empty(2, 2, 3, device="cuda")  # older torch draws no random numbers after a capture that failed
        assert x[told].shape == (3, 3)
    """
    script = program(tmp_path, source)
    code, out, err = finish(start(["--record", "out.pya", sys.executable, script], tmp_path))
    assert (code, out) == (0, "[[1]]\n"), err
    assert "note: 10 masks (used as indices or by nonzero()) counted as all true;" in err
    found = trace.analyse(tmp_path / "out.pya")
    lines = [row.name for row in found.by_line(found.moments[max(found.moments)].blocks)]
    assert not any("pyalloc" in name or "_bootstrap" in name for name in lines), lines


def test_masks_choose_a_place_for_each_value_that_is_put(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Models of images and text put pictures among their tokens this way: there were more places than values."""
    source = """
        import pytest, torch
        tokens = torch.randn(2, 30, 8, requires_grad=True, device="cuda")
        image = torch.randn(6, 8, requires_grad=True, device="cuda")
        mask = torch.randn(2, 30, device="cuda") > 1
        tokens.masked_scatter(mask.unsqueeze(-1).expand_as(tokens), image).sum().backward()
        assert image.grad.shape == (6, 8)
        x = tokens.clone()
        x[mask] = image
        assert x[mask].shape == (6, 8)
        x.sum().backward()
        x = x.detach()
        x[mask] = 0
        x[:, mask[0]] = 1
        x[x[..., 0] > 0] = image[0].detach()
        x[torch.tensor([1]).cuda()] = 1
        told = (torch.arange(60) < 5).view(2, 30).cuda()
        for wrong in (told, x[..., 0] > 0):
            with pytest.raises(RuntimeError, match="shape mismatch"):
                x[wrong] = torch.randn(61, 8, device="cuda")
        of_host = torch.zeros(2, 30, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="shape mismatch"):
            x[of_host] = torch.randn(10, 8, device="cuda")
        assert not of_host.any()
        put = torch.compile(lambda x, mask, values: x.index_put((mask,), values), backend="eager")
        assert put(x, x[..., 0] > 0, image.detach()).shape == (2, 30, 8)
    """
    end_well(tmp_path, source)


def test_objects_travel_between_ranks(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Kernels would find NCCL's sizes; and barriers waited for nobody."""
    source = """
        import datetime, os, time, torch
        import torch.distributed as dist
        from torch.distributed import broadcast_object_list
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        both = dist.new_group([0, 1], backend="cpu:gloo,cuda:nccl")
        long = datetime.timedelta(hours=2)
        slow = dist.new_group([0, 1], backend="nccl", timeout=long)
        groups = (None, {}), (both, {"device_ids": [rank]}), (slow, {"device_ids": [rank]})
        for number in range(9):
            if rank == 0:
                while not os.path.exists(f"arrived{number}"):
                    time.sleep(0.01)
                open(f"written{number}", "w").close()
            else:
                open(f"arrived{number}", "w").close()
            group, names = groups[number % 3]
            dist.barrier(group, **names)
            assert os.path.exists(f"written{number}"), number
        hosts = [each for each in dist.distributed_c10d._world.pg_map if dist.get_backend(each) == "gloo"]
        waits = sorted(each._get_backend(torch.device("cpu")).options._timeout for each in hosts)
        assert waits == [long / 4, long], waits
        device = torch.device("cuda", rank)
        for group in (None, dist.new_group([0, 1], backend="nccl"), both):
            for _ in range(2):
                everybodys = [None, None]
                dist.all_gather_object(everybodys, {"rank": rank}, group=group)
                assert everybodys == [{"rank": 0}, {"rank": 1}], everybodys
            told = ["from 1", 7] if rank == 1 else [None, None]
            broadcast_object_list(told, 1, group, device)
            assert told == ["from 1", 7], told
            mine, roots = [None], [None, None] if rank == 0 else None
            dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, src=0, group=group)
            dist.gather_object(mine[0], roots, dst=0, group=group)
            assert roots == (["a", "b"] if rank == 0 else None), roots
            told = [None, None]
            if rank == 0:
                dist.send_object_list(["to 1", 7], 1, group, device)
                assert dist.recv_object_list(told, 1, group) == 1 and told == ["to 0", 8], told
            else:
                found = dist.recv_object_list(told, group=group, device=device, group_src=0)
                assert found == 0
                assert told == ["to 1", 7], told
                dist.send_object_list(["to 0", 8], group=group, group_dst=0)
        from torch.distributed.optim import ZeroRedundancyOptimizer
        weight = torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.Adam)
        weight.sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(1)
        assert rank == 0 or optimizer.state_dict()["state"][0]["exp_avg"].shape == (8, 8)
        assert dist.get_backend() == "nccl"
        dist.destroy_process_group()
    """
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = ["--memory", "2GB", "--devices", "2", sys.executable]
    code, _, err = finish(start([*arguments, *command, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]


def test_what_is_counted_on_the_device_has_its_largest_size(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """unique() and coalesce() found nothing; the sizes of the others were whatever lay there, or far too large."""
    source = """
        import torch
        from torch.nn.functional import one_hot
        told = torch.tensor([3, 0, 2]).cuda()
        unknown = torch.randn(100, device="cuda").long()
        x = torch.randn(100, 20, device="cuda")
        for made in (
            torch.unique(unknown, return_inverse=True, return_counts=True),
            torch.unique_consecutive(unknown, return_inverse=True, return_counts=True),
            torch.unique(x, dim=0, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x, dim=0, return_inverse=True, return_counts=True),
        ):
            assert [len(each) for each in made] == [100, 100, 100], made
        assert torch.unique(x).shape == (2000,)
        sparse = torch.sparse_coo_tensor(torch.stack([unknown, unknown]), x, (9, 9, 20)).coalesce()
        assert sparse.is_coalesced() and sparse.values().shape == (100, 20)
        assert one_hot(told).shape == (3, 4) and one_hot(told, 7).shape == (3, 7)
        assert torch.bincount(told).shape == (4,) and torch.bincount(unknown, minlength=9).shape == (9,)
        assert torch.bincount(told, torch.ones(3, device="cuda")).dtype == torch.float32
        for counts in (torch.bincount(unknown, minlength=9), torch.histc(unknown.float(), 9, 0, 9)):
            assert len(x.split(counts.cpu().long().tolist())) == 9
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert torch.histc(x, 9, 0, 9).shape == (9,)
        assert torch.bincount(told).tolist() == torch.histc(told, 4, 0, 3).tolist() == [1, 0, 1, 1]
        assert torch.repeat_interleave(x[:3], told, 0).shape == (5, 20)
        column = torch.tensor([[3, 7], [0, 7], [2, 7]]).cuda()[:, 0]
        assert torch.repeat_interleave(x[:3], column, 0).shape == (5, 20)
        assert one_hot(unknown).shape == (100, 1)
        assert torch.repeat_interleave(x, unknown, 0).shape == (100, 20)
        torch._logging.set_logs(graph_breaks=True)
        compiled = torch.compile(lambda labels: torch.bincount(labels, minlength=9) + 1, backend="eager")
        assert compiled(told).tolist()[4:] == [1] * 5
        average = torch.nn.BatchNorm1d(20, momentum=None).cuda()
        average(x)
    """
    err = end_well(tmp_path, source)
    words = " ".join(err.split())
    assert "note: 6 calls of unique() or coalesce() treated all elements as different;" in words, (
        err
    )
    assert "the sizes of 4 tensors are guesses," in words, err
    assert "sizes.py" not in err, err


def test_losses_share_out_their_targets(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Each cluster took all, and the sum was too large; operators that look at numbers got the program's answers."""
    source = """
        import pytest, torch
        loss = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 30]).cuda()
        n = []
        for tail in loss.tail:
            tail.register_forward_hook(lambda _module, inputs, _output: n.append(len(inputs[0])))
        told = torch.tensor([5, 20, 40, 99, 41, 9]).cuda()
        for targets, shares in ((told, [1, 3]), (torch.randn(6, device="cuda").long(), [2, 2])):
            n.clear()
            loss(input_=torch.randn(6, 16, device="cuda"), target_=targets).loss.backward()
            assert n == shares, n
        column = torch.tensor([[3, 7], [0, 7], [2, 7]]).cuda()[:, 0]
        assert torch.repeat_interleave(torch.randn(3, 4, device="cuda"), column, 0).shape == (5, 4)
        assert torch.bincount(column).shape == (4,)
        speech = torch.randn(30, 1, 5, device="cuda")
        with pytest.raises(RuntimeError, match="must be integral"):
            lengths = torch.tensor([30.0]), torch.tensor([2])
            torch.nn.functional.ctc_loss(speech, torch.tensor([[1, 2]]).cuda(), *lengths)
    """
    err = end_well(tmp_path, source)
    assert "back from the device" not in " ".join(err.split()), err


def test_largest_smallest_and_sum_of_what_the_program_put_there(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """They were 0, so padding to the longest left nothing, and a division by their sum raised."""
    source = """
        import pytest, torch
        lengths = torch.tensor([3, 7, 2]).cuda()
        x = torch.randn(3, 9, requires_grad=True, device="cuda")
        assert x[:, : lengths.max()].shape == (3, 7)
        assert [int(each) for each in (lengths.max(), lengths.min(), lengths.sum())] == [7, 2, 12]
        assert lengths.sum(dtype=torch.float32).tolist() == 12.0
        assert torch.tensor([True, False, True]).cuda().sum().item() == 2
        for kind in (torch.int64, torch.float32):
            none = torch.empty(0, dtype=kind, device="cuda")
            with pytest.raises(RuntimeError, match="Expected reduction dim to be specified"):
                none.max()
            assert none.sum().shape == none.any().shape == ()
        x.sum().backward()
        (x * 2).max().backward()
        assert x.sum(dtype=torch.float64).dtype == torch.float64 and (x > 0).sum().item() == 0
        compiled = torch.compile(lambda x: x.sum() + lengths.max(), backend="eager", fullgraph=True)
        assert compiled(x).shape == torch.func.grad(torch.sum)(x[0, 0].detach()).shape == ()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            lengths.max(), lengths.sum()
        assert lengths.any() and (lengths > 2).sum().item() == 2 and lengths.byte().any().dtype == torch.uint8
        while lengths.max().item() > 0:
            lengths -= 1
        window = torch.hann_window(64).cuda()
        sound = torch.stft(x[:1].repeat(1, 50), 64, window=window, return_complex=True)
        torch.istft(sound, 64, window=window, length=450).sum().backward()
        assert torch.istft(sound.detach(), 64, window=window).shape == (1, 448)
    """
    end_well(tmp_path, source)


def test_numbers_that_follow_from_what_the_program_put_there(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Along dimensions they were 0, and a comparison of the program's own labels chose all of them."""
    source = """
        import torch
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).cuda()
        lengths = mask.sum(-1, dtype=torch.int32)
        assert lengths.tolist() == [3, 2] and lengths.dtype == torch.int32 and int(lengths.max()) == 3
        assert torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().tolist() == [0, 3, 5]
        assert mask.argmin(-1).tolist() == [3, 2] and mask.amax(0).tolist() == [1, 1, 1, 0]
        assert [each.tolist() for each in mask.min(1)] == [[0, 0], [3, 2]]
        assert [each.tolist() for each in mask.max(0, keepdim=True)][0] == [[1, 1, 1, 0]]
        assert mask.nonzero().shape == mask.bool().nonzero().shape == (5, 2)
        labels = torch.tensor([[1, -100, 3]]).cuda()
        is_counted, unknown = labels != -100, torch.randn(1, 3, device="cuda") > 0
        assert labels[is_counted].shape == (2,) and labels[~is_counted].shape == (1,)
        assert labels[is_counted & (labels > torch.tensor(1))].shape == (1,) and (labels & 1).sum() == 2
        assert torch.bitwise_or(8, labels).tolist() == [[9, -100, 11]]
        assert torch.bitwise_and(True, is_counted).tolist() == [[True, False, True]]
        unsigned = torch.tensor([0, 5, 7], dtype=torch.uint16).cuda()
        assert unsigned.nonzero().tolist() == [[1], [2]] and (unsigned == 5).tolist() == [False, True, False]
        assert labels[unknown].shape == labels[unknown & is_counted].shape == (3,)
        x, n = torch.randn(4, 5, requires_grad=True, device="cuda"), 0
        (x.sum(0).max(0).values + x.amax() + x.cumsum(1).half().sum()).backward()
        assert (x == x).nonzero().shape == (20, 2) and x.sum(1).tolist() == [0] * 4
        known = lambda x, labels: x.sum(0) + (labels != 3).sum(1).amax()
        assert torch.compile(known, backend="aot_eager", fullgraph=True)(x, labels).shape == (5,)
        torch.vmap(lambda x: x.max(0).values + x.sum(0) + (x > 1))(x.detach())
        ids = torch.arange(10).cuda()
        assert ids.roll((1, 2), (0, 0))[:4].tolist() == [7, 8, 9, 0] and torch.isin(ids, 3).sum() == 1
        assert torch.div(ids, 4, rounding_mode="floor").tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
        assert torch.div(ids, 4, rounding_mode=None).dtype == torch.float32 and ids.fmod(7).tolist()[6:] == [6, 0, 1, 2]
        assert torch.searchsorted(ids, ids[3:5], right=True).tolist() == [4, 5]
        assert torch.bucketize(ids, ids[3:5], out_int32=True).tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
        assert ids.clamp(max=lengths[0]).sum() == 24 and (ids - 5).sign().sum() == -1
        assert ids.masked_select(ids > 6).tolist() == [7, 8, 9] and ids.take(ids[1:3]).tolist() == [1, 2]
        assert not (ids > 9).view(2, 5).any((0, 1)) and torch.isin(3, ids) and not torch.isin(2.5, ids)
        while (lengths > n).any():
            n += 1
        lengths -= 1
        assert n == 3 and lengths.tolist() == [2, 1]
    """
    err = end_well(tmp_path, source)
    assert "note: 3 masks (used as indices or by nonzero()) counted as all true;" in " ".join(
        err.split()
    ), err


def test_large_results_are_not_worked_out_on_the_host(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """A causal mask for few positions took gigabytes there, of which nothing was kept."""
    source = """
        import resource, torch
        def most_kib():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        few = torch.arange(1, 20).cuda()
        (few[:, None] >= few).nonzero()
        places = torch.tensor(range(1, 32769)).cuda()
        before = most_kib()
        is_seen = places[:, None] >= places
        places.expand(32768, -1).amax(1)
        assert is_seen.shape == (32768, 32768) and most_kib() - before < 2**18, most_kib() - before
    """
    end_well(tmp_path, source)


def test_jagged_tensors_are_taken_apart(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """The places where their parts begin were read from the device, and they had no length."""
    source = """
        import pytest, torch
        from torch.nested._internal.nested_tensor import NestedTensor
        parts = [torch.randn(n, 8, device="cuda", requires_grad=True) for n in (5, 9, 3)]
        made = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        assert [len(each) for each in (made * 2).unbind()] == [5, 9, 3]
        sum(each.sum() for each in made.unbind()).backward()
        assert parts[1].grad.shape == (9, 8)
        values = torch.randn(17, 8, device="cuda")
        for ends, lengths in (([0, 4, 17], [4, 13]), ([0, 0, 0], [8, 9])):
            told = torch.nested.nested_tensor_from_jagged(values, torch.tensor(ends).cuda())
            assert [len(each) for each in told.unbind()] == lengths
        ends, weight = torch.tensor([0, 4, 17]).cuda(), torch.nn.Parameter(values)
        held = NestedTensor(weight, ends)
        assert [len(each) for each in held.unbind()] == [4, 13]
        none = torch.zeros(1, dtype=torch.int64, device="cuda")
        assert NestedTensor(values[:0], none).unbind() == ()
        with pytest.raises(RuntimeError, match="split_sizes"):
            NestedTensor(values, none).unbind()
    """
    end_well(tmp_path, source)


def test_a_weight_of_which_half_is_left_out(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """A little more than half of the elements for each: cuSPARSELt says how many bytes that is."""
    source = """
        import torch
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Sparse
        for dtype in (torch.float16, torch.bfloat16, torch.int8):
            weight = torch.zeros(256, 512, dtype=dtype).cuda()
            before = torch.cuda.memory_allocated()
            sparse = Sparse.from_dense(weight)
            made = torch.cuda.memory_allocated() - before
            assert made == weight.nbytes // 2 + weight.numel() // 8, made
            del sparse
    """
    end_well(tmp_path, source)


def test_sums_and_products_of_sparse_matrices(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """The number of their elements was unknown: none, or more than there are addresses."""
    source = """
        import torch
        a, b = (torch.rand(200, 300) > 0.98 for _ in range(2))
        n_a, n_b = int(a.sum()), int(b.sum())
        host = a.float().to_sparse_csr(), b.float().t().to_sparse_csr()
        a, b = (each.cuda() for each in host)
        other = (torch.rand(200, 300) > 0.98).float().to_sparse_csr()
        assert (a + other.cuda())._nnz() == n_a + other._nnz()
        product = torch.sparse.mm(*(each.to_sparse().cuda() for each in host))
        assert product._nnz() == (a @ b)._nnz() == n_a * n_b // 300, product
        full = torch.ones(20, 30).to_sparse_csr().cuda()
        assert (full + full)._nnz() == 600
        assert torch.sparse.mm(full, torch.ones(30, 20).to_sparse_csr().cuda())._nnz() == 400
    """
    end_well(tmp_path, source)


def test_sequences_of_unknown_lengths_are_as_long_as_can_be(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Their order is read back from the device and was no order; ctc_loss() found its targets too long."""
    source = """
        import torch
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        ones = [torch.ones(64).cuda() for _ in range(50)]  # lie where the order will
        del ones
        x = torch.randn(3, 30, 20, requires_grad=True, device="cuda")
        recurrent = torch.nn.GRU(20, 16, batch_first=True).cuda()
        for lengths, n in ((torch.tensor([5, 30, 7]), 42), ((x > 0).sum((1, 2)).cpu(), 90)):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            assert packed.data.shape == (n, 20), packed.data.shape
            padded, found = pad_packed_sequence(recurrent(packed)[0], batch_first=True)
            assert padded.shape == (3, 30, 16) and int(found.sum()) == n, found
            padded.sum().backward()
        counted = (x > 0).sum((1, 2))
        for inputs, targets, lengths in (
            (counted, torch.ones(20, dtype=torch.int64).cuda(), counted),
            (counted, torch.ones(3, 7, dtype=torch.int64).cuda(), counted),
            (torch.tensor([9, 30, 2]).cuda(), torch.ones(6, dtype=torch.int64).cuda(), torch.tensor([3, 2, 1]).cuda()),
        ):
            torch.nn.functional.ctc_loss(x.transpose(0, 1), targets, inputs, lengths).backward()
        one = (torch.ones(7, dtype=torch.int64), torch.tensor(30), torch.tensor(7))
        torch.nn.functional.ctc_loss(x[0], *(each.cuda() for each in one)).backward()
    """
    err = end_well(tmp_path, source)
    assert "the sizes of 5 tensors are guesses," in " ".join(err.split()), err


@pytest.mark.parametrize("allocator", dryrun.ALLOCATORS)
def test_what_nobody_computed_reads_as_zero(
    torch_found: hostcuda.Torch, tmp_path: Path, allocator: str
) -> None:
    """And not as whatever lay there before, which would make two allocators incomparable."""
    source = """
        import torch
        for size in (1, 3000, 300_000):
            before = [torch.ones(size).cuda() for _ in range(50)]
            del before
            ones = torch.ones(size).cuda()
            found = [torch.randn(size, device="cuda") for _ in range(50)]
            assert all(not each.cpu().any() for each in found)
            assert sum((each > 0).sum().item() for each in found) == 0
            assert ones.cpu().all()
    """
    command = ["--allocator", allocator, sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(command, tmp_path))
    assert code == 0, err


def test_stages_of_a_pipeline_tell_each_other_their_shapes(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """As objects, from one rank to the next."""
    source = """
        import os, torch
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        device = torch.device("cuda", rank)
        model = torch.nn.Linear(64, 64).to(device)
        stage = PipelineStage(model, rank, 2, device)
        schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
        for _ in range(2):
            x = torch.randn(16, 64, device=device)
            schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[])
        assert model.weight.grad.shape == (64, 64)
        dist.destroy_process_group()
    """
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    arguments = ["--memory", "2GB", "--devices", "2", sys.executable]
    code, _, err = finish(start([*arguments, *command, program(tmp_path, source)], tmp_path))
    assert code == 0, err[-4000:]
