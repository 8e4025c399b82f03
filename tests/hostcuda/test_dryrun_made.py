"""pyalloc dryrun: numbers and masks that the program makes on the device, and what follows from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pyalloc._bootstrap import contents
from pyalloc.outside import hostcuda

from .dryrun_support import ROOT, end_well, finish, flat, program, start


def test_what_the_program_has_the_device_make(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """They were zeros: masks from lengths or of triangles chose everything, random sizes were 0."""
    source = """
        import torch
        from torch.nn.functional import one_hot
        torch.set_default_device("cuda")
        lengths, x = torch.tensor([3, 7, 2]), torch.randn(3, 9, 4)
        mask = torch.arange(9)[None] < lengths[:, None]
        assert x[mask].shape == (12, 4) and x[mask.logical_not()].shape == (15, 4)
        assert torch.ones(5, 5).triu(1).bool().nonzero().shape == (10, 2)
        assert x[0, :4][~torch.eye(4).bool()].shape == (12,)
        numbers = torch.randint(2, 7, (3000,))
        assert numbers.unique().tolist() == [2, 3, 4, 5, 6] and 550 < (numbers == 3).sum() < 650
        assert 2 <= int(torch.randint(2, 7, ())) < 7 and torch.randperm(50).sort().values.tolist() == [*range(50)]
        assert 280 < len(numbers[torch.rand(3000) < 0.1]) < 320
        ids = torch.cat([torch.full((2,), 5), torch.ones_like(lengths), lengths.new_full((2,), 9)])
        assert ids.tolist() == [5, 5, 1, 1, 1, 9, 9] and ids[ids != 1].unique().tolist() == [5, 9]
        assert one_hot(ids).shape == (7, 10) and one_hot(ids).sum(0)[5] == 2
        assert (ids == 5).view(1, 7).any(-1).tolist() == [True]
        assert (ids * 2 % 10 // 3 - 1).tolist() == [-1, -1, -1, -1, -1, 1, 1]
        assert len(x[:2].repeat(4, 1, 1)[:7][ids == 77]) == 0  # none, and that is known
        assert int((ids != 1).sum() * 0.75) == 3 and (lengths.max() + 1).item() == 8
        assert torch.where(ids == 5, -100, ids).masked_fill(ids == 9, 0).tolist() == [-100, -100, 1, 1, 1, 0, 0]
        assert torch.isin(ids, lengths).tolist() == [False] * 7 and ids.flip(0).tolist()[:3] == [9, 9, 1]
        grid = torch.tensor([[2, 4, 4], [1, 2, 6]])  # of pictures, as models of the Qwen family are told
        ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0, dtype=torch.int32)
        ends = torch.nn.functional.pad(ends, (1, 0))
        assert [len(each) for each in torch.randn(44, 2).split((ends[1:] - ends[:-1]).tolist())] == [16, 16, 12]
        end = torch.nn.functional.pad(torch.tensor([16]).cumsum(0), (1, 0))
        assert (end[1:] - end[:-1]).tolist() == [16]
        assert (grid.prod(-1) // 4).tolist() == [8, 3]
        assert torch.randn(grid[0].prod(), 2).shape == (32, 2) and (grid > 1).prod().tolist() == 0
        depth = torch.tensor([[0.0, 2.0], [0.0, 1.0]], device="cpu").cuda()
        assert depth[depth > 0].shape == (2,) and depth.nonzero().tolist() == [[0, 1], [1, 1]]
        state = torch.cuda.get_rng_state()
        first = torch.rand(9) < 0.5
        torch.cuda.set_rng_state(state)
        assert torch.equal(first.cpu(), (torch.rand(9) < 0.5).cpu())
        assert torch.randn(100)[torch.randn(100) > 1].shape == (100,)
        places, several = torch.zeros(2, 30, 4), torch.randn(2, 30) > 1
        for i in range(2):
            places[i][several[i]] = torch.randn(5, 4)
        assert (torch.zeros(3, dtype=torch.int8) + 128).shape == (3,)
        assert (torch.ones(3, dtype=torch.int32) * 2654435761).tolist() == [-1640531535] * 3
        by = torch.tensor([2, 0])
        assert (torch.tensor([4, 6]) // by).shape == (torch.tensor([4, 6]) % by).shape == (2,)
        ids = torch.tensor([3, 4], device="cpu").cuda()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            later = ids + 1, torch.nn.functional.one_hot(ids, 9), ids == 3
        assert not any(each.any() for each in later)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.arange(5) + torch.ones(5) * torch.rand(5)
    """
    err = end_well(tmp_path, source)
    assert "note: 1 mask (used as indices or by nonzero()) counted as all true;" in flat(
        err
    ) and "elements as different" not in flat(err)


def test_losses_over_the_classes_that_are_there(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Before, every pixel was a class of its own: 80 GiB, and minutes."""
    source = """
        import torch
        labels = torch.arange(3 * 256 * 256).view(3, 256, 256) % 5
        labels[:, :9] = 255
        labels = labels.cuda()
        scores = torch.randn(3 * 256 * 256, 5, device="cuda")
        valid = labels.view(-1) != 255
        scores, labels = scores[valid], labels.view(-1)[valid]
        classes = [int(each) for each in labels.unique()]
        assert classes == [0, 1, 2, 3, 4], classes
        assert sum(len(scores[labels == each]) for each in classes) == 3 * 247 * 256
        values, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        assert inverse.shape == labels.shape and int(counts.sum()) == len(labels)
        pairs = torch.tensor([[1, 2], [1, 2], [3, 4]]).cuda()
        assert torch.unique(pairs, dim=0).tolist() == [[1, 2], [3, 4]]
        assert torch.unique_consecutive(torch.tensor([4, 4, 1, 4]).cuda()).tolist() == [4, 1, 4]
    """
    end_well(tmp_path, source)


def test_experts_share_the_tokens(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Each expert saw every token or, if asked whether it has any, none; clusters took all points."""
    source = """
        import torch
        from torch.nn.functional import one_hot
        tokens = torch.randn(64, 8, requires_grad=True, device="cuda")
        router = torch.nn.Linear(8, 4).cuda()
        scores = router(tokens)
        chosen = scores.topk(2).indices
        assert [len(tokens[(chosen == each).any(-1)]) for each in range(4)] == [32] * 4
        assert all((chosen == each).any() for each in range(4))
        assert [len(torch.where(chosen == each)[0]) for each in range(4)] == [32] * 4
        mask = one_hot(chosen, 5).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        assert hit.tolist() == [[0], [1], [2], [3]]
        assert [len(torch.where(mask[each].squeeze(0))[0]) for each in hit] == [32] * 4
        assert chosen.view(-1).bincount(minlength=5).tolist() == [32, 32, 32, 32, 0]
        many = one_hot(torch.randn(4096, 8, device="cuda").topk(8).indices, 257).permute(2, 1, 0)
        hit = torch.greater(many.sum(dim=(-1, -2)), 0).nonzero()
        seen = [len(torch.where(many[each].squeeze(0))[0]) for each in hit]
        assert len(seen) == 257 and set(seen) == {128}, seen
        assert not any(set(each) - {0, 1, 2, 3} for each in chosen.tolist())
        for one in (scores.argmax(-1), scores.max(-1).indices, scores.softmax(-1).multinomial(1)[:, 0]):
            assert [len(tokens[one == each]) for each in range(4)] == [16] * 4
        assert torch.compile(lambda x: x.topk(2).indices, backend="aot_eager")(scores).shape == (64, 2)
        assert all(len({*each}) == 2 for each in scores.T.topk(2, dim=0).indices.T.tolist())
        assert scores.argmax().item() == 128 and scores[:, 0].max(0).indices.shape == ()
        sum(tokens[chosen[:, 0] == each].sum() for each in range(4)).backward()
    """
    err = end_well(tmp_path, source)
    assert "note: 1 mask (used as indices or by nonzero()) counted as all true;" in flat(err), (
        err
    )  # of the large mask, which experts there are


def test_no_fraction_is_beyond_the_infinities(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """The first loss was not below the best one so far, which was none: no checkpoint was written."""
    source = """
        import torch
        inf, loss, x = float("inf"), torch.randn(9, device="cuda").mean(), torch.randn(64, 9, device="cuda")
        assert loss < inf and loss <= inf and loss > -inf and loss >= -inf and inf > loss and -inf < loss
        assert not (loss > inf or loss >= inf or loss < -inf or loss <= -inf)
        for device in ("cpu", "cuda"):
            best = torch.tensor(inf, device=device)
            assert loss < best and best > loss and torch.lt(loss, best) and not loss > best
        assert (x < inf).all() and (x > -inf).sum() == 576 and x[x < inf].shape == (576,) and not (x < 0.5).any()
        assert not loss < 0.5 and not loss > 0.0 and not loss < loss
        put = torch.tensor([1.0, float("nan"), inf]).cuda()
        assert (put < inf).tolist() == [True, False, False] and (put <= inf).tolist() == [True, False, True]
        total = torch.zeros((), device="cuda")
        total += loss
        assert total < inf
    """
    end_well(tmp_path, source)


def test_numbers_to_divide_by(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """A loss was 0: examples that print the signal-to-noise ratio raised."""
    source = """
        import math, torch
        loss = torch.nn.functional.mse_loss(torch.randn(9, device="cuda"), torch.randn(9, device="cuda"))
        assert 10 * math.log10(1 / loss.item()) > 0 and 0 < float(loss) < 1e-20
        assert f"{loss:.4f}" == "0.0000" and int(loss) == 0 and not loss > 0
        assert torch.tensor(0.0).cuda().item() == 0 and torch.tensor(1.5).cuda().item() == 1.5
        assert torch.randn(1, device="cuda").long().item() == 0 and torch.tensor(True).cuda().item() is True
        assert torch.zeros((), dtype=torch.complex64, device="cuda").item() == 0
        assert not loss and not torch.is_nonzero(loss)
        assert loss.detach().item() > 0 and (loss / 2).view(1).item() > 0
        zeros = torch.zeros((), device="cuda"), torch.zeros_like(loss), loss.new_zeros(1)
        assert [each.item() for each in (*zeros, torch.tensor([0.0, 1.0]).cuda()[0])] == [0, 0, 0, 0]
        found_inf = torch.tensor([0.0]).cuda().fill_(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_([torch.randn(3).cuda()], found_inf, torch.ones(()).cuda())
        assert found_inf.item() == 0
        n = 0
        while loss.mean().item() > 0 and n < 9999:
            n += 1
        assert 9 < n < 9999
        try:
            bool(torch.randn(2, device="cuda"))
        except RuntimeError as error:
            assert "more than one value" in str(error)
        else:
            raise AssertionError
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                loss.item()
        except RuntimeError:
            print("not in a capture")
    """
    code, out, err = finish(start([sys.executable, program(tmp_path, source)], tmp_path))
    assert (code, out) == (0, "not in a capture\n"), err
    assert "back from the device in 1" in flat(err), err


def test_what_follows_from_fractions(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """The largest of the program's own values was that of an even spread; one in a sum that is 0 was not."""
    source = """
        import torch
        torch.set_default_device("cuda")
        scores, unknown = torch.tensor([0.5, 3.0, 1.0]), torch.randn(5, 5)
        assert scores.argmax().item() == 1 and scores.topk(2).indices.tolist() == [1, 2]
        assert [each.item() for each in (scores.sum(), scores.mean(), *scores.max(0))] == [4.5, 1.5, 3, 1]
        assert scores.cumsum(0).tolist() == [0.5, 3.5, 4.5] and scores.argsort().tolist() == [0, 2, 1]
        assert torch.isnan(unknown).float().sum().item() == torch.isinf(unknown).float().mean().item() == 0
        assert unknown[~unknown.isnan()].shape == (25,) and not unknown.isnan().any()
        assert torch.tensor([float("nan"), 1.0, float("inf")]).isnan().tolist() == [True, False, False]
        order = torch.rand(2, 10).argsort(1)
        kept = torch.ones(2, 10)
        kept[:, :4] = 0
        kept = kept.gather(1, order.argsort(1))
        assert kept.sum(1).tolist() == [6, 6] and torch.randn(2, 10, 3)[kept.bool()].shape == (12, 3)
        assert all(sorted(each) == [*range(5)] for each in unknown.sort(0).indices.T.tolist())
        lengths = torch.tensor([3, 0, 9])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.clamp(min=1).cumsum(0)])
        assert ends.tolist() == [0, 3, 4, 13] and torch.maximum(lengths, torch.tensor(4)).tolist() == [4, 4, 9]
        assert torch.zeros(3, 4).scatter(1, torch.tensor([[2], [0], [1]]), 1).bool().nonzero().shape == (3, 2)
    """
    end_well(tmp_path, source)


def test_the_absolute_of_complex_numbers_is_real(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """It was complex, and so too large: spectrograms raised when they were multiplied or compared."""
    source = """
        import torch
        torch.set_default_device("cuda")
        found = torch.stft(torch.randn(1, 640), 64, window=torch.ones(64), return_complex=True).abs()
        assert (torch.randn(20, 33) @ found).dtype == found.dtype == torch.float32
        x = torch.randn(1024, dtype=torch.complex128, requires_grad=True)
        before = torch.cuda.memory_allocated()
        sizes = x.abs()
        assert torch.cuda.memory_allocated() - before == sizes.nbytes == 8192 and sizes.dtype == torch.float64
        assert (sizes >= 0).shape == (1024,) and (-x).dtype == torch.complex128
        sizes.sum().backward()
        assert x.grad.dtype == torch.complex128 and torch.tensor([-3, 2]).abs().tolist() == [3, 2]
    """
    end_well(tmp_path, source)


def test_places_that_are_guessed_may_be_none(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """A device finds out later, if ever; here the program ended."""
    source = """
        import torch
        torch.set_default_device("cuda")
        head, ids = torch.nn.Linear(8, 50).requires_grad_(False), torch.ones(3, 2, dtype=torch.int64)
        for _ in range(4):
            ids = torch.cat([ids, head(torch.randn(3, 8)).argmax(-1, True)], 1)
        last = (ids == 49).int().argmax(1, True) - 1
        assert ids.gather(1, last).shape == (3, 1) and ids[:, last[0]].shape == (3, 1)
        assert ids.index_select(1, last[:1, 0] + 9).shape == (3, 1)
        assert torch.zeros(3, 2).scatter(1, ids + 7, 1.0).shape == (3, 2)
    """
    end_well(tmp_path, source)


def test_what_is_drawn_in_place_is_not_known(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Where x.data, which has a version counter of its own, was filled in, the old values were believed."""
    source = """
        import torch
        torch.set_default_device("cuda")
        x = torch.randn(8, 3)
        w, mask, n = torch.ones(8), torch.zeros(8, dtype=torch.bool), torch.tensor([3, 4, 5, 0, 0, 0, 0, 0])
        w.data.fill_(-1.0)
        mask.data[:2] = True
        n.data += 1
        assert (len(x[w > 0]), len(x[mask]), len(x[n > 4])) == (0, 2, 2)
        w.data.normal_()
        mask[1:].bernoulli_(0.5)
        n.random_(9)
        assert (len(x[w > 0]), len(x[mask]), len(x[n > 4])) == (8, 8, 8)
        weight = torch.nn.Parameter(torch.empty(8))
        for change in (
            torch.nn.init.uniform_, torch.nn.init.trunc_normal_, torch.Tensor.exponential_, torch.Tensor.cauchy_,
            lambda x: x.mul_(torch.randn(8)), lambda x: x.lerp_(torch.randn(8), 0.1), lambda x: x.add_(1),
            lambda x: x.addcdiv_(torch.randn(8), torch.randn(8)),
        ):
            torch.nn.init.constant_(weight.data, -1.0)
            assert len(x[weight > 0]) == 0
            change(weight.data)
            assert len(x[weight > 0]) == 8
    """
    end_well(tmp_path, source)


def test_one_part_that_is_not_known(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """All others were read as 0, and what resize_() added was taken for the program's own zeros."""
    source = """
        import torch
        torch.set_default_device("cuda")
        n, unknown = torch.tensor([3, 4, 5]), torch.randn(7) > 0
        n += 1
        n[0] = unknown.sum()
        assert n.tolist()[1:] == [5, 6] and len(torch.randn(3, 2)[n > 5]) == 3
        counts = torch.zeros(2, 3, dtype=torch.int64)
        counts += 2
        counts[:, 1] *= unknown.sum()
        assert counts.sum().item() == 0
        lengths = torch.tensor([3, 4])
        lengths.detach()[:0].random_(9)
        lengths.data[:0] *= unknown.sum()
        assert lengths.data.sum().item() == 7
        n.fill_(2)
        assert n.sum().item() == 6
        mask = torch.ones(500, dtype=torch.bool)
        mask[2:] = False
        mask.resize_(1000)
        assert len(torch.randn(1000)[mask]) == 1000 and mask.all()
        mask.fill_(False)
        assert len(torch.randn(1000)[mask]) == 0
    """
    end_well(tmp_path, source)


def test_zeros_that_a_kernel_may_have_filled_in(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Compared with known numbers they were certain: the first expert took all tokens, the others none."""
    source = """
        import torch
        torch.set_default_device("cuda")
        x, few, ids = torch.randn(5, 3), torch.arange(5), torch.zeros(5, dtype=torch.int64)
        assert [len(x[ids == each]) for each in (*torch.arange(3), 3)] == [5] * 4
        assert len(x[torch.isin(ids, few[1:3])]) == len(x[few[ids] > 2]) == len(x[ids[few] > 2]) == 5
        mask, offset = torch.zeros(5, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
        assert len(x[mask | (few > 2)]) == len(x[torch.where(few > 2, few, ids) > 0]) == 2
        assert torch.cat([offset, few.cumsum(0)]).tolist() == [0, 0, 1, 3, 6, 10] and (offset + few).sum() == 10
        assert ids.scatter(0, few[:2], 1).tolist() == [1, 1, 0, 0, 0]
    """
    end_well(tmp_path, source)


def test_values_are_believed_as_far_as_blocks_begin_with_zeros() -> None:
    text = (ROOT / "csrc" / "hostcuda" / "zeros.c").read_text()
    found = re.search(r"#define MOST \(\(int64_t\)(\d+) << (\d+)\)", text)
    assert found is not None
    assert int(found[1]) << int(found[2]) == contents.MOST_BYTES


def test_a_mask_chooses_on_the_host_what_it_does_on_the_device(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """SegmentAnything filters points of the host, scores of the device and a list with one mask: they did not match."""
    source = """
        import torch
        scores, points, names = torch.randn(9, device="cuda"), torch.rand(9, 2), list("abcdefghi")
        keep = scores > 0
        assert scores[keep].shape == (9,) and points[torch.as_tensor(keep, device="cpu")].shape == (9, 2)
        assert points.numpy()[keep.cpu().numpy()].shape == (9, 2) and keep.tolist() == [True] * 9
        assert [name for i, name in enumerate(names) if keep[i]] == names
        assert all(each.item() is True for each in keep) and len(scores[keep.cpu().cuda()]) == 9
        known = torch.arange(9, device="cuda") > 6
        assert points[known.cpu()].shape == (2, 2) and [bool(each) for each in known].count(True) == 2
        done = torch.zeros(9, dtype=torch.bool, device="cuda")  # there to be filled in
        assert not done.cpu().any() and not done[3]
        assert not bool(scores.sum() > 0)  # a number by itself
        done |= keep
        while not done[3]:  # it was waited for, for ever
            pass
    """
    end_well(tmp_path, source)


def test_what_was_brought_to_the_host_and_back(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """An offloaded mask came back as zeros that the program had copied: backward chose nothing, and raised."""
    source = """
        import torch
        from torch.autograd.graph import save_on_cpu
        x = torch.randn(64, 8, device="cuda", requires_grad=True)
        for is_pinned in (False, True):
            with save_on_cpu(pin_memory=is_pinned):
                h = x * 2
                chosen = h[h.sum(-1) > 0].sum() + h.masked_select(h > 0).sum()
            chosen.backward()
            mask = torch.tensor([True, False] * 32).cuda()
            mask &= x.detach().sum(-1) > 0
            with save_on_cpu(pin_memory=is_pinned):
                chosen = (x * 2)[mask].sum()  # all 64, by what was there before 32
            chosen.backward()
        unknown, rows = torch.randn(6, device="cuda") > 0, torch.randn(6, device="cuda")
        on_host, pinned = unknown.cpu(), torch.zeros(6, dtype=torch.bool, pin_memory=True)
        pinned.copy_(unknown)
        assert [len(rows[each.cuda()]) for each in (on_host, on_host[:6], pinned, pinned.data)] == [6] * 4
        placed = torch.zeros(6, dtype=torch.bool, device="cuda")
        placed.copy_(pinned)
        assert len(rows[placed]) == 6
        pinned.copy_(torch.zeros(6, dtype=torch.bool).cuda())
        assert len(rows[pinned.cuda()]) == len(rows[torch.zeros(6, dtype=torch.bool).cuda()]) == 0
        on_host[2:4] = False
        assert len(rows[on_host.cuda()]) == 4 and len(rows[torch.tensor([True, False] * 3).cuda().cpu().cuda()]) == 3
        on_host.zero_()
        assert len(rows[on_host.cuda()]) == 0
        known = torch.tensor([True, False] * 3).cuda()
        known |= torch.tensor([False, True] + 4 * [False]).cuda()
        assert len(rows[known.cpu().cuda()]) == 4
        known &= unknown
        on_host = known.cpu()
        on_host[:] = torch.tensor([True, False] * 3)
        assert len(rows[on_host.cuda()]) == 3
        lost = torch.tensor([True, False] * 3).cuda()
        lost &= unknown
        for written in ([True, False, False] * 2, [False] * 6):  # which counts no change
            on_host = lost.cpu()
            assert len(rows[on_host.cuda()]) == 6
            on_host.numpy()[:] = written
            assert len(rows[on_host.cuda()]) == sum(written)
        assert 1 / (rows.sum().cpu().cuda().item()) > 0 and torch.zeros(()).cuda().cpu().cuda().item() == 0
        brought = torch.sparse_coo_tensor([[1], [2]], [3.0], (4, 4)).cuda().cpu().cuda()
        assert brought.shape == torch.eye(4).to_sparse_csr().cuda().cpu().cuda().shape == (4, 4)
    """
    end_well(tmp_path, source)


def test_gradients_are_added_up_in_place(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """As on a card: those that are zero except for a part held one more storage each, from torch 2.10 on.

    So did those that would be known, such as a known gradient times a known mask.
    """
    source = """
        import torch
        from torch.utils.checkpoint import checkpoint
        x = torch.randn(4096, device="cuda", requires_grad=True)
        even = (torch.arange(4096).cuda() % 2).float()
        odd = 1 - even
        for parts in (
            *(lambda h: h[1:] + h[:-1], lambda h: h[1:] + h[:-1] + 2 * h[:-1]),
            *(lambda h: h * even + h * odd, lambda h: (h * even).sum() + (h * odd).sum()),
        ):
            peaks = []
            h = x.sin()
            h.register_hook(lambda _: peaks.append(torch.cuda.max_memory_allocated()))
            y = parts(h)
            given = torch.ones_like(y)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y.backward(given)
            assert peaks[0] - before == 2 * x.nbytes, (peaks, before)
        def masked(x):  # what is made while it is computed again is known as it was the first time
            mask = torch.zeros(4096, dtype=torch.bool, device="cuda")
            weight = torch.zeros(4096, device="cuda")
            mask[:7], weight[:9] = True, 1.0
            return x[mask].sum() + x[weight > 0].sum()
        for reentrant in (False, True):
            checkpoint(masked, x, use_reentrant=reentrant).backward()
        x.grad.zero_()
        x.exp().sum().backward()
        assert len(x[x.grad == 0]) == 4096
    """
    end_well(tmp_path, source)


def test_zeros_among_fractions_that_the_program_copied(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """The first of a solver's points in time was wrong; of a range made on the device nothing was known."""
    source = """
        import torch
        for times in (torch.tensor([0.0, 1.0, 2.0]).cuda(), torch.tensor([0.0, 1.0, 2.0], device="cuda"),
                      torch.linspace(0, 2, 3, device="cuda"), torch.arange(3.0).to("cuda", torch.bfloat16)):
            assert times[0] == times[0] and (times[1:] > times[:-1]).all() and not (times[1:] < times[:-1]).all()
            assert torch.randn(3, device="cuda")[times > 0].shape == (2,) and times[0].item() == 0
        filled = torch.zeros(3).cuda()  # by a kernel that nobody tells of
        assert torch.randn(3, device="cuda")[filled > 0].shape == (3,)
        bias = torch.tensor([0.0, 0.0, 1.0]).cuda()
        bias.lerp_(torch.randn(3, device="cuda"), 0.5)
        assert torch.randn(3, device="cuda")[bias == 0].shape == (3,)
        for kind in (torch.float8_e4m3fn, torch.complex64, torch.float16, torch.float64):
            assert torch.ones(3).to("cuda", kind).dtype == torch.ones(3).to(kind).cuda().dtype == kind
    """
    end_well(tmp_path, source)


def test_masks_that_are_fractions(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """RT-DETR and similar models take them from 1, repeat and multiply them, and look where the result is not 0."""
    source = """
        import torch
        counts = [2, 1]
        padding = torch.zeros(2, 2, dtype=torch.bool, device="cuda")
        for row, n in enumerate(counts):
            padding[row, :n] = 1
        negative = torch.zeros(2, 4, 1, device="cuda")
        negative[:, 2:] = 1
        negative = negative.tile([1, 5, 1])
        positive = (1 - negative).squeeze(-1) * padding.tile([1, 10])
        places = torch.nonzero(positive)[:, 1]
        assert [len(part) for part in torch.split(places, [5 * n for n in counts])] == [10, 5]

        kept = (torch.tensor([[1, 2, 0], [3, 0, 0]]).cuda() != 0).float()
        other = torch.ones(2, 3, device="cuda") - kept
        assert (other.sum().item(), (kept * kept).sum().item()) == (3, 3)
        assert len(torch.randn(2, 3, device="cuda")[(kept * (1 - other)) > 0]) == 3
        assert torch.cat([kept, other]).nonzero().shape == (6, 2)
        assert len(torch.randn(2, 3, device="cuda")[torch.maximum(kept, other) == 1]) == 6

        tokens = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).cuda()
        is_global = torch.zeros_like(tokens)
        is_global[:, 0] = 1
        seen = (tokens * (is_global + 1))[:, None, None, :].float()  # Longformer: 2 sees all
        far = (1.0 - seen) * torch.finfo(torch.float32).min
        far = far[:, 0, 0, :]
        assert (far > 0).flatten().any().item()
        assert (far > 0).nonzero().tolist() == [[0, 0], [1, 0]] and (far < 0).sum().item() == 3

        for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16):  # not all operators take them
            assert kept.to(kind).float().sum().item() == 3

        least = torch.finfo(torch.float32).min
        zero = torch.zeros((), device="cuda")
        seen = (tokens > 0)[:, None, None, :].expand(2, 1, 4, 4)
        far = torch.where(seen, zero, least)[:, 0, 0, :]
        assert (far < 0).nonzero().tolist() == [[0, 3], [1, 2], [1, 3]]
        far[is_global == 1] = -least
        assert (far > 0).nonzero().tolist() == [[0, 0], [1, 0]]
        filled = torch.zeros(2, 1, 4, 4, device="cuda")  # by whom nobody knows
        assert (torch.where(seen, filled, least) < 0).nonzero().shape == (32, 4)

        weights = torch.randn(2, 3, device="cuda")
        assert (weights * kept).nonzero().shape == (6, 2)  # nobody knows
        scaled = kept * 0.5 * kept
        assert scaled.nonzero().shape == (3, 2)  # no masks any more, but few
        kept.lerp_(weights, 0.5)
        assert (1 - kept).nonzero().shape == (6, 2)
    """
    end_well(tmp_path, source)


def test_reads_of_what_is_right_are_told_from_others(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Copied there, made there, and followed from both; not a product's result, nor what is taken for granted."""
    source = """
        import torch
        offsets = torch.tensor([0, 100, 137], device="cuda")
        assert offsets.diff().tolist() == [100, 37] and offsets.max().item() == 137
        assert torch.arange(5, device="cuda").cpu().sum() == 10
        assert torch.rand(9).cuda().cpu().any()
        product = torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda")
        product.cpu(), product.sum().item(), product.argmax(1).tolist()
        places = product.argmax(1)
        places.unique().tolist(), (places > 0).nonzero().tolist()
        assert torch.isfinite(product).all()
        torch.empty(9).copy_(product.flatten())
    """
    arguments = ["--json", "figures.json", sys.executable, program(tmp_path, source)]
    code, _, err = finish(start(arguments, tmp_path))
    assert code == 0, err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["known_copies"], figures["dtoh_copies"]) == (4, 11), err


def test_shares_of_lengths(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """As in pooling of graphs and speech: half of each graph's nodes, a length for each sample.  All was 0."""
    source = """
        import torch
        n = torch.tensor([5, 6, 9], device="cuda")
        assert (0.5 * n.float()).ceil().long().tolist() == [3, 3, 5]
        shares = torch.tensor([0.25, 1.0, 0.7]).cuda()
        assert (shares * 20).round().int().tolist() == [5, 20, 14]
        degree = torch.zeros(4, device="cuda")
        degree.scatter_add_(0, torch.tensor([0, 3, 3, 3]).cuda(), torch.ones(4, device="cuda"))
        assert int(degree.max()) == 3

        # many fractions are weights and pictures, of which nobody asks
        picture = torch.full((5000,), 0.5).cuda()
        assert (picture * 2).mean().item() == 1e-30
    """
    end_well(tmp_path, source)


def test_what_is_written_into_memory_that_the_program_gives(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Offsets are a zero followed by sums.  They are known once all of them are, not before."""
    source = """
        import torch
        n = torch.tensor([5, 6, 7], device="cuda")
        offsets = n.new_empty(4)
        offsets[:1] = 0
        assert (offsets > 4).nonzero().shape == (4, 1)  # nobody knows
        torch.cumsum(n, 0, out=offsets[1:])
        assert offsets.tolist() == [0, 5, 11, 18] and (offsets > 4).nonzero().shape == (3, 1)

        gap = n.new_empty(4)
        gap[0] = 9
        gap[2:] = 9
        assert (gap > 4).nonzero().shape == (4, 1)
        gap[1] = 9
        gap += (torch.ones(4, 4, device="cuda") @ torch.ones(4, device="cuda")).long()
        gap[2:] = 0
        assert (gap > 4).nonzero().shape == (4, 1)  # what was known of the first two is no more
    """
    end_well(tmp_path, source)
