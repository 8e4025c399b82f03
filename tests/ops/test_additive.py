"""additive_attention, its module, and the gradients gathered once per sequence."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from pyalloc.errors import OpError
from pyalloc.ops import AdditiveAttention, _additive, additive_attention, sequence_gradients

from .reference import relative, within


def eager(query, keys, values, v, mask=None):
    score = torch.tanh(keys[:, None] + query[:, :, None]) @ v
    if mask is not None:
        seen = mask.any(-1)[:, None, None]
        score = score.masked_fill(~mask[:, None] & seen, -torch.inf)
        probs = torch.softmax(score, -1) * seen
    else:
        probs = torch.softmax(score, -1)
    return probs @ values, probs


def check_nan_stays():
    """A batch entry with a NaN has one in every gradient; the others have none."""
    leaves = [x.requires_grad_() for x in problem(2, 3, 4, 5, 6)]
    with torch.no_grad():
        leaves[1][0, 1, 2] = torch.nan
    grads = torch.autograd.grad(additive_attention(*leaves).sum(), leaves)
    for g in grads[:3]:
        assert g[0].isnan().all() and not g[1].isnan().any()
    assert grads[3].isnan().all()
    query, *rest = (x.detach() for x in problem(2, 3, 4, 5, 6))
    query[0, 1, 2] = torch.nan  # so no score is a number
    out = additive_attention(query, *rest)
    assert out[0, 1].isnan().all() and out.isnan().sum() == out[0, 1].numel()


def test_nan_stays(isa):
    check_nan_stays()


def problem(n_b, n_q, n_s, n_h, n_e):
    return [
        torch.randn(n_b, n_q, n_h),
        torch.randn(n_b, n_s, n_h),
        torch.randn(n_b, n_s, n_e),
        torch.randn(n_h) / n_h**0.5,
    ]


def results(function, tensors, grads, mask):
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs = function(*leaves, mask)
    grads = [g.to(outs[0].dtype) for g in grads]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, grads)]


def fused(*args):
    return additive_attention(*args, return_weights=True)


SHAPES = [(5, 3, 9, 50, 70), (1, 1, 1, 1, 1), (4, 1, 50, 128, 256), (3, 2, 17, 100, 33)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients(shape, masked, isa):
    tensors = problem(*shape)
    mask = torch.rand(shape[0], shape[2]) > 0.4 if masked else None
    if masked:
        mask[0] = False
    grads = [torch.randn(*shape[:2], n, dtype=torch.float64) for n in (shape[4], shape[2])]
    ours = results(fused, tensors, grads, mask)
    torchs = results(eager, tensors, grads, mask)
    exact = results(eager, [x.double() for x in tensors], grads, mask)
    for mine, other, right in zip(ours, torchs, exact, strict=True):
        is_zero = float(right.norm()) < 1e-9  # one s: the probability is 1 whatever the score
        within(mine, other, right, floor=right.numel() ** 0.5 if is_zero else 1e-300)
    if masked:
        assert not ours[0][0].any() and not torch.isnan(ours[0]).any()


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_long_rows_of_values(order, isa):
    """Here four keys at a time add their values before the largest score is known; more than caches hold."""
    n_b, n_s = 45, 11
    query, keys, values, v = problem(n_b, 1, n_s, 8, 20_000)
    if order != "random":
        step = torch.linspace(-1.5, 1.5, n_s) * (1 if order == "rising" else -1)
        keys = keys / 4 + step[:, None] * v.sign()
        query = query / 4
    v = 30 * v
    mask = torch.rand(n_b, n_s) > 0.3
    mask[0], mask[1, :5], mask[2, 5:] = False, False, False
    values[~mask] = torch.nan
    tensors = [query, keys, values, v]
    context, probs = fused(*tensors, mask)
    exact, right = eager(*(x.double() for x in (query, keys, values.nan_to_num(), v)), mask)
    assert relative(context, exact) < 1e-6 and relative(probs, right) < 1e-6
    assert not context[0].any()
    alone = fused(*(x[3:4] for x in tensors[:3]), v, mask[3:4])
    assert torch.equal(alone[0], context[3:4]) and torch.equal(alone[1], probs[3:4])


@pytest.mark.parametrize("hidden", [slice(0, 2), slice(-2, None)], ids=["left", "right"])
def test_what_padding_holds_is_nobodys_business(hidden, isa):
    """A NaN in the first row of values got past the mask; in other rows it did not."""
    pads_may_hold_nan(hidden)


def pads_may_hold_nan(hidden):
    tensors = problem(3, 2, 5, 7, 20)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, hidden] = False
    mask[0] = False
    right = additive_attention(*tensors, mask)
    tensors[2][~mask] = torch.nan
    found = additive_attention(*tensors, mask)
    assert torch.equal(found, right) and not found[0].any()


def test_saturated_and_tiny_arguments(isa):
    tensors = problem(2, 1, 40, 64, 8)
    tensors[1] *= torch.logspace(-6, 3, 40)[None, :, None]
    exact, _ = eager(*(x.double() for x in tensors))
    assert relative(additive_attention(*tensors), exact) < 1e-6


def test_gradients_to_second_order():
    tensors = [x.double().requires_grad_() for x in problem(2, 2, 3, 4, 3)]
    mask = torch.tensor([[True, True, False], [True, False, True]])

    def one_step(query, *rest):
        return additive_attention(query[:, 0], *rest, mask, return_weights=True)

    for function in (fused, lambda *a: additive_attention(*a, mask), one_step):
        assert gradcheck(function, tensors)
        assert gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["context", "weights", "both"])
def test_no_gradient_is_made_up_for_weights_that_nobody_used(used, monkeypatch):
    """Through the registered op, as on a card, where that would be a separate launch."""
    leaves = [x.requires_grad_() for x in problem(2, 3, 5, 8, 6)]

    def gradients(outs):
        return torch.autograd.grad(sum(outs[i].square().sum() for i in used), leaves)

    right = gradients(additive_attention(*leaves, return_weights=True))
    kernel, given = _additive.backward_kernel, []

    def seen(inputs, probs, grads, *args, **options):
        given.append(grads[1])
        return kernel(inputs, probs, grads, *args, **options)

    monkeypatch.setattr(_additive, "backward_kernel", seen)
    found = gradients(torch.ops.pyalloc.additive_attention(*leaves, None))
    assert [x is None for x in given] == [used == (0,)]
    assert all(map(torch.equal, found, right))


def test_a_single_query_has_no_query_dimension():
    query, keys, values, v = problem(3, 1, 5, 8, 6)
    out, weights = additive_attention(query[:, 0], keys, values, v, return_weights=True)
    assert out.shape == (3, 6) and weights.shape == (3, 5)
    torch.testing.assert_close(out, eager(query, keys, values, v)[0][:, 0])


def decode(query, keys, values, v, steps):
    state, total = query[:, 0], 0
    for _ in range(steps):
        context = additive_attention(state, keys, values, v)
        state = torch.tanh(state + context)
        total = total + context.square().sum()
    return total


def test_sequence_gradients_are_those_of_the_steps():
    tensors = [x.requires_grad_() for x in problem(4, 1, 11, 24, 24)]
    plain = torch.autograd.grad(decode(*tensors, steps=6), tensors)
    with sequence_gradients(tensors[1], tensors[2]):
        total = decode(*tensors, steps=6)
        assert additive_attention(*tensors).grad_fn.name() == "_StepBackward"  # not the op's own
    for _ in range(2):
        gathered = torch.autograd.grad(total, tensors, retain_graph=True)
        for a, b in zip(gathered, plain, strict=True):
            assert relative(a, b) < 1e-6
    # a backward without gradients of keys and values leaves nothing in their buffers
    torch.autograd.grad(total, tensors[0], retain_graph=True)
    again = torch.autograd.grad(total, tensors, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(again, gathered, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_steps_of_a_sequence_in_checkpoints(use_reentrant):
    """The backward computes a step again after the context has ended."""
    query, keys, values, v = (x.requires_grad_() for x in problem(2, 1, 5, 8, 8))

    def step(state):
        return torch.tanh(state + additive_attention(state, keys, values, v))

    def run(call):
        state = query[:, 0]
        for _ in range(3):
            state = call(state)
        return state.square().sum()

    run(step).backward()
    plain = [x.grad for x in (query, keys, values, v)]
    query.grad = keys.grad = values.grad = v.grad = None
    with sequence_gradients(keys, values):
        total = run(lambda state: checkpoint(step, state, use_reentrant=use_reentrant))
    total.backward()
    for x, right in zip((query, keys, values, v), plain, strict=True):
        assert relative(x.grad, right) < 1e-6


def test_sequence_gradients_only_for_its_own_tensors():
    tensors = [x.requires_grad_() for x in problem(2, 1, 5, 8, 8)]
    other = [x.requires_grad_() for x in problem(2, 1, 5, 8, 8)]
    plain = torch.autograd.grad(decode(*other, steps=2), other)
    with sequence_gradients(tensors[1], tensors[2]):
        inside = torch.autograd.grad(decode(*other, steps=2), other)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@pytest.mark.parametrize("wider", [0, 3], ids=["query", "v"])
def test_sequence_gradients_where_the_query_is_wider_than_the_keys(wider):
    """Its float64 was once read as float32."""
    tensors = problem(2, 1, 5, 8, 6)
    tensors[wider] = tensors[wider].double()
    tensors = [x.requires_grad_() for x in tensors]
    right, _ = eager(*(x.double() for x in tensors))
    with sequence_gradients(tensors[1], tensors[2]):
        out = additive_attention(*tensors)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, right)
    found = torch.autograd.grad(out.sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(right.sum(), tensors))


def traced_real(step, given):
    return make_fx(step)(*given)


def traced_fake(step, given):
    return make_fx(step, tracing_mode="symbolic")(*given)


def traced_jit(step, given):
    return torch.jit.trace(step, tuple(given), check_trace=False)  # which compares addresses


@pytest.mark.filterwarnings("ignore")  # torch's own, about its tracer
@pytest.mark.parametrize("trace", [traced_real, traced_fake, traced_jit])
def test_sequence_gradients_where_calls_are_traced(trace):
    """The kernel was called past the tracer, which kept its earlier result, or what was there before."""

    def step(query, keys, values, v):
        with sequence_gradients(keys, values):
            return additive_attention(query, keys, values, v)

    traced = trace(step, problem(2, 1, 5, 8, 6))
    given = problem(2, 1, 5, 8, 6)
    torch.testing.assert_close(traced(*given), eager(*given)[0])


def test_sequence_gradients_of_tensors_without_data():
    with FakeTensorMode():
        tensors = [torch.empty_like(x).requires_grad_() for x in problem(2, 1, 5, 8, 8)]
        with sequence_gradients(tensors[1], tensors[2]):
            total = decode(*tensors, steps=2)
        grads = torch.autograd.grad(total, tensors)
    assert [g.shape for g in grads] == [x.shape for x in tensors]


def test_saved_for_backward_does_not_grow_with_the_keys():
    tensors = [x.requires_grad_() for x in problem(8, 1, 50, 256, 512)]
    own = {x.untyped_storage().data_ptr() for x in tensors}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        additive_attention(*tensors)
    assert sum(kept.values()) <= 8 * 50 * 4
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        eager(*tensors)
    assert sum(kept.values()) >= 40 * 8 * 50 * 4


def test_a_sequence_lets_go_of_its_tensors():
    query, keys, values, v = (x.requires_grad_() for x in problem(2, 1, 4, 5, 5))
    gc.disable()  # which would find cycles, but only some time later
    try:
        keys, values = keys * 1, values * 1
        with sequence_gradients(keys, values):
            total = decode(query, keys, values, v, steps=2)
        total.backward()
        left = [weakref.ref(keys), weakref.ref(values)]
        del keys, values, total
        assert [x() for x in left] == [None, None]
    finally:
        gc.enable()


def test_module_and_repeats():
    layer = AdditiveAttention(12, 10, 16)
    raw, values = torch.randn(3, 7, 10), torch.randn(3, 7, 5)
    keys = layer.project_keys(raw)
    context, weights = layer(torch.randn(3, 4, 12), keys, values)
    assert context.shape == (3, 4, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4))
    grads = [
        torch.autograd.grad(context.sum(), list(layer.parameters()), retain_graph=True)
        for _ in "ab"
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("zero", range(5))
def test_an_empty_dimension_gives_zeros_and_gradients(zero):
    shape = [2, 3, 4, 5, 6]
    shape[zero] = 0
    n_b, n_q, n_s, n_h, n_e = shape
    sizes = ((n_b, n_q, n_h), (n_b, n_s, n_h), (n_b, n_s, n_e), (n_h,))
    tensors = [torch.randn(s) for s in sizes]
    out = additive_attention(*(x.requires_grad_() for x in tensors))
    assert out.shape == (n_b, n_q, n_e) and not torch.isnan(out).any()
    torch.autograd.grad(out.sum(), tensors, allow_unused=True)


def test_wrong_arguments_are_named_with_what_was_given():
    query, keys, values, v = problem(2, 3, 4, 5, 6)
    with pytest.raises(OpError, match=r"query must be \(2, 5\) or \(2, Q, 5\).*got \(2, 3, 4\)"):
        additive_attention(query[..., :4], keys, values, v)
    with pytest.raises(OpError, match=r"values must be \(2, 4, E\), got \(2, 3, 6\)"):
        additive_attention(query, keys, values[:, :3], v)
    with pytest.raises(OpError, match=r"v must be \(5,\), got \(4,\)"):
        additive_attention(query, keys, values, v[:4])
    with pytest.raises(OpError, match=r"mask must be bool \(2, 4\), got torch.float32 \(2, 4\)"):
        additive_attention(query, keys, values, v, torch.ones(2, 4))
    with pytest.raises(OpError, match="mask must be a tensor, got list"):
        additive_attention(query, keys, values, v, [[True] * 4] * 2)
    for wrong in ((keys.half(), values), (keys.half(), values.half()), (keys, values.double())):
        with (
            pytest.raises(OpError, match="both be float32 or both float64"),
            sequence_gradients(*wrong),
        ):
            pass
    for wrong in ((keys.sum(), values), (keys, values[0])):
        with (
            pytest.raises(OpError, match=r"keys must be \(B, S, H\) and values \(B, S, E\)"),
            sequence_gradients(*wrong),
        ):
            pass


def test_backward_that_failed_halfway_leaves_nothing_behind():
    query, keys, values, v = (x.requires_grad_() for x in problem(2, 1, 4, 5, 6))
    fails = [True]

    def once(grad):
        if fails[0]:
            fails[0] = False
            raise RuntimeError("halfway")

    with sequence_gradients(keys, values):
        first = additive_attention(query, keys, values, v)
        first.register_hook(once)
        second = additive_attention(query + first.sum(), keys, values, v)
    leaves = (query, keys, values, v)
    with pytest.raises(RuntimeError, match="halfway"):
        torch.autograd.grad(second.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(second.sum(), leaves)
    one = additive_attention(query, keys, values, v)
    right = torch.autograd.grad(
        additive_attention(query + one.sum(), keys, values, v).sum(), leaves
    )
    for a, b in zip(again, right, strict=True):
        assert relative(a, b) < 1e-5


def test_keys_changed_in_place_are_noticed():
    query, keys, values, v = (x.requires_grad_() for x in problem(2, 1, 4, 5, 6))
    mine = keys * 1
    with sequence_gradients(mine, values):
        out = additive_attention(query, mine, values, v)
    with torch.no_grad():
        mine += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("is_copied", [False, True], ids=["as they lie", "of a copy"])
def test_keys_changed_before_a_step_are_those_of_the_step(is_copied):
    """Also if rows with gaps were copied, and if the change has a gradient."""
    tensors = [x.requires_grad_() for x in problem(2, 1, 4, 5, 6)]

    def run(inside):
        query, keys, values, v = tensors
        keys = (keys * 1).mT.contiguous().mT if is_copied else keys * 1
        with sequence_gradients(keys, values) if inside else contextlib.nullcontext():
            keys.mul_(3)
            total = additive_attention(query, keys, values, v).square().sum()
        return total, torch.autograd.grad(total, tensors)

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("asks", ["grad mode", "keys", "values"])
def test_gradients_that_are_asked_for_within_the_context(asks):
    query, keys, values, v = problem(2, 1, 4, 5, 6)
    learned = [query, v] if asks in ("keys", "values") else [query, keys, values, v]
    for x in learned:
        x.requires_grad_()
    late = {"keys": [keys], "values": [values]}.get(asks, [])
    with torch.set_grad_enabled(asks != "grad mode"), sequence_gradients(keys, values):
        for x in late:
            x.requires_grad_()
        with torch.enable_grad():
            out = additive_attention(query, keys, values, v)
    leaves = learned + late
    found = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    right = torch.autograd.grad(additive_attention(query, keys, values, v).sum(), leaves)
    torch.testing.assert_close(found, right)
