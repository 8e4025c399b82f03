"""torch.func over the ops: what works on plain torch returns the same on ours."""

from __future__ import annotations

import pytest
import torch
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from pyalloc.errors import OpError
from pyalloc.ops import (
    _cuda,
    _eager,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
    sequence_gradients,
)

from .reference import pairwise, sphere

# torch's own script of decompositions for forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


def plain_mixture(value, loc, scale, weights):
    joint = pairwise(value, loc.transpose(0, 1), scale.t()) + weights.t()[:, :]
    return torch.logsumexp(joint, 1)


def plain_additive(query, keys, values, v):
    score = torch.tanh(keys[:, None] + query[:, :, None]) @ v
    return torch.softmax(score, -1) @ values


def plain_step(query, *rest):
    return plain_additive(query[:, None], *rest)[:, 0]


def plain_attention(q, k, v, bias=None):
    score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(score if bias is None else score + bias, -1) @ v


def spherical():
    return sphere(3, 4, 5), sphere(2, 4, 5), torch.rand(2, 4) * 9 + 1


def mixture():
    value, loc, scale = spherical()
    return value, loc.transpose(0, 1), scale.t(), torch.randn(4, 2)


def additive():
    return torch.randn(2, 2, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 5), torch.randn(4)


def one_step():
    query, *rest = additive()
    return query[:, 0], *rest


def attention():
    return torch.randn(2, 2, 4, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3)


def attention_with_bias():
    return (*attention(), torch.randn(4, 5))


# ours, the same in plain torch, inputs
OPS = {
    "log_prob": (lambda x, *rest: power_spherical_log_prob(x[:, None], *rest), pairwise, spherical),
    "mixture": (power_spherical_mixture_log_prob, plain_mixture, mixture),
    "additive": (additive_attention, plain_additive, additive),
    "one step": (additive_attention, plain_step, one_step),
    "attention": (scaled_attention, plain_attention, attention),
    "attention_bias": (scaled_attention, plain_attention, attention_with_bias),
}


def everything(f, inputs):
    """The numbers of all arguments."""
    return tuple(range(len(inputs)))


def energy(f):
    return lambda *inputs: f(*inputs).sin().sum()


def transformed_vjp(f, inputs):
    out, pull = vjp(f, *inputs)
    return pull(torch.ones_like(out))


def transformed_jvp(f, inputs):
    torch.manual_seed(1)
    return jvp(f, inputs, tuple(torch.randn_like(x) for x in inputs))


def dual_numbers(f, inputs):
    torch.manual_seed(1)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, torch.randn_like(x)) for x in inputs]
        return tuple(torch.autograd.forward_ad.unpack_dual(f(*duals)))


def many(inputs):
    """Three of each."""
    return tuple(torch.stack([x, x.flip(0), 0.5 * x], -1) for x in inputs)


def dims(inputs):
    return tuple(x.dim() for x in inputs)


def vmapped_gradients(f, inputs):
    each = vmap(grad(energy(f), argnums=everything(f, inputs)), in_dims=dims(inputs))
    return each(*many(inputs))


def gradients_of_one_sample(f, inputs):
    """Per-sample gradients of what the samples share."""
    samples = torch.stack([inputs[0], 0.5 * inputs[0]])
    shared = inputs[1:]
    one = grad(lambda rest, x: f(x, *rest).sin().sum())
    return vmap(one, in_dims=(None, 0))(shared, samples)


def gradients_of_vmap(f, inputs):
    mapped = vmap(f, in_dims=dims(inputs))
    return grad(energy(mapped), argnums=everything(f, inputs))(*many(inputs))


def nested_vmaps(f, inputs):
    twice = vmap(vmap(f, in_dims=dims(inputs)), in_dims=(None,) + (0,) * (len(inputs) - 1))
    stacks = many(inputs)
    return twice(stacks[0], *(torch.stack([x, 2 * x]) for x in stacks[1:]))


def second_gradients(f, inputs):
    argnums = everything(f, inputs)

    def slope(*args):
        return sum(g.sin().sum() for g in grad(energy(f), argnums=argnums)(*args))

    return grad(slope, argnums=argnums)(*inputs)


def batched_backward(f, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    grads = torch.stack([torch.ones_like(out), out.detach()])
    return torch.autograd.grad(out, leaves, grads, is_grads_batched=True)


def backward_of_vmap(f, inputs):
    leaves = [x.requires_grad_() for x in many(inputs)]
    out = vmap(f, in_dims=dims(inputs))(*leaves)
    return torch.autograd.grad(out.sin().sum(), leaves)


def gradients(f, inputs):
    return grad(energy(f), argnums=everything(f, inputs))(*inputs)


def functionalized_gradients(f, inputs):
    return functionalize(lambda *args: gradients(f, args))(*inputs)


def third_derivatives(f, inputs):
    def along(t):
        return f(inputs[0] + t * 0.1, *inputs[1:]).sin().sum()

    return grad(grad(grad(along)))(torch.zeros((), dtype=inputs[0].dtype))


def forward_reverse_forward(f, inputs):
    def along(x):
        return jvp(lambda y: energy(f)(y, *inputs[1:]), (x,), (torch.ones_like(x),))[1]

    return jvp(grad(along), (inputs[0],), (torch.ones_like(inputs[0]),))


TRANSFORMS = {
    "grad": gradients,
    "vjp": transformed_vjp,
    "jacrev": lambda f, inputs: jacrev(f, argnums=everything(f, inputs))(*inputs),
    "vmap(grad)": vmapped_gradients,
    "per sample": gradients_of_one_sample,
    "grad(vmap)": gradients_of_vmap,
    "vmap(vmap)": nested_vmaps,
    "grad(grad)": second_gradients,
    "jacrev(jacrev)": lambda f, inputs: jacrev(jacrev(energy(f)))(*inputs),
    "hessian": lambda f, inputs: hessian(energy(f), argnums=(0, 1))(*inputs),
    "jvp": transformed_jvp,
    "jacfwd": lambda f, inputs: jacfwd(f, argnums=everything(f, inputs))(*inputs),
    "jacfwd(jacfwd)": lambda f, inputs: jacfwd(jacfwd(energy(f)))(*inputs),
    "jvp(grad(jvp))": forward_reverse_forward,
    "dual numbers": dual_numbers,
    "is_grads_batched": batched_backward,
    "backward of vmap": backward_of_vmap,
    "third": third_derivatives,
    "functionalize": lambda f, inputs: functionalize(f)(*inputs),
    "vmap(functionalize)": lambda f, inputs: vmap(functionalize(f), in_dims=dims(inputs))(
        *many(inputs)
    ),
    "grad(functionalize)": lambda f, inputs: gradients(functionalize(f), inputs),
    "functionalize(grad)": functionalized_gradients,
    "make_fx(functionalize(grad))": lambda f, inputs: make_fx(
        lambda *args: functionalized_gradients(f, args)
    )(*inputs)(*inputs),
    "jvp(functionalize)": lambda f, inputs: transformed_jvp(functionalize(f), inputs),
    "dual numbers of functionalize": lambda f, inputs: dual_numbers(functionalize(f), inputs),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OPS)
def test_as_on_plain_torch(name, transform):
    ours, plain, make = OPS[name]
    inputs = tuple(x.double() for x in make())
    found = TRANSFORMS[transform](ours, inputs)
    torch.testing.assert_close(found, TRANSFORMS[transform](plain, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", ["jacrev", "is_grads_batched", "jacrev(jacrev)"])
@pytest.mark.parametrize("name", ["additive", "attention", "attention_bias"])
def test_batch_of_one(name, transform):
    """What many gradients share has stride 0 in the batch into which they are folded."""
    ours, plain, make = OPS[name]
    inputs = tuple(x[:1].double() if x.dim() > 2 else x.double() for x in make())
    found = TRANSFORMS[transform](ours, inputs)
    torch.testing.assert_close(found, TRANSFORMS[transform](plain, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["additive", "one step"])  # the others' plain forms fail too
def test_gradients_traced_before_dispatch(name):
    ours, plain, make = OPS[name]
    inputs = tuple(x.double() for x in make())
    traced = make_fx(lambda *args: gradients(ours, args), pre_dispatch=True)(*inputs)
    torch.testing.assert_close(traced(*inputs), gradients(plain, inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["additive", "one step"])
def test_batched_gradients_of_the_weights_alone(name):
    """Then the context has no gradient and does not say how many there are."""
    _, plain, make = OPS[name]
    query, keys, values, v = (x.double() for x in make())
    each = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    found, right = (
        batched_backward(f, (query, keys, v))
        for f in (
            lambda q, k, v: additive_attention(q, k, values, v, return_weights=True)[1],
            lambda q, k, v: plain(q, k, each, v),
        )
    )
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "hessian"])
@pytest.mark.parametrize("name", OPS)
def test_in_single_precision(name, transform):
    """If torch's own kernel would serve attention, which has first derivatives only."""
    ours, plain, make = OPS[name]
    inputs = make()
    found = TRANSFORMS[transform](ours, inputs)
    torch.testing.assert_close(found, TRANSFORMS[transform](plain, inputs), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "hessian"])
def test_half_precision_attention(transform):
    inputs = tuple(x.bfloat16() for x in attention())
    found = TRANSFORMS[transform](scaled_attention, inputs)
    exact = TRANSFORMS[transform](plain_attention, tuple(x.double() for x in inputs))
    torch.testing.assert_close(found, exact, rtol=1e-1, atol=1e-1, check_dtype=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 4, 5), (1, 1, 4, 5), (2, 1, 1, 5), (5,)], ids=str)
def test_per_sample_gradients_of_a_shared_bias_and_mask(shape, causal):
    q, k, v = (x.double() for x in attention())
    bias, mask = torch.randn(shape, dtype=torch.float64), torch.rand(4, 5) > 0.3
    mask[:, 0] = True
    samples = torch.stack([q, 2 * q, -q])
    hidden = ~mask | (~torch.ones(4, 5).tril().bool() if causal else torch.zeros(4, 5).bool())

    def ours(bias, k, q):
        return scaled_attention(q, k, v, bias, mask, causal).sin().sum()

    def plain(bias, k, q):
        return (
            plain_attention(q, k, v, (bias + torch.zeros(4, 5)).masked_fill(hidden, -1e300))
            .sin()
            .sum()
        )

    found, right = (
        vmap(grad(f, argnums=(0, 1)), in_dims=(None, None, 0))(bias, k, samples)
        for f in (ours, plain)
    )
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_many_gradients_of_an_expanded_large_bias():
    """vmap copies what it cannot view; the backward's scores must be rounded like the forward's."""
    q, k, v = (torch.randn(2, 1, n, 8) for n in (40, 50, 50))
    bias = torch.full((2, 1, 1, 50), -1e6).expand(2, 1, 40, 50)
    out, pull = vjp(lambda *x: scaled_attention(*x, bias, path="kernel"), q, k, v)
    cotangent = torch.randn(out.shape)
    many = vmap(pull)(torch.stack((cotangent, cotangent)))
    for one, each in zip(pull(cotangent), many, strict=True):
        torch.testing.assert_close(each, one.expand(each.shape))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap(grad)"])
@pytest.mark.parametrize("name", OPS)
def test_kernels_serve_within_transforms(name, transform, monkeypatch):
    """And not the formulas in plain torch, whose results are the same."""
    served = []
    perform = _cuda.perform

    def count(call, *args):
        served.append(call)
        perform(call, *args)

    monkeypatch.setattr(_cuda, "perform", count)
    ours, _, make = OPS[name]
    TRANSFORMS[transform](ours, make())
    # Where score vectors differ, each entry of the batch of three has a call.
    each = 3 if transform == "vmap(grad)" and ours is additive_attention else 1
    assert len(served) == each * (1 if transform == "jvp" else 2)


def test_plain_formulas_hide_what_the_kernels_hide():
    """The lowest number of a dtype fills masks: a row of nothing else is no softmax of equal scores."""
    q, k, v = attention()
    bias = torch.zeros(4, 5)
    bias[::2] = bias[:, 1] = torch.finfo(torch.float32).min

    def attend(v):
        return scaled_attention(q, k, v, bias, path="kernel")

    compiled = torch.compile(lambda v: vjp(attend, v)[0], backend="eager", fullgraph=True)
    right = attend(v)
    assert right[:, :, ::2].count_nonzero() == 0
    torch.testing.assert_close(compiled(v), right)
    cotangent = torch.zeros_like(right).requires_grad_()
    v.requires_grad_()
    (d_v,) = torch.autograd.grad(attend(v), v, cotangent, create_graph=True)
    (second,) = torch.autograd.grad(d_v, cotangent, v.detach())
    torch.testing.assert_close(second, right)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_hides_by_all_that_is_given(causal, has_mask, has_bias):
    q, k, v = attention()
    bias = torch.randn(4, 5).masked_fill(torch.rand(4, 5) > 0.8, -torch.inf) if has_bias else None
    mask = torch.rand(4, 5) > 0.4 if has_mask else None
    right = scaled_attention(q, k, v, bias, mask, causal, 0.3, path="kernel")
    torch.testing.assert_close(_eager.attention(q, k, v, bias, mask, causal, 0.3), right)


def test_masked_additive_attention():
    query, keys, values, v = (x.double() for x in additive())
    masks = torch.rand(3, 2, 3) > 0.4
    masks[..., 0] = True

    def ours(mask, *args):
        return additive_attention(*args, mask).sin().sum()

    def plain(mask, query, keys, values, v):
        score = torch.tanh(keys[:, None] + query[:, :, None]) @ v
        score = score.masked_fill(~mask[:, None], -torch.inf)
        return (torch.softmax(score, -1) @ values).sin().sum()

    def once(f):
        return grad(f, argnums=(1, 2, 3, 4))

    def twice(f):
        return grad(lambda *args: grad(f, argnums=1)(*args).sin().sum(), argnums=(1, 2, 3, 4))

    for derived in (once, twice):
        found, right = (
            vmap(derived(f), in_dims=(0, None, None, None, None))(masks, query, keys, values, v)
            for f in (ours, plain)
        )
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


def test_within_sequence_gradients():
    query, keys, values, v = (x.double() for x in additive())
    right = grad(lambda x: plain_additive(x, keys, values, v).sin().sum())(query)
    with sequence_gradients(keys, values):
        ours = grad(lambda x: additive_attention(x, keys, values, v).sin().sum())(query)
    torch.testing.assert_close(ours, right)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["grad", "grad(grad)"])
@pytest.mark.parametrize("name", OPS)
def test_compiles_in_one_graph(name, transform):
    ours, _, make = OPS[name]

    def derivatives(*inputs):
        return TRANSFORMS[transform](ours, inputs)

    inputs = make()
    torch._dynamo.reset()
    compiled = torch.compile(derivatives, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(*inputs), derivatives(*inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_sequence_gradients_compile_in_one_graph():
    """The context was a Python variable that torch's compiler does not follow."""
    inputs = [x.double().requires_grad_() for x in additive()]

    def steps(query, keys, values, v):
        with sequence_gradients(keys, values):
            first = additive_attention(query, keys, values, v)
            return first + additive_attention(query * first.sum(), keys, values, v)

    torch._dynamo.reset()
    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")(*inputs)
    plain = steps(*inputs)
    torch.testing.assert_close(compiled, plain)
    found, right = (torch.autograd.grad(x.sin().sum(), inputs) for x in (compiled, plain))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("n", [3, 50])
def test_scale_of_attention_has_no_tangent(n):
    """The tangent of a tensor was dropped: the derivative along it was 0."""
    q, scale = torch.randn(1, 2, n, 8), torch.tensor(0.5)
    for along_scale in (
        lambda: jvp(lambda s: scaled_attention(q, q, q, scale=s), (scale,), (scale,)),
        lambda: jacfwd(lambda s: scaled_attention(q, q, q, scale=s))(scale),
    ):
        with pytest.raises(OpError, match="scale must be a number, got a tensor with a tangent"):
            along_scale()
    right = jvp(lambda x: scaled_attention(x, q, q, scale=0.5), (q,), (q,))
    fixed = jvp(lambda x: scaled_attention(x, q, q, scale=scale), (q,), (q,))
    detached = jvp(
        lambda x: scaled_attention(x, q, q, scale=0 * x.detach().sum() + 0.5), (q,), (q,)
    )
    for found in (fixed, detached):
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("n", [3, 50])
def test_scale_of_attention_is_no_outer_transforms_variable(n):
    """An inner transform takes it for a constant: the outer one's derivative along it was 0."""
    q, scale = torch.randn(1, 2, n, 8), torch.tensor(0.5)

    def inner(q, scale):
        return grad(lambda k: scaled_attention(k, q, q, scale=scale).sin().sum())(q).sum()

    def pushed(q, scale):
        return jvp(lambda k: scaled_attention(k, q, q, scale=scale), (q,), (q,))[1]

    def mixed(scale):  # also computed from the inner one's variable
        return grad(lambda k: scaled_attention(k, q, q, scale=scale + 0 * k.detach().sum()).sum())(
            q
        )

    for function in (lambda s: inner(q, s), lambda s: pushed(q, s), mixed):
        with pytest.raises(OpError, match="scale must be a number, got a tensor with a tangent"):
            jvp(function, (scale,), (scale,))
    for function in (lambda s: inner(q, s), lambda s: mixed(s).sum()):
        with pytest.raises(OpError, match="got a tensor that requires a gradient"):
            grad(function)(scale)
    right = jvp(lambda x: inner(x, 0.5), (q,), (q,))
    for constant in (lambda x: scale, lambda x: 0 * x.detach().sum() + 0.5):
        found = jvp(lambda x, c=constant: inner(x, c(x)), (q,), (q,))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("kappa", [10.0, 1e6])
def test_forward_mode_at_the_mode_and_for_large_kappa(kappa):
    """Once, cosines that rounding puts above 1 had no derivative, and lgamma in float32 had no digits."""
    loc = sphere(64, 33)
    scale = torch.full((64,), kappa)
    _, along = jvp(lambda x: power_spherical_log_prob(x, loc, scale), (loc,), (loc,))
    torch.testing.assert_close(along, scale / 2, rtol=1e-6, atol=0.0)

    def curvature(loc, scale):
        return grad(grad(lambda s: power_spherical_log_prob(loc, loc, s)))(scale)

    right = curvature(loc[0].double(), scale[0].double())
    torch.testing.assert_close(curvature(loc[0], scale[0]).double(), right, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_derivatives_at_the_antipode(dtype):
    """Cosines one rounding step beside it, in every way of asking; forward mode's and second derivatives were not."""
    loc = torch.eye(5, dtype=dtype)[2]
    inputs = (-loc, loc, torch.tensor(3.0, dtype=dtype))
    given = torch.func.grad(power_spherical_log_prob, (0, 1, 2))(*inputs)
    for i, g in enumerate(given):
        tangents = tuple(torch.ones_like(x) * (i == k) for k, x in enumerate(inputs))
        out, pushed = torch.func.jvp(power_spherical_log_prob, inputs, tangents)
        assert torch.isneginf(out)
        torch.testing.assert_close(pushed, g.sum(), rtol=1e-5, atol=0.0)
    second = torch.func.hessian(power_spherical_log_prob)(*inputs)
    step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(second, -3 / step**2 * torch.outer(loc, loc), rtol=1e-5, atol=0.0)
