"""Which kernel serves attention on CUDA: seen on the host-memory runtime, where neither computes anything."""

from __future__ import annotations

import json

import pytest
from conftest import RunPython

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_torchs_kernel_serves_where_it_is_faster_and_keeps_no_scores(dry_python: RunPython) -> None:
    source = """
        import json, torch
        from pyalloc.ops import scaled_attention

        def tensors(d=64, heads=3):
            shapes = ((2, 3, 50, d), (2, heads, 70, d), (2, heads, 70, d))
            return [torch.ones(shape, device="cuda", requires_grad=True) for shape in shapes]

        def path(qkv, *bias, **options):
            out, info = scaled_attention(*qkv, *bias, return_info=True, **options)
            kinds.append(type(out.grad_fn).__name__)
            return info["path"]

        kinds = []
        found = {
            "plain": path(tensors()),
            "causal": path(tensors(), causal=True),
            "odd head": path(tensors(35)),
            "groups": path(tensors(heads=1)),
            "bias": path(tensors(), torch.ones(50, 70, device="cuda")),
            "dropout": path(tensors(), dropout=0.1),
        }
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        found["switched off"] = path(tensors())
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        out = scaled_attention(*(qkv := tensors()))
        (first,) = torch.autograd.grad(out.sum(), qkv[0], create_graph=True)
        found["second"] = list(torch.autograd.grad(first.sum(), qkv[1])[0].shape)
        print(json.dumps([found, kinds[:2]]))
        """
    found, kinds = json.loads(dry_python(source).stdout.splitlines()[-1])
    assert found.pop("second") == [2, 3, 70, 64]
    assert [name for name, path in found.items() if path == "sdpa"] == ["plain", "causal"]
    assert set(found.values()) == {"sdpa", "kernel"}
    assert all("Efficient" in kind for kind in kinds)
