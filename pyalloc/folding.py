"""Lines for a terminal of 80 columns, without what reads traces: an installation tells of itself by it too."""

from __future__ import annotations

import textwrap

_WIDTH = 79


def folded(line: str) -> str:
    """What does not fit goes on, indented; no word is broken, for it may be a name or an option."""
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
