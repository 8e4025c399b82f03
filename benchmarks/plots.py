"""Plots as SVG files, byte for byte the same for the same figures."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any


def option(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds ``--plot FILE``; if matplotlib is missing, refuses it before anything is measured."""

    def path(text: str) -> Path:
        if importlib.util.find_spec("matplotlib") is None:
            raise argparse.ArgumentTypeError(
                "needs matplotlib: pip install matplotlib, or leave --plot out"
            )
        return Path(text)

    parser.add_argument("--plot", type=path, metavar="FILE", help=f"{text} (needs matplotlib)")


def subplots(n: int) -> tuple[Any, list[Any]]:
    """A figure with n panels side by side; imports matplotlib only here."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pyalloc"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, n, figsize=(4 * n, 3.6), squeeze=False)
    for panel in panels[0]:
        panel.grid(alpha=0.3)
    return figure, list(panels[0])


def save(figure: Any, path: Path) -> None:
    """Writes the figure, without a date in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
