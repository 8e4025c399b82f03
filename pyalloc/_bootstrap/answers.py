"""Answers to questions that libraries ask a device and act on: in a dry run no kernel has computed them.

GradScaler asks whether gradients overflowed, L-BFGS whether a direction is useful, operators how many elements there
are (sizes.py, detection.py, graphs.py), assertions whether all is well (truths.py), generate() of transformers whether
all sequences have ended (generation.py), and torch.distributed how large the objects are that ranks exchange.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

from pyalloc._bootstrap import (
    changing,
    contents,
    creating,
    detection,
    following,
    generation,
    graphs,
    inference,
    jagged,
    sizes,
    truths,
)
from pyalloc._bootstrap.importing import after_import


def give() -> None:
    """Installs all answers, each as soon as its library is imported."""
    after_import("torch", _of_torch)
    after_import("torch.distributed.distributed_c10d", _exchange_objects_on_the_host)
    after_import("torch.distributed.optim.zero_redundancy_optimizer", _collect_states_on_the_host)
    detection.answer()
    generation.answer()
    graphs.answer()
    jagged.answer()


def _of_torch(torch: Any) -> None:
    _take_every_step(torch)
    _remember_directions(torch)
    after_import("torch.optim.lbfgs", _search_between_equals)
    sizes.answer(torch)
    truths.answer(torch)
    creating.answer(torch)
    following.answer(torch)
    changing.answer(torch)
    inference.answer(torch)


def _take_every_step(torch: Any) -> None:
    """Makes a GradScaler take every step.  It reads its scale, and whether gradients overflowed, from the device.

    Skipped steps would never allocate the optimizer's state, often the largest part of the memory.
    """

    def step(_scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    scaler = torch.amp.GradScaler
    scaler._maybe_opt_step = step
    begin = scaler._lazy_init_scale_growth_tracker

    @functools.wraps(begin)
    def begin_with_the_scale(self: Any, device: Any) -> None:
        begin(self, device)
        contents.write(torch, self._scale, self._init_scale)

    scaler._lazy_init_scale_growth_tracker = begin_with_the_scale


def _remember_directions(torch: Any) -> None:
    """Makes L-BFGS keep its directions, which are most of its memory: it asks the device, and would keep none."""
    step = torch.optim.LBFGS.step

    @functools.wraps(step)
    def remember(optimizer: Any, closure: Any) -> Any:
        loss = step(optimizer, closure)
        state = optimizer.state[optimizer._params[0]] if optimizer._params else {}
        latest, group = state.get("d"), optimizer.param_groups[0]
        kept = state.get("old_dirs")
        if latest is not None and latest.is_cuda and kept is not None:
            # One direction for each iteration of the step, as if it went on to its last.
            for _ in range(min(group["history_size"] - len(kept), group["max_iter"])):
                kept.append(torch.empty_like(latest))
                state["old_stps"].append(torch.empty_like(latest))
                state["ro"].append(latest.new_empty(()))
        return loss

    torch.optim.LBFGS.step = remember


def _search_between_equals(lbfgs: Any) -> None:
    """Keeps L-BFGS from dividing by 0: losses that nobody computed shrink its search interval to nothing."""
    interpolate = lbfgs._cubic_interpolate

    @functools.wraps(interpolate)
    def between(x1: Any, f1: Any, g1: Any, x2: Any, *rest: Any, **kwargs: Any) -> Any:
        return x1 if x1 == x2 else interpolate(x1, f1, g1, x2, *rest, **kwargs)

    lbfgs._cubic_interpolate = between


def _exchange_objects_on_the_host(c10d: Any) -> None:
    """Over NCCL objects travel as tensors, and kernels compute their largest size.  They take next to no memory.

    Barriers wait on the host, too, since one rank may read another's files after one: NCCL's calls do not wait here.
    """
    if not hasattr(c10d, "_canonicalize_group_rank"):  # before 2.6
        return
    hosts: dict[Any, Any] = {}

    def on_host(given: Any) -> Any:
        """A Gloo group of the same ranks if the given group is on the device only.  All ranks must call this."""
        if c10d._rank_not_in_group(given):
            return given
        group = c10d._get_default_group() if given is None else given
        ranks = c10d.get_process_group_ranks(group)
        if c10d._get_object_coll_device(group) != "cuda" or ranks != sorted(ranks):
            return given
        name = group.group_name
        if hosts.get(name) not in c10d._world.pg_map:
            # At least the group's own timeout: a dry run takes longer than a card.
            least = c10d.default_pg_timeout
            backend = group._get_backend(c10d.torch.device("cuda"))
            options = getattr(backend, "options", None)
            timeout = max(least, getattr(options, "_timeout", least))
            hosts[name] = c10d.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        return hosts[name]

    for name in (
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    ):
        setattr(c10d, name, _in_group(c10d, getattr(c10d, name), on_host))
    wait = c10d.barrier
    bind = inspect.signature(wait).bind

    @functools.wraps(wait)
    def barrier(group: Any = None, async_op: bool = False, *args: Any, **kwargs: Any) -> Any:
        found = wait(group, async_op, *args, **kwargs)
        if async_op or c10d._rank_not_in_group(group):
            return found
        chosen = on_host(group)
        host = chosen or c10d._get_default_group()
        # A group with both backends waits on the device only, if it was given a device.
        has_both = {"cpu:gloo", "cuda:nccl"} <= set(c10d.get_backend_config(host).split(","))
        if has_both or chosen is not group:
            options = c10d.BarrierOptions()
            options.device = c10d.torch.device("cpu")
            timeout = bind(group, async_op, *args, **kwargs).arguments.get("timeout")
            if timeout is not None:
                options.timeout = timeout
            host.barrier(opts=options).wait()
        return found

    c10d.barrier = barrier
    _send_objects_by_the_store(c10d)


def _send_objects_by_the_store(c10d: Any) -> None:
    """Sends objects from one rank to another through the store.  Pipeline stages send each other shapes in this way."""
    send, receive = c10d.send_object_list, c10d.recv_object_list
    n_sent: Counter[tuple[Any, ...]] = Counter()

    def place(
        given: Any, peer: Any, in_group: Any, device: Any, is_sender: bool
    ) -> tuple[Any, str, int] | None:
        """Store, key and the peer's global rank; None if torch's own function should send the objects."""
        group = c10d._group_or_default_group(given)
        if c10d._rank_not_in_group(group):
            return None
        if not _is_device(c10d, device or c10d._get_object_coll_device(group)):
            return None
        if peer is None and in_group is None:  # from anybody
            return None
        other = c10d._canonicalize_group_rank(group, peer, in_group, return_global=True)
        ends = (c10d.get_rank(), other) if is_sender else (other, c10d.get_rank())
        way = (group.group_name, *ends)
        n_sent[way] += 1
        key = f"pyalloc/objects/{ends[0]}/{ends[1]}/{n_sent[way]}"
        return c10d._get_process_group_store(group), key, other

    @functools.wraps(send)
    def send_object_list(
        object_list: Any,
        dst: Any = None,
        group: Any = None,
        device: Any = None,
        group_dst: Any = None,
        **kwargs: Any,
    ) -> Any:
        found = place(group, dst, group_dst, device, True)
        if found is None:
            return send(object_list, dst, group, device, group_dst, **kwargs)
        found[0].set(found[1], pickle.dumps(list(object_list)))
        return None

    @functools.wraps(receive)
    def recv_object_list(
        object_list: Any,
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
        **kwargs: Any,
    ) -> Any:
        found = place(group, src, group_src, device, False)
        if found is None:
            return receive(object_list, src, group, device, group_src, **kwargs)
        store, key, sender = found
        object_list[:] = pickle.loads(store.get(key))
        store.delete_key(key)
        return sender

    c10d.send_object_list, c10d.recv_object_list = send_object_list, recv_object_list


def _collect_states_on_the_host(zero: Any) -> None:
    """ZeroRedundancyOptimizer reads the states' sizes from the device.  Both sides hold a state on it for a moment."""
    send, dist, torch = zero._broadcast_object, zero.dist, zero.torch

    @functools.wraps(send)
    def _broadcast_object(obj: Any, src_rank: int, group: Any, device: Any) -> Any:
        if torch.device(device).type != "cuda":
            return send(obj, src_rank, group, device)
        is_sender = dist.get_rank() == src_rank
        buffer = io.BytesIO()
        if is_sender:
            torch.save(obj, buffer)
        told = [buffer.getvalue()]
        dist.broadcast_object_list(told, src_rank, group)
        torch.empty(len(told[0]), dtype=torch.uint8, device=device)
        if is_sender:
            return obj
        return torch.load(io.BytesIO(told[0]), map_location=device, weights_only=False)

    zero._broadcast_object = _broadcast_object


def _is_device(c10d: Any, device: Any) -> bool:
    return bool(c10d.torch.device(device).type == "cuda")


def _in_group(
    c10d: Any, collective: Callable[..., Any], choose: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The collective on the host, in the group that `choose` returns for the given one.

    A group with both backends is returned unchanged: the `device` argument decides there, and is dropped.
    """
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get("group")
        device = bound.arguments.get("device")
        chosen = choose(given)
        if chosen is not given:
            bound.arguments["group"] = chosen
        if chosen is not given or (device is not None and _is_device(c10d, device)):
            bound.arguments.pop("device", None)
        return collective(*bound.args, **bound.kwargs)

    return call
