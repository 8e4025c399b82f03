"""The names of a recording's files: which it may have, and which lie beside it."""

from __future__ import annotations

import os
from pathlib import Path

from pyalloc import files
from pyalloc.errors import UsageError


def path_of(path: str | os.PathLike[str]) -> Path:
    """What record() was given.

    Raises:
        TypeError: it is no path.
    """
    name = files.name_of(path)
    if name is None:
        raise TypeError(f"record() needs the name of a file to write, not {path!r}")
    return Path(name)


def check_name(path: Path) -> None:
    """Can a recording have this name?

    Raises:
        UsageError: it is a folder's.
    """
    if not path.name or path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it, such as {path / 'out.pya'}")


def part(path: Path) -> Path:
    """The name a recording has until it ends."""
    return path.with_name(path.name + ".part")


def beside(path: Path) -> Path:
    """The name of what says in words why memory ran out."""
    return path.with_name(f"{path.stem}.oom.txt")


def plan(path: Path) -> Path:
    """The name of its plan: out.plan of out.pya, and of the out.pya.part that a killed program left."""
    return path.parent / f"{Path(path.name.removesuffix('.part')).stem}.plan"


def cut_off(path: Path) -> str:
    """Why a file of that name may be there, for an error."""
    return " (from a recording that was cut off or still runs)" if path.suffix == ".part" else ""
