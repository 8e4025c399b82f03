"""Calls of scaled_attention that C serves at once, and what must see a call and therefore stops it."""

from __future__ import annotations

import itertools
import logging
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pyalloc._core import attention_plain
from pyalloc.ops import _library, _plain, _plans, scaled_attention

from .attention_cases import SHOWS_TENSORS_TO_C, eager, problem
from .reference import relative

pytestmark = pytest.mark.skipif(not SHOWS_TENSORS_TO_C, reason="this torch has no table for C")

SHAPES = [
    (2, 4, 4, 1, 50, 64, 40),
    (1, 4, 2, 9, 300, 20, 36),
    (1, 2, 2, 12, 150, 70, 65),
    (1, 6, 2, 3, 7, 1, 200),
    (2, 2, 2, 40, 30, 40, 8),
    (1, 8, 1, 5, 129, 256, 256),
    (1, 2, 2, 1, 1, 5, 17),
    (1, 3, 1, 5, 3, 5, 60),
]


def served(*qkv, bias=None, mask=None, causal=False, scale=None):
    """What C computes; None if it leaves the call to Python."""
    return _plain.serve(*qkv, bias, mask, causal, scale, 0.0, "auto", True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_results(shape, causal, attention_isa):
    q, k, v = problem(*shape)
    for scale in (None, 0.0, -0.7):
        out, info = served(q, k, v, causal=causal, scale=scale)
        wide = eager(q.double(), k.double(), v.double(), causal=causal, scale=scale)
        assert info == {"path": "kernel", "reason": "pyalloc's kernel"}
        assert out.is_contiguous() and relative(out, wide) < 2e-6
        other = scaled_attention(q, k, v, causal=causal, scale=scale, path="kernel")
        assert torch.equal(out, other)  # by the same kernels


@pytest.mark.parametrize("n_q", [2, 20])
def test_biases_and_masks(n_q):
    """As without C, bit by bit; of any layout that broadcasts, with one key too."""
    q, k, v = problem(2, 4, 2, n_q, 30, 16, 24)
    full = torch.randn(2, 4, n_q, 30)
    some = full, full[:, :1], full[0], full[0, 0, :1], full[0, 0, 0], full[0, 0, 0, 0]
    some += full.transpose(0, 1).contiguous().transpose(0, 1), full[:, :, :, :1].expand(full.shape)
    for bias in (None, *some):
        for mask in (None, *(x > 0 for x in some)):
            given = {"bias": bias, "mask": mask, "causal": bias is full}
            out, info = served(q, k, v, **given)
            assert info["path"] == "kernel"
            assert torch.equal(out, scaled_attention(q, k, v, path="kernel", **given))
    one = {"bias": full[..., :1], "mask": full[..., :1] > -1}
    out = served(q, k[:, :, :1], v[:, :, :1], **one)[0]
    wide = (x.double() for x in (q, k[:, :, :1], v[:, :, :1], one["bias"]))
    torch.testing.assert_close(out.double(), eager(*wide, mask=one["mask"]), atol=1e-6, rtol=1e-6)


def test_biases_and_masks_that_c_leaves_alone():
    q, k, v = problem(2, 4, 4, 5, 11, 16, 16)
    bias = torch.randn(2, 4, 5, 11)
    learned = bias.clone().requires_grad_()
    refused = bias[:, :3], bias[..., 1:], bias[None], bias.double(), bias > 0, bias.to("meta")
    for wrong in (*refused, bias.as_subclass(Marked), torch._neg_view(-bias), learned[0], 0.5):
        assert served(q, k, v, bias=wrong) is None
    assert served(q, k, v, bias=learned, mask=bias[0] > 0) is None
    for wrong in (bias[:, :3] > 0, (bias > 0)[None], bias, (bias > 0).byte(), True):
        assert served(q, k, v, mask=wrong) is None
    torch.testing.assert_close(
        scaled_attention(q, k, v, torch._neg_view(-bias)), scaled_attention(q, k, v, bias)
    )
    with torch.no_grad():
        assert served(q, k, v, bias=learned)[1]["path"] == "kernel"


@pytest.mark.parametrize("n_q", [8, 60])
def test_calls_that_autograd_records(n_q):
    """Derivatives, first and second ones, are those of the calls that C leaves alone, bit by bit."""
    tensors = problem(2, 4, 2, n_q, 70, 32, 24, (1, 4, n_q, 70))
    grad = torch.randn(2, 4, n_q, 24)

    def derivatives(function, n_leaves, **given):
        leaves = [torch.nn.Parameter(x.clone()) for x in tensors[:n_leaves]]
        given |= {"bias": leaves[3]} if n_leaves == 4 else {}
        out = function(*leaves[:3], **given)
        first = torch.autograd.grad(out, leaves, grad, create_graph=True)
        return [out, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    def by_c(*qkv, **given):
        out, info = served(*qkv, **given)
        assert info == {"path": "kernel", "reason": "pyalloc's kernel"}
        return out

    def by_python(*qkv, **given):
        return scaled_attention(*qkv, path="kernel", **given)

    mask = torch.randn(2, 1, n_q, 70) > -1
    for n_leaves, given in ((3, {}), (3, {"mask": mask, "causal": True}), (4, {"scale": 0.3})):
        for mine, other in zip(
            derivatives(by_c, n_leaves, **given),
            derivatives(by_python, n_leaves, **given),
            strict=True,
        ):
            assert torch.equal(mine, other)


def test_layouts():
    """Rows may lie anywhere, but have no gaps."""
    q, k, v = problem(2, 4, 4, 5, 11, 16, 16)
    right = served(q, k, v)[0]
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], 3)[..., :16],
        lambda x: torch.stack([x, x], 2)[:, :, 1],
    ):
        for which in itertools.product([False, True], repeat=3):
            given = [change(x) if w else x for x, w in zip((q, k, v), which, strict=True)]
            assert torch.equal(served(*given)[0], right)
    one = k[:, :1]
    shared = served(q, one.expand(k.shape), v[:, :1].expand(v.shape))[0]
    assert torch.equal(shared, served(q, one.repeat(1, 4, 1, 1), v[:, :1].repeat(1, 4, 1, 1))[0])
    windows = torch.randn(2, 4, 20).unfold(2, 16, 1)
    assert torch.equal(served(windows, k, v)[0], served(windows.contiguous(), k, v)[0])
    gaps = torch.stack([q, q], 4)[..., 0]
    negated = torch._neg_view(-q)
    for unusual in (gaps, negated):
        assert served(unusual, k, v)[1]["path"] == "sdpa"  # torch's kernel, which takes any
        torch.testing.assert_close(scaled_attention(unusual, k, v), right)


def test_many_queries_of_one_key_are_torchs_if_heads_are_wide():
    q, k, v = problem(1, 2, 2, 5, 2, 96, 96)
    assert served(q, k, v)[1]["path"] == "kernel"
    k, v = k[:, :, :1], v[:, :, :1]
    assert served(q, k, v)[1]["path"] == "sdpa"
    assert served(q[:, :, :4], k, v)[1]["path"] == "kernel"
    assert served(q[..., :95], k[..., :95], v)[1]["path"] == "kernel"


def test_what_does_not_fit():
    q, k, v = problem(2, 4, 4, 5, 11, 16, 16)
    wide = torch.randn(2, 4, 11, 257)
    for given in (
        (q[:1], k, v),
        (q[..., 1:], k, v),
        (q, k[:, :, 1:], v),
        (q, k, v[:, 1:]),
        (q, k[:1], v[:1]),
        (q[:, 1:], k[:, :2], v[:, :2]),
        (q, k, wide),
        (q, k[:, :, :0], v[:, :, :0]),
        (q.double(), k.double(), v.double()),
    ):
        assert served(*given) is None
        assert served(*(x.clone().requires_grad_() for x in given)) is None


class Marked(torch.Tensor):
    pass


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found = str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("n", [2, 40])
def test_dispatch_modes_see_the_call(n):
    qkv = problem(1, 2, 2, n, 5, 8, 8)
    with Seen() as mode:
        scaled_attention(*qkv)
    assert "scaled" in mode.found


@pytest.mark.parametrize("n", [2, 40])
@pytest.mark.parametrize("early", [False, True])
def test_tracers_see_the_call(n, early):
    qkv = problem(1, 2, 2, n, 5, 8, 8)
    graph = make_fx(lambda *x: scaled_attention(*x), pre_dispatch=early)(*qkv)
    other = [torch.randn_like(x) for x in qkv]
    torch.testing.assert_close(graph(*other), scaled_attention(*other))


@pytest.mark.filterwarnings(
    "ignore"
)  # of torch.jit, with which torch's tracer and forward mode work
@pytest.mark.parametrize("n", [2, 40])
def test_jit_sees_the_call(n):
    qkv = problem(1, 2, 2, n, 5, 8, 8)
    traced = torch.jit.trace(lambda *x: scaled_attention(*x), qkv, check_trace=False)
    other = [torch.randn_like(x) for x in qkv]
    torch.testing.assert_close(traced(*other), scaled_attention(*other))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n", [2, 40])
def test_tangents_and_casts_see_the_call(n):
    q, k, v = problem(1, 2, 2, n, 5, 8, 8)
    with forward_ad.dual_level():
        assert served(q, k, v)[1]["path"] == "sdpa"
        out = scaled_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(out).tangent is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_attention(q, k, v).dtype == torch.bfloat16
    q.requires_grad_()
    assert scaled_attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert served(q, k, v)[1]["path"] == "kernel"


def test_the_kernel_is_logged(caplog):
    caplog.set_level(logging.DEBUG, "pyalloc.ops")
    scaled_attention(*problem(1, 2, 2, 3, 5, 8, 8))
    assert [x.getMessage() for x in caplog.records] == [
        "scaled_attention: kernel (pyalloc's kernel)"
    ]


def test_threads():
    """Small calls take one without asking; a result does not depend on their number."""
    asked = []

    def threads(products):
        asked.append(products)
        return len(asked)

    modes = (lambda: False), torch.is_grad_enabled, (lambda _: None)
    parts = torch.Tensor, torch.nn.Parameter, torch.float32, vars(torch.compiler), *modes
    kernels = (
        partial(_library.address, f"pya_ops_attention_{way}") for way in ("forward", "backward")
    )
    kinds = None, None, {}, {}, {}, bool, {"_current_level": -1}, ()
    limits = 1, 1, 1, 1, 1, 256, 100_000
    parts = *parts, *kinds, _plans.empty_cpu, threads, *kernels, None
    serve, _ = attention_plain(parts, limits)
    options = None, None, False, None, 0.0, "auto", False
    large, small = problem(1, 2, 2, 6, 131, 64, 32), problem(1, 2, 2, 6, 130, 64, 32)
    found = [serve(*large, *options) for _ in range(3)]
    assert asked == [2 * 6 * 131 * 64] * 3
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert serve(*small, *options) is not None and len(asked) == 3
