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


def is_special(path: Path) -> bool:
    """Must it not be replaced?  It is no regular file, or a link such as /dev/stdout, which may lead to one."""
    return path.exists() and (not path.is_file() or path.absolute().parent == Path("/dev"))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file (mode 0600) that replaces path, or a link of that name, if the `with` block ends without error.

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
        error.filename = str(path)  # the caller does not know the temporary name
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o600)  # a umask may take bits from the owner, too
            yield file
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def temporary_folder(prefix: str, parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder of mode 0700, whatever the umask, that is removed at the end of a `with` block or of the program."""
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    os.chmod(folder.name, 0o700)
    return folder


def write(path: Path, data: bytes) -> None:
    """Writes a whole file as writing() does."""
    with writing(path) as file:
        file.write(data)


def name_of(path: object) -> str | None:
    """The file name in a caller's argument; None if it is neither a string nor a path."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return name if isinstance(name, str) else None
