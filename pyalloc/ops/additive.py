"""Additive attention (Bahdanau et al. 2015) that keeps only the projected query and the probabilities."""
# mypy: disable-error-code="untyped-decorator"
#   mypy does not follow torch: what it decorates has no type

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from pyalloc.errors import OpError
from pyalloc.ops import _additive, _cuda
from pyalloc.ops._check import cast, compute_dtype, require_float, require_tensor
from pyalloc.ops._composed import is_checkpointed, is_transformed
from pyalloc.ops._library import dense_rows
from pyalloc.ops._plans import keep, key_of_call
from pyalloc.ops._sizes import is_empty, same
from pyalloc.ops._vmap import asks_gradient, is_eager, is_plain

_is_compiling = torch.compiler.is_compiling


@overload
def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None = ...,
    *,
    return_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None = ...,
    *,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes each query's context: sum over s of softmax(v . tanh(keys + query)) * values (Bahdanau et al. 2015).

    Args:
        query: projected queries, (B, H) for one decoder step or (B, Q, H).
        keys: projected keys, (B, S, H).
        values: (B, S, E).
        v: score vector, (H,).
        mask: boolean, (B, S), True where s takes part; a row that is all False gives zeros.
        return_weights: also return the probabilities, (B, S) or (B, Q, S), differentiable.

    Returns:
        The context, (B, E) or (B, Q, E), in the dtype that the arguments promote to; with return_weights also the
        probabilities.

    Eager torch keeps tanh(keys + query), (B, S, H), for every step; this op recomputes it in the
    backward.  Inside `sequence_gradients(keys, values)` the gradients of keys and values are
    accumulated in one buffer for all steps.  Differentiable twice (plain torch), except there.

    Raises:
        OpError: shapes, dtypes or devices do not fit together.
    """
    compute, result, is_direct = _check(query, keys, values, v, mask)
    memory = None if _is_compiling() else _memory.get()
    shared = memory is not None and memory.serves((query, keys, values, v, mask), compute)
    query, v = cast(query, compute), cast(v, compute)
    if shared and memory is not None:
        context, probs = memory.attend(query, v, mask)
    elif is_direct and is_eager():
        context, probs = _additive.run_direct(query, keys, values, v, mask)
    else:
        context, probs = _additive.run(query, cast(keys, compute), cast(values, compute), v, mask)
    context = cast(context, result)
    return (context, cast(probs, result)) if return_weights else context


class AdditiveAttention(nn.Module):
    """Bahdanau's attention: projections of query and keys, a score vector, and the fused op.

    Args:
        query_size: features of a query.
        key_size: features of a key.
        hidden_size: features of the space in which they are added.

    forward(query (B, query_size) or (B, Q, query_size), keys (B, S, hidden_size) as projected by
    project_keys() once per sequence, values (B, S, E), mask (B, S)) gives (context, probabilities),
    (B, E) and (B, S), or (B, Q, E) and (B, Q, S).

    Raises:
        OpError: in forward, as additive_attention.
    """

    def __init__(self, query_size: int, key_size: int, hidden_size: int) -> None:
        super().__init__()
        self.query_layer = nn.Linear(query_size, hidden_size, bias=False)
        self.key_layer = nn.Linear(key_size, hidden_size, bias=False)
        self.energy_layer = nn.Linear(hidden_size, 1, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        """(B, S, key_size) to (B, S, hidden_size)."""
        projected: Tensor = self.key_layer(keys)
        return projected

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        context, weights = additive_attention(
            self.query_layer(query),
            keys,
            values,
            self.energy_layer.weight.squeeze(0),
            mask,
            return_weights=True,
        )
        return context, weights


@contextmanager
def sequence_gradients(keys: Tensor, values: Tensor) -> Iterator[None]:
    """Lets steps over these keys, (B, S, H), and values, (B, S, E), add their gradients to one buffer per sequence.

    Outside this context each step's backward makes its own gradients, which autograd adds up: the same result up to the
    order of the sums.

    Args:
        keys: the tensor passed to additive_attention() inside.  Calls with other keys, or with these after they were
            changed in place or had requires_grad switched on, are served as outside.
        values: likewise.

    Raises:
        OpError: they are not both float32 or both float64, not on one device, or not of three dimensions.
    """
    require_float("sequence_gradients", keys=keys, values=values)
    if keys.dtype not in (torch.float32, torch.float64) or keys.dtype != values.dtype:
        raise OpError(
            "sequence_gradients: keys and values must both be float32 or both float64, "
            f"got {keys.dtype} and {values.dtype}"
        )
    if keys.dim() != 3 or values.dim() != 3:
        raise OpError(
            "sequence_gradients: keys must be (B, S, H) and values (B, S, E), "
            f"got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if _is_compiling():  # a compiled step is the registered op, and autograd adds up its gradients
        yield
        return
    reset = _memory.set(_Memory(keys, values))
    try:
        yield
    finally:
        _memory.reset(reset)


_Buffers = dict[int, tuple[Tensor, Tensor]]


class _Memory:
    """One sequence's keys and values, and the buffers that collect their gradients."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.is_served = keys.device.type == "cpu" or _cuda.serves(keys, "additive")
        self.rows = dense_rows(keys.detach()), dense_rows(values.detach())
        self.versions, self.asks = self.versions_now(), self.asks_now()
        # per running backward: one that failed halfway must not add to the next
        self.buffers: _Buffers = {}
        # The gate gets only the buffers: a reference to self would make a cycle, and keep keys and values until
        # Python collects it.
        self.token: Tensor = _Gate.apply(keys, values, self.buffers)

    def serves(self, args: tuple[Any, ...], compute: torch.dtype) -> bool:
        """Whether a step uses these keys and values, unchanged and in their dtype, and only autograd sees it.

        A query of another dtype may need a wider one.  Not in a checkpoint: it recomputes its step after this
        context has ended, and must then get the same.
        """
        is_ours = args[1] is self.keys and args[2] is self.values and args[1].dtype == compute
        is_alone = is_plain(args) and not is_transformed() and not is_checkpointed()
        is_whole = not is_empty(*args[:3])
        return is_ours and self.is_served and is_alone and is_whole and self.is_unchanged()

    def is_unchanged(self) -> bool:
        """Whether the rows are still those of keys and values, and the gate still leads to all that need gradients."""
        has_gate = self.token.requires_grad or not asks_gradient((self.keys, self.values))
        return has_gate and self.versions_now() == self.versions and self.asks_now() == self.asks

    def versions_now(self) -> tuple[int, ...]:
        """Numbers that change if either is modified in place, as autograd checks for what it saved."""
        return tuple(0 if x.is_inference() else x._version for x in (self.keys, self.values))

    def asks_now(self) -> tuple[bool, ...]:
        return self.keys.requires_grad, self.values.requires_grad

    def attend(self, query: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        context, probs = _Step.apply(query, v, self.token, mask, self)
        return context, probs

    def is_wanted(self) -> bool:
        """Whether the running backward will reach the gate: a gradient of queries alone does not."""
        node = self.token.grad_fn
        return node is not None and bool(torch._C._will_engine_execute_node(node))


_memory: ContextVar[_Memory | None] = ContextVar("additive_memory", default=None)


class _Gate(torch.autograd.Function):
    """Stands between keys, values and all steps: its backward runs once, after theirs."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, buffers: _Buffers) -> Tensor:
        ctx.buffers = buffers
        return keys.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        buffers = ctx.buffers.pop(torch._C._current_graph_task_id(), None)
        return (None, None, None) if buffers is None else (*buffers, None)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, v: Tensor, token: Tensor, mask: Tensor | None, memory: _Memory
    ) -> tuple[Tensor, Tensor]:
        context, probs = _additive.forward_kernel(query, *memory.rows, v, mask)
        ctx.save_for_backward(query, v, probs)
        ctx.memory = memory
        return context, probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probs: Tensor | None) -> tuple[Any, ...]:
        query, v, probs = ctx.saved_tensors
        memory: _Memory = ctx.memory
        if memory.versions_now() != memory.versions:
            raise RuntimeError(
                "additive_attention: keys or values of sequence_gradients were modified by an inplace "
                "operation after a step had used them; modify copies instead"
            )
        wanted = memory.is_wanted()
        task = torch._C._current_graph_task_id()
        is_first = task not in memory.buffers
        if wanted and is_first:
            keys, values = memory.rows
            memory.buffers[task] = torch.empty_like(keys), torch.empty_like(values)
        sinks = memory.buffers[task] if wanted else (None, None)
        d_query, d_v = _additive.backward_kernel(
            (query, *memory.rows, v), probs, (grad, grad_probs), sinks, accumulate=not is_first
        )
        return d_query, d_v.sum(0), v.new_zeros(()) if wanted else None, None, None


_known: dict[Any, tuple[torch.dtype, torch.dtype, bool]] = {}


def _check(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtype to compute in, that of the result, and whether the kernels take the tensors as they are.

    Raises:
        OpError: the arguments do not fit together.
    """
    key = key_of_call(query, keys, values, v, mask)
    known = None if key is None else _known.get(key)
    if known is not None:
        return known
    op = "additive_attention"
    require_float(op, query=query, keys=keys, values=values, v=v)
    _check_shapes(op, query, keys, values, v, mask)
    compute, result = compute_dtype(query, keys, values, v)
    if key is None:
        return compute, result, False
    is_computed = all(x.dtype == compute for x in (query, keys, values, v))
    found = compute, result, is_computed and _cuda.is_direct("additive", keys)
    keep(_known, key, found)
    return found


def _check_shapes(
    op: str, query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None
) -> None:
    if keys.dim() != 3:
        raise OpError(f"{op}: keys must be (B, S, H), got {tuple(keys.shape)}")
    n_b, n_s, n_h = keys.shape
    if query.dim() not in (2, 3) or not same((query.shape[0], query.shape[-1]), (n_b, n_h)):
        raise OpError(
            f"{op}: query must be ({n_b}, {n_h}) or ({n_b}, Q, {n_h}) as keys are "
            f"{tuple(keys.shape)}, got {tuple(query.shape)}"
        )
    if values.dim() != 3 or not same(values.shape[:2], (n_b, n_s)):
        raise OpError(f"{op}: values must be ({n_b}, {n_s}, E), got {tuple(values.shape)}")
    if not same(v.shape, (n_h,)):
        raise OpError(f"{op}: v must be ({n_h},), got {tuple(v.shape)}")
    if mask is not None:
        require_tensor(op, "mask", mask)
        if mask.dtype != torch.bool or not same(mask.shape, (n_b, n_s)):
            raise OpError(
                f"{op}: mask must be bool ({n_b}, {n_s}), got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask.device != keys.device:
            raise OpError(f"{op}: mask must be on {keys.device} as keys is, got {mask.device}")
