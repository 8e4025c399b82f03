"""What is found out once about a call serves all calls like it, but no others, and not if someone observes them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pyalloc._core import op_call, tensor_key
from pyalloc.ops import _plans, attention, scaled_attention

from .test_registration import OPS

key = tensor_key(torch.Tensor, torch.nn.Parameter)
has_keys = pytest.mark.skipif(
    key(torch.zeros(1)) is None, reason="this torch lacks DLPack's functions for C: no plan is kept"
)


class Marked(torch.Tensor):
    pass


@has_keys
def test_key_is_of_all_but_the_numbers():
    x = torch.zeros(2, 3, 4)
    assert key(x) == key(torch.ones(2, 3, 4)) == key(torch.nn.Parameter(x)) == key(x.clone()[:])
    assert key(x, None) == key(x, None) != key(None, x)
    others = (x.double(), x.int(), x.half(), x.bfloat16(), x[:1], x[..., None], x[:, :, ::2])
    found = {key(y) for y in (x, *others, x.transpose(0, 1), x.expand(2, 3, 4)[:1, :1, :1])}
    assert len(found) == 10
    assert key() != key(None) != key(x)


@has_keys
def test_no_key():
    """If something other than a dense tensor's own memory is read."""
    x = torch.zeros(2, 3)
    assert key(x) is not None
    negative = torch._neg_view(x)
    many = torch.zeros((1,) * 9)
    for y in (x.as_subclass(Marked), x.to("meta"), x[:0], x.to_sparse(), negative, many, 1, "x"):
        assert key(y) is None and key(x, y) is None
    assert key(*[x] * 11) is None


FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_char_p)


def test_call():
    """Pointers of tensors, and numbers, go to their places; the rest stays as it was given."""
    seen = []

    @FUNCTION
    def function(structure, target):
        seen.append((structure[:4], target))
        return 7

    address = ctypes.cast(function, ctypes.c_void_p).value
    given, places = b"".join(n.to_bytes(8, "little") for n in (1, 2, 3, 4)), b"\0\0\x10\0\x18\0"
    x = torch.zeros(3)
    assert op_call(address, given, places, b"there", x, 5, None) == 7
    assert seen == [([x.data_ptr(), 2, 5, 4], b"there")]
    for wrong, error in (
        ((address, given, places, b"", x, x), ValueError),  # too few
        ((address, given, b"\x19\0", b"", x), ValueError),  # beyond the end
        ((address, bytes(1025), b"", b""), ValueError),
        ((address, given, b"\0\0", b"", "x"), AttributeError),
        ((address, given, b"\0\0", b"", x.to_sparse()), RuntimeError),
        ((address, "x", b"", b""), TypeError),
        ((address, given), TypeError),
    ):
        with pytest.raises(error):
            op_call(*wrong)
    assert len(seen) == 1


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # torch's forward mode scripts rules of its own
@pytest.mark.parametrize("name", OPS)
def test_who_looks_at_a_call_sees_it_though_it_is_known(name):
    op, make = OPS[name]
    inputs = [x.requires_grad_() for x in make()]
    right = op(*inputs)
    grads = torch.autograd.grad(right.sum(), inputs)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(op(*inputs), right)
    assert counter.get_total_flops() > 0
    with Watching() as watching:
        op(*inputs)
    assert any("pyalloc" in each for each in watching.seen)
    first = torch.stack([inputs[0]] * 2)
    mapped = torch.vmap(lambda x: op(x, *inputs[1:]))(first)
    torch.testing.assert_close(mapped, torch.stack([right] * 2))
    found = torch.func.grad(lambda x: op(x, *inputs[1:]).sum())(inputs[0])
    torch.testing.assert_close(found, grads[0])
    tangent = torch.randn_like(inputs[0])
    with torch.autograd.forward_ad.dual_level():
        dual = op(torch.autograd.forward_ad.make_dual(inputs[0], tangent), *inputs[1:])
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    # for half inputs, autocast gives log-probabilities and contexts in float32; attention of float32 inputs in half
    given = inputs if name == "attention" else [x.bfloat16() for x in inputs]
    cold = op(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert {op(*given).dtype, cold.dtype} == {torch.float32, torch.bfloat16}
    marked = op(inputs[0].as_subclass(Marked), *inputs[1:])
    assert torch.equal(marked.as_subclass(torch.Tensor), right)


@pytest.mark.parametrize("name", OPS)
def test_the_same_without_keys(name, monkeypatch):
    """As with a torch that lacks DLPack's table of functions."""
    op, make = OPS[name]
    inputs = make()
    right = op(*inputs)
    monkeypatch.setattr(_plans, "key_of", lambda *_: None)
    assert torch.equal(op(*inputs), right)


@has_keys
def test_what_is_kept_has_an_end(monkeypatch):
    monkeypatch.setattr(_plans, "MOST", 3)
    attention._known.clear()
    for n in range(1, 9):
        x = torch.randn(1, 1, n, 4)
        assert torch.equal(*(scaled_attention(x, x, x, path="kernel") for _ in range(2)))
        assert 1 <= len(attention._known) <= 3


def test_options_are_part_of_what_is_known():
    q, k, v = torch.randn(3, 1, 2, 12, 8)

    def kernel(**options):
        return scaled_attention(q, k, v, path="kernel", **options)

    plain = kernel()
    assert not torch.equal(kernel(causal=True), plain) and torch.equal(kernel(), plain)
    assert torch.equal(kernel(causal=1), kernel(causal=True))
    assert not torch.equal(kernel(scale=1), plain) and torch.equal(kernel(scale=8**-0.5), plain)
    scale = torch.tensor(2.0)
    twice = kernel(scale=scale)
    scale.fill_(1)
    assert torch.equal(kernel(scale=scale), kernel(scale=1.0)) and not torch.equal(
        kernel(scale=scale), twice
    )
    dropped = [kernel(dropout=0.5) for _ in range(2)]
    assert not torch.equal(*dropped) and torch.equal(kernel(), plain)
    negative = torch._neg_view(q)
    assert torch.equal(
        scaled_attention(negative, k, v, path="kernel"),
        scaled_attention(-q, k, v, path="kernel"),
    )


def test_what_is_made_lies_on_the_tensors_own_device(monkeypatch):
    """torch's quick way makes tensors on the current device of the call."""
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(_plans, "_empty_cuda", lambda *_: "on the current device")
    like = SimpleNamespace(
        is_cpu=False, is_cuda=True, dtype=torch.half, device="meta", get_device=lambda: 1
    )
    make = _plans.maker((2, 3), like)
    elsewhere = make()
    assert (elsewhere.device.type, elsewhere.dtype) == ("meta", torch.half)
    assert (elsewhere.shape, elsewhere.stride()) == ((2, 3), (3, 1))
    current[0] = 1
    assert make() == "on the current device"
