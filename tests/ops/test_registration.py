"""torch's view of the ops: schemas, fake kernels, compile in one graph, vmap, autocast."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from dry_support import run_checked, torch_python
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pyalloc.errors import OpError
from pyalloc.ops import (
    _additive,
    _attention,
    _cuda,
    _power_spherical,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
)

from .reference import sphere

ops = torch.ops.pyalloc


def spherical():
    return sphere(6, 1, 4, 5), sphere(3, 4, 5), torch.rand(3, 4) * 9


def mixture():
    value, loc, scale = spherical()
    return value[:, 0], loc.transpose(0, 1), scale.t(), torch.randn(4, 3)


def additive():
    return torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(8)


def one_step():
    query, *rest = additive()
    return query[:, 0], *rest


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
    "one step": (additive_attention, one_step),
    "attention": (scaled_attention, attention),
}


@pytest.mark.parametrize("name", OPS)
def test_shapes_without_data(name):
    """On the device "meta", where models are laid out before they have memory."""
    op, make = OPS[name]
    inputs = make()
    assert op(*(x.to("meta") for x in inputs)).shape == op(*inputs).shape
    leaves = [x.to("meta").requires_grad_() for x in inputs]
    gradients = torch.autograd.grad(op(*leaves).sum(), leaves)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


@pytest.mark.filterwarnings("ignore")  # torch's checker reads .grad of its own intermediates
@pytest.mark.parametrize("name", [name for name in OPS if name != "one step"])  # no op of its own
def test_schema_fake_kernel_and_autograd(name):
    inputs = [x.requires_grad_() for x in OPS[name][1]()]
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
def test_export_agrees(name):
    function, make = OPS[name]

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    inputs = tuple(make())
    program = torch.export.export(Module(), inputs)
    assert torch.equal(program.module()(*inputs), function(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_may_be_a_comparison_of_sizes_while_exported(dtype):
    class Module(torch.nn.Module):
        def forward(self, q):
            return scaled_attention(q, q, q, causal=q.shape[2] > 1)

    lengths = {"q": {2: torch.export.Dim("n", min=2, max=64)}}
    q = torch.randn(1, 2, 8, 16).to(dtype)
    program = torch.export.export(Module(), (q,), dynamic_shapes=lengths, strict=False)
    for x in (q, torch.randn(1, 2, 12, 16).to(dtype)):
        torch.testing.assert_close(program.module()(x), scaled_attention(x, x, x, causal=True))


def test_causal_may_be_a_truth_of_another_type():
    for n in (4, 300):
        q = torch.randn(1, 2, n, 16)
        for truth in (False, True):
            expected = scaled_attention(q, q, q, causal=truth)
            for each in (int(truth), np.bool_(truth), torch.tensor(truth)):
                assert torch.equal(scaled_attention(q, q, q, causal=each), expected)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_vmap_agrees_with_one_call_for_each(name, which):
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


@pytest.mark.filterwarnings(
    "ignore"
)  # torch.jit is deprecated, and warns of shapes that become constants
@pytest.mark.parametrize("name", OPS)
def test_jit_trace_agrees(name):
    """A tracer that does not see the op keeps the memory of its result, without its contents."""
    function, make = OPS[name]
    traced = torch.jit.trace(lambda *args: function(*args), make(), check_trace=False)
    other = make()
    torch.testing.assert_close(traced(*other), function(*other))


@pytest.mark.parametrize("name", OPS)
def test_traces_before_dispatch(name):
    """As an exporter does for training; its mode is on a different stack than all others."""
    function, make = OPS[name]
    traced = make_fx(lambda *args: function(*args), pre_dispatch=True)(*make())
    other = make()
    torch.testing.assert_close(traced(*other), function(*other))


@pytest.mark.parametrize("name", OPS)
def test_numbers_whose_sign_torch_keeps_aside(name):
    """Like the imaginary part of a conjugate, among inputs and among gradients."""
    function, make = OPS[name]
    inputs = [x.requires_grad_() for x in make()]
    aside = [torch._neg_view(-x.detach()).requires_grad_() for x in inputs]
    assert all(x.is_neg() for x in aside)
    plain, ours = function(*inputs), function(*aside)
    assert torch.equal(plain, ours)
    grad = torch.randn_like(plain)
    right = torch.autograd.grad(plain, inputs, grad)
    found = torch.autograd.grad(ours, aside, torch._neg_view(-grad))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_a_mode_around_the_backward_alone_sees_the_registered_op(name):
    """Like FakeTensorMode or compiled autograd: the forward went past the dispatcher."""
    function, make = OPS[name]
    called = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    inputs = [x.requires_grad_() for x in make()]
    out = function(*inputs).sum()
    right = torch.autograd.grad(out, inputs, retain_graph=True)
    with Names():
        found = torch.autograd.grad(out, inputs)
    assert any(each.startswith("pyalloc::") and each.endswith("_backward") for each in called), (
        called
    )
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_a_backward_alone_compiles_in_one_graph(name):
    function, make = OPS[name]
    inputs = [x.requires_grad_() for x in make()]
    out = function(*inputs).sum()
    right = torch.autograd.grad(out, inputs, retain_graph=True)
    torch._dynamo.reset()
    whole = partial(torch.compile, backend="eager", fullgraph=True)
    with compiled_autograd._enable(whole):
        out.backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, right, strict=True))


@pytest.fixture
def declined(monkeypatch):
    """CPU tensors take the path of CUDA tensors that the kernels do not support."""
    monkeypatch.setattr(_cuda, "declines", lambda x, family: True)
    # No way past the dispatcher, as on CUDA.
    for module in (_attention, _additive, _power_spherical):
        monkeypatch.setattr(module, "is_plain", lambda args: False)


def mixture_backward(needs):
    return lambda value, loc, scale, weights: (
        ops.power_spherical_mixture_log_prob_backward,
        (
            torch.randn(6, 4),
            torch.randn(6, 4),
            value,
            loc.transpose(0, 1),
            scale.t(),
            weights.t(),
            False,
            needs,
        ),
    )


REGISTERED = {
    "log_prob": lambda value, *rest: (
        ops.power_spherical_log_prob_backward,
        (torch.randn(4, 6, 3), value[:, 0], *rest, True, [True] * 3),
    ),
    "log_prob, some": lambda value, *rest: (
        ops.power_spherical_log_prob_backward,
        (torch.randn(6, 3, 4), value[:, 0], *rest, False, [True, False, True]),
    ),
    "mixture": mixture_backward([True] * 4),
    "mixture, some": mixture_backward([False, True, False, True]),
    "additive": lambda *inputs: (
        ops.additive_attention_backward,
        (torch.randn(2, 3, 6), None, torch.rand(2, 3, 5), *inputs, None, [True] * 4),
    ),
    "additive, some": lambda *inputs: (
        ops.additive_attention_backward,
        (
            torch.randn(2, 3, 6),
            None,
            torch.rand(2, 3, 5),
            *inputs,
            None,
            [True, False, False, True],
        ),
    ),
    "attention": lambda q, k, v, bias: (
        ops.scaled_attention_backward,
        (
            torch.randn(2, 2, 9, 8),
            torch.randn(2, 2, 9, 8),
            torch.randn(2, 2, 9),
            q,
            k,
            v,
            bias[None, None],
            None,
            False,
            0.3,
            0.0,
            None,
            True,
        ),
    ),
}


@pytest.mark.parametrize("by", ["kernels", "declined"])
@pytest.mark.parametrize("name", REGISTERED)
def test_gradients_have_the_promised_layout(name, by, request):
    """What the compiler makes of an op relies on the strides that the op's fake form declares."""
    if by == "declined":  # by plain torch
        request.getfixturevalue(by)
    backward, args = REGISTERED[name](*OPS[name.partition(",")[0]][1]())
    real = backward(*args)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = backward(*(mode.from_tensor(x) if torch.is_tensor(x) else x for x in args))
    assert [(x.shape, x.stride()) for x in real] == [(x.shape, x.stride()) for x in fake]


@pytest.mark.parametrize("name", OPS)
def test_plain_torch_serves_where_the_kernels_decline(name, declined, monkeypatch):
    function, make = OPS[name]
    inputs = [x.requires_grad_() for x in make()]

    def run():
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]

    with monkeypatch.context() as patch:
        patch.setattr(_cuda, "declines", lambda x, family: False)
        right = run()
    torch.testing.assert_close(run(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("t_first", [False, True])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_plain_torch_puts_numbers_where_the_kernels_do(is_mixture, t_first, declined, monkeypatch):
    value, loc, scale = spherical()
    inputs = [x.requires_grad_() for x in (value[:, 0], loc, scale)]
    op = ops.power_spherical_log_prob
    if is_mixture:
        op = ops.power_spherical_mixture_log_prob
        inputs.append(torch.randn(3, 4, requires_grad=True))

    def run():
        out = op(*inputs, t_first)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)]

    with monkeypatch.context() as patch:
        patch.setattr(_cuda, "declines", lambda x, family: False)
        right = run()
    found = run()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert found[0].stride() == right[0].stride()


@pytest.mark.filterwarnings("ignore")  # torch's nested tensors are a prototype and warn of it
@pytest.mark.parametrize("name", OPS)
def test_tensors_without_strides_are_refused(name):
    function, make = OPS[name]
    first, *rest = make()
    nested = torch.nested.nested_tensor(list(first.flatten(0, -2)))
    for given, what in ((first.to_sparse(), "torch.sparse_coo"), (nested, "a nested tensor")):
        with pytest.raises(OpError, match=f"must be a dense tensor, got {what}"):
            function(given, *rest)


def test_missing_library_says_what_to_do(monkeypatch, tmp_path):
    from pyalloc.ops import _library

    monkeypatch.setattr(_library, "LIBRARY", tmp_path / "none.so")
    _library.library.cache_clear()
    _library.address.cache_clear()
    with pytest.raises(OpError, match="make -C csrc/ops OUT="):
        power_spherical_log_prob(*spherical())
    _library.library.cache_clear()


def test_grouped_queries_in_half_precision_compile_with_dynamic_shapes():
    """Torch's kernel takes no symbolic boolean for its enable_gqa."""
    q, k, v = torch.randn(1, 4, 5, 8).half(), *torch.randn(2, 1, 2, 6, 8).half()
    torch._dynamo.reset()
    compiled = torch.compile(scaled_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), scaled_attention(q, k, v))


def test_compiles_with_another_dimension_of_components_each_time():
    """From the second call on, the compiler takes it for a symbol."""
    torch._dynamo.reset()
    tensors = torch.randn(8), torch.randn(3, 4, 5, 8), torch.rand(3, 4, 5), torch.randn(3, 4, 5)
    compiled = torch.compile(power_spherical_mixture_log_prob, fullgraph=True, backend="eager")
    for dim in (0, 1, -1):
        right = power_spherical_mixture_log_prob(*tensors, dim=dim)
        assert torch.equal(compiled(*tensors, dim=dim), right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows_of_a_sequence_in_half_precision_compile(dynamic):
    """Torch's kernel misreads rows that overlap, whoever calls it."""
    x, q = torch.randn(2, 3, 45).half(), torch.randn(2, 3, 7, 6).half()

    def function(x, q, windows):
        return scaled_attention(q, windows, x.unfold(2, 6, 1))

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    windows = x.unfold(2, 6, 1)
    right = function(x, q, windows.contiguous())
    torch.testing.assert_close(compiled(x, q, windows), right)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", [0.3, -0.4, [0.3], 2], ids=str)
def test_a_tensor_as_scale_compiles_in_one_graph(scale):
    """Its value is not known then, nor whether it is above 0."""
    inputs = [*attention()[:3], torch.tensor(scale)]

    def function(q, k, v, scale):
        return scaled_attention(q, k, v, causal=True, scale=scale)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    inputs[3] = inputs[3] * 3
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


def test_a_torch_that_is_too_old_is_named() -> None:
    """2.7 does not say which hooks on saved tensors are in force."""
    source = """
import torch
del torch._C._autograd._top_saved_tensors_default_hooks
try:
    import pyalloc.distributions
except ImportError as error:
    print(error)
"""
    python, env = torch_python()
    done = run_checked([python, "-c", source], env=env)
    said = f"pyalloc.ops needs PyTorch 2.8 or newer; this is {torch.__version__}\n"
    assert done.stdout == said, done
