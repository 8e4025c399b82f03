"""Random calls of the ops, in every way that torch has of calling them, against the formula in float64.

python tests/ops/fuzz_ops.py [--seconds 60] [--seed 1] [--runs N] [--compiled] [--case SEED]

A case is its seed: op, shapes, dtypes, memory layouts, masks, instruction set, threads and the way of calling follow
from it.  --compiled adds torch.compile and torch.export, one second a case; --case runs one again.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 2)]
    __package__ = "ops"

from pyalloc.errors import OpError
from pyalloc.ops import (
    _additive,
    _attention,
    _library,
    _power_spherical,
    cpu_isa,
    sequence_gradients,
    set_cpu_isa,
)

from .fuzz_inputs import Draw, bits, guarded, same
from .fuzz_problems import HALVES, KINDS, Problem

LIMIT_S = 200  # for one case; a longer one is a finding
TINY = 1e-34  # a product with a probability below 1e-38, which may be flushed to zero


# --- comparing -----------------------------------------------------------------------------------


def outside(found: Tensor, low: Tensor, high: Tensor) -> str:
    """Nothing, or where a result is outside its bounds."""
    x = found.detach().double()
    known = ~(low.isnan() | high.isnan() | (torch.isneginf(low) & torch.isposinf(high)))
    bad = known & ~((x >= low) & (x <= high))
    if not bad.any():
        return ""
    at = tuple(int(i) for i in bad.nonzero()[0])
    return f"{int(bad.sum())} of {bad.numel()}, first at {at}: {x[at]:.9g} not in [{low[at]:.9g}, {high[at]:.9g}]"


def rounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bounds for a result rounded to its dtype, which may overflow or be flushed to zero there."""
    info = torch.finfo(dtype)
    floor = max(info.tiny, TINY)
    low, high = low - info.eps * low.abs() - floor, high + info.eps * high.abs() + floor
    return low.to(dtype).double(), high.to(dtype).double()


def check_outputs(p: Problem, outs: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
    exact = [x.double() for x in p.tensors]
    right = p.exact(*exact)
    bounds, _ = p.errors(exact, [torch.zeros_like(x) for x in right], p.eps)
    for i, (out, r, (low, high)) in enumerate(zip(outs, right, bounds, strict=True)):
        assert out.shape == r.shape, (
            f"output {i}: shape {tuple(out.shape)}, expected {tuple(r.shape)}"
        )
        assert out.dtype == (dtype or p.result), (
            f"output {i}: {out.dtype}, expected {dtype or p.result}"
        )
        wrong = outside(out, *rounded(low, high, out.dtype))
        assert not wrong, f"output {i}: {wrong}"


def check_gradients(
    p: Problem, gs: Sequence[Tensor], grads: Sequence[Tensor | None], loose: float = 1
) -> None:
    """For every input; None if it was not requested."""
    leaves = [x.double().requires_grad_() for x in p.tensors]
    gs = [g.double() for g in gs]
    exact = torch.autograd.grad(p.exact(*leaves), leaves, gs)
    _, errors = p.errors([x.detach() for x in leaves], gs, p.eps)
    for name, x, found, right, error in zip(p.names, p.tensors, grads, exact, errors, strict=True):
        if found is None:
            continue
        assert found.shape == x.shape, f"gradient of {name}: shape {tuple(found.shape)}"
        assert found.dtype == x.dtype, f"gradient of {name}: {found.dtype}, expected {x.dtype}"
        known = torch.isfinite(error) & torch.isfinite(right)
        off = torch.where(known, loose * error + 8 * p.eps * right.abs(), torch.inf)
        low, high = (
            torch.where(known, right - off, -torch.inf),
            torch.where(known, right + off, torch.inf),
        )
        wrong = outside(found, *rounded(low, high, found.dtype))
        assert not wrong, f"gradient of {name}: {wrong}"


@contextmanager
def settings(draw: Draw):
    """An instruction set and a number of threads, whatever the size."""
    isas = _library.ISA_NAMES[: _library.library().pya_ops_isa_best() + 1]
    before, n = cpu_isa(), draw.choice((1, 1, 1, 2, 2, 3, 8))
    with ExitStack() as stack:
        for module in (_attention, _additive, _power_spherical):
            stack.enter_context(mock.patch.object(module, "threads", lambda work: n))
        set_cpu_isa(draw.choice(isas))
        stack.callback(set_cpu_isa, before)
        yield


# --- ways of calling -----------------------------------------------------------------------------


def gradients_of_outputs(draw: Draw, p: Problem) -> list[Tensor]:
    shapes = [x.shape for x in p.exact(*(x.double() for x in p.tensors))]
    made = []
    for shape in shapes:
        g = torch.randn(shape).to(p.result)
        if draw.chance(0.2):
            g = torch.ones(()).to(p.result).expand(shape)
        made.append(draw.laid_out(g) if draw.chance(0.5) else g)
    return made


def forward_backward(
    p: Problem, gs: Sequence[Tensor], wanted: Sequence[bool], outputs: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    leaves = [x.detach().requires_grad_(want) for x, want in zip(p.tensors, wanted, strict=True)]
    outs = p.ours(*leaves)
    if not any(wanted):
        return list(outs), [None] * len(leaves)
    asked = [x for x, want in zip(leaves, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(outs[:outputs], asked, gs[:outputs]))
    return [x.detach() for x in outs], [next(found) if want else None for want in wanted]


def alike(first: Any, second: Any, what: str) -> None:
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert (a is None) == (b is None) and (a is None or same(a, b)), f"other bits {what}"


def some(draw: Draw, p: Problem) -> list[bool]:
    everything = draw.chance(0.5)
    return [everything or draw.chance(0.5) for _ in p.tensors]


def plain(draw: Draw, p: Problem) -> None:
    """Eager: results, gradients of some inputs, nothing else written, the same bits again."""
    gs, wanted = gradients_of_outputs(draw, p), some(draw, p)
    outputs = draw.randint(1, len(gs))
    memory = [*p.tensors, *p.masks, *gs]
    before = [bits(x) for x in memory]
    with guarded():
        first = forward_backward(p, gs, wanted, outputs)
    assert all(torch.equal(bits(x), y) for x, y in zip(memory, before, strict=True)), (
        "an input changed"
    )
    check_outputs(p, first[0])
    known = [*gs[:outputs], *(torch.zeros_like(g) for g in gs[outputs:])]
    check_gradients(p, known, first[1])
    alike(first, forward_backward(p, gs, wanted, outputs), "in a second run")
    if p.is_kernel:
        dense = p.with_tensors([x.contiguous() for x in p.tensors])
        alike(first, forward_backward(dense, gs, wanted, outputs), "from contiguous inputs")


def without_gradients(draw: Draw, p: Problem) -> None:
    leaves = [x.detach().requires_grad_() for x in p.tensors]
    with draw.choice((torch.no_grad, torch.inference_mode))():
        if draw.chance(0.5):
            leaves = [x.clone() for x in leaves]
        outs = p.ours(*leaves)
    assert not any(x.requires_grad for x in outs)
    check_outputs(p, outs)


def in_threads(draw: Draw, p: Problem) -> None:
    gs, wanted = gradients_of_outputs(draw, p), some(draw, p)
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(forward_backward, p, gs, wanted, len(gs)) for _ in range(3)]
        results = [run.result() for run in runs]
    check_outputs(p, results[0][0])
    check_gradients(p, gs, results[0][1])
    for other in results[1:]:
        alike(results[0], other, "in another thread")


def autocast(draw: Draw, p: Problem) -> None:
    """Attention in the lower precision, as in torch; log-probabilities and additive attention in float32."""
    dtype = torch.float64 if p.result == torch.float64 else torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        outs = p.ours(*p.tensors)
    if p.kind == "scaled_attention" and dtype == torch.float32:
        cast = [x.bfloat16() for x in p.tensors[:3]]
        p = p.with_tensors([*cast, *p.tensors[3:]])
        dtype = torch.bfloat16
        p.eps = torch.finfo(dtype).eps / 4
    check_outputs(p, outs, dtype)


def through_vjp(draw: Draw, p: Problem) -> None:
    gs = gradients_of_outputs(draw, p)
    outs, pull = vjp(p.ours, *p.tensors)
    check_outputs(p, outs)
    check_gradients(p, gs, pull(tuple(gs)))


def through_jvp(draw: Draw, p: Problem) -> None:
    """The Jacobian times tangents, against the exact gradients times the same tangents."""
    tangents = [torch.randn(x.shape).to(x.dtype) for x in p.tensors]
    outs, pushed = jvp(p.ours, tuple(p.tensors), tuple(tangents))
    check_outputs(p, outs)
    gs = [torch.randn(x.shape, dtype=torch.float64) for x in outs]
    leaves = [x.double().requires_grad_() for x in p.tensors]
    exact = torch.autograd.grad(p.exact(*leaves), leaves, gs)
    eps = max(p.eps, *(torch.finfo(x.dtype).eps for x in (*outs, *p.tensors)))
    _, errors = p.errors([x.detach() for x in leaves], gs, eps)
    ours = sum(float((g * x.double()).sum()) for g, x in zip(gs, pushed, strict=True))
    right, off = 0.0, 0.0
    for t, g, error in zip(tangents, exact, errors, strict=True):
        right += float((t.double() * g).sum())
        off += float((t.double().abs() * (4 * error + 64 * eps * g.abs())).sum())
    off += sum(
        float((g * x.double()).abs().sum()) * 64 * eps for g, x in zip(gs, pushed, strict=True)
    )
    assert not abs(ours - right) > off, f"jvp: {ours:.9g}, expected {right:.9g} +- {off:.2g}"
    assert all(x.dtype == out.dtype for x, out in zip(pushed, outs, strict=True))


def batched(draw: Draw, p: Problem) -> tuple[list[Tensor], tuple[int | None, ...], list[Problem]]:
    """Inputs with one more dimension, or shared; and the problem that each entry is."""
    n = draw.randint(1, 3)
    stacked: list[Tensor] = []
    dims: list[int | None] = []
    for i, x in enumerate(p.tensors):
        if draw.chance(0.35) and not (i == len(p.tensors) - 1 and all(d is None for d in dims)):
            stacked.append(x)
            dims.append(None)
            continue
        others = [x.flip(draw.randrange(x.dim())) if x.dim() else x * (1 + k) for k in range(n)]
        at = draw.randint(0, x.dim())
        stacked.append(draw.laid_out(torch.stack(others, at)))
        dims.append(at - x.dim() - 1 if draw.chance(0.3) else at)
    entries = []
    for k in range(n):
        pairs = zip(stacked, dims, strict=True)
        entries.append(p.with_tensors([x if d is None else x.select(d, k) for x, d in pairs]))
    return stacked, tuple(dims), entries


def through_vmap(draw: Draw, p: Problem) -> None:
    stacked, dims, entries = batched(draw, p)
    outs = vmap(p.ours, dims)(*stacked)
    for k, entry in enumerate(entries):
        check_outputs(entry, [x[k] for x in outs])


def through_vmap_of_grad(draw: Draw, p: Problem) -> None:
    stacked, dims, entries = batched(draw, p)
    gs = gradients_of_outputs(draw, p)

    def energy(*x: Tensor) -> Tensor:
        return sum((out * g).sum() for out, g in zip(p.ours(*x), gs, strict=True))

    found = vmap(grad(energy, tuple(range(len(stacked)))), dims)(*stacked)
    for k, entry in enumerate(entries):
        check_gradients(entry, gs, [x[k] for x in found])


def through_vmap_of_pull(draw: Draw, p: Problem) -> None:
    """Many gradients of the outputs of one call, as jacrev computes them: all inputs are shared."""
    _, pull = vjp(p.ours, *p.tensors)
    many = [gradients_of_outputs(draw, p) for _ in range(draw.randint(1, 3))]
    at = [draw.randint(0, g.dim()) for g in many[0]]
    stacked = [torch.stack(gs, k) for gs, k in zip(zip(*many, strict=True), at, strict=True)]
    found = vmap(pull, (tuple(at),))(tuple(stacked))
    for k, gs in enumerate(many):
        check_gradients(p, gs, [x[k] for x in found])


def through_grad_of_vmap(draw: Draw, p: Problem) -> None:
    """A shared input's gradient is the sum of the entries' gradients."""
    stacked, dims, entries = batched(draw, p)
    gs = gradients_of_outputs(draw, p)
    leaves = [x.detach().requires_grad_() for x in stacked]
    outs = vmap(p.ours, dims)(*leaves)
    total = sum((out * g).sum() for out, g in zip(outs, gs, strict=True))
    found = torch.autograd.grad(total, leaves)
    whole = [None if d is not None else x for x, d in zip(found, dims, strict=True)]
    for k, entry in enumerate(entries):
        each = [None if d is None else x.select(d, k) for x, d in zip(found, dims, strict=True)]
        check_gradients(entry, gs, each)
        if len(entries) == 1:
            check_gradients(entry, gs, whole)


def second_order(
    call: Callable[..., Any], tensors: Sequence[Tensor], gs: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of a number computed from the first derivatives."""
    leaves = [x.detach().requires_grad_() for x in [*tensors, *gs]]
    n = len(tensors)
    first = torch.autograd.grad(call(*leaves[:n]), leaves[:n], leaves[n:], create_graph=True)
    # linear: near the antipode they are large, and no digit of their sines would be left
    energy = sum(
        (x * torch.linspace(-1, 1 + i, x.numel()).view(x.shape)).sum() for i, x in enumerate(first)
    )
    found = torch.autograd.grad(energy, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def second_derivatives(draw: Draw, p: Problem) -> None:
    """In float64, where only a wrong formula makes a difference."""
    tensors = [draw.laid_out(x.double()) for x in p.tensors]
    gs = [x.double() for x in gradients_of_outputs(draw, p)]
    # A large kappa: the second derivatives of its normaliser are what is left of lgammas.  An infinite one, which
    # float16 makes of it: the formula's result is NaN, as are its first derivatives and ours; the numbers among its
    # second derivatives come from trigamma(inf) being 0.
    if any((x > 100).any() for x in tensors):
        return
    exact = second_order(p.exact, tensors, gs)
    for i, (a, b) in enumerate(zip(second_order(p.ours, tensors, gs), exact, strict=True)):
        assert a.shape == b.shape and a.dtype == torch.float64
        if torch.isfinite(b).all():
            error = float((a - b).norm()) / max(1.0, float(b.norm()))
            assert error < 1e-6, f"second derivative {i}: {error:.2g} from the formula's"


def with_dropout(draw: Draw, p: Problem) -> None:
    """The same random bits from the same seed in both directions: what is linear in v has its transpose as vjp."""
    if p.kind != "scaled_attention":
        return
    rate, gs = draw.choice((0.1, 0.5, 0.9)), gradients_of_outputs(draw, p)
    dropped = Problem(**{**p.__dict__, "ours": lambda *x: p.ours(*x, dropout=rate)})
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(forward_backward(dropped, gs, [True] * len(p.tensors), 1))
    alike(*runs, "from the same seed")
    outs, grads = runs[0]
    out, g, v, d_v = (x.double() for x in (outs[0], gs[0], p.tensors[2], grads[2]))
    eps = max(p.eps, *(torch.finfo(x.dtype).eps for x in (*outs, *gs, p.tensors[2])))
    off = float((out * g).sum() - (d_v * v).sum())
    size = float((out * g).abs().sum() + (d_v * v).abs().sum())
    assert out.shape == g.shape and outs[0].dtype == p.result
    assert abs(off) <= 64 * eps * size + TINY, f"{off} of {size}"


def in_sequence(draw: Draw, p: Problem) -> None:
    """Additive attention again and again, with one buffer for the gradients of keys and values."""
    kept = {x.dtype for x in p.tensors[1:3]}
    if p.kind != "additive_attention" or len(kept) > 1 or kept & set(HALVES):
        return
    gs = gradients_of_outputs(draw, p)
    leaves = [x.detach().requires_grad_() for x in p.tensors]
    n = draw.randint(1, 3)
    with sequence_gradients(leaves[1], leaves[2]):
        steps = [p.ours(*leaves) for _ in range(n)]
    for outs in steps:
        check_outputs(p, outs)
    total = sum((out * g).sum() for outs in steps for out, g in zip(outs, gs, strict=True))
    for _ in range(2):
        found = torch.autograd.grad(total, leaves, retain_graph=True)
        check_gradients(p, [n * g for g in gs], found, loose=2)


def compiled(draw: Draw, p: Problem) -> None:
    torch.compiler.reset()
    gs = gradients_of_outputs(draw, p)
    backend = draw.choice(("aot_eager", "aot_eager", "inductor"))
    ours = torch.compile(p.ours, fullgraph=True, dynamic=draw.choice((None, True)), backend=backend)
    p = Problem(**{**p.__dict__, "ours": ours})
    outs, grads = forward_backward(p, gs, [True] * len(p.tensors), len(gs))
    check_outputs(p, outs)
    check_gradients(p, gs, grads)


class Called(torch.nn.Module):
    def __init__(self, ours: Callable[..., Any]) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, *x: Tensor) -> Any:
        return self.ours(*x)


def exported(draw: Draw, p: Problem) -> None:
    program = torch.export.export(Called(p.ours), tuple(p.tensors))
    check_outputs(p, program.module()(*p.tensors))


# --- inputs out of range, and wrong ones ---------------------------------------------------------

STRANGE = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -1e-42, 1e30, -1e30)


def strange_values(draw: Draw, p: Problem) -> None:
    """Where the formula gives NaN, so do we.  Where it is finite and a factor is not, any answer will do."""
    tensors = [x.clone() for x in p.tensors]
    spoiled = []
    for x in tensors:
        if x.numel() and draw.chance(0.6):
            at = tuple(draw.randrange(n) for n in x.shape)
            value = draw.choice(STRANGE)
            x[at] = value
            spoiled.append(value)
    q = p.with_tensors(tensors)
    outs, grads = forward_backward(
        q,
        [torch.ones_like(x).to(p.result) for x in p.exact(*(x.double() for x in tensors))],
        [True] * len(tensors),
        1,
    )
    assert all(g.shape == x.shape for g, x in zip(grads, tensors, strict=True) if g is not None)
    # what nobody sees may hold anything: a skipped key does not spread its NaN, as 0 times it would
    if (
        p.masks
        or "causal=True" in p.note
        or not all(torch.isfinite(x).all() or x.isnan().any() for x in tensors)
    ):
        return
    if p.kind == "additive_attention" and tensors[2].isnan().any():
        return  # nor does a value whose probability is 0
    for out, right in zip(outs, q.exact(*(x.double() for x in tensors)), strict=True):
        assert out.isnan()[right.isnan()].all(), f"NaN is lost: {spoiled}"
        if not any(x.isnan().any() or (x.abs() > 1e4).any() for x in tensors):
            assert not out.isnan()[~right.isnan()].any(), f"NaN from numbers: {spoiled}"


def wrong_inputs(draw: Draw, p: Problem) -> None:
    """An error that names the argument and says what was expected."""
    tensors: list[Any] = list(p.tensors)
    i = draw.randrange(len(tensors))
    x = tensors[i]
    wrong = draw.choice(("integer", "device", "list", "number", "size", "dimensions"))
    if wrong == "size" and (x.dim() == 0 or x.shape[-1] < 2):
        wrong = "list"
    tensors[i] = {
        "integer": lambda: x.int(),
        "device": lambda: x.to("meta"),
        "list": lambda: [1.0],
        "number": lambda: 1.5,
        "size": lambda: torch.cat([x, x, x], -1),
        "dimensions": lambda: x.expand(7, 7, 7, 7, 7, 11, *x.shape),
    }[wrong]()
    name = p.names[i]
    if wrong == "dimensions" and p.kind.startswith("power_spherical"):
        return  # those may have any number
    try:
        outs = p.ours(*tensors)
    except OpError as error:
        text = str(error)
        assert text.startswith(p.kind + ":"), text
        assert name in text.replace(p.kind, ""), f"{wrong} {name}: {text}"
        return
    if wrong == "size":  # three times as many may also be right
        right = p.exact(*(y.double() for y in tensors))
        assert all(a.shape == b.shape for a, b in zip(outs, right, strict=True))
        return
    raise AssertionError(f"{wrong} {name} was accepted")


WAYS: dict[Callable[[Draw, Problem], None], int] = {
    plain: 30,
    without_gradients: 4,
    in_threads: 4,
    autocast: 4,
    through_vjp: 4,
    through_jvp: 6,
    through_vmap: 8,
    through_vmap_of_grad: 8,
    through_grad_of_vmap: 6,
    through_vmap_of_pull: 6,
    second_derivatives: 5,
    in_sequence: 4,
    with_dropout: 4,
    strange_values: 10,
    wrong_inputs: 4,
}
COMPILED: dict[Callable[[Draw, Problem], None], int] = {compiled: 2, exported: 1}


def run_case(seed: int, with_compiled: bool = False) -> str:
    """The way of calling, and the op."""
    draw = Draw(seed)
    kind = draw.choice(list(KINDS))
    ways = {**WAYS, **COMPILED} if with_compiled else WAYS
    way = draw.choices(list(ways), list(ways.values()))[0]
    p = KINDS[kind](draw)
    try:
        with settings(draw), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its internals
            way(draw, p)
    except BaseException as error:
        error.add_note(f"case {seed}, {way.__name__}: {p}")
        raise
    return f"{way.__name__} {kind}"


def stuck(seed: int) -> None:
    print(f"case {seed} takes more than {LIMIT_S} s", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    if args.case is not None:
        print(run_case(args.case, args.compiled))
        return 0
    end, seed, done, failed = time.monotonic() + args.seconds, args.seed * 10**9, Counter[str](), 0
    while time.monotonic() < end and (args.runs is None or done.total() + failed < args.runs):
        watch = threading.Timer(LIMIT_S, stuck, [seed])
        watch.start()
        try:
            done[run_case(seed, args.compiled)] += 1
        except Exception as error:
            failed += 1
            traceback.print_exception(error, limit=-3)
        watch.cancel()
        seed += 1
    print(f"fuzz_ops: {done.total()} cases right, {failed} wrong; seed {args.seed}")
    for what, n in sorted(done.items()):
        print(f"  {n:6} {what}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
