"""DTensors: four processes over gloo, each with its part."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from dry_support import PATIENCE_S, torch_python

pytest.importorskip("torch.distributed.tensor")

TESTS = Path(__file__).parent.parent
N_PROCESSES = 4


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """The output of the first process; all must exit with 0."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    file = tmp_path_factory.mktemp("sharded") / "meeting"
    python, env = torch_python()
    running = [
        subprocess.Popen(
            [python, "-m", "ops.sharded", str(rank), str(file)],
            cwd=TESTS,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(N_PROCESSES)
    ]
    try:
        ended = [each.communicate(timeout=PATIENCE_S) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (_, errors) in zip(running, ended, strict=True):
        assert each.returncode == 0, errors[-3000:]
    return ended[0][0].splitlines()


# The placement of the result: what the op can use as it is sharded stays so.
PLACES = {
    "batch and heads": "S(0) S(1)",
    "heads and batch": "S(1) S(0)",
    "heads twice": "S(1) S(1)",
    "groups that fit": "S(1) R",
    "groups that do not": "S(1) R",
    "an uneven batch": "S(0) R",
    "a process without entries": "S(0) S(1)",
    "queries only": "S(0) S(1)",
    "values only": "S(0) S(1)",
    "features": "R R",
    "nothing sharded": "R R",
    "a bias of each head": "S(0) S(1)",
    "a bias of each entry": "S(0) S(1)",
    "a bias of all": "S(0) S(1)",
    "additive": "S(0) S(0)",
    "additive, queries": "S(0) S(1)",
    "additive, keys": "R R",
    "additive, one step": "S(0) R",
    "pairs": "S(0) S(1)",
    "pairs of a place": "S(2) R",
    "samples by place": "S(0) S(2)",
    "summed": "P(sum) P(sum)",
    "mixture": "S(0) S(1)",
    "its components": "R R",
}


@pytest.mark.parametrize("name", PLACES)
def test_as_over_whole_tensors(name, printed):
    """Results and gradients, which the processes compare."""
    assert f"ok {name} {PLACES[name]}" in printed


def test_every_case_has_its_place(printed):
    assert sum(line.startswith("ok ") for line in printed) == len(PLACES)


@pytest.mark.parametrize(
    "what", ["on the same mesh, got DTensor, DTensor, Tensor", "set dropout=0"]
)
def test_what_cannot_be_is_refused(what, printed):
    assert any(line.startswith("refused: scaled_attention: ") and what in line for line in printed)
