"""The ops' formulas for torch.utils.flop_counter: matrix products only, as torch counts its own attention.

Elementwise work (softmax, tanh, the normaliser) does not count, and masks and `causal` reduce nothing. A backward
counts the scores that it recomputes and the gradients that are needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE = "torch.utils.flop_counter"  # not imported here: it takes a tenth of a second
_Shape = tuple[int, ...]


def _attention(q: _Shape, k: _Shape, v: _Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _attention_backward(
    _g: _Shape, _o: _Shape, _s: _Shape, q: _Shape, k: _Shape, v: _Shape, *_: Any, **__: Any
) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def _additive(query: _Shape, keys: _Shape, values: _Shape, *_: Any, **__: Any) -> int:
    """The scores, as products with v, and the context."""
    return 2 * query[0] * query[1] * keys[1] * (keys[2] + values[2])


def _additive_backward(
    _g: _Shape,
    _gp: _Shape | None,
    _p: _Shape,
    query: _Shape,
    keys: _Shape,
    values: _Shape,
    *rest: Any,
    **_: Any,
) -> int:
    """The gradients of the tanh, of v, of the probabilities and, if needed, of the values."""
    needs_values: bool = rest[-1][2]
    return 2 * query[0] * query[1] * keys[1] * (2 * keys[2] + (1 + needs_values) * values[2])


def _pairs(value: _Shape, loc: _Shape, *_: Any, **__: Any) -> int:
    """The cosines, for either log-probability."""
    return 2 * math.prod(value) * loc[0]


def _pairs_backward(_: _Shape, value: _Shape, loc: _Shape, *rest: Any, **__: Any) -> int:
    needs: list[bool] = rest[-1]
    return (1 + sum(needs[:2])) * _pairs(value, loc)


def _mixture_backward(grad: _Shape, _: _Shape, *rest: Any, **__: Any) -> int:
    return _pairs_backward(grad, *rest)


_FORMULAS: dict[str, Callable[..., int]] = {
    "scaled_attention": _attention,
    "scaled_attention_backward": _attention_backward,
    "additive_attention": _additive,
    "additive_attention_backward": _additive_backward,
    "power_spherical_log_prob": _pairs,
    "power_spherical_log_prob_backward": _pairs_backward,
    "power_spherical_mixture_log_prob": _pairs,
    "power_spherical_mixture_log_prob_backward": _mixture_backward,
}


n_modes = torch._C._len_torch_dispatch_stack


def register_where_modes_are() -> bool:
    """Whether dispatch modes are active; tells those that count about the ops."""
    if n_modes() == 0:
        return False
    register()
    return True


def register() -> None:
    """Adds the formulas to torch's registry, if it is loaded, and to active counters, which hold copies of it."""
    module = sys.modules.get(_MODULE)
    wrap = getattr(module, "shape_wrapper", None)
    if wrap is None:
        return
    counters = (getattr(mode, "counter", mode) for mode in _get_current_dispatch_mode_stack())
    for holder in (module, *counters):
        registry = getattr(holder, "flop_registry", None)
        if isinstance(registry, dict) and torch.ops.pyalloc.scaled_attention not in registry:
            for name, formula in _FORMULAS.items():
                registry[getattr(torch.ops.pyalloc, name)] = wrap(formula)
