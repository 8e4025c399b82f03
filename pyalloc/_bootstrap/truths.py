"""Are all elements true?  Programs assert it, or loop until it holds; in a dry run no kernel computes it.

If nothing else is known the answer is yes: assertions hold, loops end.  Maximum, minimum and sum of integers are
computed from what the program put there: how many classes, graphs or steps there are.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import asking, contents, sizes
from pyalloc._bootstrap.importing import after_import

_NEXT_TO_NOTHING = 1e-30  # below any loop's threshold
_GUESSED = 1  # a depth, see contents.depth()


def answer(torch: Any) -> None:
    """Answers from now on.  torch.equal(), allclose(), torch.distributions and checks in operators ask like this."""
    aten = torch.ops.aten
    for name, kernel in (
        ("all", aten.all.all_out),
        ("all.dim", aten.all.out),
        ("all.dims", aten.all.dims_out),
    ):
        sizes.implement(torch, "CUDA", name, _all(torch, kernel))

    def one(x: Any, dtype: Any = None) -> Any:
        return torch.empty(0, dtype=dtype or x.dtype, device=x.device)

    for name, kernel in (
        ("any", lambda x: aten.any.all_out(x, out=one(x, kind(torch, x)))),
        ("max", lambda x: aten.max.unary_out(x, out=one(x))),
        ("min", lambda x: aten.min.unary_out(x, out=one(x))),
        ("sum", lambda x, dtype=None: aten.sum.dim_IntList(x, [], dtype=dtype)),
    ):
        sizes.implement(torch, "CUDA", name, _reduced(torch, getattr(torch, name), kernel))
    isfinite, isinf = aten.isfinite.default.decompose, sizes.generic(torch, aten.isinf.default)
    for name, kernel, is_so in (
        ("isfinite", isfinite, True),
        ("isinf", isinf, False),
        ("isnan", lambda x: aten.ne.Tensor(x, x), False),
    ):
        on_host = getattr(torch, name)
        sizes.implement(torch, "CUDA", name, _finite(torch, on_host, kernel, is_so))
    sizes.implement(torch, "CUDA", "_local_scalar_dense", _one_number(torch))
    sizes.implement(torch, "CUDA", "is_nonzero", _is_nonzero(torch))
    # nn.TransformerEncoder asks whether padding is at the end only, to remove it.  No: it keeps the padded batch.
    padded = "_nested_tensor_from_mask_left_aligned"
    sizes.implement(torch, "CUDA", padded, lambda _x, _mask: False)
    for name in ("stat_scores", "confusion_matrix", "precision_recall_curve"):
        after_import(f"torchmetrics.functional.classification.{name}", _take_classes_as_valid)


def kind(torch: Any, x: Any, *_: Any) -> Any:
    """The dtype of the result of any() and all()."""
    return torch.uint8 if x.dtype == torch.uint8 else torch.bool


def _all(torch: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def is_all_true(x: Any, *dim: Any, **keepdim: Any) -> Any:
        found = torch.empty(0, dtype=kind(torch, x), device=x.device)
        kernel(x, *dim, **keepdim, out=found)  # allocates the work memory as on a card
        known = contents.told(torch, x)
        if known is None:
            contents.write(torch, found, not contents.is_still_false(x), depth=_GUESSED)
        else:
            depth = contents.depth(torch, (x,))
            contents.write(torch, found, torch.all(known, *dim, **keepdim), depth=depth)
        return found

    return is_all_true


def _reduced(torch: Any, on_host: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x: Any, **kind: Any) -> Any:
        if x.numel() == 0:
            on_host(torch.empty(0))  # raises torch's error, if it refuses empty tensors
        found = kernel(x, **kind)
        known = contents.put(torch, x, x.nbytes <= contents.FEW_FRACTIONS)
        if known is not None:
            contents.write(torch, found, on_host(known, **kind), depth=contents.depth(torch, (x,)))
        elif on_host is torch.any and contents.is_open(torch, x) and asking.takes_if_any():
            contents.write(torch, found, True, depth=_GUESSED)
        return found

    return reduce


def _one_number(torch: Any) -> Callable[..., Any]:
    """item(): a loss that nobody computed is not quite 0, because programs divide by it and take its logarithm.

    A number that was changed in place may be 0, such as the flag for infinite gradients.
    """
    reads: collections.Counter[tuple[Any, int]] = collections.Counter()

    def item(x: Any) -> Any:
        found = x.cpu().item()
        if _is_chosen(torch, x):
            return True
        if found != 0 or not x.is_floating_point() or not _is_result(x):
            return found
        caller = sys._getframe(1)
        place = caller.f_code, caller.f_lineno
        reads[place] += 1
        return found if reads[place] > contents.MOST_ASKED else _NEXT_TO_NOTHING

    return item


def _is_result(x: Any) -> bool:
    """Is it the unknown result of an operator: a single number, not one element of many?"""
    is_alone = x._base is None or x._base.numel() == 1
    is_changed = not x.is_inference() and x._version > 0
    return is_alone and not is_changed and not contents.is_known(x)


def _is_nonzero(torch: Any) -> Callable[..., Any]:
    """bool()."""

    def ask(x: Any) -> bool:
        if x.numel() != 1:
            return bool(x.new_empty(x.shape, device="cpu"))  # raises torch's error
        return bool(x.cpu()) or _is_chosen(torch, x)

    return ask


def _is_chosen(torch: Any, x: Any) -> bool:
    """Is it an element of an unknown mask?  As an index such a mask chooses everything."""
    is_one_of_many = x._base is not None and x._base.numel() > 1
    return is_one_of_many and contents.is_open(torch, x)


def _finite(torch: Any, on_host: Any, kernel: Any, is_so: bool) -> Callable[..., Any]:
    """isfinite() and the like: programs stop at a loss that is not finite, and so does Lightning's EarlyStopping."""

    def ask(x: Any) -> Any:
        found = kernel(x)
        known = contents.told(torch, x)
        depth = _GUESSED if known is None else contents.depth(torch, (x,))
        contents.write(torch, found, is_so if known is None else on_host(known), depth=depth)
        return found

    return ask


def _take_classes_as_valid(module: Any) -> None:
    """Skips the checks of metrics that count classes on the device: all elements would be taken as different."""

    def on_host(validate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(validate)
        def call(preds: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            return None if target.is_cuda else validate(preds, target, *args, **kwargs)

        return call

    for name in dir(module):
        if name.endswith("_tensor_validation"):
            setattr(module, name, on_host(getattr(module, name)))
