"""Files of a program of several processes: each rank has its own beside the name that was given."""

from __future__ import annotations

import os
import re
from pathlib import Path


def own(path: Path) -> Path:
    """That of this process: out.rank3.pya for out.pya; path itself where there is one rank, or none."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank and size.isdecimal() and int(size) > 1:
        return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    return path


def existing(path: Path) -> list[Path]:
    """Those of all ranks, by rank."""
    name = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    found = [
        (match, each) for each in path.parent.glob("*") if (match := name.fullmatch(each.name))
    ]
    return [each for _, each in sorted(found, key=lambda pair: int(pair[0][1]))]


def common(path: Path) -> Path:
    """The name without a rank."""
    return path.with_name(re.sub(r"\.rank\d+$", "", path.stem) + path.suffix)
