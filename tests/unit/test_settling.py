"""Python ends once torch's autograd threads rest; here a thread of that name stands in for them."""

from __future__ import annotations

import os

import pytest

from pyalloc import _bootstrap

PROGRAM = """
import sys, threading, time
begun = threading.Event()

def clear_up():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write("pt_autograd_0")
    begun.set()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    print("rests", flush=True)
    threading.Event().wait()

def others_come_and_go():
    while True:
        thread = threading.Thread(target=int, daemon=True)
        thread.start()
        thread.join()

def another_runs():
    while True:
        pass

threading.Thread(target=clear_up, daemon=True).start()
begun.wait()
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("threading.Thread(target=others_come_and_go, daemon=True).start()", 0),
        ("threading.Thread(target=another_runs, daemon=True).start()", 0),
    ],
)
def test_however_a_program_ends_it_waits(run_python, ending: str, code: int) -> None:  # type: ignore[no-untyped-def]
    done = run_python(PROGRAM + ending, expect=code, env=_bootstrap.environment(dict(os.environ)))
    assert done.stdout == "rests\n"


def test_a_thread_that_sleeps_in_between_is_waited_for(run_python) -> None:  # type: ignore[no-untyped-def]
    """It may be asleep whenever one looks."""
    program = PROGRAM.replace("        pass\n    print", "        time.sleep(0.0005)\n    print")
    assert program != PROGRAM
    done = run_python(program, env=_bootstrap.environment(dict(os.environ)))
    assert done.stdout == "rests\n"


def test_without_such_threads_nothing_is_waited_for(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(
        "import time; time.sleep = None", env=_bootstrap.environment(dict(os.environ))
    )
    assert "Error" not in done.stderr
