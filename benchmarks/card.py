"""Questions to the driver about a card."""

from __future__ import annotations

import subprocess


def smi(query: str) -> str | None:
    """nvidia-smi's answer for the first device; None if it has none, as for virtual devices."""
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
