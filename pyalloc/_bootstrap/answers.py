"""Answers for what libraries ask a device and go by: in a dry run no kernel has computed them.

The GradScaler asks whether gradients overflowed, torch.distributions whether its arguments are valid, a mask as index
how much it chooses, generate() of transformers whether all sequences have ended, the object collectives of
torch.distributed how large the objects are.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyalloc._bootstrap.importing import after_import


@dataclass
class Counted:
    """How often an answer changed what the program allocates."""

    masks: int = 0


counted = Counted()
_libraries: list[Any] = []  # of operators; they go with it


def give() -> None:
    """Each as soon as its library is imported."""
    after_import("torch", _of_torch)
    after_import("torch.distributed.distributed_c10d", _exchange_objects_on_the_host)
    after_import("transformers.generation.utils", _generate_to_the_limit)


def _of_torch(torch: Any) -> None:
    _take_every_step(torch)
    _take_arguments_as_valid(torch)
    _choose_everything(torch)


def _take_every_step(torch: Any) -> None:
    """A GradScaler reads from the device whether gradients overflowed; here that would be whatever lay there.

    Skipping the steps would leave out the optimizer's state, often the largest part of the memory in question.
    """

    def step(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    torch.amp.GradScaler._maybe_opt_step = step


def _take_arguments_as_valid(torch: Any) -> None:
    """torch.distributions reads from the device whether its arguments are valid, and would find that they are not."""
    ask = getattr(torch, "_is_all_true", None)
    if ask is None:
        return

    def is_all_true(valid: Any) -> Any:
        answer = ask(valid)
        return torch.ones((), dtype=torch.bool) if answer.is_cuda else answer

    torch._is_all_true = is_all_true


def _choose_everything(torch: Any) -> None:
    """A mask as index, torch.where(mask) and masked_select() ask nonzero() for the places, and it the device how many.

    All is the most there can be, and two readers of one mask get the same; the summary says how often.
    """
    library = torch.library.Library("aten", "IMPL")

    def nonzero(mask: Any) -> Any:
        counted.masks += 1
        torch.cuda.current_stream(mask.device).synchronize()  # as the count does: not in a capture
        # Transposed, so that the places along one dimension lie together.
        places = torch.empty((mask.dim(), mask.numel()), dtype=torch.int64, device=mask.device)
        return places.t()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 says that it had one before
        library.impl("nonzero", nonzero, "CUDA")
    _libraries.append(library)


def _generate_to_the_limit(generation: Any) -> None:
    """The generate() of transformers asks the device whether all sequences have ended: it might stop at once, or never.

    Here it goes on to its largest length, which is what has to fit.
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


def _exchange_objects_on_the_host(c10d: Any) -> None:
    """Over NCCL they are sent as tensors, and kernels find the largest of their sizes.  They take next to no memory."""
    if not hasattr(c10d, "_get_object_coll_device"):  # before 2.5
        return
    hosts: dict[Any, Any] = {}

    def on_host(given: Any) -> Any:
        """The same ranks on Gloo, where the given group is on the device only; all ranks come here together."""
        if c10d._rank_not_in_group(given):
            return given
        group = c10d._get_default_group() if given is None else given
        ranks = c10d.get_process_group_ranks(group)
        if c10d._get_object_coll_device(group) != "cuda" or ranks != sorted(ranks):
            return given
        name = group.group_name
        if hosts.get(name) not in c10d._world.pg_map:
            hosts[name] = c10d.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return hosts[name]

    for name in (
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    ):
        setattr(c10d, name, _in_group(getattr(c10d, name), on_host))


def _in_group(collective: Callable[..., Any], choose: Callable[[Any], Any]) -> Callable[..., Any]:
    """The collective in the group that is chosen in place of the given one."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("group")
        chosen = choose(given)
        if chosen is not given:
            bound.arguments["group"] = chosen
            bound.arguments.pop("device", None)
        return collective(*bound.args, **bound.kwargs)

    return call
