"""File names of a recording: which it may have, and those of the files beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from pyalloc.common import files
from pyalloc.errors import UsageError


def path_of(path: str | os.PathLike[str]) -> Path:
    """The path that was passed to record().

    Raises:
        TypeError: it is not a path.
    """
    name = files.name_of(path)
    if name is None:
        raise TypeError(f"record() needs the name of a file to write, not {path!r}")
    return Path(name)


def check_name(path: Path) -> None:
    """Refuses a path that a recording cannot have.

    Raises:
        UsageError: it is a folder, a device or a pipe, or too long: that would fail once the program uses CUDA.
    """
    try:
        os.lstat(f"{path}.part")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{path}: the name is too long; choose a shorter one") from None
    if not path.name or path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it, such as {path / 'out.pya'}")
    if files.is_special(path):
        raise UsageError(f"{path} is not a regular file; choose another name")


def part(path: Path) -> Path:
    """The path of a recording until it ends."""
    return path.with_name(path.name + ".part")


def beside(path: Path) -> Path:
    """The path of the text that explains why memory ran out."""
    return path.with_name(f"{path.stem}.oom.txt")


def made(path: Path, suffix: str) -> Path:
    """The path of what is made from a recording: out.plan for out.pya, also if it was cut off or is compressed."""
    name = re.sub(r"(?<=.)(\.part|\.gz|\.xz)+$", "", path.name)
    return path.parent / f"{Path(name).stem}{suffix}"


def plan(path: Path) -> Path:
    """The path of its plan."""
    return made(path, ".plan")


def is_being_written(path: Path) -> bool:
    """Does a recording still write this file?  It holds a lock on it until its end."""
    if path.suffix != ".part":
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def cut_off(path: Path) -> str:
    """Why a file of that name may exist, for an error message."""
    return " (from a recording that was cut off or still runs)" if path.suffix == ".part" else ""
