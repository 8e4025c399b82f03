"""torch's view of the ops: schemas, fake kernels, compile in one graph, vmap, autocast."""

from __future__ import annotations

import pytest
import torch

from pyalloc.errors import OpError
from pyalloc.ops import (
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .reference import sphere


def spherical():
    return sphere(6, 1, 4, 5), sphere(3, 4, 5), torch.rand(3, 4) * 9


def mixture():
    value, loc, scale = spherical()
    return value[:, 0], loc.transpose(0, 1), scale.t(), torch.randn(4, 3)


def additive():
    return torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(8)


def attention():
    return (
        torch.randn(2, 2, 9, 8),
        torch.randn(2, 2, 7, 8),
        torch.randn(2, 2, 7, 8),
        torch.randn(9, 7),
    )


OPS = {
    "log_prob": (power_spherical_log_prob, spherical),
    "mixture": (power_spherical_mixture_log_prob, mixture),
    "additive": (additive_attention, additive),
    "attention": (scaled_attention, attention),
}


@pytest.mark.parametrize("name", OPS)
def test_shapes_without_data(name):
    """On the device "meta", on which models are laid out before they have memory."""
    op, make = OPS[name]
    inputs = make()
    assert op(*(x.to("meta") for x in inputs)).shape == op(*inputs).shape
    leaves = [x.to("meta").requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(op(*leaves).sum(), leaves)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.filterwarnings("ignore")  # torch's checker reads .grad of its own intermediates
@pytest.mark.parametrize("name", OPS)
def test_schema_fake_kernel_and_autograd(name):
    inputs = [x.requires_grad_() for x in OPS[name][1]()]
    ops = torch.ops.pyalloc
    if name == "log_prob":
        value, *rest = inputs
        cases = [
            (ops.power_spherical_log_prob, (value[:, 0], *rest, first)) for first in (True, False)
        ]
    elif name == "mixture":
        value, loc, scale, weights = inputs
        args = (value, loc.transpose(0, 1), scale.t(), weights.t())
        cases = [(ops.power_spherical_mixture_log_prob, (*args, first)) for first in (True, False)]
    elif name == "additive":
        cases = [(ops.additive_attention, (*inputs, mask)) for mask in (None, torch.ones(2, 5) > 0)]
    else:
        q, k, v, b = inputs
        cases = [(ops.scaled_attention, (q, k, v, b[None, None], None, True, 0.3, 0.0, None))]
    for op, args in cases:
        leaves = [
            x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in args
        ]
        torch.library.opcheck(op.default, tuple(leaves))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_compiles_in_one_graph(name):
    function, make = OPS[name]
    inputs = [x.requires_grad_() for x in make()]
    out = function(*inputs)
    grad = torch.randn_like(out)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)(*inputs)
    assert torch.equal(out, compiled) and out.stride() == compiled.stride()
    plain, traced = (torch.autograd.grad(x, inputs, grad) for x in (out, compiled))
    for a, b in zip(plain, traced, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", OPS)
def test_exports(name):
    function, make = OPS[name]

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    inputs = tuple(make())
    program = torch.export.export(Module(), inputs)
    assert torch.equal(program.module()(*inputs), function(*inputs))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_vmap(name, which):
    function, make = OPS[name]
    made = zip(*(make() for _ in range(3)), strict=True)
    stacks = [torch.stack(x, 1 if x[0].dim() else 0) for x in made]
    singles = make()
    n = len(singles)
    mapped = {"all": range(n), "first": [0], "last": [n - 1]}[which]
    dims = tuple((1 if singles[k].dim() else 0) if k in mapped else None for k in range(n))
    inputs = [stacks[k] if k in mapped else singles[k] for k in range(n)]
    ours = torch.vmap(function, in_dims=dims)(*inputs)

    def single(i):
        return [x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True)]

    each = [function(*single(i)) for i in range(3)]
    torch.testing.assert_close(ours, torch.stack(each))


@pytest.mark.parametrize("name", OPS)
def test_autocast(name):
    function, make = OPS[name]
    inputs = [x.bfloat16() for x in make()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = function(*inputs)
    assert out.dtype == (torch.bfloat16 if name == "attention" else torch.float32)
    right = function(*(x.float() for x in inputs))
    torch.testing.assert_close(out.float(), right, rtol=3e-2, atol=3e-2)


def test_missing_library_says_what_to_do(monkeypatch, tmp_path):
    from pyalloc.ops import _library

    monkeypatch.setattr(_library, "LIBRARY", tmp_path / "none.so")
    _library.library.cache_clear()
    with pytest.raises(OpError, match="make -C csrc/ops OUT="):
        power_spherical_log_prob(*spherical())
    _library.library.cache_clear()


def test_unknown_instruction_set():
    from pyalloc.ops import set_cpu_isa

    with pytest.raises(OpError, match="'sse9' is not available here; the widest is"):
        set_cpu_isa("sse9")


def test_grouped_queries_in_half_precision_compile_with_dynamic_shapes():
    """Torch's kernel takes no symbolic truth for its enable_gqa."""
    q, k, v = torch.randn(1, 4, 5, 8).half(), *torch.randn(2, 1, 2, 6, 8).half()
    torch._dynamo.reset()
    compiled = torch.compile(scaled_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), scaled_attention(q, k, v))
