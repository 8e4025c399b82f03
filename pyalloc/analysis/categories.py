"""What a block holds, inferred from where it was requested and how long it lived."""

from __future__ import annotations

from collections.abc import Callable

from pyalloc.traces import source
from pyalloc.traces.moments import Block
from pyalloc.traces.source import Frame


def by_phase(block: Block, is_beyond_backward: Callable[[int, int], bool]) -> str:
    """The category by the phases of its allocation and its free; "" if they do not tell.

    is_beyond_backward(since, until): was a block made in one backward and freed in a later one, as a gradient?
    """
    if block.phase == "backward":
        is_short = block.free_phase == "backward" and not is_beyond_backward(
            block.alloc_event, block.free_event or 0
        )
        return "backward temporaries" if is_short else "gradients"
    if block.phase == "optimizer":
        return "optimizer state" if block.free_phase != "optimizer" else "temporaries"
    if block.phase in ("forward", "loss", "inference"):
        is_short = block.free_phase == block.phase and (block.free_event or 0) < (
            block.alloc_event + 8
        )
        return "temporaries" if is_short else "activations"
    # A loss made of functions, and whatever is computed outside of modules.
    is_kept = not block.phase and bool(block.stack) and block.free_phase == "backward"
    return "activations" if is_kept else ""


def by_function(frames: tuple[Frame, ...]) -> str:
    """The category that a function is known to make, however long it lives; "" for most functions."""
    if any("workspace" in name.lower() or "cublas" in name.lower() for name, _, _ in frames):
        return "workspace"
    if source.is_tuning(frames):
        return "temporaries"
    if source.is_bucket(frames):
        return "gradients"
    if source.is_gathered(frames):
        return "parameters"
    # A step that runs out of memory makes state that it may take with it.
    makes_state = any(name == "_init_group" and "/torch/optim/" in file for name, file, _ in frames)
    return "optimizer state" if makes_state else ""


def by_frames(frames: tuple[Frame, ...]) -> str:
    """The category by all functions that led to the request, innermost first."""
    names = {name for name, _, _ in frames}
    if source.optimizer(frames):
        return "optimizer state"
    if names & {"_engine_run_backward", "backward"} or source.is_autograd(frames):
        return "gradients"
    is_layer = any("/torch/nn/modules/" in file and name == "__init__" for name, file, _ in frames)
    is_copy = any(
        name == "__deepcopy__" and file.endswith("/torch/nn/parameter.py")
        for name, file, _ in frames
    )
    # transformers 5 brings what it loads to the device, on threads of its own, before the model is first called.
    is_loaded = any(file.endswith("/transformers/core_model_loading.py") for _, file, _ in frames)
    is_moved = names & {"_apply", "convert", "_load_from_state_dict"}
    if is_layer or is_copy or is_loaded or is_moved:
        return "parameters"
    if names & {"forward", "_call_impl"}:
        return "activations"
    return "other" if frames else "unknown"
