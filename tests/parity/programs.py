"""Programs that tests of this folder start.

In forks of the Python that the tests themselves were forked from, if any: importing torch again takes three seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys

PYTHON = os.environ.get("PYALLOC_PARITY_PYTHON", sys.executable)


def run(
    *words: str, expect: int = 0, folder: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [PYTHON, *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == expect, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done
