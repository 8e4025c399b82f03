"""Dry runs: questions about masks, and random draws, before a program selects with them."""

from __future__ import annotations

from pathlib import Path

from pyalloc.outside import hostcuda

from .dryrun_support import end_well


def test_what_is_done_only_if_a_mask_chooses_anything_is_done(
    torch_found: hostcuda.Torch, tmp_path: Path
) -> None:
    """Otherwise spline flows leave out all that they learn, and end at backward."""
    source = """
        import torch
        net = torch.nn.Linear(8, 8).cuda()
        x = net(torch.randn(64, 8, device="cuda"))
        inside = (x > -3) & (x < 3)
        done, y = [], torch.zeros_like(x)
        if torch.any(inside):
            y[inside] = 2 * x[inside]
        y.sum().backward()
        if inside.any() and not done:
            done += [x[inside, None]]
        taken = x[inside] if inside.any().item() else None
        def chosen(mask):
            if not mask.any():
                return None
            return x.masked_select(mask)
        def others(mask):
            if not mask.any():
                return None
            else:
                return x[..., 0][mask]
        assert done[0].shape == (512, 1) and taken.shape == chosen(inside).shape == (512,)
        assert others(inside[:, 0]).shape == (64,)

        def check(mask):
            if mask.any():
                raise ValueError(f"not allowed: {x[mask]}")
        check(inside)  # what is checked passes
        assert not (x > 9).any() and not inside.any()
        if inside.any():
            raise AssertionError("nothing is taken by it")
        def insists(mask):
            if not mask.any():
                raise ValueError("there has to be some")
        insists(inside)
        assert inside.any(), "there has to be some"
        assert torch.any(inside) and (x > 9).any().item() and len(x) == 64
        assert not torch.any(inside)  # none is allowed, elsewhere
        while inside.any():  # and loops end
            x = x[inside]
        none = torch.zeros(64, dtype=torch.bool, device="cuda")
        if none.any():
            raise AssertionError(x[none].shape)  # which is known
    """
    end_well(tmp_path, source)


def test_what_is_drawn_by_shares_is_as_many(torch_found: hostcuda.Torch, tmp_path: Path) -> None:
    """Of masked words everything was chosen."""
    source = """
        import torch
        shares = torch.full((40, 25), 0.25, device="cuda")
        masked = torch.bernoulli(shares).bool()
        words = torch.randint(100, (40, 25), device="cuda")
        assert abs(len(words[masked]) - 250) < 3 and abs(torch.bernoulli(words.float(), 0.5).sum() - 500) < 3
        certain = torch.tensor([0.0, 1.0] * 8).cuda()
        assert torch.bernoulli(certain).tolist() == certain.tolist()
        drawn = torch.empty(1000, dtype=torch.bool, device="cuda").bernoulli_(0.15)
        assert abs(len(words.view(-1)[drawn]) - 150) < 3
        drawn[:500].bernoulli_(0.15)  # a part, of which nobody knows
        assert words.view(-1)[drawn].shape == (1000,)
        generator = torch.Generator("cuda")
        again = [torch.bernoulli(shares, generator=generator.manual_seed(7)) for _ in range(2)]
        assert torch.equal(*again)
        unknown = torch.bernoulli(torch.randn(64, device="cuda").sigmoid()).bool()
        assert words.view(-1)[:64][unknown].shape == (64,)
        weights = torch.ones(5, device="cuda", requires_grad=True)
        (torch.bernoulli(weights) * weights).sum().backward()
        many = torch.bernoulli(torch.full((3, 1 << 20), 0.5, device="cuda"))  # too many to be looked at
        assert many.shape == (3, 1 << 20)
    """
    end_well(tmp_path, source)
