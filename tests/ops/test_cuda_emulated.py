"""The CUDA kernels' own source, launched by the real launchers, on a CPU emulation of the device."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from pyalloc.errors import OpError
from pyalloc.ops import (
    _cuda,
    additive_attention,
    power_spherical_log_prob,
    power_spherical_mixture_log_prob,
    scaled_attention,
    sequence_gradients,
)
from pyalloc.ops._library import AdditiveArgs, Call, PowerSphericalArgs, View, library

from . import attention_cases
from . import test_additive as additive_cases
from . import test_power_spherical as spherical_cases
from .reference import relative
from .test_cuda_tensor import Driver


def gradients(function, tensors, seed=3):
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(seed)
    grads = [torch.randn(x.shape) for x in outs]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, grads)]


def agree(function, tensors, monkeypatch, *, bar=2e-6, floor=1e-300):
    """The emulated launch against the C kernels."""
    launched = gradients(function, tensors)
    monkeypatch.setattr(_cuda, "on_device", lambda x: False)
    called = gradients(function, tensors)
    for a, b in zip(launched, called, strict=True):
        assert relative(a, b, floor) < bar


@pytest.mark.parametrize(
    "shape",
    # the first six have few pairs, a block a t or a warp; (130, 140, 2, 64) and (70, 65, 3, 131) take the tensor cores:
    # blocks for both sides, one block a t, tails everywhere
    [
        (5, 3, 2, 4),
        (17, 15, 2, 70),
        (1, 1, 9, 300),
        (5, 3, 97, 4),
        (1, 32, 99, 10),
        (1, 1, 101, 300),
        (130, 140, 2, 33),
        (257, 1, 2, 10),
        (130, 140, 2, 64),
        (70, 65, 3, 131),
        (2, 130, 1, 70),
    ],
    ids=str,
)
def test_power_spherical(shape, device, monkeypatch):
    value, loc, scale, weights = spherical_cases.problem(*shape)
    agree(spherical_cases.log_prob, (value, loc, scale), monkeypatch)
    monkeypatch.setattr(_cuda, "on_device", lambda x: True)
    agree(spherical_cases.mixture, (value, loc, scale, weights), monkeypatch, bar=2e-5)


@pytest.mark.parametrize("shape", [(900, 3, 2, 5), (1030, 2, 1, 70)], ids=str)
def test_many_samples_and_few_t_are_cut(shape, device, monkeypatch):
    """One block went through all samples of a component."""
    value, loc, scale, weights = spherical_cases.problem(*shape)
    agree(spherical_cases.log_prob, (value, loc, scale), monkeypatch)
    monkeypatch.setattr(_cuda, "on_device", lambda x: True)
    agree(spherical_cases.mixture, (value, loc, scale, weights), monkeypatch, bar=2e-5)


@pytest.mark.parametrize("dim", [5, 64])
def test_blocks_that_walk(dim, device, emulator, monkeypatch):
    """More t than a grid's second index can count."""
    value, loc, scale, weights = spherical_cases.problem(70, 130, 3, dim)
    calls = ctypes.CDLL(str(emulator))
    calls.emu_limit_y(1)
    try:
        agree(spherical_cases.log_prob, (value, loc, scale), monkeypatch)
        monkeypatch.setattr(_cuda, "on_device", lambda x: True)
        agree(spherical_cases.mixture, (value, loc, scale, weights), monkeypatch, bar=2e-5)
    finally:
        calls.emu_limit_y(65535)


def test_which_problems_are_cut():
    room = library().pya_ops_cuda_ps_room
    room.restype = ctypes.c_int64
    wanted = {name: View(1, 0, 0) for name in ("d_loc", "d_scale")}

    def numbers(n_l, n_m, n_t, **of):
        return room(ctypes.byref(PowerSphericalArgs(n_l=n_l, n_m=n_m, n_t=n_t, dim=10, **of)))

    assert numbers(1025, 3, 1, **wanted) == 9 * 3 * 11  # chunks of 128 samples
    assert numbers(1025, 3, 1, d_scale=View(1, 0, 0)) == 9 * 3
    assert numbers(100_000, 3, 1, **wanted) == 261 * 3 * 11
    assert numbers(896, 3, 1, **wanted) == numbers(1025, 3, 3, **wanted) == 0  # fewer launches
    assert numbers(100_000, 96 * 128, 1, **wanted) == 0  # enough blocks
    assert numbers(1025, 3, 1, d_value=View(1, 0, 0)) == 0
    assert numbers(1025, 3, 0, **wanted) == numbers(1025, 0, 1, **wanted) == 0  # nothing to do


def test_less_shared_memory_than_the_tensor_kernels_want(device, emulator, monkeypatch):
    """As on a later card that runs them from PTX: the fp32 kernels serve."""
    calls = ctypes.CDLL(str(emulator))
    calls.emu_limit_shared(99 << 10)
    try:
        tensors = spherical_cases.problem(20, 30, 1, 64)[:3]
        agree(spherical_cases.log_prob, tensors, monkeypatch)
    finally:
        calls.emu_limit_shared(227 << 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(dtype, device, monkeypatch):
    value, loc, scale = (x.to(dtype) for x in spherical_cases.problem(9, 7, 2, 64)[:3])
    launched = spherical_cases.log_prob(value, loc, scale)
    assert launched.dtype == dtype
    monkeypatch.setattr(_cuda, "on_device", lambda x: False)
    exact = spherical_cases.log_prob(value.float(), loc.float(), scale.float())
    assert relative(launched, exact) < torch.finfo(dtype).eps


@pytest.mark.parametrize("n", [5, 40])
def test_power_spherical_corners(n, device):
    """With few pairs, and in a tile."""
    loc = torch.zeros(5, 6)
    loc[:, 1] = 1
    value = torch.zeros(n, 1, 6)
    value[..., 1] = 1
    kappa = torch.tensor([0.0, 1.0, 1e3, 1e7, float("nan")])
    at_mode = power_spherical_log_prob(value, loc, kappa)[-1]
    right = spherical_cases.textbook(loc.double(), loc.double(), kappa.double())
    torch.testing.assert_close(at_mode[:4].double(), right[:4], rtol=2e-7, atol=3.5e-5)
    opposite = power_spherical_log_prob(-value, loc, kappa)[-1]
    assert torch.isfinite(opposite[0]) and torch.isneginf(opposite[1:4]).all()
    assert torch.isnan(at_mode[4]) and torch.isnan(opposite[4])
    assert torch.isnan(power_spherical_log_prob(value, loc, torch.tensor(-1e30))).all()
    of_three = (-value[:, 0], loc[1:4], kappa[1:4], torch.zeros(3))
    mixed = [x.clone().requires_grad_() for x in of_three]
    out = power_spherical_mixture_log_prob(*mixed)
    assert torch.isneginf(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), mixed))


@pytest.mark.parametrize(
    "shape",
    # one part of keys, several, too many for one block to combine; the last of each have rows of multiples of four
    [
        (1, 1, 1, 1, 1),
        (2, 210, 3, 5, 6),
        (2, 210, 3, 4, 8),
        (2, 3, 9, 50, 70),
        (2, 1, 40, 300, 290),
        (2, 2, 41, 132, 1040),
        (1, 1, 140, 9, 133),
        (1, 2, 300, 8, 12),
    ],
    ids=str,
)
def test_additive(shape, device, monkeypatch):
    tensors = additive_cases.problem(*shape)
    mask = torch.rand(shape[0], shape[2]) > 0.4
    mask[0] = False
    for m in (None, mask):
        monkeypatch.setattr(_cuda, "on_device", lambda x: True)
        floor = 0.1 * min(x.numel() for x in tensors) ** 0.5
        agree(
            lambda *a, m=m: additive_attention(*a, m, return_weights=True),
            tensors,
            monkeypatch,
            floor=floor,
        )


@pytest.mark.parametrize("wide", range(3), ids=["none", "keys", "values"])
def test_additive_wherever_rows_begin(wide, device, monkeypatch):
    """Four numbers are loaded at once only if all rows allow it."""
    query, keys, values, v = additive_cases.problem(2, 3, 19, 140, 36)

    def gaps(x, is_wide):
        n = x.shape[-1]
        room = torch.full((*x.shape[:-1], n + (4 if is_wide else 3)), torch.nan)
        room[..., -n:] = x
        return room[..., -n:]

    def function(query, keys, values, v):
        return additive_attention(
            gaps(query, wide == 1), gaps(keys, wide == 1), gaps(values, wide == 2), v
        )

    agree(function, (query, keys, values, v), monkeypatch)


@pytest.mark.parametrize("n_s", [20, 150])
def test_additive_whatever_the_workspace_holds(n_s, device, monkeypatch):
    """Including the tickets of its parts, which nobody clears, whichever block comes last."""
    tensors = additive_cases.problem(3, 2, n_s, 40, 24)
    launch, fills, found = _cuda.launch, [0, None, 0xFF, None, 0x55, 0x80, 0], []

    def launched(call, like, *tensors):
        fill, workspace = fills[len(found)], tensors[-1]
        if fill is not None:
            ctypes.memset(workspace.data_ptr(), fill, workspace.nbytes)
        launch(call, like, *tensors)
        tickets = (ctypes.c_uint64 * 6).from_address(workspace.data_ptr())
        assert fill != 0 or not any(tickets)

    monkeypatch.setattr(_cuda, "launch", launched)
    with torch.no_grad():
        for _ in fills:
            found.append(additive_attention(*tensors, return_weights=True))
    for context, probs in found[1:]:
        assert torch.equal(context, found[0][0]) and torch.equal(probs, found[0][1])


def test_how_keys_are_cut():
    room = library().pya_ops_cuda_additive_room
    room.restype = ctypes.c_int64

    def parts(n_b, n_q, n_s):
        rows = n_b * n_q
        numbers = room(ctypes.byref(AdditiveArgs(n_b=n_b, n_q=n_q, n_s=n_s, n_h=4, n_e=8)))
        return (numbers - (2 * rows + 3) // 4 * 4 - rows * n_s) / rows / (8 + 2)

    assert parts(80, 1, 50) == 4
    assert parts(1, 1, 50) == 7  # a key for each warp of a block
    assert parts(8, 1, 1000) == 40
    assert parts(500, 1, 1000) == 4  # no more keys than threads
    assert parts(80, 1, 1) < 0 and parts(300, 2, 256) < 0  # alone


def test_additive_with_gradients_of_the_query_alone(device, monkeypatch):
    query, *rest = additive_cases.problem(2, 2, 19, 36, 40)
    agree(lambda x: additive_attention(x, *rest), (query,), monkeypatch)


def test_what_padding_holds_is_nobodys_business(device):
    for hidden in (slice(0, 2), slice(-2, None)):
        additive_cases.pads_may_hold_nan(hidden)


@pytest.mark.parametrize("shape", [(2, 3, 9, 50, 70), (2, 1, 70, 140, 260)], ids=str)
def test_additive_in_a_sequence(shape, device, monkeypatch):
    """Later steps add to the gradients of keys and values that the first one wrote."""
    tensors = additive_cases.problem(*shape)

    def steps(query, keys, values, v):
        with sequence_gradients(keys, values):
            contexts = [additive_attention(query * (1 + k), keys, values, v) for k in range(3)]
        return tuple(contexts)

    agree(steps, tensors, monkeypatch)


def test_queries_by_the_million(emulator):
    """Three times 128 columns for each are more than 32 bits count: the write went before the gradient."""
    n, grad, probs = 6_000_000, torch.ones(4), torch.zeros(6_000_000)
    d_values, room = torch.zeros(1, 1, 4), torch.empty(n)
    probs[0], probs[-1] = 0.25, 0.5
    args = AdditiveArgs(n_b=1, n_q=n, n_s=1, n_h=4, n_e=4, probs=probs.data_ptr())
    args.values, args.grad = View(d_values.data_ptr(), 4, 4), View(grad.data_ptr(), 0, 0)
    args.d_values, args.workspace = View(d_values.data_ptr(), 4, 4), room.data_ptr()
    # only the thread of the first query's warp that has these columns: others would take half a minute
    Driver(emulator).launch("pya_additive_backward_values", args, threads=1)
    assert d_values.flatten().tolist() == [0.75] * 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 70, 90, 24, 40, (1, 2, 70, 90)),
        (2, 2, 2, 17, 80, 7, 9, (2, 1, 1, 80)),
        (1, 2, 2, 66, 66, 70, 130, (66, 1)),
        (2, 1, 1, 3, 2, 1, 1, (3, 2)),
    ],
    ids=str,
)
def test_attention(shape, causal, device, monkeypatch):
    tensors = attention_cases.problem(*shape)
    floor = (min(x.numel() for x in tensors) * shape[6]) ** 0.5
    agree(lambda *a: attention_cases.kernel(*a, causal=causal), tensors, monkeypatch, floor=floor)


def test_attention_masks_and_dropout(device, monkeypatch):
    tensors = attention_cases.problem(1, 2, 2, 70, 66, 8, 8, (70, 66))
    tensors[3][::3] = -1e9
    mask = torch.rand(1, 2, 70, 66) > 0.5
    mask[:, :, 0] = False

    def function(*args):
        torch.manual_seed(4)
        return scaled_attention(*args, mask=mask, dropout=0.3)

    agree(function, tensors, monkeypatch)


def test_other_devices_are_refused():
    """Their pointers are not host addresses."""
    with pytest.raises(OpError, match="CPU and CUDA tensors; move the inputs, got xpu:0"):
        _cuda.on_device(SimpleNamespace(is_cuda=False, is_cpu=False, device="xpu:0"))


def test_dropout_is_not_captured(monkeypatch):
    """All replays of a graph would drop the same.  Ask the tensors' device; once, the current one was asked."""
    current = [0]

    @contextlib.contextmanager
    def device_is(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device_is)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    on_device = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    _cuda.refuse_captured_dropout(0.0, on_device)
    with pytest.raises(OpError, match="at every replay; set dropout=0"):
        _cuda.refuse_captured_dropout(0.1, on_device)


def test_nan_stays_in_gradients(device):
    """They tell a loss scaler to skip the step."""
    for n, dim in ((6, 5), (12, 5), (12, 64)):
        value, loc, scale, weights = spherical_cases.problem(n, 4, 1, dim)
        value[2, 0, 1] = torch.nan
        _, d_value, d_loc, d_scale = gradients(spherical_cases.log_prob, (value, loc, scale))
        assert d_value[2].isnan().all() and not d_value[:2].isnan().any()
        assert d_loc.isnan().all() and d_scale.isnan().all()
        found = gradients(spherical_cases.mixture, (value, loc, scale, weights))
        assert found[1][2].isnan().all() and all(x.isnan().all() for x in found[2:])
    additive_cases.check_nan_stays()


def test_launch_too_large_says_so(device):
    args = bytes(AdditiveArgs(n_b=1 << 20, n_q=1 << 20, n_e=1))
    with pytest.raises(OpError, match=r"^additive_forward: the launch exceeds .* split the batch"):
        _cuda.launch(Call.of("additive", "forward", args, b"", on_device=True), torch.zeros(1))


def test_no_dimension_ends_at_65535_blocks(device, emulator):
    """Only a grid's first index goes further; batches, heads, keys and tiles count there."""
    n, leaf = 70_000, torch.zeros(1, requires_grad=True)

    def launched(out):
        torch.autograd.grad(out.sum(), leaf)

    calls = ctypes.CDLL(str(emulator))
    calls.emu_only_look(True)
    try:
        many = leaf.expand(n, 1, 1)
        launched(additive_attention(many[:, 0], many, many, leaf))
        assert calls.emu_blocks(0) >= n
        calls.emu_only_look(True)
        rows = leaf.expand(1, 8 * n, 1)  # eight to a block
        launched(additive_attention(leaf[None], rows, rows, leaf))
        assert calls.emu_blocks(0) >= n
        calls.emu_only_look(True)
        four = leaf.expand(n, 1, 1, 1)
        launched(scaled_attention(four, four, four, bias=four, path="kernel"))
        assert calls.emu_blocks(0) >= n
        # they request no gradient, which would take 2.3 GB
        samples, one, loc = torch.zeros(64).expand(n * 128, 64), torch.ones(1), leaf.expand(1, 64)
        launched(power_spherical_log_prob(samples, loc, one))
        launched(power_spherical_mixture_log_prob(samples, loc, one, one))
        power_spherical_log_prob(samples[0], samples, one)
    finally:
        calls.emu_only_look(False)


def test_launch_from_any_thread_and_context(device):
    """A new thread has no context; the context that a thread has is still there afterwards."""
    x = torch.randn(4, 8)
    right = power_spherical_log_prob(x, x, torch.ones(4))
    found = []
    thread = threading.Thread(
        target=lambda: found.append(power_spherical_log_prob(x, x, torch.ones(4)))
    )
    thread.start()
    thread.join()
    assert torch.equal(found[0], right)


def test_every_kernel_of_the_source_is_found(device, emulator):
    text = (emulator.parent / "ops.cu").read_bytes()
    names = _cuda.kernel_names(text)
    assert [n for f in _cuda.FAMILIES for n in _cuda.kernel_names(text, f)] == names
    library().pya_ops_cuda_has.restype = ctypes.c_bool
    assert all(library().pya_ops_cuda_has(ctypes.byref(device), name) for name in names)
    assert not library().pya_ops_cuda_has(ctypes.byref(device), b"pya_nothing")


def test_unknown_kernel_is_a_driver_error(device, tmp_path):
    assert library().pya_ops_cuda_open(str(tmp_path / "none.so").encode()) == 3
    assert "cannot be opened" in _cuda._error(library())
