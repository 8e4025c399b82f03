"""Who called whom for what is alive at a moment: a tree for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pyalloc import source
from pyalloc.advice import size
from pyalloc.analysis import Analysis
from pyalloc.moments import Moment
from pyalloc.report.text import WIDTH, clip

_DEEPEST = 10  # branches that are moved to the right
_ITSELF = "(this line itself)"
_OUTERMOST = "(called by nobody)"
_AT = 31  # the column where calls begin


@dataclass(frozen=True)
class Chain:
    """What is held by one chain of calls.  calls: outermost first."""

    calls: tuple[str, ...]
    bytes: int
    blocks: int


@dataclass
class _Node:
    """A call, and all that it led to."""

    bytes: int = 0
    blocks: int = 0
    n_chains: int = 0
    is_shown: bool = False
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, chain: Chain, *, is_shown: bool) -> None:
        self.bytes += chain.bytes
        self.blocks += chain.blocks
        self.n_chains += 1
        self.is_shown |= is_shown


def of(analysis: Analysis, moment: Moment) -> list[Chain]:
    """All chains of calls and what they hold, largest first."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for stack, phase, n_bytes, n_blocks in moment.stack_sums():
        row = sums.setdefault(calls(analysis, stack) or (analysis.nameless(stack, phase),), [0, 0])
        row[0] += n_bytes
        row[1] += n_blocks
    chains = [Chain(key, *row) for key, row in sums.items()]
    return sorted(chains, key=lambda chain: (-chain.bytes, chain.calls))


def calls(analysis: Analysis, stack: int) -> tuple[str, ...]:
    """A stack's calls in the program's own code, and the innermost one of Python; outermost first."""
    python = [frame for frame in analysis.frames(stack) if not source.is_cpp(frame[1])]
    return tuple(
        f"{source.short_file(file)}:{line} {source.qualified(file, line, name)}"
        for name, file, line in (
            *(frame for frame in reversed(python[1:]) if not source.is_foreign(frame[1])),
            *python[:1],
        )
    )


def inverted(chains: Sequence[Chain]) -> list[Chain]:
    """The same with the innermost call first."""
    return [replace(chain, calls=chain.calls[::-1]) for chain in chains]


def tree(
    title: str, chains: Sequence[Chain], total: int, limit: int, *, is_inverted: bool = False
) -> list[str]:
    """The largest chains: a call stands below its caller, to the right of it where there are others beside it.

    is_inverted: of what inverted() gives, so that callers stand below.
    """
    root = _Node()
    ends: list[tuple[_Node, Chain, bool]] = []
    for i, chain in enumerate(chains):
        node = root
        node.add(chain, is_shown=i < limit)
        for call in chain.calls:
            node = node.children.setdefault(call, _Node())
            node.add(chain, is_shown=i < limit)
        ends.append((node, chain, i < limit))
    for node, chain, is_shown in ends:
        if node.children:  # calls that led on from the same line
            end = _OUTERMOST if is_inverted else _ITSELF
            node.children.setdefault(end, _Node()).add(chain, is_shown=is_shown)
    return [title, *_lines(root, total, 0)]


def _lines(node: _Node, total: int, depth: int) -> Iterator[str]:
    """What a call led to."""
    shown = [(call, each) for call, each in node.children.items() if each.is_shown]
    shown.sort(key=lambda pair: -pair[1].bytes)
    n_left = node.n_chains - sum(each.n_chains for _, each in shown)
    left = [(each.bytes, each.blocks) for each in node.children.values() if not each.is_shown]
    is_only = len(shown) == 1 and not left
    for call, each in shown:
        # The only way on holds as much as what led to it.
        beside = " " * _AT if is_only and depth else _figures(each.bytes, each.blocks, total)
        inset = 2 * min(depth - is_only * bool(depth), _DEEPEST)
        yield beside + " " * inset + clip(call, WIDTH - _AT - inset)
        yield from _lines(each, total, depth + 1 - is_only * bool(depth))
    if left:
        n_bytes, n_blocks = (sum(column) for column in zip(*left, strict=True))
        blanks = " " * (2 * min(depth, _DEEPEST))
        yield f"{_figures(n_bytes, n_blocks, total)}{blanks}{n_left:,} smaller stack{'s' * (n_left != 1)}"


def _figures(n_bytes: int, n_blocks: int, total: int) -> str:
    share = 100 * n_bytes / total if total else 0
    return f"  {size(n_bytes):>10} {share:5.1f} % {n_blocks:>6} x  "
