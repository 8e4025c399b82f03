"""Hostile or unlucky callers, from Python; tests/c/test_core_hostile.c has those of the C interface."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dry_support import dry_environment, run_checked

from pyalloc import _core

ROOT = Path(__file__).parent.parent.parent

SUBINTERPRETER = """
import faulthandler
faulthandler.dump_traceback_later(600, exit=True)
try:
    import _interpreters as interpreters
except ImportError:
    try:
        import _xxsubinterpreters as interpreters
    except ImportError:
        raise SystemExit(77)
run = getattr(interpreters, "exec", None) or interpreters.run_string
IMPORT_FIRST
other = interpreters.create()
run(other, '''
try:
    import pyalloc
    pyalloc.install()
except Exception as error:
    assert "interpreter" in str(error), repr(error)
else:
    raise SystemExit("installed")
''')
interpreters.destroy(other)
from pyalloc import _core
assert not _core.is_created()
"""


@pytest.mark.parametrize("first", ["", "import pyalloc"])
def test_a_subinterpreter_is_refused_with_words(first: str) -> None:
    code = SUBINTERPRETER.replace("IMPORT_FIRST", first)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this Python has no subinterpreters to test with")
    assert done.returncode == 0, done.stderr[-3000:]


BASE_SYMBOLS = re.findall(
    r"X\(\s*BASE,\s*\w+,\s*(\w+)", (ROOT / "csrc/device/cuda_driver.h").read_text()
)


@pytest.mark.parametrize(
    ("symbols", "said"),
    [
        ([], "cuInit returned 0 (libcuda.so.1 has no cu"),
        (BASE_SYMBOLS[:-1], f"(libcuda.so.1 has no {BASE_SYMBOLS[-1]})"),
        (BASE_SYMBOLS, "cuInit returned 35 (cuInit failed with code 35)"),  # the driver is too old
    ],
)
def test_a_driver_that_cannot_be_used_is_named(
    tmp_path: Path, symbols: list[str], said: str
) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    library = tmp_path / "libcuda.so.1"
    source = "".join(f"int {name}(void) {{ return 35; }}\n" for name in symbols)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=source, text=True, check=True)
    program = """
from pyalloc import _core
_core.create("")
for _ in range(2):
    try:
        _core.alloc(0, 1000, 0)
    except Exception as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    for line in lines:
        assert said in line
        assert "GPU 0 could not be opened" in line


def test_a_release_build_cannot_end_the_program() -> None:
    """No exit, no abort, no failed assertion: whatever happens, the caller gets an error."""
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", _core.__file__], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}
    assert "malloc" in names
    ending = {
        "abort",
        "exit",
        "_exit",
        "_Exit",
        "quick_exit",
        "raise",
        "kill",
        "__assert_fail",
        "__assert",
    }
    assert not names & ending
    assert "Py_FatalError" not in names and "Py_Exit" not in names


PROGRAM = """
import atexit, signal, os, gc, threading
import torch

kept = torch.ones(1000, device="cuda")

class Late:
    def __init__(self):
        self.tensor = torch.ones(3 << 20, device="cuda")
    def __del__(self):
        self.tensor = None

late = Late()
late.cycle = late

@atexit.register
def at_exit():
    fresh = torch.ones(1 << 20, device="cuda")
    del fresh

# A handler that allocates, between any two bytecodes.
seen = []
def handler(number, frame):
    seen.append(torch.ones(777, device="cuda"))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
while len(seen) < 20:
    tensors = [torch.ones(1 << (i % 20), device="cuda") for i in range(50)]
signal.setitimer(signal.ITIMER_REAL, 0)
assert all(int(t.sum()) >= 0 for t in seen)

# An observer of out of memory that allocates and frees.
inside = []
torch._C._cuda_attach_out_of_memory_observer(lambda *_: inside.append(torch.ones(500, device="cuda")))
try:
    torch.ones(1 << 40, device="cuda")
    raise SystemExit("a terabyte was there")
except torch.OutOfMemoryError:
    pass
assert len(inside) == 1

# Made in one thread, freed in another.
box = [torch.ones(5 << 20, device="cuda") for _ in range(8)]
thread = threading.Thread(target=box.clear)
thread.start()
thread.join()

# A child that drops its parent's tensors.
child = os.fork()
if child == 0:
    kept = late = seen = inside = None
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
del seen, inside, tensors
gc.collect()
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_stats()["allocation.all.current"] == 2
print("good")
"""


# Children that drop their parent's tensors, forked while its threads are inside pyalloc.
FORKS = """
import os, signal, threading, torch

torch.cuda.init()
torch.cuda.memory.caching_allocator_enable(False)
kept = [torch.ones(10, device="cuda") for _ in range(20)]
is_over = threading.Event()
has_begun = threading.Barrier(3)

def work():
    each = [torch.ones(1, device="cuda") for _ in range(1000)]
    has_begun.wait()
    while not is_over.is_set():
        torch._foreach_neg(each)  # a thousand tensors without Python

threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
has_begun.wait()
ends = []
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # one that hangs is killed, which the parent sees
        kept.clear()
        os._exit(0)
    ends.append(os.waitpid(child, 0)[1])
is_over.set()
[thread.join() for thread in threads]
assert ends == [0] * 60, ends
print("good")
"""


@pytest.mark.torch
def test_children_forked_off_under_load() -> None:
    done = run_checked([sys.executable, "-c", FORKS], env=dry_environment(install=True))
    assert done.stdout.strip() == "good" and "refused" not in done.stderr, done.stderr


@pytest.mark.torch
def test_signals_observers_threads_children_and_the_end() -> None:
    done = run_checked([sys.executable, "-c", PROGRAM], env=dry_environment(install=True))
    assert done.stdout.strip() == "good"
    assert "Error" not in done.stderr and "Exception" not in done.stderr, done.stderr
