"""Second derivatives of scaled_attention, and checkpoints, with torch's kernel and with pyalloc's."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from pyalloc.ops import _plain, scaled_attention
from pyalloc.ops import attention as attention_module

from .attention_cases import SHOWS_TENSORS_TO_C, eager, problem, serve_without_table
from .reference import relative


@pytest.fixture(params=["sdpa", "kernel"])
def path_of_few(request, monkeypatch):
    """Which kernel serves calls with little to do: torch's if C is shown no tensors."""
    if request.param == "sdpa":
        monkeypatch.setattr(_plain, "serve", serve_without_table())
    elif not SHOWS_TENSORS_TO_C:
        pytest.skip("this torch has no table for C")
    return request.param


@pytest.mark.parametrize("bias", [None, (1, 2, 4, 5), (5,)])
def test_gradients_to_second_order(bias):
    tensors = [x.double().requires_grad_() for x in problem(2, 2, 1, 4, 5, 3, 2, bias)]
    for attend in (scaled_attention, partial(scaled_attention, path="kernel")):
        assert gradcheck(attend, tensors)
        assert gradgradcheck(attend, tensors)


def second_order(function, inputs, grad, weights):
    """First derivatives, and the derivatives of their weighted sum."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    g = grad.to(leaves[0].dtype).requires_grad_()
    first = torch.autograd.grad(function(*leaves), leaves, g, create_graph=True)
    total = sum((a * w.to(a.dtype)).sum() for a, w in zip(first, weights, strict=True))
    return [*(x.detach() for x in first), *torch.autograd.grad(total, [*leaves, g])]


@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("shape", [(1, 4, 4, 10, 30, 8, 8), (1, 4, 2, 5, 9, 8, 8)], ids=str)
def test_second_derivatives_of_few_queries(shape, options, dtype, bar, path_of_few):
    """Torch's kernel has none: create_graph makes pyalloc's compute the gradients again."""
    inputs = [x.to(dtype) for x in problem(*shape)]
    grad, weights = torch.randn(*shape[:2], shape[3], 8), [torch.randn(x.shape) for x in inputs]
    if dtype != torch.float32 or shape[1] == shape[2]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        path = path_of_few if dtype == torch.float32 else "sdpa"
        assert scaled_attention(*leaves, **options, return_info=True)[1]["path"] == path

    def right(*args):
        return eager(*args, **options)

    ours = second_order(lambda *a: scaled_attention(*a, **options), inputs, grad.to(dtype), weights)
    exact = second_order(right, [x.double() for x in inputs], grad.to(dtype), weights)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype and relative(a, b) < bar


@pytest.mark.usefixtures("path_of_few")
def test_graph_of_a_backward_can_be_made_again_and_left():
    inputs = [x.requires_grad_() for x in problem(1, 2, 2, 4, 5, 4, 4)]
    out = scaled_attention(*inputs)
    heard = []
    out.register_hook(lambda g: heard.append(g.shape))  # only the caller's own passes call it
    plain = torch.autograd.grad(out.sin().sum(), inputs, retain_graph=True)
    assert all(not g.requires_grad for g in plain)
    for _ in range(2):
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        torch.testing.assert_close(first, plain, rtol=1e-5, atol=1e-6)
        torch.autograd.grad(first[0].square().sum(), inputs, retain_graph=True)
    assert heard == [out.shape] * 3 + [out.shape] * 2  # second derivatives go through out too
    again = torch.autograd.grad(out.sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    heard.clear()
    torch.autograd.grad(scaled_attention(*inputs).sum(), inputs)
    assert not heard  # it belongs to the other result


@pytest.mark.usefixtures("path_of_few")
def test_hessian_of_a_small_input():
    q, k, v = problem(1, 1, 1, 3, 4, 2, 2)

    def energy(attend):
        return lambda x: attend(x, k, v).sin().sum()

    right = torch.autograd.functional.hessian(energy(eager), q)
    for vectorize in (False, True):
        ours = torch.autograd.functional.hessian(energy(scaled_attention), q, vectorize=vectorize)
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_of_few_queries(dtype, early_stop, path_of_few):
    """A checkpoint hands out its tensors once: torch's kernel needs them, and so do second derivatives."""
    inputs = [x.to(dtype).requires_grad_() for x in problem(1, 2, 2, 4, 5, 4, 4)]
    path = path_of_few if dtype == torch.float32 else "sdpa"
    assert scaled_attention(*inputs, return_info=True)[1]["path"] == path

    def attend(*qkv):
        return scaled_attention(*(2 * x for x in qkv), scale=0.125).sin()

    def checkpointed(*qkv):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            return checkpoint(attend, *qkv, use_reentrant=False)

    out = checkpointed(*inputs)
    bar = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 1e-2}
    for kwargs in ({"retain_graph": True}, {"create_graph": True}):
        ours = torch.autograd.grad(out.sum(), inputs, **kwargs)
        torch.testing.assert_close(ours, torch.autograd.grad(attend(*inputs).sum(), inputs), **bar)
    grad, weights = torch.randn(1, 2, 4, 4), [torch.randn(x.shape) for x in inputs]
    leaves = [x.detach() for x in inputs]
    found = second_order(checkpointed, leaves, grad.to(dtype), weights)
    plain = second_order(attend, leaves, grad.to(dtype), weights)
    torch.testing.assert_close(found, plain, **bar)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_second_derivatives_where_torch_pads_heads(is_checkpointed, monkeypatch):
    """As on CUDA for head sizes that are not multiples of 8: a slice hides the kernel's node."""
    plain = torch.nn.functional.scaled_dot_product_attention
    called = []

    def padded(q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None):
        called.append(q.shape)
        size = q.shape[-1]
        q, k, v = (torch.nn.functional.pad(x, (0, -size % 8)) for x in (q, k, v))
        scale = size**-0.5 if scale is None else scale
        return plain(q, k, v, mask, dropout, causal, scale=scale)[..., :size]

    def attend(*qkv):
        if is_checkpointed:
            return checkpoint(scaled_attention, *qkv, use_reentrant=False)
        return scaled_attention(*qkv)

    monkeypatch.setattr(_plain, "serve", lambda *_: None)  # the CPU's alone
    monkeypatch.setattr(attention_module, "_choose", lambda *_: ("sdpa", "as on CUDA"))
    monkeypatch.setattr(attention_module, "_known", {})
    monkeypatch.setattr(attention_module, "_sdpa", padded)
    inputs = problem(1, 2, 2, 4, 5, 5, 5)
    grad, weights = torch.randn(1, 2, 4, 5), [torch.randn(x.shape) for x in inputs]
    ours = second_order(attend, inputs, grad, weights)
    assert called
    exact = second_order(eager, [x.double() for x in inputs], grad, weights)
    for a, b in zip(ours, exact, strict=True):
        assert relative(a, b) < 2e-6


@pytest.mark.usefixtures("path_of_few")
def test_checkpoint_lets_go_of_its_tensors():
    """What is kept for a possible second derivative must not outlive a first one."""
    q, k, v = problem(1, 2, 2, 4, 5, 4, 4)
    alive = []

    def attend(q, k, v):
        doubled = 2 * q
        alive.append(weakref.ref(doubled.untyped_storage()))
        return scaled_attention(doubled, k, v)

    out = checkpoint(attend, q.requires_grad_(), k, v, use_reentrant=False)
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert len(alive) == 2
    assert [x() for x in alive] == [None, None]
