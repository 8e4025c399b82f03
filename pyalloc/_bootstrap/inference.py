"""torch.inference_mode() as torch.no_grad(): tensors made there count no changes in place, so that nothing is known.

They take the same memory.  As on a card torch.enable_grad() in there records nothing, but where torch.func
differentiates.  What a card refuses of such tensors later passes here.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

from pyalloc._bootstrap import sizes


class _Here(threading.local):
    is_on = False  # the mode, in this thread


_here = _Here()


def answer(torch: Any) -> None:
    """From now on, where Python enters it."""
    modes = torch.autograd.grad_mode
    enter_real, leave_real = torch.inference_mode.__enter__, torch.inference_mode.__exit__
    is_real = torch.is_inference_mode_enabled

    def enter(mode: Any) -> None:
        mode.is_real = is_real()  # as C++ enters it: one that is off leaves it
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
        """torch.compile drops what one that is off returns, by which torch leaves it again."""
        if not is_on or is_real():
            return enter_compiled(is_on)
        return _Guard(torch.inference_mode())

    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = enter, leave
    modes._enter_inference_mode = enter_in_graph

    @functools.wraps(is_real)
    def is_enabled() -> bool:
        """As the program asks; torch itself asks what its tensors are, and they are none of this mode's."""
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
    """As torch's own: in the mode until it goes, also where an operator of the graph raises and nobody leaves it."""

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
    """What switches gradients on, but in this mode."""

    @functools.wraps(switch)
    def call(*args: Any, **kwargs: Any) -> Any:
        done = switch(*args, **kwargs)
        if _here.is_on and not _differentiates(torch):
            torch._C._set_grad_enabled(False)
        return done

    return call


def _differentiates(torch: Any) -> bool:
    """Whether torch.func does, around this: vmap() alone does not."""
    functions = torch._C._functorch
    kinds = functions.TransformType.Grad, functions.TransformType.Jvp
    return any(each.key() in kinds for each in functions.get_interpreter_stack() or ())


def _detached(kernel: Any) -> Any:
    """In place, which torch.no_grad() refuses of views."""

    def call(keyset: Any, x: Any) -> Any:
        return x if _here.is_on else kernel.call_boxed(keyset, x)

    return call
