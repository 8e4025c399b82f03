"""Recordings that begin while the program is running."""

from __future__ import annotations

from pathlib import Path

import pytest
from dry_support import RunPython

from pyalloc import trace

pytestmark = pytest.mark.torch


def test_a_recording_that_begins_in_the_middle_of_an_optimizers_step(
    dry_python: RunPython, tmp_path: Path
) -> None:
    """Then torch calls the hook after the step, but not the one before it."""
    out = tmp_path / "out.pya"
    done = dry_python(
        f"""
        import contextlib, torch, pyalloc
        with contextlib.ExitStack() as stack:
            model = torch.nn.Linear(1000, 1000).cuda()
            optimizer = torch.optim.SGD(model.parameters())
            handle = optimizer.register_step_pre_hook(
                lambda *_: stack.enter_context(pyalloc.record({str(out)!r})) and None
            )
            for _ in range(3):
                model(torch.ones(8, 1000, device="cuda")).sum().backward()
                optimizer.step()
                handle.remove()
        """
    )
    assert done.stderr == ""
    analysis = trace.analyse(out)
    assert [phase.name for phase in analysis.phases].count("optimizer") == 2
    assert "begins when memory was already in use" in " ".join(analysis.caveats)
