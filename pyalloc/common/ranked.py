"""Files of a program with several processes: each rank writes its own, named after the given path."""

from __future__ import annotations

import os
import re
from pathlib import Path

RANK = r"\.rank\d+"  # what own() adds, as a pattern


def own(path: Path) -> Path:
    """The file of this process: out.rank3.pya for out.pya; path itself unless there are several ranks."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank and size.isdecimal() and int(size) > 1:
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    return path


def existing(path: Path) -> list[Path]:
    """The existing files of all ranks, sorted by name."""
    name = re.compile(rf"{re.escape(path.stem)}{RANK}{re.escape(path.suffix)}")
    return sorted(each for each in path.parent.glob("*") if name.fullmatch(each.name))


def common(path: Path) -> Path:
    """The path without a rank."""
    return path.with_name(re.sub(f"{RANK}$", "", path.stem) + path.suffix)


def is_second(path: Path) -> bool:
    """Is it the file of another process that a rank started, such as out.rank0.77.pya?"""
    return re.search(rf"{RANK}\.\d+$", path.stem) is not None
