"""No thread of a CUDA kernel uses what another writes without a barrier in between, nor a block what another writes.

Tested on the emulation, which sees each read and write of shared and global memory.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import pytest
import torch

from pyalloc.ops import additive_attention, scaled_attention, sequence_gradients
from pyalloc.ops._library import PowerSphericalArgs, View

from . import attention_cases, emulation
from . import test_additive as additive_cases
from . import test_power_spherical as spherical_cases
from .test_cuda_tensor import BIG, Driver

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def racing(tmp_path_factory):
    built = emulation.build(tmp_path_factory.mktemp("races"), emulation.RACES)
    if built is None:
        pytest.skip("the emulation needs a C++ compiler")
    library = ctypes.CDLL(str(built))
    library.emu_races.restype = ctypes.c_char_p
    return built, library


@pytest.fixture
def no_races(racing):
    """The emulation's library; a test that uses it fails if races are found."""
    built, library = racing
    library.emu_races()
    with emulation.launching(built):
        yield library
    assert library.emu_races().decode() == ""


@contextmanager
def without_tensor_cores(library):
    """If the shared memory that they need is not available, the kernels of plain fp32 serve."""
    library.emu_limit_shared(48 << 10)
    yield
    library.emu_limit_shared(227 << 10)


def both_ways(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.grad(sum(out.sum() for out in outs), leaves)


def test_a_forgotten_barrier_is_found(racing):
    built, library = racing
    one = torch.zeros(1, 1)
    Driver(built).product("test_forgotten_barrier", one, one, (2, 256))
    found = library.emu_races().decode()
    assert "test_forgotten_barrier: a thread reads what another wrote in shared memory: " in found


@pytest.mark.parametrize(
    "shape",
    [(5, 3, 2, 40), (17, 15, 2, 40), (1, 5, 97, 40), (130, 9, 1, 20), (130, 9, 1, 64)],
    ids=str,
)
def test_power_spherical(shape, no_races):
    """A warp a t, a block a t, tiles with and without tensor cores; with cosines that are too coarse."""
    value, loc, scale, weights = spherical_cases.problem(*shape)
    value[0], loc[-1] = -loc[0], 5 * loc[-1]
    both_ways(spherical_cases.log_prob, (value, loc, scale))
    both_ways(spherical_cases.mixture, (value, loc, scale, weights))


def test_samples_in_chunks(no_races):
    both_ways(spherical_cases.log_prob, spherical_cases.problem(1030, 2, 1, 10)[:3])


def test_a_block_with_all_gradients_of_its_tiles(racing, no_races):
    """As with many t, each with several tiles."""
    n, dim = BIG + 5, 64
    value, loc, scale, _ = (x.squeeze(1) for x in spherical_cases.problem(n, n, 1, dim))
    grad, room = torch.randn(n, n), torch.empty(2 * n * dim + n)
    args = PowerSphericalArgs(n_l=n, n_m=n, n_t=1, dim=dim, grad=grad.data_ptr())
    args.value, args.loc = View(value.data_ptr(), dim, 0), View(loc.data_ptr(), dim, 0)
    args.scale, args.grad_l, args.grad_m = View(scale.data_ptr(), 1, 0), n, 1
    args.d_value = View(room.data_ptr(), dim, 0)
    args.d_loc = View(room[n * dim :].data_ptr(), dim, 0)
    args.d_scale = View(room[2 * n * dim :].data_ptr(), 1, 0)
    Driver(racing[0]).launch("pya_ps_backward_tensor", args)


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 9, 50, 70), (2, 1, 41, 132, 264), (1, 2, 300, 8, 12)],
    ids=["few", "parts", "many"],
)
def test_additive(shape, no_races):
    """One part of the keys, several that the last block combines, and more than it takes."""
    query, keys, values, v = additive_cases.problem(*shape)
    both_ways(lambda *a: additive_attention(*a, return_weights=True), (query, keys, values, v))

    def steps(query, keys, values, v):
        with sequence_gradients(keys, values):
            return tuple(additive_attention(query * k, keys, values, v) for k in (1, 2))

    both_ways(steps, (query, keys, values, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1, 66, 98, 8, 9, (1, 2, 66, 98)), (1, 1, 1, 66, 66, 66, 3, (66, 1))],
    ids=["small heads", "large heads"],
)
def test_attention(shape, causal, no_races):
    """With a bias for each score, and with a shared one; on tensor cores and with the kernels of plain fp32."""
    tensors = attention_cases.problem(*shape)

    def function(*args):
        return scaled_attention(*args, causal=causal, dropout=0.3, path="kernel")

    both_ways(function, tensors)
    with without_tensor_cores(no_races):
        both_ways(function, tensors)
