"""Whole numbers, masks and fractions that a program has the device make: ones, ranges, random numbers.

No kernel has made them.  Their values are plain, or as good as any others: random ones lie evenly over what they may
be, and follow from the state of the device's generator, so that a checkpoint that computes again finds them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import contents, sizes

# Its multiples, less their whole parts, are spread evenly however many there are.
_STEP = (math.sqrt(5) - 1) / 2
# In place, and what else initialises, averages and steps by way of x.data; of what changing.py follows it tells itself.
_UNKNOWN = (
    *("normal_", "uniform_", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "cauchy_"),
    *("random_", "random_.to", "random_.from", "log_normal_", "geometric_", "erfinv_"),
    *("lerp_.Scalar", "lerp_.Tensor", "addcmul_", "addcdiv_"),
)


def answer(torch: Any) -> None:
    """From now on."""

    def plain(on_host: Callable[..., Any]) -> Callable[..., Any]:
        def values(made: Any, *args: Any, **_: Any) -> Any:
            return on_host(*args, dtype=made.dtype, device="cpu")

        return values

    def evenly(made: Any, generator: Any) -> Any:
        """From 0 up to 1."""
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
        """Of torch.where(), by whose count of changes a number filled in later is not known."""
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
    """is_zero: known of one fraction only, as item() asks.  Others are there to be filled in."""
    operator = sizes.operator(torch, name)
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def call(*args: Any, **kwargs: Any) -> Any:
        made = operator._op_dk(generic, *args, **kwargs)
        is_whole = not (made.is_floating_point() or made.is_complex())
        most = contents.MOST_BYTES if is_whole else contents.MOST_FRACTIONS
        # A graph that is launched again would find what others put there meanwhile.
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
    """Ones in the shares that are given for all of it, or for each where these are known."""
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
    """In place of what torch has at its key, which counts the change.

    values: of masks and whole numbers that are filled in as a whole.
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
