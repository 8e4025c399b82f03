"""How long generated sequences become: as long as they may, because that has to fit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap.importing import after_import


def answer() -> None:
    """Answers as soon as the libraries are imported."""
    after_import("transformers.generation.utils", _go_on_to_the_limit)
    for name, kind in (("grpo", "GRPOTrainer"), ("rloo", "RLOOTrainer")):
        after_import(f"trl.trainer.{name}_trainer", functools.partial(_complete_to_the_limit, kind))


def _go_on_to_the_limit(generation: Any) -> None:
    """Makes generate() of transformers go on to its maximum length, because that has to fit.

    It asks the device whether all sequences have ended, so in a dry run it might stop at once, or never.
    """
    criteria, mixin = generation.StoppingCriteriaList, generation.GenerationMixin
    ask, goes_on = criteria.__call__, getattr(mixin, "_has_unfinished_sequences", None)
    if goes_on is None:  # before 4.39
        return
    asked = threading.local()

    def call(stopping: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if stopping.max_length is not None:
            asked.is_full = input_ids.shape[-1] >= stopping.max_length
        return ask(stopping, input_ids, *args, **kwargs)

    def has_unfinished(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_full = asked.__dict__.pop("is_full", None)
        return goes_on(model, *args, **kwargs) if is_full is None else not is_full

    criteria.__call__ = call
    mixin._has_unfinished_sequences = has_unfinished
    if hasattr(mixin, "_assisted_decoding"):
        mixin._assisted_decoding = _accepting_no_draft(mixin._assisted_decoding)
    if hasattr(mixin, "_beam_search"):
        mixin._beam_search = _returning_everything(mixin._beam_search)


def _returning_everything(search: Callable[..., Any]) -> Callable[..., Any]:
    """Returns beams of the maximum length; otherwise they are cut where the device says they end: before the prompt."""

    def whole(rows: Any, length: int) -> Any:
        return rows.new_zeros((len(rows), length)) if rows.is_cuda else rows

    @functools.wraps(search)
    def call(model: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        found = search(model, input_ids, *args, **kwargs)
        if "generation_config" not in kwargs:
            return found
        length = kwargs["generation_config"].max_length
        if not hasattr(found, "sequences"):
            return whole(found, length)
        found.sequences = whole(found.sequences, length)
        if found.beam_indices is not None:
            found.beam_indices = whole(found.beam_indices, length - input_ids.shape[-1])
        return found

    return call


def _accepting_no_draft(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Assisted decoding that never accepts a drafted token: the device counts how many are right.

    Each round then adds one token, the model's own: the fewest possible, so that drafting happens at every length.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class CountOnTheHost(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.Tensor.sum and len(args) == 1 and not kwargs:
                (x,) = args
                if x.is_cuda and x.dtype == torch.bool:
                    return torch.zeros((), dtype=torch.int64, device="cpu")
            return function(*args, **(kwargs or {}))

    @functools.wraps(decode)
    def call(*args: Any, **kwargs: Any) -> Any:
        with CountOnTheHost():
            return decode(*args, **kwargs)

    return call


def _complete_to_the_limit(kind: str, module: Any) -> None:
    """Restores completions to the maximum length: TRL's trainers cut them where the device says they end, at once."""
    trainer = getattr(module, kind)
    generate = getattr(trainer, "_generate_single_turn", None)
    if generate is None:  # before 0.24
        return

    def complete(self: Any, found: Any) -> Any:
        return [ids or [0] * self.max_completion_length for ids in found]

    @functools.wraps(generate)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = generate(self, *args, **kwargs)
        if not isinstance(found, tuple):
            return complete(self, found)
        return tuple(complete(self, each) if isinstance(each, list) else each for each in found)

    trainer._generate_single_turn = call
