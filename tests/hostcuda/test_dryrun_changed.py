"""pyalloc dryrun: numbers and masks that a program changes in place on the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyalloc.outside import hostcuda

from .dryrun_support import end_well, flat


@pytest.mark.torch
def test_older_torch_follows_no_changes_and_the_summary_says_so(
    dry_python: Callable[..., Any], tmp_path: Path
) -> None:
    """Before 2.9 torch gave no kernels out, before 2.6 it had no torch.accelerator: importing it failed."""
    source = f"""
        import torch
        vars(torch.library).pop("get_kernel", None)
        newer = {{"accelerator": vars(torch).pop("accelerator")}} if hasattr(torch, "accelerator") else {{}}
        from pyalloc._bootstrap import contents, report
        report.watch({str(tmp_path)!r})
        vars(torch).update(newer)  # which torch's own optimizers ask
        torch.set_default_device("cuda")
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        x = torch.arange(8)
        assert contents.told(torch, x).tolist() == list(range(8))
        x.fill_(3)
        assert contents.told(torch, x) is None
        assert x.roll(1).shape == (8,)
        with torch.inference_mode():
            assert torch.ones(3).detach_().shape == (3,)
    """
    dry_python(source)
    (report,) = tmp_path.glob("torch.*.json")
    assert json.loads(report.read_text())["unfollowed"] is True


def test_what_a_program_changes_in_place(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Before, nothing was known of it any more: masks chose everything, counters were 0."""
    source = """
        import torch
        torch.set_default_device("cuda")
        mask = torch.zeros(2, 5000, dtype=torch.bool)
        mask[:, :140] = True
        assert torch.randn(2, 5000)[mask].shape == (280,) and torch.randn(2, 60)[mask[:, 120:180]].shape == (40,)
        assert torch.randn(2, 60)[mask[:, 4000:4060]].shape == (0,)
        mask.fill_diagonal_(False)
        mask |= torch.arange(5000) > 4998
        assert int(mask.sum()) == 280
        ids = torch.tensor([4, 2, 0])
        ids[ids == 2] = -100
        ids += 1
        ids.masked_fill_(ids == 1, 7)[0] -= 2
        assert ids.tolist() == [3, -99, 7]
        table = torch.zeros(3, 5, dtype=torch.int64).scatter_(1, torch.tensor([[1], [0], [4]]), 1)
        table[1], table[[0, 2], 3] = torch.tensor([1, 2, 3, 4, 5]), -1
        assert table.tolist() == [[0, 1, 0, -1, 0], [1, 2, 3, 4, 5], [0, 0, 0, -1, 1]]
        ends = torch.zeros(4, dtype=torch.int32)
        ends[1:] = torch.tensor([3, 4, 5]).cumsum(0)
        assert ends.diff().tolist() == [3, 4, 5]
        count = torch.zeros(())
        for _ in range(3):
            count += 1
        assert count.item() == 3 and torch.ones(1).fill_(0.0).item() == 0
        left, n = torch.tensor([3, 7]), 0
        while left.max().item() > 0:
            left, n = left.sub_(1), n + 1
        assert n == 7 and left.tolist() == [-4, 0]
        kept = torch.empty(6, dtype=torch.int64).copy_(torch.arange(6, device="cpu"))
        kept.mul_((kept != 3).long())
        assert kept.tolist() == [0, 1, 2, 0, 4, 5]
        assert (torch.full((4, 4), 1.0).triu_(1) == 0).sum() == 10
    """
    err = end_well(tmp_path, source)
    assert "counted as all true" not in flat(err), err


def test_steps_that_an_optimizer_counts_on_the_device(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Where the device is their default, up to torch 2.11, they lie there: Adam divided by 0."""
    source = """
        import torch
        torch.set_default_device("cuda")
        steps = [torch.tensor(0.0) for _ in range(3)]
        for _ in range(2):
            torch._foreach_add_(steps, 1)
        assert [step.item() for step in steps] == [2, 2, 2]
        large = [torch.ones(64, 64), torch.tensor(1)]
        torch._foreach_add_(large, 2)
        assert [x._version for x in large] == [1, 1]
        net = torch.nn.Linear(4, 4)
        for kind in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam):
            optimizer = kind(net.parameters(), foreach=True)
            for _ in range(2):
                net(torch.randn(2, 4)).sum().backward()
                optimizer.step()
    """
    end_well(tmp_path, source)


def test_a_part_without_elements_changes_nothing(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """The padding of a batch's longest sequence.  Before, nothing was known of the whole mask any more."""
    source = """
        import torch
        torch.set_default_device("cuda")
        lengths, x = [7, 3, 5], torch.randn(3, 7)
        mask, padding = torch.ones(3, 7, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool)
        ids = torch.full((3, 7), -100)
        for row, n in enumerate(lengths):
            mask[row, n:] = False
            padding[row, : 7 - n] = True
            ids[row, :n] = torch.arange(n)
            ids[row, n:] += 1
        assert x[mask].shape == (15,) and x[padding].shape == (6,)
        assert ids.max() == 6 and ids.tolist()[1] == [0, 1, 2, -99, -99, -99, -99]
        mask[:0].fill_(True)
        padding[:0], ids.data[:0], ids[mask[:0].nonzero()] = True, 3, 5
        assert x[mask].shape == (15,) and x[padding].shape == (6,) and ids.max() == 6
        ids = torch.cat([torch.empty(0, dtype=torch.int64), ids.flatten(), ids[0, :0]])
        assert ids.max() == 6 and x.flatten()[ids >= 0].shape == (15,)
        unknown = torch.randn(4) > 0
        unknown[:0] = True
        assert torch.randn(4)[unknown].shape == (4,)
        for changed in (False, True):  # once changed, by what can be followed, it ends loops
            ids = torch.tensor([5, 6])
            ids[:0] = 0
            if changed:
                ids += 1
            ids[:0] = 0
            ids *= unknown[:2]
            assert ids.tolist() == ([0, 0] if changed else [5, 6])
        done = torch.zeros(4, dtype=torch.bool)
        done[:0] = True
        while not done.all():  # kernels nobody tells of may change it
            pass
    """
    end_well(tmp_path, source)


def test_changes_in_place_that_nobody_can_follow(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """No old value is believed: loops end, masks choose everything, and operators refuse what they refused before."""
    source = """
        import pytest, torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        torch.set_default_device("cuda")
        unknown = torch.randn(4) > 0
        for flags in (torch.zeros(4, dtype=torch.bool), torch.tensor([True, False, True, False])):
            flags[1], n = True, 0
            while not flags.all():
                flags |= unknown
                n += 1
                assert n < 9
            assert torch.randn(4)[flags].shape == (4,)
        left = torch.ones(4, dtype=torch.int64)
        left += 1
        while left.max() > 0:
            left *= unknown
        flags.fill_(False)
        assert torch.randn(4)[flags].shape == (0,)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flags |= unknown
        flags.fill_(False)
        while not flags.all():
            graph.replay()
        left.zero_()
        assert torch.randn(4)[left == 0].shape == (4,)  # kernels nobody tells of may have counted
        x = torch.ones(3, requires_grad=True)
        squares = x.exp()
        squares += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            x += 1
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            left.add_(torch.zeros(2, 4, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="can't be cast"):
            left += 1.5
        left[torch.tensor([9])] = 1
        with FakeTensorMode():
            fake = torch.zeros(4, dtype=torch.int64, device="cuda")
            fake[1:] += 1
        def change(x):
            x = x.clone()
            x[0] = 5
            return (x.mul_(2) * x).add_(1).sum()
        def choose(x):  # which torch before 2.15 has no vmap() of
            x = x.clone()
            x[x > 1] = 0
            return change(x)
        x = x.detach()
        assert torch.func.grad(choose)(x).shape == (3,) and torch.vmap(change)(x.expand(2, 3)).shape == (2,)
        for backend in ("eager", "aot_eager"):
            assert torch.compile(choose, backend=backend)(x).shape == ()
        assert torch.jit.trace(lambda x: x.clone().copy_(x), x)(x).shape == (3,)
        with torch._C._InferenceMode(True):  # as C++ enters it
            made = torch.zeros(3, dtype=torch.bool)
            made[1:].fill_(True)
            assert torch.randn(3)[made].shape == (3,)
            made |= torch.randn(3) > 0
            logits = torch.ones(3)
            logits += 1
            logits /= 2
            assert logits.add_(made).shape == (3,)
    """
    end_well(tmp_path, source)


def test_loops_over_tokens_go_on_to_their_limit(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Nobody knew whether all had ended, so all had after one token.  Loops without a limit end all the same."""
    source = """
        import torch
        torch.set_default_device("cuda")
        head = torch.nn.Linear(8, 500).requires_grad_(False)
        def few(scores):
            values, places = scores.topk(5)
            return places.gather(1, values.softmax(-1).multinomial(1))[:, 0]
        def likely(scores):
            values, places = scores.sort(descending=True)
            values = values.masked_fill(values.softmax(-1).cumsum(-1) > 0.9, float("-inf"))
            scores = torch.full_like(scores, float("-inf")).scatter(1, places, values)
            return scores.softmax(-1).multinomial(1)[:, 0]
        def joined(done, hit):
            done |= hit
            return done
        def marked(done, hit):
            done[hit] = True
            return done
        for choose in (lambda scores: scores.argmax(-1), few, likely):
            for update in (joined, marked, torch.logical_or):
                ids, done, n = torch.ones(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), 0
                while n < 20 and not done.all():
                    chosen = choose(head(torch.randn(3, 8)))
                    ids, done, n = torch.cat([ids, chosen[:, None]], 1), update(done, chosen == 2), n + 1
                assert n == 20 and ids.shape == (3, 24)
        tokens = torch.full((3, 12), -1)
        for row, n in enumerate((4, 7, 5)):
            tokens[row, :n] = torch.arange(1, n + 1)
        is_told, ended = tokens != -1, torch.tensor([False] * 3)
        for place in range(4, 12):
            chosen = head(torch.randn(3, 8)).argmax(-1)
            tokens[:, place] = torch.where(is_told[:, place], tokens[:, place], chosen)
            ended |= ~is_told[:, place] & torch.isin(tokens[:, place], torch.tensor([1, 2]))
            assert not all(ended)
        assert tokens[0, 3:9].tolist() == [4, *[250] * 5] and tokens[2, 3:9].tolist() == [4, 5, *[252] * 4]
        n, limits = 0, torch.tensor([3, 5, 2])
        for go_on in (lambda done: (~done).any(), lambda done: done.logical_not().sum() > 0):
            n, done = 0, torch.zeros(3, dtype=torch.bool)
            while go_on(done):
                n += 1
                done |= limits <= n
            assert n == 5
        n, done = 0, torch.zeros(3, dtype=torch.bool)  # which a kernel that nobody tells of fills in
        while (~done).any():
            n += 1
        assert n == 1000
        left = torch.ones(3, dtype=torch.int64)
        while left.max() > 0:
            left *= head(torch.randn(3, 8)).argmax(-1) != 500
        done = torch.zeros(3, dtype=torch.bool)
        while not done.all():  # a kernel that nobody tells of may change it
            head(torch.randn(3, 8))
    """
    end_well(tmp_path, source)


def test_in_inference_mode_all_is_as_outside(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Before, nothing was followed in there: masks chose everything, loops over tokens ended after one."""
    source = """
        import torch
        torch.set_default_device("cuda")
        outside = torch.tensor([True, False, True, False])
        model = torch.nn.Linear(8, 500)
        with torch.inference_mode():
            outside.fill_(True)
            outside[3:] = False
            ids = torch.tensor([[5, 6, 0], [5, 0, 0]])
            assert torch.randn(2, 3)[ids != 0].shape == (3,) and (ids != 0).sum(1).tolist() == [2, 1]
            assert not model(torch.randn(2, 8)).requires_grad
            with torch.inference_mode(False):
                assert model(torch.randn(2, 8)).requires_grad
            assert not torch.is_grad_enabled()
        assert torch.randn(4)[outside].shape == (3,) and torch.is_grad_enabled()
        @torch.inference_mode()
        def generate(limit):
            ids, done = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
            while ids.shape[1] < limit and not done.all():
                chosen = model(torch.randn(2, 8)).argmax(-1)
                ids, done = torch.cat([ids, chosen[:, None]], 1), done | (chosen == 2)
            return ids
        assert generate(20).shape == (2, 20)
        with torch.inference_mode():
            assert torch.compile(model, backend="aot_eager")(torch.randn(2, 8)).add_(1).shape == (2, 500)
    """
    end_well(tmp_path, source)


def test_nothing_is_recorded_in_inference_mode(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Code that enabled gradients in there kept activations, numpy() raised, parameters refused changes in place."""
    source = """
        import pytest, torch, warnings
        torch.set_default_device("cuda")
        model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
        decorated = torch.enable_grad()(lambda: model(x))
        switched = torch.set_grad_enabled(True)(lambda: model(x))
        with torch.inference_mode():
            with torch.enable_grad():
                model(x).cpu().numpy()
                model.weight.mul_(2)
                with torch.inference_mode(False):
                    assert model(x).requires_grad and not torch.is_inference_mode_enabled()
                assert not model(x).requires_grad and torch.is_inference_mode_enabled()
            mapped = torch.vmap(lambda row: decorated() + row)
            assert not mapped(x).requires_grad
            with torch.set_grad_enabled(mode=True):
                assert not model(x).requires_grad
            torch.set_grad_enabled(True)
            assert not model(x).requires_grad and not decorated().requires_grad and not switched().requires_grad
            with torch.no_grad():
                pass
            assert not model(x).requires_grad
            assert torch.func.grad(lambda x: model(x).sum())(x).shape == x.shape
            (x + 1)[-1].detach_()
            (x.cpu() + 1)[-1].detach_()
        with torch.no_grad(), pytest.raises(RuntimeError, match="detach views"):
            (x + 1)[-1].detach_()
        assert not (model(x) + 1).detach_().requires_grad
        detach = lambda x: (model(x) + 1).detach_()
        assert not torch.compile(detach, backend="aot_eager")(x).requires_grad
        assert model(x).requires_grad and decorated().requires_grad
        with torch.no_grad():
            assert decorated().requires_grad and switched().requires_grad and not model(x).requires_grad
            with torch.enable_grad():
                assert model(x).requires_grad
        with torch._C._InferenceMode(True):  # as C++ enters it
            with torch.inference_mode(False):
                assert model(x).requires_grad and not (x + 1).is_inference()
            assert (x + 1).is_inference() and not model(x).requires_grad
        def inner(x):
            with torch.inference_mode():
                y = x + 1
            return y
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(inner, backend=backend)
            with torch.inference_mode():
                y = compiled(x)
            y.add_(1)
            compiled(x).add_(1)
        asking = torch.compile(lambda x: x * torch.is_inference_mode_enabled(), backend="eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Dynamo does not know")
            assert asking(x).shape == x.shape
        assert model(x).requires_grad
        def too_large(x):
            with torch.inference_mode():
                y = x.new_empty(1 << 50)
            return y
        with pytest.raises(torch.OutOfMemoryError):  # nobody leaves the mode
            torch.compile(too_large, backend="eager")(x)
        with torch.enable_grad():
            assert model(x).requires_grad
    """
    end_well(tmp_path, source)


def test_nothing_that_is_followed_is_kept(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Tensors live as long as on a card, whether or not Python collects its cycles."""
    source = """
        import gc, torch
        gc.disable()
        torch.set_default_device("cuda")
        blank, places = torch.zeros(1000, dtype=torch.bool), torch.arange(1000)
        def step():
            mask = torch.zeros(1000, dtype=torch.bool)
            mask[:5] = True
            mask |= places > 5
            mask = mask | blank
            mask &= torch.randn(1000) > 0
            x = torch.zeros(1000).scatter_(0, places, 1.0)
            x[mask] = 0
            x += 1
            torch.cat([torch.zeros(1, dtype=torch.int32), places[:4].int()]), x.sort(), x.isnan().any(), mask.all()
        before = []
        for _ in range(5):
            step()
            before.append(torch.cuda.memory_allocated())
        assert len({*before[1:]}) == 1, before
    """
    end_well(tmp_path, source)


def test_who_asks_for_no_numbers_is_left_alone(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Compilers were asked for sizes they do not know, the host's tensors went through Python, numbers failed."""
    source = """
        import sys, torch
        torch._dynamo.config.capture_scalar_outputs = True
        def filled(m):
            n = m.sum().item()
            torch._check(n >= 0)
            return torch.empty(n, device="cuda").fill_(1)
        compiled = torch.compile(filled, fullgraph=True, backend="aot_eager")
        assert compiled(torch.ones(4, dtype=torch.int64, device="cuda")).shape == (4,)
        class Cleared(torch.nn.Module):
            def forward(self, x):
                x = x.clone().zero_()
                x[0] = 1
                return x
        size = torch.export.Dim("n", min=2)
        torch.export.export(Cleared(), (torch.ones(4, device="cuda"),), dynamic_shapes=({0: size},))
        def change(x):
            y = x.clone().copy_(2)
            return (y * x).sum()
        x, called = torch.ones(3, device="cuda"), []
        assert torch.func.grad(change)(x).shape == (3,) and torch.vmap(change)(x.expand(2, 3)).shape == (2,)
        there = torch.zeros(4)
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)
        there[1] = 5
        there.copy_(2).masked_fill_(there > 1, 0.0).zero_()
        sys.setprofile(None)
        assert not called, called
    """
    end_well(tmp_path, source)


def test_what_the_host_cannot_change_is_not_followed(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Before, it raised, or the old value was believed, and a change that an operator refused was forgotten."""
    source = """
        import pytest, torch
        torch.set_default_device("cuda")
        flags = torch.ones(4, dtype=torch.bool).zero_()
        flags[0] = True
        assert torch.randn(4)[flags].shape == (1,)
        for kind in (torch.float4_e2m1fn_x2, torch.bits8):
            one, other = (torch.ones(4, dtype=torch.uint8).view(kind) for _ in range(2))
            one.copy_(other)
        torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.quint8).fill_(1)
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).zero_()
        z, copied = torch.full((2,), 1 + 2j), torch.zeros(2)
        copied.copy_(z.conj().imag)
        assert (copied < 0).nonzero().shape == (2, 1)
        buf, graph = torch.zeros(16), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            buf.mul_(2)
        buf.fill_(0.3)
        graph.replay()
        assert (buf > 0.5).nonzero().shape == (16, 1)
        weight, graph = torch.randn(16, requires_grad=True), torch.cuda.CUDAGraph()
        (weight * buf).sum().backward()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            (weight * buf).sum().backward()  # which adds in place to what there is
        weight.grad.fill_(0)
        graph.replay()
        assert weight.grad.nonzero().shape == (16, 1)
        n = torch.ones(4, dtype=torch.int64)
        n += 1
        for wrong in (torch.zeros(3, dtype=torch.int64), torch.randn(3).long()):
            with pytest.raises(RuntimeError, match="must match the size"):
                n.add_(wrong)
        assert n.tolist() == [2, 2, 2, 2]
    """
    end_well(tmp_path, source)


def test_what_is_known_is_not_looked_through(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Filled in one sample at a time: before, all of a mask was read for each."""
    source = """
        import sys, torch
        torch.set_default_device("cuda")
        mask, places, called = torch.zeros(64, 1000, dtype=torch.bool), torch.arange(5), []
        mask[0, :3] = True
        sys.setprofile(lambda _, event, what: called.append(what.__qualname__) if event == "c_call" else None)
        for row in mask:
            row[places] = True
        sys.setprofile(None)
        assert {"Tensor.as_strided", "Tensor.any", "Tensor.view"} & {*called} == {"Tensor.as_strided"}
        assert int(mask.sum()) == 64 * 5
    """
    end_well(tmp_path, source)


def test_copies_of_which_a_part_is_changed(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Before, they counted as unchanged, whether or not the value that changes them is known."""
    source = """
        import torch
        torch.set_default_device("cuda")
        unknown, numbers = torch.randn(4, 6) > 0, torch.randn(4, 6).long()
        even, rows = torch.arange(24).view(4, 6) % 2 == 0, torch.tensor([2, 0])
        changes = (
            lambda x, mask, rows, values: x.masked_fill(mask, 1),
            lambda x, mask, rows, values: x.masked_fill(mask, values[0, 0]),
            lambda x, mask, rows, values: x.masked_scatter(mask, values),
            lambda x, mask, rows, values: x.index_fill(0, rows, 1),
            lambda x, mask, rows, values: x.index_fill(0, rows, values[0, 0]),
            lambda x, mask, rows, values: x.index_copy(0, rows, values[:2]),
            lambda x, mask, rows, values: x.index_add(0, rows, values[:2]),
            lambda x, mask, rows, values: x.index_put((rows,), values[:2]),
            lambda x, mask, rows, values: x.index_put((mask,), values[0, 0]),
            lambda x, mask, rows, values: x.put(rows, values[0, :2]),
            lambda x, mask, rows, values: x.scatter(0, rows[:, None].expand(2, 6), values),
            lambda x, mask, rows, values: x.scatter(0, rows[:, None].expand(2, 6), 1),
            lambda x, mask, rows, values: x.scatter(0, rows[:, None].expand(2, 6), values, reduce="add"),
            lambda x, mask, rows, values: x.scatter_add(0, rows[:, None].expand(2, 6), values),
            lambda x, mask, rows, values: x.select_scatter(values[0], 0, 1),
            lambda x, mask, rows, values: x.slice_scatter(values[:, :2], 1, 1, 3),
            lambda x, mask, rows, values: x.diagonal_scatter(values[0, :4]),
            lambda x, mask, rows, values: torch.block_diag(x, values),
            lambda x, mask, rows, values: torch.cat([x, values.int()]),
            lambda x, mask, rows, values: torch.diag_embed(x[0] | values[0]),
        )
        def there(x):
            return torch.ones_like(x) * x != 0
        for base in (torch.tensor([[0, 3, 0, 4, 0, 1]] * 4), even.flip(0)):
            values = torch.arange(24).view(4, 6).to(base.dtype)
            for change in changes:
                on_host = change(*(each.cpu() for each in (base, even, rows, values)))
                assert torch.equal(change(base, even, rows, values).cpu(), on_host)
                assert there(change(base, even, rows, values)).nonzero().shape == on_host.nonzero().shape
                made = change(base, unknown, numbers[0, :2], numbers.to(base.dtype))
                assert there(made).nonzero().shape == (made.numel(), 2)
        changed = even.clone()
        changed[unknown] = True
        copies = changed.clone(), torch.stack([changed]), changed.to(torch.bool, copy=True), changed.repeat(2, 1)
        for copied in copies:
            assert copied.nonzero().shape[0] == copied.numel()
        scores = even.float().scatter_add(0, rows[:, None].expand(2, 6), torch.randn(4, 6))
        assert (scores > 0.5).nonzero().shape == (24, 2)
        assert (even.float().bfloat16() > 0.5).nonzero().shape == (12, 2)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            made = even.masked_fill(unknown, True)
        assert made.nonzero().shape == (24, 2)
    """
    end_well(tmp_path, source)


def test_a_row_of_zeros_among_others_that_are_known(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """A buffer of flags as in PPO: a step at which no episode ended made all of it unknown."""
    source = """
        import torch
        flags = torch.eye(4)
        flags[2] = 0
        done = torch.zeros(4, 4, device="cuda")
        for t in range(4):
            done[t] = flags[t].to("cuda")
        assert done.sum().item() == 3 and done.sum(1).tolist() == [1, 1, 0, 1]

        # there to be filled in, and zeros that nobody computed are no better known for having been on the host
        alone = torch.zeros(4).to("cuda")
        assert (alone > 0).nonzero().shape == (4, 1)
        unknown = (torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).cpu().to("cuda")
        assert torch.cat([unknown, torch.eye(4, device="cuda")]).sum().item() < 1
    """
    end_well(tmp_path, source)
