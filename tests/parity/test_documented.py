"""docs/parity.md lists every function of torch.cuda.memory and torch.accelerator.memory of this version of torch."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest
import torch
import torch.accelerator.memory

TEXT = (Path(__file__).parent.parent.parent / "docs" / "parity.md").read_text()
STATUSES = {"same", "differs", "torch's", "not"}


def rows(section: str) -> dict[str, str]:
    (part,) = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL
    )
    found = dict(re.findall(r"^\| (.+?) \| ([a-z']+) \|", part, re.MULTILINE))
    return {name: status for name, status in found.items() if status != "status"}


def names_of(module: object) -> set[str]:
    private = {
        name
        for name, value in vars(module).items()
        if name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__ == module.__name__
    }
    return set(module.__all__) | {name for name in private if not name.startswith("__")}


@pytest.mark.parametrize(
    "module", [torch.cuda.memory, torch.accelerator.memory], ids=lambda m: m.__name__
)
def test_every_function_is_listed(module: object) -> None:
    section = module.__name__
    listed = {name.strip("`") for name in rows(section)}
    public = {name for name in names_of(module) if section == "torch.cuda.memory" or name[0] != "_"}
    assert public - listed == set()


@pytest.mark.parametrize(
    "section", ["torch.cuda.memory", "torch.accelerator.memory", "Everything else"]
)
def test_rows_have_a_status(section: str) -> None:
    found = rows(section)
    assert len(found) >= 10
    assert set(found.values()) <= STATUSES


@pytest.mark.parametrize("section", ["torch.cuda.memory", "torch.accelerator.memory"])
def test_rows_of_status_same_are_held_by_tests(section: str) -> None:
    """Those that this version of torch has, each by its name."""
    tests = "".join(
        path.read_text()
        for path in Path(__file__).parent.glob("test_*.py")
        if path != Path(__file__)
    )
    same = {name.strip("`") for name, status in rows(section).items() if status == "same"}
    assert len(same) >= 5
    assert [name for name in sorted(same) if re.search(rf"\b{name}\b", tests) is None] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch._C._cuda_getCheckpointState(0, (9, 9)),
        lambda: torch.cuda.memory.memory_summary(),
        lambda: torch.cuda.memory.memory_stats(),
        lambda: torch.cuda.memory.memory_snapshot(),
        lambda: torch.cuda.memory._snapshot(),
        lambda: torch.cuda.memory.get_per_process_memory_fraction(),
        lambda: torch.accelerator.memory.memory_stats(),
    ],
)
def test_nothing_is_said_to_be_unsupported(call) -> None:
    torch.zeros(1, device="cuda")
    try:
        call()
    except RuntimeError as error:
        assert "does not yet support" not in str(error)


def test_what_cplusplus_cannot_have_says_so() -> None:
    """C++ still calls the functions that pyalloc replaced in Python."""
    if os.environ["PYALLOC_PARITY"] == "native":
        pytest.skip("torch's own allocator answers")
    from pyalloc.install import _state

    originals = {name: function for _, name, function in _state.replacements.originals}
    torch.zeros(1, device="cuda")
    for name in ("_accelerator_getDeviceStats", "_cuda_memoryStats"):
        if name in originals:
            with pytest.raises(RuntimeError, match=r"pyalloc: .*torch\.cuda\.memory_stats\(\)"):
                originals[name](0)
    with pytest.raises(RuntimeError, match=r"pyalloc: .*_snapshot\(\)"):
        originals["_cuda_memorySnapshot"](None)
    if "_accelerator_emptyCache" in originals:
        originals["_accelerator_emptyCache"]()
        assert torch.cuda.memory_reserved() == 0
