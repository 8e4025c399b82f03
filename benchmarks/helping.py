"""The text of ``--help``: a module's docstring, fitted to the terminal's width."""

from __future__ import annotations

import argparse
import textwrap


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Rewraps paragraphs with a line that is too long; list items and lines that begin with an option stay apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(_fitted(paragraph, width, indent) for paragraph in paragraphs)


def _fitted(paragraph: str, width: int, indent: str) -> str:
    lines = paragraph.splitlines()
    if all(len(indent + line) <= width for line in lines):
        return textwrap.indent(paragraph, indent)
    items: list[list[str]] = []
    for line in lines:
        if line.startswith(("* ", "--")) or not items:
            items.append([])
        items[-1].append(line.strip())
    return "\n".join(
        textwrap.fill(
            " ".join(item),
            width,
            initial_indent=indent,
            subsequent_indent=indent + "  " * item[0].startswith("* "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )
