"""States of a pool that a program returns to, as CUDA-graph trees do before they record a graph after other replays."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from parity.tensors import empty

RESULTS, STEPS = 4, 20


@dataclass
class Recorded:
    """A graph, the addresses and bytes of its results, and the state of the pool once they had been made."""

    graph: torch.cuda.CUDAGraph
    results: dict[int, int]
    state: object
    live: dict[int, int]


@dataclass
class Tree:
    """Graphs of one pool along a path: each was recorded after the earlier ones had been replayed."""

    chance: random.Random
    pool: tuple[int, int] = field(default_factory=torch.cuda.graph_pool_handle)
    stream: torch.cuda.Stream = field(default_factory=torch.cuda.Stream)
    path: list[Recorded] = field(default_factory=list)
    kept: dict[int, torch.UntypedStorage] = field(
        default_factory=dict
    )  # results that nobody dropped

    def live(self) -> dict[int, int]:
        return {
            block["address"]: block["size"]
            for segment in torch.cuda.memory_snapshot(self.pool)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def record(self) -> None:
        graph, made = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            for _ in range(self.chance.randrange(1, 40)):
                made.append(empty(int(2 ** self.chance.uniform(3, 24))))
                if len(made) > 2 * RESULTS:
                    made.pop(self.chance.randrange(len(made)))
            made = made[-RESULTS:]
        results = {tensor.data_ptr(): tensor.numel() for tensor in made}
        state = torch._C._cuda_getCheckpointState(0, self.pool)
        self.path.append(Recorded(graph, results, state, self.live()))
        assert set(self.path[-1].live) == {*self.kept, *results}

    def go_back(self) -> None:
        """The state after a part of the path has been replayed and some of its results were dropped."""
        del self.path[self.chance.randrange(len(self.path)) + 1 :]
        self.kept.clear()
        last = self.path[-1]
        for recorded in self.path:
            for address, n_bytes in recorded.results.items():
                if address in last.live and self.chance.random() < 0.6:
                    self.kept[address] = torch._C._construct_storage_from_data_pointer(
                        address, torch.device("cuda", 0), n_bytes
                    )
        storages = [storage._cdata for storage in self.kept.values()]
        torch._C._cuda_setCheckpointPoolState(0, last.state, [], storages)
        assert self.live() == last.live
        for address in set(last.live) - set(self.kept):
            torch._C._cuda_cudaCachingAllocator_raw_delete(address)
        assert torch._C._cuda_checkPoolLiveAllocations(0, self.pool, set(self.kept))

    def drop_one(self) -> None:
        if self.kept:
            self.kept.popitem()
        assert set(self.live()) == set(self.kept)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_path_is_gone_back(seed: int) -> None:
    """Results that lived live again at their addresses and end with their storage; nothing made later overlaps them."""
    tree = Tree(random.Random(seed))
    elsewhere = []
    for _ in range(STEPS):
        tree.record()
        blocks = sorted(tree.path[-1].live.items())
        assert all(start + size <= after for (start, size), (after, _) in pairwise(blocks))
        if tree.chance.random() < 0.3:
            torch.cuda.empty_cache()
        elsewhere = [*elsewhere[-3:], empty(int(2 ** tree.chance.uniform(3, 24)))]
        tree.go_back()
        tree.drop_one()
    pool = tree.pool
    del tree
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_snapshot(pool) == []
