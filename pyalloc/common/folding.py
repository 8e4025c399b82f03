"""Folds lines for a terminal of 80 columns.  Imports nothing that reads traces: install messages use it, too."""

from __future__ import annotations

import textwrap

_WIDTH = 79
FILLER = "\0"  # in no name


def folded(line: str) -> str:
    """Wraps a line and indents the rest; words stay whole, because they may be names or options."""
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )


def by_column(text: str) -> str:
    """Puts a filler after each character that takes two columns of a terminal, so that len() counts columns."""
    if text.isascii():
        return text
    import unicodedata  # a library of its own, and few texts need it

    return "".join(c + FILLER * (unicodedata.east_asian_width(c) in "WF") for c in text)


def clip(name: str, width: int) -> str:
    """A name, cut to at most `width` columns."""
    wide = by_column(name)
    if len(wide) <= width:
        return name
    end = width - 1
    end -= wide[end] == FILLER  # not half a character
    return wide[:end].replace(FILLER, "") + "…"


def column(name: str, width: int) -> str:
    """A name, cut and padded to `width` columns, at least one of them blank."""
    shown = clip(name, width - 1)
    return shown + " " * (width - len(by_column(shown)))
