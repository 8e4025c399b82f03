"""Sizes that torch's operators ask a device for: in a dry run no kernel has computed them.

Where there is a largest size it is taken.  Where there is none, what lies on the device is looked at: labels, counts
and lengths that a program copied there are as good as on a card, and anything else is told by being no such number.
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
_LARGEST = 2**24  # of a label or count; above it they are what lay there before
# Torch notes the file of who makes one, and takes no name that is not UTF-8, as this file's may be.
_NEW_LIBRARY = compile('torch.library.Library("aten", "IMPL")', "<pyalloc>", "eval")


@dataclass
class Counted:
    """How often an answer changed what the program allocates.

    masks: taken as true everywhere; distinct: calls whose elements were taken as all different; guessed: tensors of
    numbers that made no sense.
    """

    masks: int = 0
    distinct: int = 0
    guessed: int = 0


counted = Counted()
_libraries: list[Any] = []  # of operators; they go with it
_caller = threading.local()


def answer(torch: Any) -> None:
    """From now on."""
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
    """torch's, by its name and overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def generic(torch: Any, operator: Any) -> Callable[..., Any]:
    """The operator as torch has it for all devices."""
    key = "CompositeExplicitAutograd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        key += "NonFunctional"
    return functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, key))


def has_kernels(torch: Any) -> bool:
    """Whether torch gives its kernels out, as from 2.9 on."""
    return hasattr(torch.library, "get_kernel")


def kernel(torch: Any, operator: Any, key: str) -> Any:
    """What torch has at that key, to be called by what takes its place; None where torch gives none out."""
    return torch.library.get_kernel(operator, key) if has_kernels(torch) else None


def implement(
    torch: Any, key: str, name: str, implementation: Callable[..., Any], **how: Any
) -> None:
    """Of the operator, for tensors on a device."""
    library = eval(_NEW_LIBRARY, {"torch": torch})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 says that it had one before
        library.impl(name, implementation, key, **how)
    _libraries.append(library)
    _hide_from_compiler(torch, implementation)


def _hide_from_compiler(torch: Any, function: Any) -> None:
    """torch.compile looks at all Python that runs below a compiled program, and warns about what it finds in here."""
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def _wait(torch: Any, device: Any) -> None:
    """As whatever reads a size does: not in a capture."""
    torch.cuda.current_stream(device).synchronize()


def expected() -> dict[int, int | list[int]]:
    """How many elements of masks with so many this thread's caller knows to be true; a list: of the next in turn."""
    if not hasattr(_caller, "expected"):
        _caller.expected = {}
    found: dict[int, int | list[int]] = _caller.expected
    return found


@contextlib.contextmanager
def expecting(of_masks: dict[int, Any]) -> Iterator[None]:
    """Until left, in place of what was expected before."""
    before, _caller.expected = expected(), of_masks
    try:
        yield
    finally:
        _caller.expected = before


def _chosen(n: int) -> int:
    """How many of so many elements of a mask of which nothing is known."""
    found = expected().get(n)
    if isinstance(found, list):  # of one mask after the other
        found = found.pop(0) if found else None
    counted.masks += found is None
    return n if found is None else found


def _choose_everything(torch: Any) -> Callable[..., Any]:
    """A mask as index, torch.where(mask) and masked_select() ask for the places, and it the device how many.

    All is the most there can be, and two readers of one mask get the same.  A mask of the program's is as it is.
    """

    def nonzero(mask: Any) -> Any:
        _wait(torch, mask.device)
        is_mask = mask.dtype == torch.bool
        known = contents.told(torch, mask) if is_mask else contents.put(torch, mask, True)
        if known is not None:
            known = known != 0  # the host counts no unsigned ones as they are
        share = contents.share(mask)
        if known is not None:
            n = int(known.count_nonzero())
        elif share is not None:
            n = math.ceil(mask.numel() * share)
        else:
            n = _chosen(mask.numel())
        # Transposed, so that the places along one dimension lie together.
        places = torch.empty((mask.dim(), n), dtype=torch.int64, device=mask.device)
        if known is not None:
            depth = contents.depth(torch, (mask,))
            contents.write(torch, places, known.nonzero().t(), depth=depth)
        elif n == mask.numel() <= _FEW:  # loops go over them one by one
            everything = torch.ones(mask.shape, dtype=torch.bool, device="cpu")
            contents.write(torch, places, everything.nonzero().t())
        return places.t()

    return nonzero


def _as_many_as_are_put(torch: Any) -> dict[str, Callable[..., Any]]:
    """x[mask] = values and masked_scatter() as multimodal models use them: the mask chooses a place for each value."""
    aten = torch.ops.aten
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
        if len(indices) == 1 and indices[0].dtype == torch.bool and indices[0].is_cuda:
            (mask,), n = indices, len(values) if values.dim() > 0 else 1
            has_row_for_each = values.dim() == 1 + x.dim() - mask.dim() and 1 < n < mask.numel()
            if has_row_for_each and 0 not in mask.stride() and contents.told(torch, mask) is None:
                # Backward looks at the mask again.
                chosen = torch.arange(mask.numel(), device="cpu").view(mask.shape) < n
                contents.write(torch, mask, chosen, is_new=False)
        return aten.index_put_.default._op_dk(generic, x, indices, values, accumulate)

    def masked_scatter_backward(grad: Any, mask: Any, sizes: Any) -> Any:
        n = min(math.prod(sizes), grad.numel())
        with expecting({**expected(), grad.numel(): n}):
            return aten.masked_scatter_backward.default._op_dk(generic, grad, mask, sizes)

    return {"index_put_": index_put, "masked_scatter_backward": masked_scatter_backward}


def _all_different(torch: Any) -> dict[str, Callable[..., Any]]:
    """unique() and its like: as many as there are, for which torch makes room in any case.  What it sorts in goes.

    Those of the program's own numbers are as many as differ.
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
    """Of a sparse tensor: no two of its elements lie at one place.  The sorted places are made anew, and the values."""

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
    """Operators whose size is a number in their argument."""
    aten = torch.ops.aten
    generic = torch._C.DispatchKey.CompositeExplicitAutograd

    def sensible(numbers: Any, least: int, most: int, otherwise: int) -> Any:
        """On the host; all of them `otherwise` where one of them cannot be, or where there are only zeros."""
        there = contents.read(torch, numbers).to(torch.int64)
        ends = (int(there.min()), int(there.max())) if there.numel() > 0 else (1, 1)
        if ends == (0, 0) or not least <= ends[0] <= ends[1] <= most:
            counted.guessed += 1
            there = torch.full_like(there, otherwise)
        return there

    def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
        """Counts that add up to all there are: programs split by them."""
        counts = torch.bincount(sensible(x, 0, _LARGEST, 0), minlength=minlength)
        kind = torch.int64
        if weights is not None:
            kind = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return counts.to(kind).to(x.device)

    def histc(x: Any, bins: int = 100, least: Any = 0, most: Any = 0) -> Any:
        if torch.cuda.is_current_stream_capturing():  # which it may be
            return torch.empty(bins, dtype=x.dtype, device=x.device)
        counts = torch.histc(contents.read(torch, x).double(), bins, float(least), float(most))
        return counts.to(x.dtype).to(x.device)

    def one_hot(labels: Any, classes: int = -1) -> Any:
        if classes == -1 and labels.numel() > 0:
            classes = int(sensible(labels, 0, _LARGEST, 0).max()) + 1
        made = aten.one_hot.default.decompose(labels, classes)
        if contents.is_plain(torch, made):
            made = made.data  # new; older torch changed zeros in place, which counts
        known = contents.put(torch, labels)
        # That is much to work out, and experts look at parts of it.
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
        """All as long as the longest there can be: they were counted on the device."""
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
    """ctc_loss(): what it hears is as long as can be; targets that lie one after the other are shared out evenly."""
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
    """istft() as torch has it in Python, which does not refuse windows that add up to nothing."""
    import torch._refs

    return torch._refs.istft(*args, **kwargs)


def _shares_of_clusters(torch: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """AdaptiveLogSoftmaxWithLoss: targets that are not known are shared out evenly; together they are all there are."""

    def call(self: Any, input_: Any, target_: Any) -> Any:
        n, n_clusters = target_.numel(), len(self.cutoffs)
        ends = [each * n // n_clusters for each in range(n_clusters + 1)]
        known = contents.told(torch, target_) if target_.is_cuda else None
        if known is not None:
            ends = [int((known < each).sum()) for each in (0, *self.cutoffs)]
        shares = [end - start for start, end in itertools.pairwise(ends)]
        # Each is looked at twice, where there are any.
        with expecting({n: [share for share in shares for _ in range(1 + (share > 0))]}):
            return forward(self, input_, target_)

    return call


def _inverted_on_the_host(permutation: Any) -> Any:
    """Of packed sequences: the order is copied to the device, and what undoes it is read from there as indices."""
    return None if permutation is None else permutation.cpu().argsort().to(permutation.device)


def _batches(seen: Any) -> float:
    """Batch normalization without momentum divides by how many batches it counted on the device: one at least."""
    return float(seen) or 1.0
