"""Libraries that the benchmarks compile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def is_older(library: Path, sources: Iterable[Path]) -> bool:
    """Whether the library is missing or older than a source."""
    newest = max(path.stat().st_mtime for path in sources)
    return not library.exists() or library.stat().st_mtime < newest


@contextmanager
def making(library: Path) -> Iterator[Path]:
    """A temporary path to build it at; renames the complete library, as another process may be looking for it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        yield made
        made.replace(library)
