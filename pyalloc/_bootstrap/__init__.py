"""What `pyalloc run` and `pyalloc dryrun` put into the Python processes they start, without editing the program.

Its folder path goes first on PYTHONPATH, so that Python imports the sitecustomize.py there at start, in children too.
"""

from __future__ import annotations

import os
from pathlib import Path

INSTALL = "PYALLOC_INSTALL"  # "1": pyalloc.install() as soon as torch is imported
REPORT = "PYALLOC_DRYRUN_REPORT"  # a folder: torch's own figures are written there at exit


def environment(env: dict[str, str]) -> dict[str, str]:
    """A copy of env in which Python processes run sitecustomize.py of the folder path.

    Only that folder is added: the one that holds pyalloc may be another environment's site-packages.
    """
    parts = [str(Path(__file__).resolve().parent / "path")]
    before = env.get("PYTHONPATH", "")
    if before:  # of its parts an empty one is the working directory
        parts += [part for part in before.split(os.pathsep) if part not in parts]
    return {**env, "PYTHONPATH": os.pathsep.join(parts)}
