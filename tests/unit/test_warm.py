"""Programs in a fork of a Python that has imported torch behave like those of a fresh one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dry_support import ROOT, dry_environment, python_for, run_checked, wait_until, warm_python

pytestmark = pytest.mark.torch


def test_a_fork_has_the_environment_arguments_and_folder_it_was_given(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, warnings, torch\n"
        "print(__name__, sys.argv[1:], sys.path[0], os.environ['ONLY_HERE'], 'pyalloc' in sys.modules)\n"
        "print(torch.cuda.get_device_properties(0).total_memory >> 30, torch.cuda.device_count())\n"
        "warnings.warn('not raised')\n"
    )
    env = {**dry_environment(memory="3GB", devices=2), "ONLY_HERE": "1"}
    python = [warm_python(""), "-W", "ignore"]
    done = run_checked([*python, str(script), "a b", "-c"], env=env)
    assert done.stdout == f"__main__ ['a b', '-c'] {tmp_path} 1 False\n3 2\n" and not done.stderr
    done = run_checked([*python, "-c", "import sys; print(sys.argv, sys.path[0])", "x"], env=env)
    assert done.stdout == "['-c', 'x'] \n"


def test_what_a_test_asks_for_itself_is_not_given_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parity suite runs beside other tests, one of which turned torch's cache off for it."""
    before = dry_environment()
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert dry_environment() == before


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_fork_ends_as_its_program_does(ending: str, code: int) -> None:
    run_checked(
        [warm_python(""), "-c", f"import os, sys; {ending}"], env=dry_environment(), expect=code
    )


def test_a_program_that_nobody_waits_for_ends() -> None:
    source = "import os, time; print(os.getpid(), flush=True); time.sleep(800)"
    with subprocess.Popen(
        [warm_python(""), "-c", source], env=dry_environment(), stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        program = int(client.stdout.readline())
        client.send_signal(signal.SIGKILL)
        assert client.stdout.read() == ""  # until the program has closed it
    wait_until(lambda: not Path(f"/proc/{program}").exists())


@pytest.mark.parametrize(
    ("source", "is_warm"),
    [
        ("import os, torch, pyalloc", True),
        ("'What it does.'\nfrom __future__ import annotations\nfrom torch import nn", True),
        ("    import gc\n    import torch.nn", True),
        ("import pyalloc, torch", False),
        ("from pyalloc.inside import recording\nimport torch", False),
        ("import os\nos.environ['A'] = ''\nimport torch", False),
        ("import torchvision", False),
    ],
)
def test_programs_that_import_torch_first_are_forked(source: str, is_warm: bool) -> None:
    assert (python_for(source) != sys.executable) == is_warm
    assert (python_for(source, ["PYALLOC_CONF"]) != sys.executable) == is_warm
    assert python_for(source, ["PYTORCH_ALLOC_CONF"]) == sys.executable


@pytest.mark.parametrize("given", [["--help"], ["native"], ["nativ", "tests/parity/test_pools.py"]])
def test_the_runner_of_parity_says_how_it_is_called(given: list[str]) -> None:
    done = run_checked(
        [sys.executable, str(ROOT / "tests/parity/run.py"), *given],
        expect=0 if given == ["--help"] else 2,
    )
    assert "{native,pyalloc}" in done.stdout + done.stderr
