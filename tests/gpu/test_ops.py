"""The ops on a real device against the CPU kernels, in graphs, on other streams, and repeated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

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
    return [torch.randn(s) for s in ((n_b, n_h), (n_b, n_s, n_h), (n_b, n_s, n_e), (n_h,))]


def attention(n_b, n_h, n_q, n_k, dim):
    shapes = ((n_b, n_h, n_q, dim), (n_b, n_h, n_k, dim), (n_b, n_h, n_k, dim), (n_h, n_q, n_k))
    return [torch.randn(s) for s in shapes]


CASES = {
    "log_prob": (power_spherical_log_prob, spherical(130, 140, 33, 128)),
    "log_prob, blocks for both sides": (power_spherical_log_prob, spherical(300, 200, 3, 131)),
    "log_prob, one t": (power_spherical_log_prob, spherical(300, 70, 1, 17)),
    "mixture": (power_spherical_mixture_log_prob, mixture(130, 140, 33, 128)),
    "additive": (additive_attention, additive(80, 50, 1000, 2000)),
    "attention": (scaled_attention, attention(2, 3, 200, 333, 80)),
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
    assert _cuda.serves(device[0]), "the kernels could not be loaded"
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


def test_dropout_is_that_of_the_cpu():
    q, k, v, bias = CASES["attention"][1]
    torch.manual_seed(3)
    cpu = scaled_attention(q.requires_grad_(), k, v, bias, dropout=0.25)
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
