"""Requests over the whole run: by line, with the temporary ones, and by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LONGEST = 4096  # further requests during the life of a temporary block, at most


@dataclass
class Asked:
    """Requests of one line.  live_bytes: at the end; temporary: only set if a pass looked for temporary blocks."""

    name: str
    requests: int = 0
    bytes: int = 0
    live_bytes: int = 0
    temporary: int = 0
    temporary_bytes: int = 0


@dataclass(frozen=True)
class Size:
    """Requests of at least `least` and less than twice as many bytes; the first class also has the smaller ones."""

    least: int
    requests: int
    bytes: int


def by_line(
    stacks: Sequence[Sequence[int]],
    stackless: Iterable[tuple[str, Sequence[int]]],
    name: Callable[[int, str], str],
) -> list[Asked]:
    """Most bytes first.

    Args:
        stacks: a pass's figures by stack; those of stack 0 are in `stackless`.
        stackless: figures of requests without a stack, by phase.
        name: names a stack, or a phase if there is no stack.
    """
    found: dict[str, Asked] = {}
    rows = [(0, phase, row) for phase, row in stackless]
    rows += [(stack, "", row) for stack, row in enumerate(stacks) if stack]
    for stack, phase, (n, n_bytes, _, live, temporary, temporary_bytes) in rows:
        if not n:
            continue
        called = name(stack, phase)
        line = found.setdefault(called, Asked(called))
        line.requests += n
        line.bytes += n_bytes
        line.live_bytes += live
        line.temporary += temporary
        line.temporary_bytes += temporary_bytes
    return sorted(found.values(), key=lambda line: (-line.bytes, line.name))


def by_requests(lines: Sequence[Asked]) -> list[Asked]:
    """The same lines, most requests first."""
    return sorted(lines, key=lambda line: -line.requests)


def by_size(sizes: Sequence[tuple[int, int]], least: int) -> list[Size]:
    """Size classes from a pass's figures by powers of two, without the empty ones at both ends.

    Sizes below `least`, a power of two, are added up.
    """
    first = least.bit_length() - 1
    small = [sum(column) for column in zip(*sizes[: first + 1], strict=True)]
    found = [Size(least, *small)]
    found += [Size(1 << bit, *row) for bit, row in enumerate(sizes) if bit > first]
    used = [i for i, size in enumerate(found) if size.requests]
    return found[used[0] : used[-1] + 1] if used else []
