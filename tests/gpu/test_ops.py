"""The ops on a real device against the CPU kernels, in graphs, on other streams, and repeated."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from pyalloc.errors import OpError  # noqa: E402
from pyalloc.ops import (  # noqa: E402
    _cuda,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
    sequence_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(shape), dim=-1)


def spherical(n_l, n_m, n_t, dim):
    return [unit(n_l, 1, n_t, dim), unit(n_m, n_t, dim), torch.rand(n_m, n_t) * 50]


def mixture(n_l, n_m, n_t, dim):
    value, loc, scale = spherical(n_l, n_m, n_t, dim)
    weights = torch.log_softmax(torch.randn(n_t, n_m), -1)
    return [value[:, 0], loc.transpose(0, 1).contiguous(), scale.t().contiguous(), weights]


def additive(n_b, n_s, n_h, n_e):
    """Scores of about 1: with larger ones one key has all the weight, and gradients are differences of near equals."""
    shapes = ((n_b, n_h), (n_b, n_s, n_h), (n_b, n_s, n_e))
    return [*map(torch.randn, shapes), torch.randn(n_h) / n_h**0.5]


def queries(n_b, n_q, n_s, n_h, n_e):
    return [torch.randn(n_b, n_q, n_h), *additive(n_b, n_s, n_h, n_e)[1:]]


def attention(n_b, n_h, n_q, n_k, dim, *, shared=True):
    """The bias is shared by the batch, or each entry has its own; two heads read one of the keys if n_h is even."""
    n_kv = n_h if n_h % 2 else n_h // 2
    shapes = [(n_b, n_h, n_q, dim), (n_b, n_kv, n_k, dim), (n_b, n_kv, n_k, dim), (n_h, n_q, n_k)]
    shapes[3] = shapes[3] if shared else (n_b, *shapes[3])
    return [torch.randn(s) for s in shapes]


def padded(q, k, v, bias, *, at_end):
    """Of another length for each entry of the batch."""
    n_b, n_k = q.shape[0], k.shape[2]
    place = torch.arange(n_k, device=q.device)
    least = (torch.arange(n_b, device=q.device) * n_k // n_b + 5)[:, None, None, None]
    return scaled_attention(q, k, v, bias, (place if at_end else n_k - 1 - place) < least)


padded_at_end, padded_at_start = partial(padded, at_end=True), partial(padded, at_end=False)

CASES = {
    "log_prob": (power_spherical_log_prob, spherical(130, 140, 33, 128)),
    "log_prob, blocks for both sides": (power_spherical_log_prob, spherical(300, 200, 3, 131)),
    "log_prob, one t": (power_spherical_log_prob, spherical(300, 70, 1, 17)),
    "log_prob, a pair for each t": (power_spherical_log_prob, spherical(1, 1, 3000, 64)),
    "log_prob, many samples": (power_spherical_log_prob, spherical(5000, 6, 1, 64)),
    "mixture": (power_spherical_mixture_log_prob, mixture(130, 140, 33, 128)),
    "mixture of few": (power_spherical_mixture_log_prob, mixture(2, 10, 300, 20)),
    "mixture, many samples": (power_spherical_mixture_log_prob, mixture(3000, 40, 2, 33)),
    "additive": (additive_attention, additive(80, 50, 1000, 2000)),
    "additive, rows that begin anywhere": (additive_attention, additive(7, 53, 1001, 333)),
    "additive, many keys": (additive_attention, additive(2, 3000, 36, 41)),
    "additive, several queries": (additive_attention, queries(9, 5, 70, 260, 140)),
    "attention": (scaled_attention, attention(2, 3, 200, 333, 80)),
    "attention, small heads": (scaled_attention, attention(2, 4, 300, 257, 64)),
    "attention, a bias for each": (scaled_attention, attention(2, 3, 130, 190, 33, shared=False)),
    "attention, heads of 128": (scaled_attention, attention(1, 4, 200, 301, 128, shared=False)),
    "attention, large heads": (scaled_attention, attention(1, 3, 70, 130, 200)),
    "attention, padding": (padded_at_end, attention(3, 4, 130, 1500, 64)),
    "attention, padding at the start": (padded_at_start, attention(3, 3, 70, 900, 64)),
    "attention, padding, heads of 128": (padded_at_start, attention(3, 4, 130, 700, 128)),
    "attention, padding, a bias for each": (
        padded_at_end,
        attention(2, 4, 70, 700, 33, shared=False),
    ),
    "attention, padding, large heads": (padded_at_start, attention(2, 3, 70, 700, 200)),
}


def results(function, tensors, grad):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("name", CASES)
def test_against_the_cpu_and_bitwise_again(name):
    function, tensors = CASES[name]
    grad = torch.randn(function(*tensors).shape)
    device = [x.cuda() for x in tensors]
    assert all(_cuda.serves(device[0], family) for family in _cuda.FAMILIES), (
        "the kernels could not be loaded"
    )
    ours = results(function, device, grad.cuda())
    for a, b in zip(ours, results(function, tensors, grad), strict=True):
        assert (a.cpu() - b).norm() <= 2e-5 * b.norm()
    again = results(function, device, grad.cuda())
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_in_a_graph_and_on_another_stream(name):
    function, tensors = CASES[name]
    device = [x.cuda() for x in tensors]
    right = function(*device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = function(*device)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(right, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*device)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(right, captured)


def test_torchs_attention_serves_where_it_is_faster():
    """That is what is small, and has heads that the tensor-core kernels do not take."""
    q, k, v, bias = (x.cuda() for x in CASES["attention"][1])
    out, info = scaled_attention(q, k, v, return_info=True)
    right = scaled_attention(q, k, v, path="kernel")
    assert (out - right).norm() <= 2e-5 * right.norm()
    assert info["path"] == "sdpa"
    assert scaled_attention(q, k, v, bias, return_info=True)[1]["path"] == "kernel"
    wide = [torch.randn(2, 3, 50, 200, device="cuda") for _ in "qkv"]
    assert scaled_attention(*wide, return_info=True)[1]["path"] == "sdpa"
    ours = _cuda.has_kernel(0, "attention", b"pya_attention_forward_64_tensor")
    many = [torch.randn(8, 16, 512, 64, device="cuda") for _ in "qkv"]
    path = scaled_attention(*many, return_info=True)[1]["path"]
    assert path == ("kernel" if ours else "sdpa")


def test_dropout_is_that_of_the_cpu():
    q, k, v, bias = CASES["attention"][1]
    torch.manual_seed(3)
    cpu = scaled_attention(q, k, v, bias, dropout=0.25)
    torch.manual_seed(3)
    gpu = scaled_attention(*(x.cuda() for x in (q, k, v, bias)), dropout=0.25)
    assert (cpu - gpu.cpu()).norm() <= 1e-5 * cpu.norm()


def test_sequence_gradients():
    query, keys, values, v = (x.cuda().requires_grad_() for x in additive(8, 20, 64, 64))

    def loss():
        state = query
        for _ in range(4):
            state = torch.tanh(state + additive_attention(state, keys, values, v))
        return state.square().sum()

    plain = torch.autograd.grad(loss(), (query, keys, values, v))
    with sequence_gradients(keys, values):
        total = loss()
    for a, b in zip(torch.autograd.grad(total, (query, keys, values, v)), plain, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def need_memory(n_bytes):
    if torch.cuda.get_device_properties().total_memory < n_bytes:
        pytest.skip(f"needs a device of {n_bytes >> 30} GiB")


@pytest.mark.parametrize("dim", [3, 64])
def test_more_results_than_32_bits_count(dim):
    need_memory(24 << 30)
    value, loc = unit(66_000, 1, dim).cuda(), unit(33_000, dim).cuda()
    scale = torch.rand(33_000).cuda() * 50
    out = power_spherical_log_prob(value, loc, scale)
    right = power_spherical_log_prob(value[-9:].cpu(), loc[-300:].cpu(), scale[-300:].cpu())
    assert (out[-9:, -300:].cpu() - right).norm() <= 2e-5 * right.norm()


@pytest.mark.parametrize("dim", [3, 64])
def test_more_tiles_than_65535(dim):
    need_memory(24 << 30)
    value = torch.nn.functional.normalize(torch.randn(9_000_000, dim, device="cuda"), dim=-1)
    loc = unit(1, dim).cuda().requires_grad_()
    scale = torch.full((1,), 7.0, device="cuda", requires_grad=True)
    out = power_spherical_log_prob(value.requires_grad_(), loc, scale)
    found = torch.autograd.grad(out.sum(), (value, loc, scale))
    few = value[-300:].detach().cpu().requires_grad_()
    right = power_spherical_log_prob(few, loc.detach().cpu(), scale.detach().cpu())
    assert (out[-300:].detach().cpu() - right.detach()).norm() <= 2e-5 * right.norm()
    (d_few,) = torch.autograd.grad(right.sum(), few)
    assert (found[0][-300:].cpu() - d_few).norm() <= 2e-5 * d_few.norm()
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("name", CASES)
def test_backward_in_a_graph(name):
    function, tensors = CASES[name]
    device = [x.cuda().requires_grad_() for x in tensors]
    grad = torch.randn(function(*tensors).shape).cuda()
    right = torch.autograd.grad(function(*device), device, grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch wants a backward on the stream before it captures one
        torch.autograd.grad(function(*device), device, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(function(*device), device, grad)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, right, strict=True))


def test_dropout_is_not_captured():
    q, k, v, bias = (x.cuda() for x in CASES["attention"][1])
    scaled_attention(q, k, v, bias)
    with pytest.raises(OpError, match="at every replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        q.neg()  # torch warns of an empty graph, and warnings are errors here
        scaled_attention(q, k, v, bias, dropout=0.25)
