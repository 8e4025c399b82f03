"""The arguments of scaled_attention: which path a call takes, scales, fewer dimensions, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from pyalloc._core import attention_plain
from pyalloc.errors import OpError
from pyalloc.ops import _plain, _plans, attention, scaled_attention

from .attention_cases import SHOWS_TENSORS_TO_C, compare, eager, problem, results
from .reference import relative


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_q", [1, 9, 10, 40])
def test_either_path_gives_the_same(n_q, causal):
    """The rule that chooses between them lies between these."""
    for n_k in (1, 2, 3, 40):
        compare(problem(2, 6, 6, n_q, n_k, 8, 8), scaled_attention, causal=causal, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_causal_with_a_scale_that_is_not_positive(scale, dtype):
    """Torch's kernels add -inf first and scale then: NaN, or future keys instead of past ones."""
    for n in (5, 40):
        q, k, v = (torch.randn(1, 2, n, 8).to(dtype) for _ in range(3))
        out, info = scaled_attention(q, k, v, causal=True, scale=scale, return_info=True)
        right = eager(q.double(), k.double(), v.double(), causal=True, scale=scale)
        assert info["path"] == "kernel" and relative(out, right) < torch.finfo(dtype).eps


def test_path_is_reported():
    def path(*args, **options):
        return scaled_attention(*args, return_info=True, **options)[1]["path"]

    q, k, v = problem(1, 2, 2, 20, 20, 16, 16)
    learned = q.clone().requires_grad_()
    few = "kernel" if SHOWS_TENSORS_TO_C else "sdpa"
    for tensors in ((q, k, v), (learned, k, v)):
        assert path(*tensors) == path(*(x[:, :, :1] for x in tensors)) == few
        scaled_attention(*tensors, return_info=True)[1].clear()  # it belongs to the caller
        assert path(*tensors) == few
    assert path(q, k, v, path="kernel") == path(q, k, v, dropout=0.1) == "kernel"
    assert path(q, k, v, torch.zeros(20)) == path(q, k, v, mask=torch.ones(20) > 0) == "kernel"
    assert path(q.double(), k.double(), v.double()) == "sdpa"
    assert path(q.double(), k.double(), v.double(), torch.zeros(20).double()) == "kernel"
    more = problem(1, 2, 2, 39, 39, 16, 16)
    asking = more[0].clone().requires_grad_(), *more[1:]
    assert path(*more) == path(*asking) == few
    with torch.no_grad():
        assert path(*asking) == few
    large = problem(1, 2, 2, 40, 40, 16, 16)
    many = "kernel" if _plain.HAS_VECTORS else "sdpa"
    assert path(*large) == path(large[0].requires_grad_(), *large[1:]) == many
    assert path(q, k[:, :, :0], v[:, :, :0]) == "eager"
    half = [x.bfloat16() for x in (q, k, v)]
    out, info = scaled_attention(*half, return_info=True)
    assert info["path"] == "sdpa" and out.dtype == torch.bfloat16
    learned = torch.zeros(20, 20, requires_grad=True)
    out, info = scaled_attention(*half, learned, return_info=True)
    assert info["path"] == "kernel" and out.dtype == torch.bfloat16
    right = eager(*(x.double() for x in half))
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)


class Marked(torch.Tensor):
    pass


def few(sdpa, limits=(5, 4, 1000, 100, 2, 8, 1), offer=None, quiet=(), transforms=False):
    """As the op has it, with another kernel in the place of torch's and none in the place of ours."""
    compiler = {"_is_compiling_flag": False}
    modes = (lambda: transforms), torch.is_grad_enabled, (lambda _: "hooks")
    parts = torch.Tensor, torch.nn.Parameter, torch.float32, compiler, *modes, sdpa, offer, {}
    ours = {}, {}, None, {"_current_level": -1}, quiet, None, None, None, None, None
    return attention_plain((*parts, *ours), limits)[0]


@pytest.mark.parametrize("mark", [False, True], ids=["tensors", "a subclass"])
def test_rule_for_torchs_kernel(mark):
    """Tensors are inspected through C where torch allows it; their subclasses through attributes."""
    options = None, None, False, None, 0.0, "auto", False
    serve = few(lambda *_: torch.zeros(()))

    def rule(*tensors):
        return serve(*tensors, *options) is not None

    def applies(*tensors):
        return rule(*(x.as_subclass(Marked) if mark else x for x in tensors))

    def shaped(n_b=1, n_h=2, n_q=5, n_k=6, dim=4, **options):
        q = torch.randn(n_b, n_h, n_q, dim, **options)
        k, v = torch.randn(2, n_b, n_h, n_k, dim, **options)
        return q, k, v

    assert applies(*shaped()) and applies(*(x.requires_grad_() for x in shaped()))
    # the work: n_b * n_h * (100 + n_q * n_k * (dim + 2)), if less than 1000
    assert applies(*shaped(n_q=6, n_k=11)) and not applies(*shaped(n_q=67, n_k=3))
    assert applies(*shaped(dim=8)) and not applies(*shaped(n_q=6, n_k=7, dim=8))
    assert applies(*shaped(n_q=8, n_k=9, dim=3)) and not applies(*shaped(n_q=8, n_k=10, dim=3))
    assert applies(*shaped(n_b=4, n_q=1, n_k=1)) and not applies(*shaped(n_b=5, n_q=1, n_k=1))
    assert applies(*shaped(n_b=5, n_q=5, n_k=1))  # one key of wide heads, and many queries beside
    assert not applies(*shaped(n_b=5, n_q=4, n_k=1)) and not applies(*shaped(n_b=5, n_k=2))
    assert not applies(*shaped(n_b=5, n_q=5, n_k=1, dim=3))
    assert rule(*(torch.nn.Parameter(x) for x in shaped()))
    assert applies(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in shaped()))
    assert applies(*(x.as_strided(x.shape, (1 << 40, *x.stride()[1:])) for x in shaped()))
    windows = torch.randn(1, 2, 14).unfold(2, 4, 2)[:, :, :5]
    assert not applies(windows, *shaped()[1:]) and applies(windows.contiguous(), *shaped()[1:])
    assert applies(windows[:, :, :1], *shaped()[1:])  # no other row to overlap
    assert applies(*(x[:, :, :1].expand(x.shape) for x in shaped()))
    assert applies(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in shaped()))
    assert not applies(*shaped(n_q=1, n_k=1, dim=9))
    assert not applies(*shaped(n_q=0)) and not applies(*shaped(n_k=0))
    assert not applies(*shaped(dtype=torch.float64)) and not applies(*shaped(dtype=torch.bfloat16))
    assert not applies(*shaped(device="meta"))
    q, k, v = shaped()
    assert not applies(q[0], k[0], v[0])
    for wrong in (k[:, :1], k[:, :, 1:], k[..., 1:]):
        assert not applies(q, k, wrong) and not applies(q, wrong, v)
    assert not applies(shaped(n_b=2)[0], k, v)
    assert not applies(q, k[:, :1], v[:, :1]) and not applies(q, k[..., 1:], v[..., 1:])
    transformed = few(lambda *_: torch.zeros(()), transforms=True)
    assert transformed(*(x.as_subclass(Marked) for x in (q, k, v)), *options) is None
    assert not rule(q, k) and not rule(q, k, None) and not rule(1, 2, 3)
    for marks in itertools.product([False, True], repeat=3):
        pairs = zip((q, k, v), marks, strict=True)
        assert rule(*(x.as_subclass(Marked) if is_marked else x for x, is_marked in pairs))
    for wrong in ((), (None, (1,) * 7), ((1, 2), (1,) * 7), ((None,) * 19, (1,) * 7)):
        with pytest.raises(TypeError):
            attention_plain(*wrong)
    for wrong in (None, (len,), ((len,),), ((len, 1, 2),)):
        with pytest.raises(TypeError):
            few(None, quiet=wrong)


def test_only_bare_calls_are_torchs():
    q = torch.randn(1, 1, 2, 4)
    calls = []

    def sdpa(*args, **options):
        calls.append((len(args), options))
        return q

    serve = few(sdpa)
    bare = {"bias": None, "mask": None, "causal": False, "scale": None, "dropout": 0.0}

    def applies(path="auto", **options):
        return serve(q, q, q, *{**bare, **options}.values(), path, False) is not None

    assert applies() and applies(dropout=0) and applies(causal=True) and applies(scale=-0.5)
    assert applies(causal=True, scale=0.5)
    rest = {"scale": None}, {"scale": -0.5}, {"scale": 0.5}
    assert calls == [(3, {})] * 2 + [(6, x) for x in rest]
    for other in ({"bias": q}, {"mask": q}, {"dropout": 0.1}, {"path": "kernel"}, {"path": 5}):
        assert not applies(**other)
    for scale in (0.0, -0.5, float("nan")):
        assert not applies(causal=True, scale=scale)
    assert not applies(scale=1) and not applies(causal=1) and not applies(dropout="0")
    assert serve(q, q, q) is None and serve() is None


def test_errors_of_torchs_kernel():
    """Those of which the op makes better ones, and others, which are the caller's."""
    q = torch.randn(1, 1, 2, 4)
    rest = None, None, False, None, 0.0, "auto", False

    def failing(error):
        def fail(*_):
            raise error

        return fail

    assert few(failing(RuntimeError("shapes")))(q, q, q, *rest) is None
    assert few(lambda *_: None)(q, q, q, *rest) is None  # which has no requires_grad
    with pytest.raises(MemoryError):
        few(failing(MemoryError()))(q, q, q, *rest)
    learned = torch.nn.Parameter(q)
    served = few(lambda *_: learned, offer=failing(RuntimeError("hooks")))
    assert served(q, q, q, *rest) is None
    with pytest.raises(KeyError):
        few(lambda *_: learned, offer=failing(KeyError()))(q, q, q, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("step", [1, 0])
def test_windows_of_a_sequence(which, dtype, step):
    """Rows that overlap.  torch's kernel reads them as if they did not, unless all are one."""
    tensors = [torch.randn(2, 3, 5, 8, dtype=dtype) for _ in "qkv"]
    windows = torch.randn(2, 3, 12, dtype=dtype).unfold(2, 8, 1)
    tensors[which] = windows if step else windows[:, :, :1].expand(windows.shape)
    grad = torch.randn(2, 3, 5, 8, dtype=dtype)
    dense = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]  # a clone would not overlap
    out = scaled_attention(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    for a, b in zip(found, results(scaled_attention, dense, grad), strict=True):
        bar = 1e-5 if dtype == torch.float32 else 2e-2
        assert (a - b).norm() <= bar * (b.norm() + 1)  # with one key, the query has no gradient


@pytest.mark.parametrize("n", [3, 50])
def test_scale_is_a_number(n):
    """For a tensor with many queries the gradient was dropped without an error; with few it was a TypeError."""
    q = torch.randn(1, 2, n, 8)
    right = scaled_attention(q, q, q, causal=True, scale=0.5)
    assert torch.equal(scaled_attention(q, q, q, causal=True, scale=torch.tensor(0.5)), right)
    for scale, what in (
        (torch.tensor(0.5, requires_grad=True), "a tensor that requires a gradient; multiply q"),
        (torch.ones(2), r"a tensor \(2,\)"),
        ("half", "'half'"),
    ):
        with pytest.raises(OpError, match=f"scale must be a number, got {what}"):
            scaled_attention(q, q, q, causal=True, scale=scale)
    with torch.no_grad():
        learned = torch.nn.Parameter(torch.tensor(0.5))
        assert torch.equal(scaled_attention(q, q, q, causal=True, scale=learned), right)


@pytest.mark.parametrize("dim", [4, 3])
def test_a_compiled_scale_is_not_rounded_to_bfloat16_with_the_queries(dim):
    """Scores up to a thousand: a rounding of the queries changes the largest one."""
    q, k, v = ((torch.randn(1, 2, 40, 16) * 8).bfloat16() for _ in range(3))
    q, k, v = (x if dim == 4 else x[0] for x in (q, k, v))
    bias = torch.randn(40, 40)

    def function(scale):
        return scaled_attention(q, k, v, bias, scale=scale)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    # one step of bfloat16, which a sum in another order may reach
    found, right = compiled(torch.tensor(0.3)), function(0.3)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=1e-3)


def test_fewer_dimensions():
    q, k, v = (x[0] for x in problem(1, 3, 3, 20, 30, 8, 8))
    right = eager(q[None].transpose(0, 1), k[None].transpose(0, 1), v[None].transpose(0, 1))[:, 0]
    torch.testing.assert_close(scaled_attention(q, k, v), right)
    torch.testing.assert_close(scaled_attention(q[0], k[0], v[0]), right[0])


def test_without_heads_a_bias_and_a_mask_have_none_either():
    q, k, v = (x[:, 0] for x in problem(3, 1, 1, 5, 6, 8, 8))
    bias = torch.randn(3, 5, 6)
    mask = torch.rand(3, 5, 6) > 0.3
    expected = scaled_attention(q[:, None], k[:, None], v[:, None], bias[:, None], mask[:, None])
    assert torch.equal(scaled_attention(q, k, v, bias, mask), expected[:, 0])
    assert torch.equal(
        scaled_attention(q, k, v, mask=mask[:1]),
        scaled_attention(q[:, None], k[:, None], v[:, None], mask=mask[:1, None])[:, 0],
    )


def test_wrong_arguments_are_named_with_what_was_given():
    q, k, v = problem(1, 4, 2, 5, 6, 8, 8)
    with pytest.raises(OpError, match=r"multiple of those of k, got 3 and 2"):
        scaled_attention(q[:, :3], k, v)
    with pytest.raises(OpError, match=r"multiple of those of k, got 4 and 0"):
        scaled_attention(q, k[:, :0], v[:, :0])
    with pytest.raises(OpError, match=r"k must be \(B, Hkv, Lk, d\).*\(1, 2, 6, 7\)"):
        scaled_attention(q, k[..., :7], v)
    with pytest.raises(OpError, match=r"bias must broadcast to \(1, 4, 5, 6\), got \(5, 5\)"):
        scaled_attention(q, k, v, torch.zeros(5, 5))
    with pytest.raises(OpError, match=r"bias must be floating, got torch.bool; .* mask="):
        scaled_attention(q, k, v, torch.ones(5, 6, dtype=torch.bool))  # torch's order of arguments
    with pytest.raises(OpError, match=r"mask must be bool.*float32"):
        scaled_attention(q, k, v, mask=torch.zeros(5, 6))
    for few in ((q, k, v), (q[:, 0], k[:, 0], v[:, 0])):
        with pytest.raises(OpError, match="mask must be a tensor, got list"):
            scaled_attention(*few, mask=[[True] * 6] * 5)
    for name, value in (("dropout", "a"), ("causal", "no"), ("causal", None), ("dropout", None)):
        for inputs in ((q, k, v), (q[:, :, :2], k, v)):
            with pytest.raises(OpError, match=rf"{name} must be .*, got {value!r}"):
                scaled_attention(*inputs, **{name: value})
    with pytest.raises(OpError, match=r"dropout must be in \[0, 1\), got 1"):
        scaled_attention(q, k, v, dropout=1.0)
    with pytest.raises(OpError, match="head sizes go from 1 up to 256, got 300"):
        scaled_attention(*problem(1, 1, 1, 2, 2, 300, 4))


@pytest.mark.parametrize("n", [4, 60])
def test_a_machine_without_vectors_takes_torchs_kernel(n, monkeypatch):
    """Where it can do the case: plain numbers are slower than torch's vectors."""
    without = [None if part is _plans.empty_cpu else part for part in _plain._PARTS]
    monkeypatch.setattr(_plain, "serve", attention_plain(tuple(without), _plain._LIMITS)[0])
    monkeypatch.setattr(_plain, "HAS_VECTORS", False)
    monkeypatch.setattr(attention, "_known", {})
    q, k, v = problem(1, 4, 2, n, n, 8, 8)
    learned = q.clone().requires_grad_()
    for _ in range(2):  # the second time from what is known of such calls
        for tensors in ((q, k, v), (learned, k, v), (q.double(), k.double(), v.double())):
            out, info = scaled_attention(*tensors, return_info=True)
            assert info["path"] == "sdpa"
            assert relative(out.detach(), eager(*(x.double().detach() for x in tensors))) < 1e-6
        masked = scaled_attention(q, k, v, mask=torch.ones(n, n) > 0, return_info=True)[1]
        assert masked["path"] == "kernel"
    first = torch.autograd.grad(scaled_attention(learned, k, v).sum(), learned, create_graph=True)
    assert first[0].requires_grad
    windows = torch.randn(1, 4, 2 * n + 8).unfold(2, 8, 2)[:, :, :n]
    assert scaled_attention(windows, k, v, return_info=True)[1]["path"] == "kernel"
