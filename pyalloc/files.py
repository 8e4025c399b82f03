"""How pyalloc writes files: private, whole or not at all, and never through somebody else's link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside path (mode 0600), which takes its name at a good end; a link of that name is replaced.

    Raises:
        OSError: the folder cannot be written to, or path is a device, a pipe or a folder.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise FileExistsError(
                errno.EEXIST, "not a regular file, and would be replaced", str(path)
            )
    try:  # mkstemp opens with O_EXCL and O_NOFOLLOW, and mode 0600.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # its own is none that the caller knows
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # a umask may have taken that from its owner, too
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def temporary_folder(prefix: str, parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder of mode 0700, whatever the umask, which goes at the end of a with statement or of the program."""
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    os.chmod(folder.name, 0o700)
    return folder


def write(path: Path, data: bytes) -> None:
    """The same at once."""
    with writing(path) as file:
        file.write(data)


def name_of(path: object) -> str | None:
    """The name that a caller gave, a text or a path; None: it is neither."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return name if isinstance(name, str) else None
