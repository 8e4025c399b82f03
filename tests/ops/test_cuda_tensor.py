"""Tensor-core products by themselves, on the CPU emulation: layout, split, copies, and the error they leave."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pyalloc.ops import _eager
from pyalloc.ops._library import PowerSphericalArgs, View

from .reference import sphere

BIG = 128
ROOM = 103424  # bytes of shared memory: enough for every product
ONE_WARP = {"test_multiply", "test_half_multiply", "test_matrices"}


class Driver:
    """Launches the emulator's kernels directly."""

    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.module = ctypes.c_void_p()
        assert self.library.cuModuleLoadData(ctypes.byref(self.module), None) == 0

    def launch(self, name, args, *, threads=256, grid=(1, 1, 1)):
        function = ctypes.c_void_p()
        got = self.library.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode())
        assert got == 0, f"no kernel {name}"
        assert self.library.cuFuncSetAttribute(function, 8, ROOM) == 0
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        shape = (*grid, threads, 1, 1, ROOM)
        assert self.library.cuLaunchKernel(function, *shape, None, arguments, None) == 0

    def product(self, name, a, b, shape=(BIG, BIG), dim=None):
        """What one of the tests' kernels makes of two matrices."""
        out = torch.full(shape, torch.nan)
        args = PowerSphericalArgs(
            n_l=a.shape[0],
            n_m=b.shape[0],
            n_t=1,
            dim=b.shape[1] if dim is None else dim,
            value=View(a.data_ptr(), a.stride(0), 0),
            loc=View(b.data_ptr(), b.stride(0), 0),
            out=out.data_ptr(),
        )
        self.launch(name, args, threads=32 if name in ONE_WARP else 256)
        return out


@pytest.fixture(scope="module")
def driver(emulator):
    return Driver(emulator)


def test_a_forgotten_barrier_shows(driver):
    """Warps take turns in a varying order, and what a block did not write is NaN."""
    out = driver.product("test_forgotten_barrier", torch.zeros(1, 1), torch.zeros(1, 1), (2, 256))
    assert out[0].isnan().any() and not out[0].isnan().all()
    assert out[1].unique().tolist() == [0, 1]


def tf32(x):
    """Truncated to 11 significant bits."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_multiply_and_a_wrong_layout(driver):
    a, b = tf32(torch.randn(16, 8)), tf32(torch.randn(8, 8))
    exact = a.double() @ b.double()
    bar = 1e-6 * (a.abs() @ b.abs()).max()
    assert (driver.product("test_multiply", a, b, (16, 8), 0) - exact).abs().max() < bar
    for wrong in (1, 2, 3):  # a row for a column; two k; a row for a column
        got = driver.product("test_multiply", a, b, (16, 8), wrong)
        assert (got - exact).abs().max() > 1e4 * bar


def test_multiply_reads_eleven_bits_and_cuts_off(driver):
    a, b = torch.zeros(16, 8), torch.eye(8)
    a[0, 0] = 1 + 2**-11  # the twelfth bit
    a[1, 0], a[1, 1], b[1, 0] = 1, 1.75, 2**-24  # 1 + 1.75 * 2**-24, nearer to 1 + 2**-23
    out = driver.product("test_multiply", a, b, (16, 8), 0)
    assert out[0, 0] == 1 and out[1, 0] == 1


def test_half_multiply_and_a_wrong_layout(driver):
    a, b = torch.randn(16, 16).half().float(), torch.randn(16, 8).half().float()
    exact = a.double() @ b.double()
    bar = 1e-6 * (a.abs() @ b.abs()).max()
    assert (driver.product("test_half_multiply", a, b, (16, 8), 0) - exact).abs().max() < bar
    for wrong in (1, 2, 3):  # a row for a column; two k; a row for a column
        got = driver.product("test_half_multiply", a, b, (16, 8), wrong)
        assert (got - exact).abs().max() > 1e4 * bar


def test_half_multiply_cuts_off_but_not_whole_numbers(driver):
    a, b = torch.zeros(16, 16), torch.eye(16, 8)
    a[0, 0], a[0, 8], b[8, 0] = 1, 1.75, 2**-24
    a[1], b[:, 1] = 1023, 1023
    out = driver.product("test_half_multiply", a, b, (16, 8), 0)
    assert out[0, 0] == 1 and out[1, 1] == 16 * 1023**2 < 2**24


def test_matrices_and_transposed(driver):
    x = torch.arange(256.0).view(32, 8)
    for transposed in (0, 1):
        got = driver.product("test_matrices", x, x, (4, 8, 8), transposed)
        right = x.view(4, 8, 8)
        assert torch.equal(got, right.mT if transposed else right)


def test_halves_are_rounded_as_torch_does(driver):
    x = torch.cat(
        [
            torch.randn(500) * 10.0 ** torch.randint(-8, 6, (500,)),
            torch.tensor([0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -1e9, 2**-25, 2**-24]),
            torch.tensor([3 * 2**-25, 2**-14 - 2**-26, 1e-30, torch.inf, -torch.inf, torch.nan]),
        ]
    )
    got = driver.product("test_halves", x[:, None], x[:, None], (2, len(x)))
    right = x.half().float()
    assert torch.equal(got.nan_to_num(7e7), right.expand(2, -1).nan_to_num(7e7))


SIZES = [(128, 128, 128), (128, 128, 33), (5, 130, 40), (128, 7, 32), (70, 128, 64), (1, 1, 2)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_pairs_are_exact_enough(size, driver):
    n_l, n_m, dim = size
    a, b = (torch.randn(n, dim) / dim**0.5 for n in (n_l, n_m))
    got = driver.product("test_pairs", a, b)[:n_l, :n_m]
    exact = a.double() @ b[:BIG].double().T
    assert (got - exact).abs().max() < 1e-6 * exact.norm() / exact.numel() ** 0.5 * dim**0.5


WEIGHED = ["test_weigh_rows", "test_weigh_columns"]


@pytest.mark.parametrize("name", [*WEIGHED, *(f"{name}_plainly" for name in WEIGHED)])
@pytest.mark.parametrize("size", [(128, 128), (128, 37), (65, 130), (3, 8)], ids=str)
def test_weighed_sums_are_exact_enough(size, name, driver):
    n, dim = size
    w, b = torch.randn(BIG, BIG), torch.randn(n, dim)
    (w[n:] if "columns" in name else w[:, n:]).zero_()
    got = driver.product(name, w, b)[:, :dim]
    used = w[:n].T if "columns" in name else w[:, :n]
    exact = used.double() @ b[:, :BIG].double()
    assert (got[:, :BIG] - exact).abs().max() < 1e-6 * n**0.5 * 4


def test_rows_that_lie_oddly(driver):
    """A stride and a start that no 16-byte copy can take."""
    a = torch.rand(128 * 67 + 1)[1:].view(128, 67)[:, :64]
    b = torch.randn(128, 64)
    got = driver.product("test_pairs", a, b)
    assert torch.equal(got, driver.product("test_pairs", a.contiguous(), b))


def test_not_a_number_and_infinity_are_not_lost(driver):
    a, b = torch.ones(128, 32), torch.ones(128, 32)
    a[3, 5], a[4, 6], b[7, 1] = torch.nan, torch.inf, torch.nan
    got = driver.product("test_pairs", a, b)
    assert got[[3, 4]].isnan().all() and got[:, 7].isnan().all()
    got = torch.cat((got[:3], got[5:]))
    assert (torch.cat((got[:, :7], got[:, 8:]), 1) == 32).all()


def cosines(dim, kind):
    """128 samples and 128 locations, unit vectors as a caller would have them."""
    value = sphere(BIG, dim)
    loc = sphere(BIG, dim)
    if kind == "mode":
        loc = value.clone()
    elif kind == "near the mode":
        loc = torch.nn.functional.normalize(value + 1e-4 * torch.randn(BIG, dim), dim=-1)
    elif kind == "near the antipode":
        loc = -torch.nn.functional.normalize(value + 1e-4 * torch.randn(BIG, dim), dim=-1)
    elif kind == "cancelling":  # large products that sum to nearly nothing
        value[:, dim // 2 :] = value[:, : dim - dim // 2]
        loc[:, dim // 2 :] = -loc[:, : dim - dim // 2] * (1 + 1e-5)
    return value, loc


KINDS = ["random", "mode", "near the mode", "near the antipode", "cancelling"]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_that_of_fp32(kind, dim, driver):
    """The launcher's rule: from 64 dimensions on, the three products are as good as fp32."""
    value, loc = cosines(dim, kind)
    exact = value.double() @ loc.double().T
    near = kind in {"mode", "near the mode", "near the antipode"}
    pick = torch.diagonal if near else torch.flatten  # the intended pairs
    error = [
        float((pick(driver.product(name, value, loc)) - pick(exact)).square().mean().sqrt())
        for name in ("test_pairs", "test_big")
    ]
    assert error[0] <= max(1.5 * error[1], 2**-24), error


@pytest.mark.parametrize("dim", [1024, 4096])
def test_cosines_of_many_dimensions_keep_their_low_digits(dim, driver):
    """Near 0, where sums over samples cancel: once 2.2e-8 and 4.1e-8, and an error of 3.4e-6."""
    value, loc = cosines(dim, "random")
    wrong = driver.product("test_pairs", value, loc) - value.double() @ loc.double().T
    assert float(wrong.square().mean().sqrt()) < 2**-26


TENSOR = {"pya_ps_forward_tensor": 1, "pya_ps_backward_tensor": 1}
PLAIN = {"pya_ps_forward": 1, "pya_ps_backward_loc": 2, "pya_ps_backward_value": 2}  # blocks


def log_prob_and_gradients(driver, kernels, value, loc, scale, grad):
    """With one t."""
    n_l, n_m, dim = len(value), len(loc), value.shape[1]
    found = [torch.full_like(x, torch.nan) for x in (grad, value, loc, scale)]
    args = PowerSphericalArgs(n_l=n_l, n_m=n_m, n_t=1, dim=dim)
    pairs = {"value": value, "loc": loc, "d_value": found[1], "d_loc": found[2]}
    for name, x in pairs.items():
        setattr(args, name, View(x.data_ptr(), dim, 0))
    for name, x in {"scale": scale, "d_scale": found[3]}.items():
        setattr(args, name, View(x.data_ptr(), 1, 0))
    args.out, args.out_l, args.out_m = found[0].data_ptr(), n_m, 1
    args.grad, args.grad_l, args.grad_m = grad.data_ptr(), n_m, 1
    for name, blocks in kernels.items():
        driver.launch(name, args, grid=(blocks, 1, 1))
    return found


def test_weights_of_every_size_keep_their_digits(driver):
    """Samples and components with very different gradients, in one tile."""
    value, loc, scale = sphere(100, 64), sphere(90, 64), torch.rand(90) * 50
    grad = torch.randn(100, 90) * 10.0 ** torch.randint(-30, 10, (100, 1))
    grad *= 10.0 ** -(torch.arange(90) % 7)
    _, *found, _ = log_prob_and_gradients(driver, TENSOR, value, loc, scale, grad)
    w = grad.double() * scale / (1 + value.double() @ loc.double().T)
    for got, right in zip(found, (w @ loc.double(), w.T @ value.double()), strict=True):
        assert ((got - right).norm(dim=1) < 1e-6 * right.norm(dim=1)).all()


@pytest.mark.parametrize("large", [5.0, 1e5, 1e30])
@pytest.mark.parametrize("of_loc", [False, True])
def test_numbers_that_have_no_halves(large, of_loc, driver):
    """No unit vectors: what is infinite in half precision is computed again another way, as in fp32."""
    value, loc, scale, grad = sphere(70, 64), sphere(64, 64), torch.rand(64), torch.randn(70, 64)
    scale[9] = 0  # uniform
    (loc if of_loc else value)[7] = large * torch.randn(64).sign()
    found = log_prob_and_gradients(driver, TENSOR, value, loc, scale, grad)
    plain = log_prob_and_gradients(driver, PLAIN, value, loc, scale, grad)
    for got, right in zip(found, plain, strict=True):
        assert torch.equal(torch.isfinite(got), torch.isfinite(right))
        known = torch.isfinite(right)
        assert (got - right)[known].norm() < 1e-6 * right[known].norm()


def test_backward_of_many_tiles(driver):
    """Several tiles of both kinds in one block, and the same in separate blocks, bit for bit."""
    n_l, n_m, dim = 130, 140, 64
    value, loc = sphere(n_l, dim), sphere(n_m, dim)
    scale, grad = torch.rand(n_m) * 50, torch.randn(n_l, n_m)
    found = []
    for parts in (1, 4):
        d_value, d_loc, d_scale = (torch.full_like(x, torch.nan) for x in (value, loc, scale))
        args = PowerSphericalArgs(n_l=n_l, n_m=n_m, n_t=1, dim=dim)
        pairs = {"value": value, "loc": loc, "d_value": d_value, "d_loc": d_loc}
        for name, x in pairs.items():
            setattr(args, name, View(x.data_ptr(), dim, 0))
        for name, x in {"scale": scale, "d_scale": d_scale}.items():
            setattr(args, name, View(x.data_ptr(), 1, 0))
        args.grad, args.grad_l, args.grad_m = grad.data_ptr(), n_m, 1
        driver.launch("pya_ps_backward_tensor", args, grid=(1, parts, 1))
        found.append((d_value, d_loc, d_scale))
    leaves = [x.double().requires_grad_() for x in (value, loc, scale)]
    exact = torch.autograd.grad(
        _eager.power_spherical(leaves[0][:, None], leaves[1][:, None], leaves[2][:, None]),
        leaves,
        grad[None].double(),
    )
    for whole, apart, right in zip(*found, exact, strict=True):
        assert torch.equal(whole, apart)
        assert (whole - right).norm() < 1e-6 * right.norm()
