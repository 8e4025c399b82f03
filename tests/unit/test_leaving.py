"""What has to be done before a process ends itself is done, and no mistake in it keeps the process from ending."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, signal, threading
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


@pytest.mark.parametrize(
    "sending", ["signal.raise_signal(15)", "os.kill(os.getpid(), signal.SIGTERM)"]
)
@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("", ["first"]),
        ("leaving._calls[:] = [hang]; leaving._LIMIT_S = 0.01", []),
        ("threading.Thread.start = fail", ["fails"]),
    ],
)
def test_before_a_process_ends_by_its_own_signal(  # type: ignore[no-untyped-def]
    run_python, sending: str, doing: str, said: list[str]
) -> None:
    """As uvicorn does after it has cleaned up: its recordings and dry runs were cut off."""
    done = run_python(f"{PROGRAM}\nleaving.before(first)\n{doing}\n{sending}", expect=-15)
    assert done.stdout.splitlines() == ["begins False", *(f"{each} True" for each in said)]


def test_a_signal_that_does_not_end_the_process_is_only_sent(run_python) -> None:  # type: ignore[no-untyped-def]
    done = run_python(f"""{PROGRAM}
leaving.before(first)
other = os.fork() or signal.pause()
os.kill(other, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -15
signal.signal(signal.SIGTERM, lambda *_: say("handled"))
os.kill(os.getpid(), signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
os.kill(os.getpid(), 0)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert done.stdout.splitlines() == ["begins False", "handled False", "handled False"]
