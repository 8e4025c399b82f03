"""What has to be done before os._exit() is done, and no mistake in it keeps the process from ending."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, threading
from pyalloc._bootstrap import leaving

def say(text):
    print(text, leaving.has_begun(), flush=True)

def first():
    say("first")

def last():
    say("last")

def fail(*_):
    say("fails")
    raise ValueError

def hang():
    threading.Event().wait()

say("begins")
"""


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("", []),
        # Once each, however often it is asked for; an exception does not keep the next from its turn.
        (
            "for each in (first, fail, first, last, fail): leaving.before(each)",
            ["first", "fails", "last"],
        ),
        ("leaving.before(hang); leaving._LIMIT_S = 0.01", []),
        ("leaving.before(first); threading.Thread.start = fail", ["fails"]),  # no more threads
        ("leaving.before(first); os.fork() and os.wait()", ["first", "first"]),
    ],
)
def test_before_a_process_leaves(run_python, doing: str, said: list[str]) -> None:  # type: ignore[no-untyped-def]
    done = run_python(f"{PROGRAM}\n{doing}\nos._exit(7)", expect=7)
    assert done.stdout.splitlines() == ["begins False", *(f"{each} True" for each in said)]
    assert done.stderr == ""
