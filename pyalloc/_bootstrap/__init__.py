"""What `pyalloc run` and `pyalloc dryrun` put into the Python processes they start, without editing the program.

Its subfolder `path` goes first on PYTHONPATH.  Python imports the sitecustomize.py in there when it starts, and child
processes inherit this.
"""

from __future__ import annotations

import os
from pathlib import Path

INSTALL = "PYALLOC_INSTALL"  # "1": pyalloc.install() as soon as torch is imported
REPORT = "PYALLOC_DRYRUN_REPORT"  # a folder: torch's own figures are written there at exit
SPARE = "spare"  # a file in it that may get another name: a full disk has no room for a new one


def environment(env: dict[str, str]) -> dict[str, str]:
    """A copy of env with which Python processes run the sitecustomize.py of the subfolder `path`.

    Only that folder is added: the one that holds pyalloc may be the site-packages of another environment.
    """
    parts = [str(Path(__file__).resolve().parent / "path")]
    before = env.get("PYTHONPATH", "")
    if before:  # keep empty parts of it: they mean the working directory
        parts += [part for part in before.split(os.pathsep) if part not in parts]
    return {**env, "PYTHONPATH": os.pathsep.join(parts)}
