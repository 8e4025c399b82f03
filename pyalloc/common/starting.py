"""While a command of pyalloc's is being imported, Ctrl-C ends it at once.  Imported first, for what it does.

Nobody could catch KeyboardInterrupt then, and a traceback would tell the user nothing.
"""

from __future__ import annotations

import os
import signal
import sys


def _is_command() -> bool:
    """Is this process `pyalloc ...` or `python -m pyalloc ...`, and no program that uses pyalloc?"""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name != "-m":
        return name == "pyalloc"
    words = iter(sys.orig_argv)
    first = next((word for word in words if word.startswith("-m")), "")
    return (first[2:] or next(words, "")) == "pyalloc"


def raise_at_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again, which the caller catches."""
    if _ends_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Not where it is ignored, as in the background.
_ends_at_once = _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _ends_at_once:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
