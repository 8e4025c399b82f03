"""Turns torch.inference_mode() into torch.no_grad(): inference tensors have no version, so nothing of them is known.

They take the same memory.  As on a card, torch.enable_grad() inside records nothing, except where torch.func
differentiates.  Later uses of such tensors that a card would refuse pass here.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from pyalloc._bootstrap import sizes


class _Here(threading.local):
    is_on = False  # is this thread in inference mode?


_here = _Here()


def answer(torch: Any) -> None:
    """Replaces the mode from now on, where Python code enters it."""
    modes = torch.autograd.grad_mode
    enter_real, leave_real = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    is_real = torch.is_inference_mode_enabled

    def enter(mode: Any) -> None:
        mode.is_real = is_real()  # entered by C++: inference_mode(False) leaves it
        if mode.is_real:
            enter_real(mode)
        mode.before = torch.is_grad_enabled(), _here.is_on
        torch._C._set_grad_enabled(not mode.mode)
        _here.is_on = mode.mode

    def leave(mode: Any, *_: Any) -> None:
        enabled, _here.is_on = mode.before
        torch._C._set_grad_enabled(enabled)
        if mode.is_real:
            leave_real(mode, None, None, None)

    enter_compiled = modes._enter_inference_mode

    @functools.wraps(enter_compiled)
    def enter_in_graph(is_on: bool) -> Any:
        """torch.compile drops the returned guard of inference_mode(False) at once; torch leaves the mode with it."""
        if not is_on or is_real():
            return enter_compiled(is_on)
        return _Guard(torch.inference_mode())

    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = enter, leave
    modes._enter_inference_mode = enter_in_graph

    @functools.wraps(is_real)
    def is_enabled() -> bool:
        """True for the program's own question.  torch asks about its tensors, and those are no inference tensors."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return is_real() or (_here.is_on and asks.partition(".")[0] != "torch")

    is_enabled._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch.is_inference_mode_enabled = is_enabled
    for switch, names in (
        (torch.enable_grad, ("__enter__",)),
        (torch.set_grad_enabled, ("__init__", "__enter__", "__call__")),
    ):
        for name in names:
            setattr(switch, name, _recording_nothing(torch, getattr(switch, name)))
    for key in ("AutogradCPU", "AutogradCUDA"):
        kernel = sizes.kernel(torch, sizes.operator(torch, "detach_"), key)
        if kernel is not None:
            sizes.implement(torch, key, "detach_", _detached(kernel), with_keyset=True)


class _Guard:
    """Like torch's own guard: leaves the mode when it is dropped, even if an operator of the graph raises."""

    def __init__(self, mode: Any) -> None:
        mode.__enter__()
        self.mode = mode

    def __exit__(self, *_: Any) -> None:
        mode, self.mode = self.mode, None
        if mode is not None:
            mode.__exit__()

    def __del__(self) -> None:
        self.__exit__()


def _recording_nothing(torch: Any, switch: Any) -> Any:
    """Wraps a function that switches gradients on, so that it has no effect in this mode."""

    @functools.wraps(switch)
    def call(*args: Any, **kwargs: Any) -> Any:
        done = switch(*args, **kwargs)
        if _here.is_on and not _differentiates(torch):
            torch._C._set_grad_enabled(False)
        return done

    return call


def _differentiates(torch: Any) -> bool:
    """Is torch.func differentiating around this call?  vmap() alone does not count."""
    functions = torch._C._functorch
    kinds = functions.TransformType.Grad, functions.TransformType.Jvp
    return any(each.key() in kinds for each in functions.get_interpreter_stack() or ())


def _detached(kernel: Any) -> Any:
    """detach_() that does nothing in this mode: torch.no_grad() refuses it on views."""

    def call(keyset: Any, x: Any) -> Any:
        return x if _here.is_on else kernel.call_boxed(keyset, x)

    return call
