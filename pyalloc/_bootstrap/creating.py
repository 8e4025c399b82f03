"""Tensors that a program has the device create: ones, ranges, random numbers.

No kernel creates them in a dry run, so their values are written from the host.  Random values are spread evenly over
their range and depend on the device generator's state, so that a recomputing checkpoint gets the same ones again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import contents, sizes

# The fractional parts of its multiples are spread evenly, however many there are (golden ratio).
_STEP = (math.sqrt(5) - 1) / 2
# In-place operators with unknown results; some initialise, average or step through x.data.  changing.py follows others.
_UNKNOWN = (
    *("normal_", "uniform_", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "cauchy_"),
    *("random_", "random_.to", "random_.from", "log_normal_", "geometric_", "erfinv_"),
    *("lerp_.Scalar", "lerp_.Tensor", "addcmul_", "addcdiv_"),
)


def answer(torch: Any) -> None:
    """Writes what these operators create, from now on."""

    def plain(on_host: Callable[..., Any]) -> Callable[..., Any]:
        def values(made: Any, *args: Any, **_: Any) -> Any:
            return on_host(*args, dtype=made.dtype, device="cpu")

        return values

    def evenly(made: Any, generator: Any) -> Any:
        """Values from 0 up to, not including, 1."""
        if generator is None:
            generator = torch.cuda.default_generators[made.device.index]
        first = 1 + generator.get_offset() % 2**20
        places = torch.arange(first, first + made.numel(), dtype=torch.float64, device="cpu")
        return (places * _STEP).frac().view(made.shape)

    def fractions(made: Any, *_: Any, generator: Any = None, **_names: Any) -> Any:
        return evenly(made, generator)

    def numbers(made: Any, *limits: Any, generator: Any = None, **_: Any) -> Any:
        low, high = (0, *limits[:-1])[-2:]  # the last one is the shape
        return (evenly(made, generator) * (high - low)).long() + low

    def order(made: Any, *_: Any, generator: Any = None, **_names: Any) -> Any:
        return evenly(made, generator).argsort()

    def make(values: Callable[..., Any], *names: str) -> None:
        for name in names:
            sizes.implement(torch, "CUDA", name, _made(torch, name, values))

    def scalar(value: Any, **kind: Any) -> Any:
        """A scalar for torch.where()."""
        made = torch.empty((), **kind)
        if not contents.is_repeated(torch):
            contents.write(torch, made, value)
        return made

    sizes.implement(torch, "CUDA", "scalar_tensor", scalar)
    make(plain(torch.arange), "arange", "arange.start", "arange.start_step")
    make(plain(torch.linspace), "linspace")
    make(plain(torch.eye), "eye", "eye.m")
    make(plain(torch.full), "full")
    make(plain(torch.ones), "ones")
    make(lambda *_args, **_names: 1, "ones_like", "new_ones")
    make(lambda _made, *args, **_names: args[-1], "full_like", "new_full")
    make(numbers, "randint", "randint.generator", "randint.low", "randint.low_generator")
    make(order, "randperm", "randperm.generator")
    make(fractions, "rand", "rand.generator")
    for name in ("zeros", "zeros_like", "new_zeros"):
        sizes.implement(torch, "CUDA", name, _made(torch, name, lambda *_, **_names: 0, True))
    for name in ("bernoulli", "bernoulli.p"):
        sizes.implement(torch, "CUDA", name, _drawn(torch, name, evenly))

    def drawn(x: Any, p: float = 0.5, *, generator: Any = None) -> Any:
        return evenly(x, generator) < p

    for name in _UNKNOWN:
        values = drawn if name == "bernoulli_.float" else None
        unknown = _unknown(torch, name, values)
        sizes.implement(torch, "ADInplaceOrView", name, unknown, with_keyset=True)


def _made(
    torch: Any, name: str, values: Callable[..., Any], is_zero: bool = False
) -> Callable[..., Any]:
    """is_zero: the operator makes zeros.  They are known for a single float, as item() asks; others are only blank."""
    operator = sizes.operator(torch, name)
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def call(*args: Any, **kwargs: Any) -> Any:
        made = operator._op_dk(generic, *args, **kwargs)
        is_whole = not (made.is_floating_point() or made.is_complex())
        most = contents.MOST_BYTES if is_whole else contents.MOST_FRACTIONS
        # In a CUDA graph the block may hold other values by the time of the launch.
        if not 0 < made.nbytes <= most or contents.is_repeated(torch):
            return made
        if is_zero and (is_whole or made.numel() > 1):
            if not contents.is_gradient(torch, made):
                contents.note_blank(made, 0)
        else:
            contents.write(torch, made, values(made, *args, **kwargs))
        return made

    return call


def _drawn(torch: Any, name: str, evenly: Callable[..., Any]) -> Callable[..., Any]:
    """bernoulli(): True with the given probability, or with each element's own if those are known."""
    kernel = sizes.generic(torch, sizes.operator(torch, name))

    def bernoulli(x: Any, *p: float, generator: Any = None) -> Any:
        made = kernel(x, *p, generator=generator)
        if not 0 < made.nbytes <= contents.MOST_FRACTIONS or contents.is_repeated(torch):
            return made
        shares = p[0] if p else contents.put(torch, x, True)
        if shares is not None:
            depth = 0 if p else contents.depth(torch, (x,))
            contents.write(torch, made, evenly(made, generator) < shares, depth=depth)
        return made

    return bernoulli


def _unknown(torch: Any, name: str, values: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Replaces torch's kernel at the key that raises the version.

    values: gives the contents of an integer tensor or mask that is filled as a whole; None: they are unknown.
    """
    operator = sizes.operator(torch, name)
    below, deeper = (
        torch._C._AutoDispatchBelowADInplaceOrView,
        torch._C._after_ADInplaceOrView_keyset,
    )

    def is_filled(x: Any) -> bool:
        is_whole = not (x.is_floating_point() or x.is_complex())
        is_all = x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
        is_known = is_whole and is_all and 0 < x.nbytes <= contents.MOST_BYTES
        return is_known and not (x.is_inference() or contents.is_repeated(torch))

    def call(keyset: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        with below():
            operator.redispatch(keyset & deeper, x, *args, **kwargs)
        torch.autograd.graph.increment_version(x)
        if x.is_cuda and x.layout is torch.strided and contents.is_plain(torch, x):
            if values is not None and is_filled(x):
                contents.on_host(torch, x).copy_(values(x, *args, **kwargs))
                contents.note_change(x, x._version, True, 0)
            else:
                contents.note_random(torch, x)
        return x

    return call
