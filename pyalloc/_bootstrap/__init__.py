"""What `pyalloc run` and `pyalloc dryrun` put into the Python processes they start, without editing the program.

This folder goes first on PYTHONPATH, so that Python imports its sitecustomize.py at start, in children too.
"""

from __future__ import annotations

import os
from pathlib import Path

INSTALL = "PYALLOC_INSTALL"  # "1": pyalloc.install() as soon as torch is imported
REPORT = "PYALLOC_DRYRUN_REPORT"  # a folder: torch's own figures are written there at exit


def environment(env: dict[str, str]) -> dict[str, str]:
    """A copy of env in which Python processes run sitecustomize.py of this folder.

    Only this folder is added: the one that holds pyalloc may be another environment's site-packages.
    """
    parts = [str(Path(__file__).resolve().parent)]
    before = env.get("PYTHONPATH", "")
    parts += [part for part in before.split(os.pathsep) if part and part not in parts]
    return {**env, "PYTHONPATH": os.pathsep.join(parts)}
