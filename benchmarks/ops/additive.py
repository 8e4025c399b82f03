"""Additive attention: one step, bytes kept over a sequence, and the seq2seq example's memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.hostcuda import environment, why_not
from benchmarks.ops.measure import Bench, both, check, checked, forward
from benchmarks.torch_replay import ROOT
from pyalloc import ops


def eager_additive(query: Tensor, keys: Tensor, values: Tensor, v: Tensor) -> Tensor:
    score = torch.tanh(keys + query[:, None]) @ v
    return (torch.softmax(score, -1)[:, None] @ values).squeeze(1)


def floors(b: Bench, n_b: int, n_s: int, n_h: int, n_e: int) -> tuple[float | None, float | None]:
    """The least time on a card, forward and with backward.

    Keys and values are read once in each direction, their gradients written once.
    """
    if b.device == "cpu":
        return None, None
    read = 4 * n_b * n_s * (n_h + n_e)
    return b.floor_ms(read, 0), b.floor_ms(3 * read, 0)


def additive(b: Bench) -> None:
    n_b, n_s, n_h = 80, 50, 1000
    shapes = [(n_b, n_h), (n_b, n_s, n_h), (n_b, n_s, 2 * n_h)]
    inputs = [
        *(torch.randn(s, device=b.device) for s in shapes),
        torch.randn(n_h, device=b.device) / 30,
    ]
    error = check(
        "additive", *checked(ops.additive_attention, eager_additive, inputs, (n_b, 2 * n_h))
    )
    case = f"B{n_b} S{n_s} H{n_h} values {2 * n_h} fp32, one step"
    forward_floor, both_floor = floors(b, n_b, n_s, n_h, 2 * n_h)
    peers = b.compiled({"eager": eager_additive})
    b.compare(
        "additive forward",
        forward(ops.additive_attention, inputs),
        {k: forward(f, inputs) for k, f in peers.items()},
        target=3.0 if b.device == "cpu" else 2.0,
        case=case,
        floor_ms=forward_floor,
        error=error,
    )
    grad = torch.randn(n_b, 2 * n_h, device=b.device)
    b.compare(
        "additive forward+backward",
        both(ops.additive_attention, inputs, grad),
        {k: both(f, inputs, grad) for k, f in peers.items()},
        target=2.3 if b.device == "cpu" else 2.0,
        case=case,
        floor_ms=both_floor,
        error=error,
    )
    additive_kept(b)


def additive_kept(b: Bench) -> None:
    """Bytes that 50 decoder steps keep for backward, besides the sequence itself."""
    n_b, n_s, n_h, steps = 80, 50, 1000, 50
    kept = {}
    for name, function in (("ours", ops.additive_attention), ("eager", eager_additive)):
        keys, values = (torch.randn(n_b, n_s, n_h, requires_grad=True) for _ in "ab")
        v = torch.randn(n_h, requires_grad=True)
        shared = {x.untyped_storage().data_ptr() for x in (keys, values, v)}
        found: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(
            x: Tensor,
            shared: set[int] = shared,
            found: dict[int, int] = found,
            alive: list[Tensor] = alive,
        ) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in shared:
                found[storage.data_ptr()] = storage.nbytes()
                alive.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for _ in range(steps):
                query = torch.randn(n_b, n_h, requires_grad=True)
                alive.append(function(query, keys, values, v))
        kept[name] = sum(found.values())
    b.row(
        "additive kept for backward",
        case=f"B{n_b} T{n_s} D{n_h}, {steps} steps",
        kept_bytes=kept,
        ratio=round(kept["eager"] / kept["ours"], 1),
        target=40,
        met=kept["eager"] >= 40 * kept["ours"],
    )


def seq2seq(b: Bench) -> None:
    """The example on the host-memory device, with and without the op."""
    missing = why_not()
    if missing is not None:
        b.row("seq2seq memory", skipped=missing)
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("eager", []), ("ours", ["--fused"])):
            path = Path(folder) / f"{name}.json"
            command = [sys.executable, "examples/seq2seq.py", "--json", str(path), *options]
            # Python 3.11 may abort if it shuts down right after a backward pass; the result is complete by then.
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**environment("80GB"), "PYTHONPATH": str(ROOT)},
                check=False,
                stdout=sys.stderr,
            )
            if not path.exists():
                raise RuntimeError(f"the example ended with {done.returncode} and without a result")
            result = json.loads(path.read_text())
            at = {(r["step"], r["phase"]): r for r in result["rows"]}
            rows[name] = {
                "forward_growth_bytes": at[1, "forward"]["allocated_bytes"]
                - at[1, "start"]["allocated_bytes"],
                "peak_bytes": result["peak_allocated_bytes"],
            }
    for key, target in (("forward_growth_bytes", 0.35), ("peak_bytes", 0.14)):
        falls = 1 - rows["ours"][key] / rows["eager"][key]
        b.row(
            f"seq2seq {key}",
            ours=rows["ours"][key],
            eager=rows["eager"][key],
            falls=round(falls, 4),
            target=target,
            met=falls >= target,
        )
