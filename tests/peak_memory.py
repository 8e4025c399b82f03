"""The most memory this process had at once.

Not getrusage(): its figure survives exec, so a child of a pytest that grew large says what pytest had.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """From here on it is counted anew, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
