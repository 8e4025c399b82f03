"""The first half hour with a card, as one command: first.py [--seconds N] [--out FOLDER] [--only STEP ...].

Runs the steps of README.md, the most important first, each in its own processes with its own time limit, and goes on
after a failure.  After every step, what is known so far is in build/gpu (--results) and copied to --out: first.json has
the device, driver, versions and commit, and for each step its command, verdict, seconds and last lines; first.log has
all output as it is printed; ops.json and attention.json have the rows of the ops, costs.json the figures of
driver_costs.  No step runs twice: if --seconds ended the first call, the same command continues.  A step does not begin
with less than half of its limit left.

Exit code 0: all passed; 1: a step failed or exceeded its limit; 3: steps are left, call again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
ENDING = (signal.SIGTERM, signal.SIGHUP)
PYTEST = "-m pytest -q -rA --tb=short -p no:cacheprovider -o filterwarnings=default"
OPS = "-m benchmarks.ops --device cuda --force"
TRAINING = "-m benchmarks.repeated --plan --device cuda --json -q --steps 8"
SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
# What one kernel breaks affects no other; --foreground: they end with the step.
APART = (
    "rc=0; for k in log_prob mixture 'additive or sequence' 'attention or dropout' more; do "
    f'timeout --foreground -s KILL 45 $PY {PYTEST} tests/gpu/test_ops.py -k "$k" || rc=1; '
    "done; exit $rc"
)
# Not through the makefile's `run`, which would repeat it on the host-memory runtime.
DRIVER = (
    "make -s -j8 -C tests/c WARN= WARN_C= VARIANT=debug ONLY='test_device_conformance test_device_runs' build && "
    "build/c/debug/test_device_conformance"
)


@dataclass(frozen=True)
class Step:
    """command runs in a shell, in the repository's root; $PY is this Python."""

    name: str
    command: str
    limit_s: int
    tool: str = ""  # without them the step is skipped
    module: str = ""  # Python modules, likewise
    bad: str = ""  # what a passing command must not print
    after_failed: str = ""  # only if that step failed
    env: dict[str, str] = field(default_factory=dict)

    def may_begin(self, left_s: float) -> bool:
        return left_s >= self.limit_s / 2


STEPS = (
    # A build that was copied here is kept if it loads: compilers differ, and building takes time.
    Step(
        "build",
        "$PY -c 'import pyalloc._core' && test -e pyalloc/lib/ops.cu || $PY setup.py -q build_ext --inplace",
        300,
    ),
    Step("doctor", "$PY -m pyalloc doctor", 90, bad="the memory came from cudaMalloc"),
    Step(
        "driver",
        f"{DRIVER} all vmm_is_tried_out open_refuses && build/c/debug/test_device_runs",
        180,
        tool="make",
        bad="cuda: skipped",
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
    Step("ops by kind", APART, 240, after_failed="ops"),
    Step("ops' addresses", "$PY tests/gpu/small_ops.py", 90),
    Step(
        "each op by itself", "$PY tests/gpu/small_ops.py --each", 180, after_failed="ops' addresses"
    ),
    Step("ops' speed", f"$PY {OPS} --only spherical additive shapes --json $RESULTS/ops.json", 360),
    Step(
        "costs",
        "make -s -j8 -C tests/c ubench WARN= WARN_C= && "
        "build/c/release/bench/driver_costs --json $RESULTS/costs.json",
        120,
        tool="make",
    ),
    Step("training", f"$PY {TRAINING} --only mlp gpt", 240),
    Step("questions", "$PY tests/gpu/questions.py", 240),
    Step("parity", "$PY tests/gpu/parity_on_card.py --seconds 400", 420),
    Step(
        "attention's speed", f"$PY {OPS} --only attention sweep --json $RESULTS/attention.json", 240
    ),
    Step("training on images", f"$PY {TRAINING} --only resnet50 swin", 300, module="torchvision"),
    Step("shared pages", "$PY tests/programs/shared_pages.py 4000 --kernels", 150),
    Step(
        "sanitizer",
        f"{SANITIZER} memcheck $PY tests/programs/shared_pages.py 150 --kernels",
        180,
        tool="compute-sanitizer",
        bad="Device not supported",
    ),
    Step(
        "ops' memory",
        f"{SANITIZER} memcheck $PY tests/gpu/small_ops.py",
        150,
        tool="compute-sanitizer",
        env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ),
    Step(
        "ops' races",
        f"{SANITIZER} racecheck $PY tests/gpu/small_ops.py",
        150,
        tool="compute-sanitizer",
        bad="Race reported",
    ),
    Step("demo", "$PY examples/demo.py", 180),
    # The driver may crash: pyalloc never asks it about them (README.md).
    Step("destroyed streams", f"{DRIVER} destroyed_streams", 60, tool="make"),
)


def said(*command: str) -> str:
    """What a command prints; "" if it is missing or fails."""
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


def run_limited(
    command: str, env: dict[str, str], limit_s: float, log: Path
) -> tuple[int | None, str]:
    """Exit code (None: stopped at the limit) and output, which goes to the log.  What it started ends with it."""
    with log.open("a+b") as out:
        begin = out.seek(0, os.SEEK_END)
        # No signal may end us between the step's beginning and the try that ends it, either.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})

        def prepare() -> None:
            os.setpgrp()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

        # A group of its own, so that all of it can be ended, but in this session, whose end ends the step too.
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=prepare,  # noqa: PLW1509  (this program has one thread)
        )
        code: int | None = None
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # usually nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may not let it go
            process.wait(timeout=10)
        out.seek(begin)
        return code, out.read().decode(errors="replace")


def end_on_sigterm() -> None:
    """As on an interrupt, or when the terminal is lost: the running step ends too."""
    for each in ENDING:
        signal.signal(each, lambda number, frame: sys.exit(128 + number))


def verdict(step: Step, code: int | None, output: str) -> str:
    if code is None:
        return BEYOND
    if step.bad and step.bad in output:
        return f"failed: {step.bad}"
    return "passed" if code == 0 else f"failed: exit code {code}"


def missing(step: Step) -> str:
    """What the step needs and is not here."""
    if step.tool and shutil.which(step.tool) is None:
        return step.tool
    if step.module and importlib.util.find_spec(step.module) is None:
        return step.module
    return ""


def perform(step: Step, env: dict[str, str], left_s: float) -> dict[str, Any]:
    if lacks := missing(step):
        return {"command": step.command, "verdict": f"skipped: no {lacks}"}
    began = time.monotonic()
    log = Path(env["RESULTS"]) / "first.log"
    with log.open("a") as title:
        title.write(f"\n==== {step.name}: {step.command}\n")
    limit_s = min(step.limit_s, left_s)
    code, output = run_limited(step.command, {**env, **step.env}, limit_s, log)
    return {
        "command": step.command,
        "verdict": verdict(step, code, output),
        "seconds": round(time.monotonic() - began, 1),
        "limit_s": round(limit_s),
        "tail": output[-TAIL:],
    }


def is_wanted(step: Step, done: dict[str, Any], only: list[str]) -> bool:
    if step.name in done or (only and step.name not in only):
        return False
    if not step.after_failed or step.name in only:
        return True
    return done.get(step.after_failed, {}).get("verdict", "").startswith(("failed", BEYOND))


def save(found: dict[str, Any], results: Path, out: Path | None) -> None:
    whole = results / "first.json"
    part = whole.with_suffix(".part")  # if it is stopped meanwhile, the last one stays complete
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(whole)
    if out is not None:
        shutil.copytree(results, out, dirs_exist_ok=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1500, help="for this call (1500)")
    parser.add_argument("--out", type=Path, help="a folder that gets a copy of the results")
    names = [step.name for step in STEPS]
    parser.add_argument(
        "--only", nargs="+", default=[], choices=names, metavar="STEP", help="; ".join(names)
    )
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", help="build/gpu")
    parser.add_argument("--commit", help="where the copy of the repository has no .git")
    return parser.parse_args()


def main() -> int:
    end = time.monotonic() + (args := arguments()).seconds
    end_on_sigterm()
    results = args.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    path = results / "first.json"
    commit = args.commit or said("git", "describe", "--always", "--dirty=+", "--exclude=*")
    found = json.loads(path.read_text()) if path.exists() else {"about": about(commit), "steps": {}}
    env = {**os.environ, "PY": sys.executable, "RESULTS": str(results)}
    env.update(PYTHONPATH=str(ROOT), PYALLOC_COMMIT=commit)
    done = found["steps"]
    if not args.only:  # this may be another machine than the last time
        done.pop("build", None)
        if (now := about(commit)) != found["about"]:
            found.setdefault("about before", []).append(found["about"])
            found["about"] = now
    for step in STEPS:
        left_s = end - time.monotonic()
        if not is_wanted(step, done, args.only):
            continue
        if step.may_begin(left_s):
            row = perform(step, env, left_s)
            print(f"{step.name}: {row['verdict']}", flush=True)
            if row["verdict"] != BEYOND or left_s >= step.limit_s:  # it used up its time
                done[step.name] = row
                save(found, results, args.out)
        if step.name == "build" and step.name not in done:
            break
    save(found, results, args.out)
    if left := [step for step in STEPS if is_wanted(step, done, args.only)]:
        least = max(step.limit_s for step in left) // 2
        print(f"{len(left)} steps are left: the same command goes on, of at least {least} seconds")
        return 3
    return (
        0 if all(row["verdict"].startswith(("passed", "skipped")) for row in done.values()) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
