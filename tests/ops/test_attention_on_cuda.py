"""Which kernel serves attention on CUDA, on the host-memory runtime, where none computes anything."""

from __future__ import annotations

import json

import pytest
from dry_support import RunPython

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_ours_serves_where_it_uses_tensor_cores(dry_python: RunPython) -> None:
    """The host-memory runtime has all of the kernels."""
    source = """
        import json, logging, torch
        from pyalloc.ops import scaled_attention

        class Told(logging.Handler):
            def emit(self, record):
                told.append(record.getMessage())

        def path(d, dv, n_q=500, n_k=700, heads=48):
            q, k, v = (torch.ones(2, heads, n, d, device="cuda") for n, d in ((n_q, d), (n_k, d), (n_k, dv)))
            return scaled_attention(q, k, v, return_info=True)[1]["path"]

        told = []
        logging.getLogger("pyalloc.ops").setLevel(logging.DEBUG)
        logging.getLogger("pyalloc.ops").addHandler(Told())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # before the kernels are loaded
            found = [path(64, 64)]
        found += [path(64, 64), path(65, 8), path(8, 128), path(64, 1, 1, 8192)]
        found += [path(136, 64), path(64, 136), path(256, 256)]
        found += [path(64, 64, 64, 8192, 2), path(64, 64, 64, 8191, 2)]  # 2^29 operations, and fewer
        found += [path(128, 72, 64, 8192, 66), path(128, 72, 64, 8192, 65)]  # blocks as many as an H100 has room for
        print(json.dumps([found, [line.split()[1] for line in told]]))
        """
    found, told = json.loads(dry_python(source).stdout.splitlines()[-1])
    assert found == ["sdpa", *["kernel"] * 4, *["sdpa"] * 3, *["kernel", "sdpa"] * 2]
    assert told == found


def test_torchs_kernel_serves_elsewhere_and_keeps_no_scores(dry_python: RunPython) -> None:
    source = """
        import json, torch
        from pyalloc.ops import _cuda, scaled_attention

        _cuda.has_kernel = lambda device, family, name: False

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


def test_plain_calls_go_past_the_dispatcher(dry_python: RunPython) -> None:
    """If kernels serve and there is something to launch.  What torch should see or compute goes through it."""
    source = """
        import json, torch
        from torch.utils.flop_counter import FlopCounterMode
        from pyalloc.ops import additive_attention, power_spherical_log_prob, scaled_attention

        def ones(*shapes, dtype=torch.float32):
            return [torch.ones(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]

        def calls(n=3, dtype=torch.float32):
            head = (1, 2, n, 8)
            return {
                "attention": scaled_attention(*ones(head, head, head, dtype=dtype), path="kernel"),
                "additive": additive_attention(*ones((2, 4), (2, n, 4), (2, n, 5), (4,), dtype=dtype)),
                "ps": power_spherical_log_prob(*ones((n, 8), (n, 8), (n,), dtype=dtype)),
            }

        def names(node):
            return [type(node).__name__, *(n for up, _ in node.next_functions if up for n in names(up))]

        def direct(found):
            return [name for name, out in found.items() if "_DirectBackward" in names(out.grad_fn)]

        found = [direct(calls()), direct(calls(dtype=torch.float64)), direct(calls(n=0))]
        with FlopCounterMode(display=False):
            found.append(direct(calls()))
        for out in calls().values():
            out.sum().backward()
        print(json.dumps(found))
        """
    found = json.loads(dry_python(source).stdout.splitlines()[-1])
    assert found == [["attention", "additive", "ps"], [], [], []]
