"""torch.inference_mode() as torch.no_grad(): tensors made there count no changes in place, so that nothing is known.

They take the same memory, and torch.compile does the same.  What a card refuses of such tensors later passes here.
"""

from __future__ import annotations

from typing import Any


def answer(torch: Any) -> None:
    """From now on, where Python enters it."""

    def enter(mode: Any) -> None:
        mode.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not mode.mode)

    def leave(mode: Any, *_: Any) -> None:
        torch._C._set_grad_enabled(mode.before)

    torch.inference_mode.__enter__, torch.inference_mode.__exit__ = enter, leave
