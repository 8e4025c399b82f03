"""Gradients of plain calls of scaled_attention, which C computes too, and what it leaves to Python."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyalloc._core import attention_plain
from pyalloc.ops import _plain, scaled_attention

from .attention_cases import SHOWS_TENSORS_TO_C, problem

pytestmark = pytest.mark.skipif(not SHOWS_TENSORS_TO_C, reason="this torch has no table for C")


@pytest.fixture
def by_c(monkeypatch):
    """For each backward, whether C computed it."""
    served, backward = [], _plain._backward

    def spy(*args):
        found = backward(*args)
        served.append(found is not None)
        return found

    monkeypatch.setattr(_plain, "_backward", spy)
    return served


def leaves_of(tensors):
    return [x.clone().requires_grad_() for x in tensors]


def gradients(tensors, grad, attend=scaled_attention, **options):
    leaves = leaves_of(tensors)
    out = attend(*leaves, **options)
    return torch.autograd.grad(out, leaves, grad)


by_python = partial(scaled_attention, path="kernel")

BIASES = [None, (2, 4, 7, 30), (1, 4, 1, 30), (2, 1, 7, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_as_those_by_python_bit_for_bit(bias, causal, heads, by_c):
    tensors, grad = problem(2, 4, heads, 7, 30, 16, 24, bias), torch.randn(2, 4, 7, 24)
    for mask in (None, torch.randn(2, 1, 7, 30) > -1, torch.randn(2, 4, 1, 30) > -1):
        options = {"mask": mask, "causal": causal, "scale": 0.3}
        mine, others = (
            gradients(tensors, grad, f, **options) for f in (scaled_attention, by_python)
        )
        assert all(map(torch.equal, mine, others))
    assert by_c == [True] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_of_a_bias_with_as_many_numbers_as_scores(n, by_c):
    """A size of 1 may be shared, or all there is."""
    tensors, grad = problem(1, 1, 1, n, 1, 8, 8, (1, 1, n, 1)), torch.randn(1, 1, n, 8)
    others = gradients(tensors, grad, by_python)
    assert all(map(torch.equal, gradients(tensors, grad), others))
    assert by_c == [True]


def test_of_some_inputs_only(by_c):
    q, k, v, bias = problem(2, 4, 4, 3, 5, 8, 8, (1, 4, 3, 5))
    grad = torch.randn(2, 4, 3, 8)
    right = gradients((q, k, v, bias), grad)
    for i, name in enumerate(("q", "k", "v", "bias")):
        given = {"q": q, "k": k, "v": v, "bias": bias}
        given[name] = given[name].clone().requires_grad_()
        assert torch.equal(
            torch.autograd.grad(scaled_attention(**given), given[name], grad)[0], right[i]
        )
    assert by_c == [True] * 5


class Marked(torch.Tensor):
    pass


def test_gradients_of_another_layout_are_for_python(by_c):
    tensors, grad = problem(2, 4, 4, 3, 5, 8, 8), torch.randn(2, 4, 3, 8)
    right = gradients(tensors, grad)
    gaps = torch.stack([grad, grad], 4)[..., 0]
    for unusual in (gaps, torch._neg_view(-grad), grad.as_subclass(Marked)):
        assert all(map(torch.equal, gradients(tensors, unusual), right))
    ones = gradients(tensors, torch.ones(()).expand(grad.shape))
    assert by_c == [True] + [False] * 4
    assert all(map(torch.equal, ones, gradients(tensors, torch.ones_like(grad))))
    turned = grad.transpose(1, 2).contiguous().transpose(1, 2)  # rows may lie anywhere
    assert all(map(torch.equal, gradients(tensors, turned), right)) and by_c[-1]


def test_hooks_may_give_saved_tensors_of_another_layout(by_c):
    tensors, grad = problem(2, 4, 4, 3, 5, 8, 8, (1, 4, 3, 5)), torch.randn(2, 4, 3, 8)
    right = gradients(tensors, grad)

    def turned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def gaps(x):
        return torch.stack([x, x], x.dim())[..., 0]

    for unpack, expected in ((torch.clone, True), (turned, False), (gaps, False)):
        leaves = leaves_of(tensors)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = scaled_attention(*leaves)
        assert all(map(torch.equal, torch.autograd.grad(out, leaves, grad), right))
        assert by_c[-1] is expected, unpack  # turned: not the statistics of the rows


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_what_sees_only_the_backward(by_c):
    tensors, grad = problem(2, 4, 4, 3, 5, 8, 8), torch.randn(2, 4, 3, 8)
    right = gradients(tensors, grad)
    leaves = leaves_of(tensors)
    out = scaled_attention(*leaves)
    with Seen() as mode:
        found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    assert "pyalloc.scaled_attention_backward.default" in mode.names
    assert all(map(torch.equal, found, right))
    batch = torch.autograd.grad(
        out, leaves, torch.stack([grad, 2 * grad]), retain_graph=True, is_grads_batched=True
    )
    again = torch.autograd.grad(out, leaves, 2 * grad, retain_graph=True)
    for many, one, two in zip(batch, right, again, strict=True):
        torch.testing.assert_close(many, torch.stack([one, two]))
    found = torch.autograd.grad(out, leaves, grad, create_graph=True)
    assert all(x.requires_grad for x in found)
    assert by_c == [True, False, False, True, False]
    torch.autograd.grad(out, leaves, grad)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, grad)


def test_a_kernel_that_fails(monkeypatch):
    """It leaves the call to Python, which says what is wrong."""
    fails = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 1)
    address = ctypes.cast(fails, ctypes.c_void_p).value
    q, k, v = problem(1, 2, 2, 3, 5, 8, 8)
    learned = q.clone().requires_grad_()
    options = None, None, False, None, 0.0, "auto", False
    at = [getattr(x, "args", None) for x in _plain._PARTS].index(("pya_ops_attention_forward",))
    for place, is_forward in ((at, True), (at + 1, False)):
        parts = list(_plain._PARTS)
        parts[place] = lambda: address
        nothing_is_little = *_plain._LIMITS[:2], 0, *_plain._LIMITS[3:]
        serve, backward = attention_plain(tuple(parts), nothing_is_little)
        out = serve(learned, k, v, *options)
        assert (out is None) == is_forward
        assert (serve(q, k, v, *options) is None) == is_forward
        if not is_forward:
            monkeypatch.setattr(_plain, "_backward", backward)
            right = gradients((q, k, v), torch.ones(1, 2, 3, 8), by_python)
            found = torch.autograd.grad(out, learned, torch.ones(1, 2, 3, 8))[0]
            assert torch.equal(found, right[0])


def test_wrong_arguments(by_c):
    q, k, v = problem(1, 2, 2, 3, 5, 8, 8)
    out = scaled_attention(q.requires_grad_(), k, v)
    saved, grad = out.grad_fn.saved_tensors, torch.ones(1, 2, 3, 8)
    backward = _plain._backward
    with torch.no_grad():
        assert backward(grad, saved, False, 0.3, False) is not None
        for wrong in (
            (),
            (grad, saved, False, 0.3),
            (grad, list(saved), False, 0.3, False),
            (grad, saved[1:], False, 0.3, False),
            (None, saved, False, 0.3, False),
            (grad[:, 1:], saved, False, 0.3, False),
            (grad.double(), saved, False, 0.3, False),
            (grad, (saved[1], *saved[1:]), False, 0.3, False),
            (grad, (saved[0], saved[0], *saved[2:]), False, 0.3, False),
            (grad, (*saved[:2], None, *saved[3:]), False, 0.3, False),
            (grad, saved, False, 0.3, True),  # the gradient of no bias
            (grad, saved, False, "0.3", False),
        ):
            assert backward(*wrong) is None
    assert backward(grad, saved, False, 0.3, False) is None  # is to be differentiated
