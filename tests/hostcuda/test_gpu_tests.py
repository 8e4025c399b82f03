"""The tests for a card, as far as they go without one: kernels compute nothing here."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from dry_support import PATIENCE_S, dry_environment, python_for, run_checked, wait_until


@pytest.mark.torch
@pytest.mark.slow
def test_programs_for_a_card_run_on_either_allocator() -> None:
    """Those that look at what kernels computed only to compare the two allocators."""
    tests = ["tests/gpu/test_allocator.py", "-k", "out_of_memory or graphs or process"]
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:nvml"]
    done = run_checked(
        [sys.executable, "-m", "pytest", *options, *tests], env=dry_environment(memory="4GB")
    )
    assert "3 passed" in done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_the_first_run_goes_on_where_its_time_ended(tmp_path: Path) -> None:
    """The steps as on a card, except those that need right results."""
    env = {**dry_environment(memory="4GB"), "PYALLOC_HOSTCUDA_FAIL": "every:cuMemMap:801"}
    command = [sys.executable, "tests/gpu/first.py", "--results", str(tmp_path / "results")]
    command += ["--commit", "abc", "--only", "doctor", "costs"]
    run_checked([*command, "--seconds", "1"], env=env, expect=3)
    assert not json.loads((tmp_path / "results" / "first.json").read_text())["steps"]
    run_checked([*command, "--out", str(tmp_path / "out")], env=env, expect=1)
    found = json.loads((tmp_path / "out" / "first.json").read_text())
    assert found["about"]["commit"] == "abc"
    assert "host-memory device" in found["about"]["torch, its CUDA, device"]
    assert found["steps"]["doctor"]["verdict"] == "failed: the memory came from cudaMalloc"
    assert "refused them when tried: cuMemMap 801" in found["steps"]["costs"]["tail"]
    costs = json.loads((tmp_path / "out" / "costs.json").read_text())
    assert costs["small"] and {"cuMemAlloc"} == names(costs, "speed", "copy GiB/s")
    assert "costs" in (tmp_path / "out" / "first.log").read_text()


def names(costs: dict[str, Any], section: str, unit: str) -> set[str]:
    rows = costs["figures"]
    return {row["what"] for row in rows if row["section"] == section and row["unit"] == unit}


@pytest.fixture(scope="module")
def driver_costs() -> list[str]:
    run_checked(["make", "-s", "-C", "tests/c", "ubench"])
    return ["build/c/release/bench/driver_costs", "--small", "--json"]


def on_hostcuda(**more: str) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": "pyalloc/lib/hostcuda", "PYALLOC_HOSTCUDA_MEMORY": "4GB", **more}


def test_costs_of_the_driver_are_measured(driver_costs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    done = run_checked([*driver_costs, str(path)], env=on_hostcuda())
    costs = json.loads(path.read_text())
    assert "host-memory device" in costs["device"] and costs["driver"] >= 12000
    assert costs["small"] and costs["failed"] == 0
    assert all(row["rounds"] > 1 for row in costs["figures"])
    assert all(row["min"] <= row["median"] <= row["max"] for row in costs["figures"])
    pages = {row["what"]: row["pages"] for row in costs["figures"] if row["section"] == "idle"}
    assert pages["cuMemSetAccess, page by page"] == pages["cuMemUnmap"] == 64
    calls = {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemFree"}
    assert calls <= names(costs, "idle", "us") & names(costs, "busy", "us")
    assert names(costs, "busy", "us") == names(costs, "quiet", "us")
    assert "cuMemMap, cuMemSetAccess, cuMemUnmap" in names(costs, "copies", "work ms")
    assert names(costs, "copies", "times") == names(costs, "random reads", "times")
    assert "stitched in shuffled order" in names(costs, "speed", "copy GiB/s")
    rows = names(costs, "speed", "random reads GiB/s")
    assert "every 32nd place, rows of 2 MiB" in rows
    assert "map" in names(costs, "way, 20 MiB: one handle", "us")
    assert "| stitched in shuffled order |" in done.stdout


def test_what_the_driver_refuses_costs_one_section(driver_costs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    env = on_hostcuda(PYALLOC_HOSTCUDA_FAIL="30:cuMemSetAccess:2")
    done = run_checked([*driver_costs, str(path)], env=env, expect=1)
    assert "idle, pages: cuMemSetAccess was refused: 2" in done.stderr
    assert "failed: idle, pages: cuMemSetAccess" in done.stdout
    costs = json.loads(path.read_text())
    assert costs["failed"] == 1 and names(costs, "speed", "copy GiB/s")


@contextmanager
def program(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(name, f"tests/gpu/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def first() -> Iterator[ModuleType]:
    with program("first") as module:
        yield module


def test_no_driver_is_no_driver_that_passed(first: ModuleType) -> None:
    (step,) = (step for step in first.STEPS if step.name == "driver")
    assert step.bad and f'"{step.bad}: ' in Path("tests/c/subject.h").read_text()
    assert first.verdict(step, 0, f"{step.bad}: libcuda.so.1 could not be opened") != "passed"
    assert first.verdict(step, 0, "device: cuda") == "passed"


def test_what_a_stopped_step_printed_is_kept(
    first: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "first.log"
    log.write_text("before\n")
    wait = subprocess.Popen.wait

    def wait_until_begun(process: subprocess.Popen[bytes], timeout: float) -> int:
        wait_until(lambda: "begun" in log.read_text(), process)
        return wait(process, timeout)

    with monkeypatch.context() as patch:  # the time that bash takes to start does not count
        patch.setattr(subprocess.Popen, "wait", wait_until_begun)
        assert first.run_limited("echo begun; sleep 600", {}, 0.1, log) == (None, "begun\n")
    assert first.run_limited("echo done; exit 7", {}, PATIENCE_S, log) == (7, "done\n")
    assert log.read_text() == "before\nbegun\ndone\n"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_step_leaves_running_ends_with_it(first: ModuleType, tmp_path: Path) -> None:
    """Otherwise it would hold the card's memory in later steps."""
    code, output = first.run_limited("sleep 600 & echo $!", {}, PATIENCE_S, tmp_path / "first.log")
    assert code == 0
    wait_until(lambda: not is_running(int(output)))


def test_a_step_ends_with_the_program(tmp_path: Path) -> None:
    """Otherwise it would use the card beside the next call, which starts it again."""
    log = tmp_path / "first.log"
    source = "import sys, pathlib, first; first.end_on_sigterm(); "
    source += "first.run_limited('echo $$; exec sleep 600', {}, 600, pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(Path("tests/gpu").absolute())}
    with subprocess.Popen([sys.executable, "-c", source, str(log)], env=env) as program:
        while program.poll() is None and not (log.exists() and log.read_text().endswith("\n")):
            pass
        step = int(log.read_text())
        is_in_our_session = os.getsid(step) == os.getsid(0)
        program.terminate()
    wait_until(lambda: not is_running(step))
    assert program.returncode == 128 + signal.SIGTERM
    assert is_in_our_session


def test_a_step_that_has_just_begun_ends_with_the_program(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, subprocess, sys, first
class Begun(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Begun
first.end_on_sigterm()
first.run_limited('exec sleep 600', {}, 600, pathlib.Path(sys.argv[1]))
"""
    env = {**os.environ, "PYTHONPATH": str(Path("tests/gpu").absolute())}
    command = [sys.executable, "-c", source, str(tmp_path / "first.log")]
    program = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    step = int(program.stdout)
    is_left = is_running(step)
    if is_left:
        os.kill(step, signal.SIGKILL)
    assert program.returncode == 128 + signal.SIGTERM and not is_left


def test_a_second_look_is_taken_where_the_first_failed(first: ModuleType) -> None:
    (second,) = (step for step in first.STEPS if step.after_failed == "ops")
    verdicts = {"passed": False, "skipped: no make": False, "failed: exit code 1": True}
    for verdict, wanted in {**verdicts, first.BEYOND: True}.items():
        assert first.is_wanted(second, {"ops": {"verdict": verdict}}, []) == wanted
    assert not first.is_wanted(second, {}, [])  # not yet: its time comes
    assert first.is_wanted(second, {}, [second.name])
    names = [step.name for step in first.STEPS]
    assert all(step.after_failed in ["", *names] for step in first.STEPS)


def with_run(run: Callable[..., Any]) -> SimpleNamespace:
    """subprocess for one module: the parity suite starts programs beside these tests with the real one."""
    return SimpleNamespace(**{**vars(subprocess), "run": run})


@pytest.mark.torch
def test_an_op_that_breaks_the_device_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend("tests/gpu")
    # Other tests may have loaded the host-memory driver here, which torch's own runtime cannot use and warns of.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    asked: list[str] = []

    def ends(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        if len(asked) == 1:
            raise subprocess.TimeoutExpired(command, 30)
        return subprocess.CompletedProcess(command, -6 if len(asked) == 2 else 0)

    with program("small_ops") as small:
        monkeypatch.setattr(small, "subprocess", with_run(ends))
        monkeypatch.setattr(sys, "argv", ["small_ops.py", "--each"])
        assert small.main() == 1
        assert asked == list(small.cases())
    said = capsys.readouterr().out
    assert f"{asked[0]}: no end" in said and f"{asked[1]}: exit code -6" in said


@pytest.mark.torch
@pytest.mark.slow
def test_questions_for_a_card_are_answered() -> None:
    found = {}
    program = Path("tests/gpu/questions.py")
    python = python_for(program.read_text())
    for name in ("unmapping", "addresses", "destroyed_streams", "full_card"):
        command = [python, "-W", "ignore", str(program), name, "pyalloc"]
        found[name] = json.loads(run_checked(command, env=dry_environment(memory="8GB")).stdout)
    assert found["addresses"]["different"]
    assert found["destroyed_streams"]["reserved_mib_in_the_end"] == 0
    assert found["full_card"]["blocks_of_37_mib"] > 0


@pytest.mark.torch
def test_a_wrong_answer_is_no_success() -> None:
    right = {"relaxed": "right", "relaxed, the other thread": "no error", "stream_ms": [1.0, 2.0]}
    lost = {**right, "relaxed": "wrong", "relaxed, the other thread": ["out of memory"]}
    with program("questions") as questions:
        assert questions.wrong_alone(right, right) == []
        assert questions.wrong_alone(lost, right) == ["relaxed", "relaxed, the other thread"]
        assert questions.wrong_alone(lost, lost) == []
        failed = {**lost, "relaxed": "CUDA error: operation not permitted"}
        assert questions.wrong_alone(failed, lost) == []
        assert questions.wrong_alone(lost, failed) == ["relaxed"]
        assert questions.wrong_alone({"bytes_kept": False}, {"bytes_kept": True}) == ["bytes_kept"]
        assert questions.wrong_alone({"error": "exit code -6"}, {"error": "exit code -6"})


@pytest.mark.torch
@pytest.mark.slow
def test_training_on_a_card_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.repeated", "--device", "cuda", "--json", "-q"]
    done = run_checked(
        [*command, "--only", "mlp", "--steps", "3"], env=dry_environment(memory="8GB")
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["allocator"] for row in rows] == ["native", "expandable", "pyalloc"]
    assert all(len(row["step_ms"]) == 3 and row["calls"][0] > 0 for row in rows)
    assert all(row["peak_bytes"] >= row["live_bytes"] > 0 for row in rows)


@pytest.mark.torch
@pytest.mark.slow
def test_parity_on_a_card_runs_both_allocators() -> None:
    command = [sys.executable, "tests/gpu/parity_on_card.py", "statistics"]
    few = {"PYTEST_ADDOPTS": "-k keys_are_complete"}
    done = run_checked(command, env={**dry_environment(memory="139GB"), **few})
    (row,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert row["on_pyalloc_alone"] == []
    assert " passed" in row["native"] and " passed" in row["pyalloc"]


@pytest.mark.parametrize(
    ("ours", "code"), [({"a", "b"}, 1), ({"a"}, 0), ({"a", "(end)"}, 1)], ids=["b", "a", "end"]
)
def test_what_fails_on_pyalloc_alone_counts(
    ours: set[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does what was never seen, even if native did not get there either."""
    with program("parity_on_card") as parity:
        found = {"native": ({"a", "(end)"}, "1 failed"), "pyalloc": (ours, "some failed")}
        monkeypatch.setattr(parity, "failed", lambda name, allocator, limit_s: found[allocator])
        monkeypatch.setattr(sys, "argv", ["parity_on_card.py", "graphs"])
        assert parity.main() == code
    assert json.loads(capsys.readouterr().out)["on_pyalloc_alone"] == sorted(ours - {"a"})


PARITY = """
import os
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_passes(): pass
@pytest.mark.parametrize("n", [1])
def test_fails(n): raise ValueError
def test_is_broken_afterwards(broken): pass
def test_dies(): os._exit(7)
"""


def test_what_failed_before_a_run_ended_early_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests" / "parity").mkdir(parents=True)
    (tmp_path / "tests" / "parity" / "test_x.py").write_text(PARITY)
    right = {"test_fails[1]", "test_is_broken_afterwards", "(end)"}
    with program("parity_on_card") as parity:
        monkeypatch.setattr(parity, "TESTS", tmp_path / "tests")
        done: list[subprocess.CompletedProcess[str]] = []
        run = subprocess.run
        kept = with_run(lambda *a, **o: done.append(run(*a, **o)) or done[0])
        monkeypatch.setattr(parity, "subprocess", kept)
        assert parity.failed("x", "native")[0] == right

        def late(command: list[str], **options: Any) -> None:
            raise subprocess.TimeoutExpired(command, 100, output=done[0].stdout.encode())

        monkeypatch.setattr(parity, "subprocess", with_run(late))
        assert parity.failed("x", "native")[0] == right
        assert parity.failed("x", "native", 0) == ({"(end)"}, "not run: no time was left")
