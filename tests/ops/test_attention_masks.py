"""Masks of scaled_attention as programs have them: padding, windows, documents; stored in any way."""

from __future__ import annotations

import pytest
import torch

from .attention_cases import compare, kernel, problem, results

B, H = 2, 2


def padding(n_k, at_end=True):
    """Of another length for each batch entry; the last one has a single key."""
    first = torch.arange(n_k)
    first = first if at_end else first.flip(0)
    lengths = torch.tensor([n_k // 3, 1])
    return (first < lengths[:, None])[:, None, None]


def window(n_q, n_k):
    return (torch.arange(n_q)[:, None] - torch.arange(n_k)).abs() < 20


def documents(n_q, n_k):
    """Each query sees the keys of its own part, so that whole blocks are hidden."""
    return (torch.arange(n_q)[:, None] * 3 // n_q) == (torch.arange(n_k) * 3 // n_k)


MASKS = {
    "padding at the end": lambda n_q, n_k: padding(n_k),
    "padding at the start": lambda n_q, n_k: padding(n_k, at_end=False),
    "padding, copied for each query": lambda n_q, n_k: padding(n_k).repeat(1, 1, n_q, 1),
    "padding of a head": lambda n_q, n_k: padding(n_k).transpose(0, 1).repeat(1, H // 2, 1, 1),
    "no key": lambda n_q, n_k: torch.zeros(1, 1, 1, n_k) > 0,
    "no key for one entry": lambda n_q, n_k: torch.tensor([False, True])[:, None, None, None],
    "some queries": lambda n_q, n_k: torch.rand(1, 1, n_q, 1) > 0.5,
    "lower triangle": lambda n_q, n_k: torch.ones(n_q, n_k).tril() > 0,
    "window": window,
    "documents": documents,
    "few hidden": lambda n_q, n_k: torch.rand(B, 1, n_q, n_k) > 0.01,
    "half hidden": lambda n_q, n_k: torch.rand(B, H, n_q, n_k) > 0.5,
    "few seen": lambda n_q, n_k: torch.rand(1, 1, n_q, n_k) > 0.99,
    "turned": lambda n_q, n_k: (torch.rand(n_k, n_q) > 0.5).t(),
    "every second byte": lambda n_q, n_k: (torch.rand(n_q, 2 * n_k) > 0.5)[:, ::2],
}
CASES = [(name, sizes) for name in MASKS for sizes in ((70, 300), (5, 300))]
CASES += [
    (name, s) for name in ("half hidden", "documents") for s in ((150, 70), (64, 128), (1, 200))
]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_masks(name, sizes, attention_isa):
    mask = MASKS[name](*sizes)
    tensors = problem(B, H, 1, *sizes, 8, 8)
    compare(tensors, mask=mask)
    compare(tensors, mask=mask, causal=True)


@pytest.mark.parametrize("sizes", [(3, 400), (70, 400), (200, 400)], ids=str)
@pytest.mark.parametrize("at_end", [True, False])
def test_hidden_blocks_are_not_read(at_end, sizes, attention_isa):
    """Whatever they hold changes nothing."""
    n_q, n_k = sizes
    tensors, grad = problem(B, H, 1, *sizes, 8, 8), torch.randn(B, H, n_q, 8)
    mask = padding(n_k, at_end)
    for m in (mask, mask.repeat(1, 1, n_q, 1), mask.transpose(0, 1)):
        right = results(kernel, tensors, grad, mask=m)
        sides = [x.clone() for x in tensors[1:3]]
        for x in sides:
            x[:, :, slice(256, None) if at_end else slice(0, 256)] = torch.nan
        found = results(kernel, [tensors[0], *sides], grad, mask=m)
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("bias", [(B, H, 70, 300), (1, H, 1, 300)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_a_bias_beside_a_mask(name, bias, attention_isa):
    compare(problem(B, H, H, 70, 300, 8, 8, bias), mask=MASKS[name](70, 300))


@pytest.mark.parametrize("sizes", [(70, 300), (5, 300)], ids=str)
def test_biases_as_tables_of_positions_store_them(sizes, attention_isa):
    """Heads last, as T5's, and turned; the gradients' copies keep these strides."""
    of_heads = torch.randn(*sizes, H).permute(2, 0, 1)[None]
    turned = torch.randn(1, H, *sizes[::-1]).transpose(2, 3)
    for bias in (of_heads, turned):
        assert bias.clone().stride() == bias.stride()
        compare([*problem(B, H, H, *sizes, 8, 8), bias])
        compare([*problem(B, H, H, *sizes, 8, 8), bias], mask=turned > -1, causal=True)
