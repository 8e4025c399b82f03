"""Sizes as people write and read them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pyalloc.errors import UsageError

MIB = 2**20
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FULL = 1023.95  # from here on one decimal would say 1024.0


def parse_bytes(text: str) -> int:
    """Bytes of "24GB", "512MiB" or "1073741824"; units are powers of 1024, as on a card's label.

    Raises:
        UsageError: the text is not a size of at least one byte.
    """
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE | re.ASCII
    )
    n_bytes = float(match.group(1)) * _UNITS[match.group(2).upper()] if match else 0.0
    if not 1 <= n_bytes < math.inf:
        raise UsageError(f"{text!r} is not a size; write for example 24GB or 900MiB")
    return int(n_bytes)


@dataclass(frozen=True)
class Allowance:
    """How much more than before is tolerated: a share of the bytes before, plus a number of bytes."""

    share: float = 0.0
    bytes: int = 0

    def of(self, before_bytes: int) -> float:
        """The tolerated growth in bytes."""
        return self.share * before_bytes + self.bytes


def parse_allowance(text: str) -> Allowance:
    """The allowance written as "5%" or "100MB".

    Raises:
        UsageError: the text is neither a share nor a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match:
        return Allowance(share=float(match.group(1)) / 100)
    try:
        return Allowance(bytes=parse_bytes(text))
    except UsageError:
        message = f"{text!r} is neither a share nor a size; write for example 5% or 100MB"
        raise UsageError(message) from None


def size(value: float) -> str:
    """A number of bytes as people read it: "1.5 MiB"."""
    if abs(value) < 512:
        return f"{value:.0f} byte{'' if round(value) == 1 else 's'}"
    if abs(value) >= _FULL * MIB:
        return f"{value / 2**30:.2f} GiB"
    return f"{value / MIB:.1f} MiB" if abs(value) >= _FULL * 2**10 else f"{value / 2**10:.1f} KiB"
