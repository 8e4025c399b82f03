"""The first half hour with a card, as one command: first.py [--seconds N] [--out FOLDER] [--only STEP ...].

Runs the steps of README.md in order, each in processes of its own with a limit of its own, and goes on after one that
fails.  After every step what is known so far is in build/gpu (--results) and copied to --out: first.json has device,
driver, versions, commit and for each step its command, verdict, seconds and last lines; first.log has all they printed;
ops.json the rows of the ops.  A step that was run is not run again: where --seconds ended the first call, the same
command goes on.

Exit code 0: all passed; 1: a step failed or was beyond its limit; 3: steps are left, call again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 16000
BEYOND = "beyond its limit"
LEAST_S = 20  # with less than this left nothing is begun
PYTEST = "-m pytest -q -rA --tb=short -p no:cacheprovider -o filterwarnings=default"
DRIVER_BUILD = "make -s -j8 -C tests/c WARN= WARN_C= VARIANT=debug ONLY=test_device_conformance"


@dataclass(frozen=True)
class Step:
    """command runs in a shell, in the repository's root; $PY is this Python."""

    name: str
    command: str
    limit_s: int
    tool: str = ""  # without which the step is skipped
    bad: str = ""  # what a passing command must not print
    after_failed: str = ""  # only where that step failed
    env: dict[str, str] = field(default_factory=dict)


STEPS = (
    # A build that was carried here is kept where it loads: compilers differ, and their time counts.
    Step(
        "build",
        "$PY -c 'import pyalloc._core' && test -e pyalloc/lib/ops.cu || $PY setup.py -q build_ext --inplace",
        300,
    ),
    Step("doctor", "$PY -m pyalloc doctor", 90, bad="it came from cudaMalloc"),
    Step("driver", f"{DRIVER_BUILD} build && {DRIVER_BUILD} run", 180, tool="make"),
    Step(
        "costs",
        "make -s -j8 -C tests/c ubench WARN= WARN_C= && build/c/release/bench/driver_costs",
        120,
        tool="make",
    ),
    Step("allocator", f"$PY {PYTEST} tests/gpu/test_allocator.py", 240),
    Step(
        "allocator without virtual memory",
        f"$PY {PYTEST} tests/gpu/test_allocator.py -k 'not stitched and not shared'",
        180,
        after_failed="allocator",
        env={"PYALLOC_CONF": "vmm:false"},
    ),
    Step("ops", f"$PY {PYTEST} tests/gpu/test_ops.py", 300),
    Step("questions", "$PY tests/gpu/questions.py", 240),
    Step(
        "training",
        "$PY -m benchmarks.repeated --device cuda --json -q --steps 8 --only mlp gpt resnet50 swin",
        420,
    ),
    Step("ops' speed", "$PY -m benchmarks.ops --device cuda --force --json $RESULTS/ops.json", 420),
    Step("shared pages", "$PY tests/programs/shared_pages.py 4000 --kernels", 150),
    Step(
        "sanitizer",
        "compute-sanitizer --error-exitcode 9 $PY tests/programs/shared_pages.py 150 --kernels",
        180,
        tool="compute-sanitizer",
        bad="Device not supported",
    ),
    Step("demo", "$PY examples/demo.py", 180),
)


def said(*command: str) -> str:
    """What a command prints; "" where it is missing or fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def about(commit: str) -> dict[str, str]:
    torch = (
        "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())"
    )
    query = "name,driver_version,memory.total,clocks.max.sm,compute_cap"
    return {
        "commit": commit,
        "nvidia-smi": said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
        "torch, its CUDA, device": said(sys.executable, "-W", "ignore", "-c", torch),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cc": said("cc", "--version").partition("\n")[0],
        "nvcc": said("nvcc", "--version").rpartition("\n")[2],
        "processors": str(os.cpu_count()),
    }


def run_limited(command: str, env: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: stopped at the limit) and output; what it started ends with it."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return code, output.decode(errors="replace")


def verdict(step: Step, code: int | None, output: str) -> str:
    if code is None:
        return BEYOND
    if step.bad and step.bad in output:
        return f"failed: {step.bad}"
    return "passed" if code == 0 else f"failed: exit code {code}"


def perform(step: Step, env: dict[str, str], left_s: float) -> dict[str, Any]:
    if step.tool and shutil.which(step.tool) is None:
        return {"command": step.command, "verdict": f"skipped: no {step.tool}"}
    began = time.monotonic()
    code, output = run_limited(step.command, {**env, **step.env}, min(step.limit_s, left_s))
    with (Path(env["RESULTS"]) / "first.log").open("a") as log:
        log.write(f"==== {step.name}: {step.command}\n{output}\n")
    return {
        "command": step.command,
        "verdict": verdict(step, code, output),
        "seconds": round(time.monotonic() - began, 1),
        "limit_s": round(min(step.limit_s, left_s)),
        "tail": output[-TAIL:],
    }


def is_wanted(step: Step, done: dict[str, Any], only: list[str]) -> bool:
    if step.name in done or (only and step.name not in only):
        return False
    return not step.after_failed or done.get(step.after_failed, {}).get("verdict") != "passed"


def save(found: dict[str, Any], results: Path, out: Path | None) -> None:
    (results / "first.json").write_text(json.dumps(found, indent=1) + "\n")
    if out is not None:
        shutil.copytree(results, out, dirs_exist_ok=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1500, help="for this call (1500)")
    parser.add_argument("--out", type=Path, help="a folder that gets a copy of the results")
    parser.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS])
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", help="build/gpu")
    parser.add_argument("--commit", help="where the copy of the repository has no .git")
    return parser.parse_args()


def main() -> int:
    end = time.monotonic() + (args := arguments()).seconds
    results = args.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    path = results / "first.json"
    commit = args.commit or said("git", "describe", "--always", "--dirty=+", "--exclude=*")
    found = json.loads(path.read_text()) if path.exists() else {"about": about(commit), "steps": {}}
    env = {**os.environ, "PY": sys.executable, "RESULTS": str(results)}
    env.update(PYTHONPATH=str(ROOT), PYALLOC_COMMIT=commit)
    done = found["steps"]
    for step in STEPS:
        left_s = end - time.monotonic()
        if left_s < LEAST_S:
            break
        if is_wanted(step, done, args.only):
            row = perform(step, env, left_s)
            print(f"{step.name}: {row['verdict']}", flush=True)
            if row["verdict"] == BEYOND and left_s < step.limit_s:
                break  # it had less than its due
            done[step.name] = row
            save(found, results, args.out)
    save(found, results, args.out)
    if any(is_wanted(step, done, args.only) for step in STEPS):
        print("steps are left: the same command goes on with them")
        return 3
    return (
        0 if all(row["verdict"].startswith(("passed", "skipped")) for row in done.values()) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
