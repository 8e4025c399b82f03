"""What is asked of the driver about a card."""

from __future__ import annotations

import subprocess


def smi(query: str) -> str | None:
    """What the driver's own tool says of the first device; None where it does not know, as of virtual ones."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = done.stdout.strip()
    return answer if done.returncode == 0 and answer and not answer.startswith("[") else None
