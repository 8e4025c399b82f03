"""Folds lines for a terminal of 80 columns.  Imports nothing that reads traces: install messages use it, too."""

from __future__ import annotations

import textwrap

_WIDTH = 79


def folded(line: str) -> str:
    """Wraps a line and indents the rest; words stay whole, because they may be names or options."""
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
