"""Single keys from a terminal, while something is shown on it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time
from collections.abc import Iterator

_ENTER = "\x1b[?1049h\x1b[?25l"  # a screen of its own, without the cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_LONGEST = 16  # bytes of one key: arrows and the like are several


@contextlib.contextmanager
def screen() -> Iterator[None]:
    """Keys come at once and are not shown; what stood on the terminal is there again afterwards."""
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def show(text: str) -> None:
    """On that screen, instead of what was there."""
    sys.stdout.write("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J")
    sys.stdout.flush()


def key(until: float) -> str | None:
    """The next one, waited for until then by time.monotonic(), or for ever; "": none came, None: none ever will."""
    number = sys.stdin.fileno()
    left = None if until == math.inf else max(until - time.monotonic(), 0)
    if not select.select([number], [], [], left)[0]:
        return ""
    return os.read(number, _LONGEST).decode("utf-8", "replace") or None
