"""Replays traces on models of torch's allocators and on pyalloc: how much memory they take, how little is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyalloc import _core
from pyalloc.common.units import parse_bytes
from pyalloc.errors import UsageError
from pyalloc.traces.moments import PAGE

Progress = Callable[[int, int], object]


def policies() -> list[str]:
    """Names of the policies."""
    return [name for name, _ in _core.replay_policies()]


def check_settings(names: Sequence[str], what: str) -> None:
    """Raises UsageError if none of these policies uses what was given; what: its name."""
    if "pyalloc" not in names:
        raise UsageError(f"only the policy pyalloc uses {what}; add --policy pyalloc")


def limit_of(name: str, text: str) -> int:
    """Bytes of a device's memory, as a person writes them after the option of that name.

    Raises:
        UsageError: text is not a size, is less than a page (the unit was probably forgotten), or is 2**63 or more.
    """
    try:
        return _limit_of(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _limit_of(text: str) -> int:
    limit = parse_bytes(text)
    if limit < PAGE:
        hint = (
            f"did you mean {text.strip()}GB?"
            if text.strip().isdecimal()
            else "write for example 24GB"
        )
        raise UsageError(f"{text!r} is less than 2 MiB; {hint}")
    if limit >= 2**63:
        raise UsageError(f"{text!r} is more than any device has; write for example 24GB or 900MiB")
    return limit


def compare(
    program: _core.Program,
    names: list[str],
    *,
    capacity: int = 0,
    options: str = "",
    progress: Progress | None = None,
    passes: int = 1,
    plan: bytes | None = None,
) -> dict[str, dict[str, Any]]:
    """Replays the program on each policy; results by policy.

    capacity: bytes of each device, 0: ample; passes: how many times in a row; options, plan (packed): for pyalloc only.
    """
    return {
        name: program.replay(
            name,
            capacity=capacity,
            options=options if name == "pyalloc" else "",
            progress=progress,
            passes=passes,
            plan=plan if name == "pyalloc" else None,
        )
        for name in names
    }


def find_min(
    program: _core.Program,
    name: str,
    *,
    options: str = "",
    progress: Progress | None = None,
    passes: int = 1,
    plan: bytes | None = None,
) -> dict[str, Any] | None:
    """Finds the smallest capacity with which the program completes.

    Now and then a little more memory fails where less was enough; hence the margin.  Arguments as in compare().

    Returns:
        bytes (smallest that completed), safe_bytes (all tried from here up completed), margin_bytes (the difference),
        holes (capacities between the two that failed), n_replays; None if ample memory is not enough either.
    """
    found = program.find_min(
        name,
        options=options if name == "pyalloc" else "",
        progress=progress,
        passes=passes,
        plan=plan if name == "pyalloc" else None,
    )
    if found is not None:
        found["margin_bytes"] = found["safe_bytes"] - found["bytes"]
    return found
