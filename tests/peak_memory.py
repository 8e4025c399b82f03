"""The most memory that this process had at once.

Not from getrusage(): its figure survives exec, so a child of a large pytest would report pytest's.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """From here on the peak is counted anew, if the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
