"""Sizes that torch's operators ask a device for: in a dry run no kernel has computed them.

If a size has a maximum, that is taken.  Otherwise the device memory is read: labels, counts and lengths that a program
copied there are the same as on a card, and anything else is recognised because it makes no sense as such a number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyalloc._bootstrap import contents
from pyalloc._bootstrap.replacing import standing_for

_FEW = 2**12
_LARGEST = 2**24  # label or count; larger values are leftovers in the block
# Library() notes its caller's file name and refuses a name that is not UTF-8, which this file's path may be.
_NEW_LIBRARY = compile('torch.library.Library("aten", "IMPL")', "<pyalloc>", "eval")


@dataclass
class Counted:
    """How often an answer was a guess that changes what the program allocates.

    masks: masks taken as all true; distinct: calls whose elements were taken as all different; guessed: tensors whose
    numbers made no sense and were replaced.
    """

    masks: int = 0
    distinct: int = 0
    guessed: int = 0


counted = Counted()
_libraries: list[Any] = []  # an operator is unregistered with its library
_caller = threading.local()


def answer(torch: Any) -> None:
    """Answers from now on."""
    implement(torch, "CUDA", "nonzero", _choose_everything(torch))
    for name, implementation in {**_all_different(torch), **_from_what_lies_there(torch)}.items():
        implement(torch, "CUDA", name, implementation)
    for key in ("AutogradCUDA", "CUDA"):
        implement(torch, key, "ctc_loss.Tensor", _lengths_of_targets(torch))
        implement(torch, key, "istft", _waves)
    for name, implementation in _as_many_as_are_put(torch).items():
        implement(torch, "CUDA", name, implementation)
    implement(torch, "SparseCUDA", "_coalesce", _coalesce_nothing(torch))
    adaptive = torch.nn.AdaptiveLogSoftmaxWithLoss
    adaptive.forward = standing_for(adaptive.forward, _shares_of_clusters(torch, adaptive.forward))
    rnn = torch.nn.utils.rnn
    rnn.invert_permutation = standing_for(rnn.invert_permutation, _inverted_on_the_host)
    torch.nn.modules.batchnorm.float = _batches


def operator(torch: Any, name: str) -> Any:
    """The operator of that name, "name.overload"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def generic(torch: Any, operator: Any) -> Callable[..., Any]:
    """The operator's kernel for all devices."""
    key = "CompositeExplicitAutograd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        key += "NonFunctional"
    return functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, key))


def has_kernels(torch: Any) -> bool:
    """Does torch hand out its kernels?  From 2.9 on."""
    return hasattr(torch.library, "get_kernel")


def kernel(torch: Any, operator: Any, key: str) -> Any:
    """The kernel at that key, for its replacement to call; None if torch does not hand kernels out."""
    return torch.library.get_kernel(operator, key) if has_kernels(torch) else None


def implement(
    torch: Any, key: str, name: str, implementation: Callable[..., Any], **how: Any
) -> None:
    """Replaces the operator's kernel at that dispatch key."""
    library = eval(_NEW_LIBRARY, {"torch": torch})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns that it overrides a kernel
        library.impl(name, implementation, key, **how)
    _libraries.append(library)
    _hide_from_compiler(torch, implementation)


def _hide_from_compiler(torch: Any, function: Any) -> None:
    """Keeps torch.compile out of the function: it would trace our Python below a compiled program, and warn."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _wait(torch: Any, device: Any) -> None:
    """Waits for the stream, as operators that read a size do; raises during a capture, as they do."""
    torch.cuda.current_stream(device).synchronize()


def expected() -> dict[int, int | list[int]]:
    """How many elements are true, by the mask's number of elements, as this thread's caller knows.

    A list gives the answers for successive masks of that size.
    """
    if not hasattr(_caller, "expected"):
        _caller.expected = {}
    found: dict[int, int | list[int]] = _caller.expected
    return found


@contextlib.contextmanager
def expecting(of_masks: dict[int, Any]) -> Iterator[None]:
    """Replaces what is expected until the context is left."""
    before, _caller.expected = expected(), of_masks
    try:
        yield
    finally:
        _caller.expected = before


def _chosen(n: int) -> int:
    """How many of the n elements of an unknown mask are true."""
    found = expected().get(n)
    if isinstance(found, list):  # one answer for each mask in turn
        found = found.pop(0) if found else None
    counted.masks += found is None
    return n if found is None else found


def _choose_everything(torch: Any) -> Callable[..., Any]:
    """nonzero(), for mask indexing, torch.where(mask) and masked_select(): it asks the device how many are true.

    An unknown mask chooses everything: that is the most there can be, and two readers of one mask agree.  A mask whose
    values are known is used as it is.
    """

    def nonzero(mask: Any) -> Any:
        _wait(torch, mask.device)
        is_mask = mask.dtype == torch.bool
        known = contents.told(torch, mask) if is_mask else contents.put(torch, mask, True)
        if known is not None:
            known = known != 0  # count_nonzero() on the host does not take unsigned types
        share = contents.share(mask)
        if known is not None:
            n = int(known.count_nonzero())
        elif share is not None:
            n = math.ceil(mask.numel() * share)
        else:
            n = _chosen(mask.numel())
        # Transposed, so that the positions along one dimension are contiguous, as in torch's own result.
        places = torch.empty((mask.dim(), n), dtype=torch.int64, device=mask.device)
        if known is not None:
            depth = contents.depth(torch, (mask,))
            contents.write(torch, places, known.nonzero().t(), depth=depth)
        elif n == mask.numel() <= _FEW:  # programs loop over the positions of small masks
            everything = torch.ones(mask.shape, dtype=torch.bool, device="cpu")
            contents.write(torch, places, everything.nonzero().t())
        return places.t()

    return nonzero


def _as_many_as_are_put(torch: Any) -> dict[str, Callable[..., Any]]:
    """x[mask] = values and masked_scatter(), as multimodal models use them: the mask chooses one place per value."""
    aten = torch.ops.aten
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
        if len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].is_cuda:
            (mask,), n = indices, len(values) if values.dim() > 0 else 1
            has_row_for_each = values.dim() == 1 + x.dim() - mask.dim() and 1 < n < mask.numel()
            if has_row_for_each and 0 not in mask.stride() and contents.told(torch, mask) is None:
                # Backward reads the mask again.
                chosen = torch.arange(mask.numel(), device="cpu").view(mask.shape) < n
                contents.write(torch, mask, chosen, is_new=False)
        return aten.index_put_.default._op_dk(generic, x, indices, values, accumulate)

    def masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
        n = min(math.prod(sizes), grad.numel())
        with expecting({**expected(), grad.numel(): n}):
            return aten.masked_scatter_backward.default._op_dk(generic, grad, mask, sizes)

    return {"index_put_": index_put, "masked_scatter_backward": masked_scatter_backward}


def _all_different(torch: Any) -> dict[str, Callable[..., Any]]:
    """unique() and the like: all elements differ; torch allocates for that case anyway, and frees its sort buffers.

    Of known numbers the result has its true size.
    """
    aten = torch.ops.aten

    def found(x: Any, n: int, kept: Any, needs_inverse: bool, needs_counts: bool) -> Any:
        _wait(torch, x.device)
        shapes = (kept if needs_inverse else 0, n if needs_counts else 0)
        return tuple(torch.empty(each, dtype=torch.int64, device=x.device) for each in shapes)

    def flat(x: Any, needs_inverse: bool, needs_counts: bool, is_sorted: bool) -> Any:
        work = [torch.empty_like(x)] if is_sorted else []
        if is_sorted and needs_inverse:
            work += [torch.empty(x.shape, dtype=torch.int64, device=x.device) for _ in range(2)]
        values = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        return (values, *found(x, x.numel(), x.shape, needs_inverse, needs_counts))

    def along(x: Any, dim: int, needs_inverse: bool, needs_counts: bool) -> Any:
        n = x.shape[dim]
        work = torch.empty(n, dtype=torch.int64, device=x.device)
        values = torch.empty_like(x, memory_format=torch.contiguous_format)
        del work
        return (values, *found(x, n, n, needs_inverse, needs_counts))

    def consecutive(x: Any, inverse: bool = False, counts: bool = False, dim: Any = None) -> Any:
        return flat(x, inverse, counts, False) if dim is None else along(x, dim, inverse, counts)

    def of_known(operator: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Any, *args: Any) -> Any:
            made = otherwise(x, *args)
            known = contents.put(torch, x)
            counted.distinct += known is None
            if known is not None:
                told = operator(known, *args)
                made = tuple(each.resize_(it.shape) for each, it in zip(made, told, strict=True))
                depth = contents.depth(torch, (x,))
                for each, it in zip(made, told, strict=True):
                    contents.write(torch, each, it, depth=depth)
            return made

        return call

    return {
        "_unique": of_known(
            aten._unique.default,
            lambda x, _sorted=True, inverse=False: flat(x, inverse, False, True)[:2],
        ),
        "_unique2": of_known(
            aten._unique2.default,
            lambda x, _sorted=True, inverse=False, counts=False: flat(x, inverse, counts, True),
        ),
        "unique_dim": of_known(
            aten.unique_dim.default,
            lambda x, dim, _sorted=True, inverse=False, counts=False: along(
                x, dim, inverse, counts
            ),
        ),
        "unique_consecutive": of_known(aten.unique_consecutive.default, consecutive),
        "unique_dim_consecutive": of_known(
            aten.unique_dim_consecutive.default,
            lambda x, dim, inverse=False, counts=False: along(x, dim, inverse, counts),
        ),
    }


def _coalesce_nothing(torch: Any) -> Callable[..., Any]:
    """coalesce() of a sparse tensor in which no two elements share a position.  Allocates new indices and values."""

    def coalesce(x: Any) -> Any:
        counted.distinct += 1
        _wait(torch, x.device)
        indices, values = x._indices(), x._values()
        work = torch.empty((3, x._nnz()), dtype=torch.int64, device=x.device)
        made = torch.empty_like(indices), torch.empty_like(values)
        del work
        return torch.sparse_coo_tensor(*made, x.shape, is_coalesced=True, check_invariants=False)

    return coalesce


def _from_what_lies_there(torch: Any) -> dict[str, Callable[..., Any]]:
    """Operators whose result's size is a number in an argument."""
    aten = torch.ops.aten
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def sensible(numbers: Any, least: int, most: int, otherwise: int) -> Any:
        """The numbers on the host; all `otherwise` if one of them is out of range, or if all are zeros."""
        there = contents.read(torch, numbers).to(torch.int64)
        ends = (int(there.min()), int(there.max())) if there.numel() > 0 else (1, 1)
        if ends == (0, 0) or not least <= ends[0] <= ends[1] <= most:
            counted.guessed += 1
            there = torch.full_like(there, otherwise)
        return there

    def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
        """Counts that add up to the number of elements, because programs split tensors by them."""
        counts = torch.bincount(sensible(x, 0, _LARGEST, 0), minlength=minlength)
        kind = torch.int64
        if weights is not None:
            kind = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return counts.to(kind).to(x.device)

    def histc(x: Any, bins: int = 100, least: Any = 0, most: Any = 0) -> Any:
        if torch.cuda.is_current_stream_capturing():  # it may be captured
            return torch.empty(bins, dtype=x.dtype, device=x.device)
        counts = torch.histc(contents.read(torch, x).double(), bins, float(least), float(most))
        return counts.to(x.dtype).to(x.device)

    def one_hot(labels: Any, classes: int = -1) -> Any:
        if classes == -1 and labels.numel() > 0:
            classes = int(sensible(labels, 0, _LARGEST, 0).max()) + 1
        made = aten.one_hot.default.decompose(labels, classes)
        if contents.is_plain(torch, made):
            made = made.data  # for version 0: older torch makes it by changing zeros in place
        known = contents.put(torch, labels)
        # A large result takes long to compute, and mixtures of experts only look at parts of it.
        if made.nbytes > contents.MOST_BYTES:
            contents.note_share(made, 1 / made.shape[-1])
        elif known is not None:
            contents.write(torch, made, torch.nn.functional.one_hot(known, classes))
        return made

    def repeat_interleave(repeats: Any, *, output_size: Any = None) -> Any:
        if output_size is None:
            output_size = int(sensible(repeats, 0, _LARGEST, 1).sum())
        made = torch.empty(output_size, dtype=torch.int64, device=repeats.device)
        known = contents.put(torch, repeats)
        if known is not None and int(known.sum()) == output_size:
            contents.write(torch, made, torch.repeat_interleave(known))
        return made

    def pack(x: Any, lengths: Any, batch_first: bool) -> Any:
        """Unknown lengths are all the longest possible: they were counted on the device."""
        longest = x.shape[1 if batch_first else 0]
        fit = sensible(lengths, 1, longest, longest)
        return aten._pack_padded_sequence.default._op_dk(generic, x, fit, batch_first)

    return {
        "bincount": bincount,
        "histc": histc,
        "one_hot": one_hot,
        "repeat_interleave.Tensor": repeat_interleave,
        "_pack_padded_sequence": pack,
    }


def _lengths_of_targets(torch: Any) -> Callable[..., Any]:
    """ctc_loss(): unknown input lengths are the longest possible; concatenated targets are divided evenly."""
    by_lists = torch.ops.aten.ctc_loss.IntList

    def known(lengths: Any, otherwise: list[int]) -> Any:
        if lengths.is_floating_point():
            raise RuntimeError("input_lengths and target_lengths must be integral")
        there = contents.read(torch, lengths).to(torch.int64).reshape(-1)
        if not lengths.is_cuda or (bool(there.any()) and not bool((there < 0).any())):
            return there.tolist()
        counted.guessed += 1
        return otherwise

    def ctc_loss(x: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any) -> Any:
        n = lengths.numel()
        ends = [each * targets.numel() // max(n, 1) for each in range(n + 1)]
        even = [end - start for start, end in itertools.pairwise(ends)]
        return by_lists(x, targets, known(inputs, [x.shape[0]] * n), known(lengths, even), *rest)

    return ctc_loss


def _waves(*args: Any, **kwargs: Any) -> Any:
    """istft() as torch's Python reference has it, which does not refuse windows that add up to 0."""
    import torch._refs

    return torch._refs.istft(*args, **kwargs)


def _shares_of_clusters(torch: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """AdaptiveLogSoftmaxWithLoss: unknown targets are divided evenly among the clusters, so that none are lost."""

    def call(self: Any, input_: Any, target_: Any) -> Any:
        n, n_clusters = target_.numel(), len(self.cutoffs)
        ends = [each * n // n_clusters for each in range(n_clusters + 1)]
        known = contents.told(torch, target_) if target_.is_cuda else None
        if known is not None:
            ends = [int((known < each).sum()) for each in (0, *self.cutoffs)]
        shares = [end - start for start, end in itertools.pairwise(ends)]
        # forward() asks twice about each cluster that has targets.
        with expecting({n: [share for share in shares for _ in range(1 + (share > 0))]}):
            return forward(self, input_, target_)

    return call


def _inverted_on_the_host(permutation: Any) -> Any:
    """The inverse permutation of packed sequences; torch computes it on the device, where it is read as indices."""
    return None if permutation is None else permutation.cpu().argsort().to(permutation.device)


def _batches(seen: Any) -> float:
    """Batch normalization without momentum divides by the number of batches counted on the device: at least 1."""
    return float(seen) or 1.0
