"""The ops on DTensors: each process computes its shard, through torch's public functions only.

Independent of each other are batch entries and heads of `scaled_attention`, batch entries and queries of
`additive_attention`, and samples, components and the dimensions that both have of a log-probability. Tensors sharded
along other dimensions, such as features, are gathered first. If several processes read a whole tensor, its gradient
is the sum of theirs (Partial).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyalloc.errors import OpError

# One kind of shard: the dimension of each input and of each result, None where all of an input is needed.
Kind = tuple[tuple[int | None, ...], tuple[int, ...]]


def is_sharded(args: Sequence[Any]) -> bool:
    """Whether one is a DTensor; does not load its module."""
    return any(type(x).__name__ == "DTensor" for x in args)


def attention(*args: Any) -> Tensor:
    """Like the registered op, but only its first result."""
    q, k, v, bias, mask, causal, scale, dropout, _ = args
    if dropout > 0:
        raise OpError("scaled_attention: dropout of DTensors is not supported; set dropout=0")

    def part(dim: int) -> Kind:
        shared = (None if x is None or x.shape[dim] == 1 else dim for x in (bias, mask))
        return (dim, dim, dim, *shared), (dim,)

    def fits(kind: Kind, n_parts: int) -> bool:
        # groups of queries stay with their keys
        return kind[1] == (0,) or q.shape[1] == k.shape[1] or k.shape[1] % n_parts == 0

    def on_shard(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        return torch.ops.pyalloc.scaled_attention(*tensors, causal, scale, 0.0, None)[:1]  # type: ignore[no-any-return]

    shape = (*q.shape[:3], v.shape[3])
    kinds = [part(0), part(1)]
    return _run("scaled_attention", on_shard, args[:5], kinds, [shape], fits)[0]


def additive(*args: Any) -> tuple[Tensor, Tensor]:
    """Like the registered op."""
    query, keys, values, *_ = args
    shapes = [(*query.shape[:2], n) for n in (values.shape[2], keys.shape[1])]
    kinds = [((0, 0, 0, None, 0), (0, 0)), ((1, None, None, None, None), (1, 1))]
    op = torch.ops.pyalloc.additive_attention
    context, probs = _run("additive_attention", op, args, kinds, shapes)
    return context, probs


def spherical(*args: Any) -> Tensor:
    """Like the registered op that takes so many arguments."""
    *tensors, t_first = args
    (n_l, n_t, _), n_m = tensors[0].shape, tensors[1].shape[0]
    if len(tensors) == 4:
        name = "power_spherical_mixture_log_prob"
        l, t = (1, 0) if t_first else (0, 1)  # noqa: E741
        kinds: list[Kind] = [((1, 1, 1, 1), (t,)), ((0, None, None, None), (l,))]
        shape: tuple[int, ...] = (n_t, n_l) if t_first else (n_l, n_t)
    else:
        name = "power_spherical_log_prob"
        l, m, t = (1, 2, 0) if t_first else (0, 1, 2)  # noqa: E741
        kinds = [((1, 1, 1), (t,)), ((0, None, None), (l,)), ((None, 0, 0), (m,))]
        shape = (n_t, n_l, n_m) if t_first else (n_l, n_m, n_t)

    def on_shard(*parts: Tensor | None) -> tuple[Tensor]:
        return (getattr(torch.ops.pyalloc, name)(*parts, t_first),)

    return _run(name, on_shard, tensors, kinds, [shape])[0]


def _mesh(op: str, inputs: Sequence[Any]) -> Any:
    """The mesh that all tensors are on."""
    from torch.distributed.tensor import DTensor

    given = [x for x in inputs if x is not None]
    mesh = next(x.device_mesh for x in given if isinstance(x, DTensor))
    if not all(isinstance(x, DTensor) and x.device_mesh == mesh for x in given):
        kinds_given = ", ".join(type(x).__name__ for x in given)
        raise OpError(
            f"{op}: if one tensor is a DTensor, all must be, on the same mesh, got {kinds_given}; "
            "convert the others with torch.distributed.tensor.distribute_tensor()"
        )
    return mesh


def _choose(
    mesh: Any, inputs: Sequence[Any], kinds: Sequence[Kind], fits: Callable[[Kind, int], bool]
) -> list[Kind | None]:
    """For each axis of the mesh, the first kind by which an input is sharded there; None: no input is."""
    from torch.distributed.tensor import Shard

    def has(kind: Kind, axis: int) -> bool:
        dims = (
            (d, x.placements[axis]) for d, x in zip(kind[0], inputs, strict=True) if x is not None
        )
        return any(type(p) is Shard and p.dim == d for d, p in dims)

    chosen: list[Kind | None] = []
    for axis in range(mesh.ndim):
        found = None
        for kind in kinds:
            others = [mesh.size(i) for i, before in enumerate(chosen) if before is kind]
            n_parts = mesh.size(axis) * math.prod(others)
            if found is None and has(kind, axis) and fits(kind, n_parts):
                found = kind
        chosen.append(found)
    return chosen


def _run(
    op: str,
    on_shard: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    kinds: Sequence[Kind],
    shapes: Sequence[tuple[int, ...]],
    fits: Callable[[Kind, int], bool] = lambda *_: True,
) -> list[Tensor]:
    """Calls on_shard on this process's parts of the inputs; returns its results as DTensors of these shapes."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = _mesh(op, inputs)
    chosen = _choose(mesh, inputs, kinds, fits)

    def of_input(i: int, where_whole: Any) -> list[Any]:
        return [
            Replicate()
            if kind is None
            else where_whole
            if kind[0][i] is None
            else Shard(kind[0][i])
            for kind in chosen
        ]

    parts = [
        None
        if x is None
        else x.redistribute(mesh, of_input(i, Replicate())).to_local(
            grad_placements=of_input(i, Partial())
        )
        for i, x in enumerate(inputs)
    ]
    results = []
    for i, (part, shape) in enumerate(zip(on_shard(*parts), shapes, strict=True)):
        placements = [Replicate() if kind is None else Shard(kind[1][i]) for kind in chosen]
        stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        given_as = {"run_check": False, "shape": torch.Size(shape), "stride": stride}
        results.append(DTensor.from_local(part, mesh, placements, **given_as))
    return results
