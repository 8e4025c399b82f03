"""Calls of _core, including calls that fail, leave no objects, references or host memory behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dry_support import ROOT, RunPython, run_checked


def test_of_files(tmp_path: Path) -> None:
    program = ROOT / "tests" / "growth_of_files.py"
    assert run_checked([sys.executable, str(program), str(tmp_path)]).stdout == ""


@pytest.mark.torch
def test_of_the_allocator(dry_python: RunPython, tmp_path: Path) -> None:
    out = dry_python(
        """
        import os, sys
        from functools import partial
        import torch
        sys.path.insert(0, "tests")
        from growth import left_by
        import pyalloc
        from pyalloc import _core
        from pyalloc.inside import eventsources
        from pyalloc.ops import _library, _plain, _plans

        MIB = 1 << 20
        sys.unraisablehook = lambda told: None
        _core.history_start(2, True, 50, 0, True)
        held = torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = torch.empty(MIB, device="cuda")
        address = held.data_ptr()
        tensors = [torch.zeros(2, 3, 4, 5) for _ in range(3)]
        nobody = torch.view_as_complex(torch.zeros(2, 2)).conj().imag

        class Own(torch.Tensor):
            pass

        def out_of_memory():
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")

        def under_pressure():
            answers = [lambda *_: 1 / 0, lambda *_: False, lambda *_: None]
            handles = [pyalloc.on_pressure(answer) for answer in answers]
            try:
                out_of_memory()
            finally:
                for handle in handles:
                    handle.remove()

        trace = _core.TraceWriter(os.environ["PYALLOC_TEST_OUT"])
        history = _core.HistoryWriter(trace, set(), eventsources.thread_name)

        def drained():
            inside.clone()
            history.drain(0, [(1, 20, 0, 0, 0, 0, 0)])

        def alloc_and_free():
            _core.free(_core.alloc(0, MIB, 0))

        def labelled():
            _core.set_metadata(b"a label")
            torch.empty(1000, device="cuda")
            assert _core.get_metadata() == "a label"
            assert _core.annotate(address, b"a note", 1)

        def own_pool():
            with pyalloc.pool(limit="1GiB"):
                torch.empty(3 * MIB, device="cuda")

        types = torch.Tensor, torch.nn.Parameter
        key = _core.tensor_key(*types)
        modes = torch.is_inference_mode_enabled, torch.is_grad_enabled, lambda _: None
        sdpa = torch.nn.functional.scaled_dot_product_attention
        parts = *types, torch.float32, vars(torch.compiler), *modes, sdpa, print, {-1: print}
        kernels = [
            partial(_library.address, f"pya_ops_attention_{way}") for way in ("forward", "backward")
        ]
        kinds = {}, {}, bool, {"_current_level": -1}, ((bool, False),)
        parts = *parts, *kinds, _plans.empty_cpu, _library.threads, *kernels, _plain._PARTS[-1]
        limits = 10, 3, 1000, 100, 2, 256, 10
        few, _ = _core.attention_plain(parts, limits)
        _, gradients = _core.attention_plain((*parts[:5], bool, *parts[6:]), limits)
        refused, _ = _core.attention_plain((*parts[:-1], bool), limits)
        learned = [torch.ones(1, 1, 2, 3, requires_grad=True)] * 3

        one = torch.ones(())
        options = None, None, False, 0.5, 0.0, "auto", True
        out = few(*learned, torch.ones(1, 1, 1, 1), *options[1:])[0]
        saved, grad = out.grad_fn.saved_tensors, torch.ones_like(out)
        wanted = grad, saved, False, 0.5, True
        assert len(gradients(*wanted)) == 4
        one_key = torch.ones(1, 1, 10, 3, requires_grad=True), *learned[:2]
        one_key = one_key[0], *(x[:, :, :1] for x in one_key[1:])

        def rule(*qkv, bias=None, mask=None, causal=False):
            return few(*qkv, bias, mask, causal, 0.5, 0.0, "auto", True)

        calls = {
            "stats": lambda: _core.stats(0),
            "stats of no device": lambda: _core.stats(-1),
            "nested": lambda: _core.nested_stats(0, {"num_ooms"}),
            "nested without a number": lambda: _core.nested_stats(0, 5),
            "pools": lambda: _core.pools(0),
            "snapshot": lambda: _core.snapshot(2, True, None),
            "snapshot of a pool": lambda: _core.snapshot(2, False, pool.id),
            "snapshot of no pool": lambda: _core.snapshot(2, False, (1, "two")),
            "snapshot of too many": lambda: _core.snapshot(99, False, None),
            "actions": _core.actions,
            "features": _core.torch_features,
            "hooks": _core.torch_attach,
            "counts": _core.counts,
            "traceback": lambda: _core.traceback(address),
            "traceback of nothing": lambda: _core.traceback(1),
            "no annotation": lambda: _core.annotate(1, b"a note", 1),
            "labels": labelled,
            "metadata of no bytes": lambda: _core.set_metadata("text"),
            "alloc": alloc_and_free,
            "alloc of too much": lambda: _core.alloc(0, 1 << 60, 0),
            "free of nothing": lambda: _core.free(1),
            "block": lambda: _core.block_info(address),
            "no block": lambda: _core.block_info(1),
            "reserve of too much": lambda: _core.reserve(0, 1 << 40, 0),
            "limit": lambda: (_core.set_limit(0, True, 8 << 30), _core.get_limit(0, True)),
            "limit of no pool": lambda: _core.pool_set_limit(0, (9, 9), MIB),
            "tensors": lambda: torch.empty(3 * MIB, device="cuda"),
            "a pool": own_pool,
            "drained": drained,
            "drained wrongly": lambda: history.drain(0, [5]),
            "out of memory": out_of_memory,
            "pressure": under_pressure,
            "key": lambda: key(*tensors, None),
            "key of no tensor": lambda: key(tensors[0], 5),
            "key of a negation": lambda: key(tensors[0], nobody),
            "key of a class": lambda: key(tensors[0].as_subclass(Own)),
            "maker of keys": lambda: _core.tensor_key(*types),
            "rule": lambda: rule(*tensors),
            "rule with a negation": lambda: rule(nobody[None, None], *2 * [nobody[None, None]]),
            "rule of others": lambda: rule(*(tensor.double() for tensor in tensors)),
            "rule of a class": lambda: rule(*(tensor.as_subclass(Own) for tensor in tensors)),
            "rule with scores": lambda: rule(*tensors, bias=one, mask=one > 0),
            "rule with other scores": lambda: rule(*tensors, bias=one > 0),
            "rule with no scores": lambda: rule(*tensors, mask=5),
            "rule of no tensors": lambda: rule(1, 2, 3),
            "rule of others than bare calls": lambda: rule(*tensors, causal=1),
            "rule with a gradient": lambda: rule(*learned, causal=True),
            "rule with a gradient of one key": lambda: rule(*one_key),
            "rule that records": lambda: few(*learned, *options),
            "rule that records no such scores": lambda: few(*learned, one, *options[1:]),
            "gradients": lambda: gradients(*wanted),
            "gradients of no bias": lambda: gradients(grad, (*saved[:5], None, None), *wanted[2:]),
            "gradients of wrong sizes": lambda: gradients(grad[..., :1], *wanted[1:]),
            "gradients of nothing": gradients,
            "rule that records nothing": lambda: refused(*learned, *options),
            "maker of rules": lambda: _core.attention_plain(parts, limits),
            "maker of none": lambda: _core.attention_plain(parts, (*limits[1:], "6")),
            "maker of no parts": lambda: _core.attention_plain(parts[1:], limits),
            "op without a place": lambda: _core.op_call(address, b"1" * 8, b"12", None, 5, 6),
            "op beyond": lambda: _core.op_call(address, b"1" * 8, b"\\1\\1", None, 5),
            "op of no tensor": lambda: _core.op_call(address, b"1" * 8, b"\\0\\0", None, "five"),
        }
        for name, call in calls.items():
            left = left_by(call)
            if left is not None:
                print(name, left, sep=": ")
        assert _core.check(0) == 0
        """,
        install=True,
        env={"PYALLOC_TEST_OUT": str(tmp_path / "out.pya")},
    ).stdout
    assert out == ""
