"""Which calls led to what is alive at a moment, as a tree for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pyalloc.analysis.meaning import Analysis
from pyalloc.common.folding import clip
from pyalloc.common.units import size
from pyalloc.report.text import WIDTH, hung
from pyalloc.traces import source
from pyalloc.traces.moments import Moment

_DEEPEST = 10  # levels that are indented
_ITSELF = "(this line itself)"
_OUTERMOST = "(no caller)"
_AT = 31  # the column where calls begin


@dataclass(frozen=True)
class Chain:
    """What one chain of calls holds.  calls: outermost first."""

    calls: tuple[str, ...]
    bytes: int
    blocks: int


@dataclass
class Function:
    """What a function of the program and all that it called hold; own_bytes: what its own lines requested."""

    name: str
    bytes: int = 0
    own_bytes: int = 0
    blocks: int = 0


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
    """A stack's calls in the program's own code, and the innermost Python call; outermost first."""
    return tuple(
        f"{source.short_file(file)}:{line} {source.qualified(file, line, name)}"
        for name, file, line in _shown(analysis, stack)
    )


def _shown(analysis: Analysis, stack: int) -> Iterator[source.Frame]:
    python = [frame for frame in analysis.frames(stack) if not source.is_cpp(frame[1])]
    yield from (frame for frame in reversed(python[1:]) if not source.is_foreign(frame[1]))
    yield from python[:1]


def functions(analysis: Analysis, moment: Moment) -> list[Function]:
    """All functions that led to what is alive then, most bytes first; a recursive function counts once."""
    found: dict[str, Function] = {}
    for stack, phase, n_bytes, n_blocks in moment.stack_sums():
        names = [
            f"{source.qualified(file, line, name)}  {source.short_file(file)}"
            for name, file, line in _shown(analysis, stack)
        ] or [analysis.nameless(stack, phase)]
        for name in set(names):
            function = found.setdefault(name, Function(name))
            function.bytes += n_bytes
            function.blocks += n_blocks
        found[names[-1]].own_bytes += n_bytes
    return sorted(found.values(), key=lambda each: (-each.bytes, -each.own_bytes, each.name))


def table(title: str, found: Sequence[Function], total: int, limit: int) -> list[str]:
    """The functions as lines."""
    lines = [title, f"{'bytes':>12}{'share':>9}{'own':>12}{'blocks':>9}  function"]
    for each in found[:limit]:
        share = 100 * each.bytes / total if total else 0
        head = f"{size(each.bytes):>12}{share:>7.1f} %{size(each.own_bytes):>12}{each.blocks:>9,}"
        lines.append(hung(head, each.name))
    return lines + [f"  and {len(found) - limit} more"] * (len(found) > limit)


def inverted(chains: Sequence[Chain]) -> list[Chain]:
    """The same with the innermost call first."""
    return [replace(chain, calls=chain.calls[::-1]) for chain in chains]


def tree(
    title: str,
    chains: Sequence[Chain],
    total: int,
    limit: int,
    *,
    is_inverted: bool = False,
    columns: int = WIDTH,
) -> list[str]:
    """The `limit` largest chains: a call stands below its caller, and is indented if there are others beside it.

    is_inverted: the chains are from inverted(), so callers stand below.  columns: where names are cut.
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
        if node.children:  # other chains go on from here
            end = _OUTERMOST if is_inverted else _ITSELF
            node.children.setdefault(end, _Node()).add(chain, is_shown=is_shown)
    return [title, *_lines(root, total, 0, columns)]


def _lines(node: _Node, total: int, depth: int, columns: int) -> Iterator[str]:
    """What a call led to."""
    shown = [(call, each) for call, each in node.children.items() if each.is_shown]
    shown.sort(key=lambda pair: -pair[1].bytes)
    n_left = node.n_chains - sum(each.n_chains for _, each in shown)
    left = [(each.bytes, each.blocks) for each in node.children.values() if not each.is_shown]
    is_only = len(shown) == 1 and not left
    for call, each in shown:
        # An only call holds as much as its caller: its figures are left out.
        beside = " " * _AT if is_only and depth else _figures(each.bytes, each.blocks, total)
        inset = 2 * min(depth - is_only * bool(depth), _DEEPEST)
        yield beside + " " * inset + clip(call, columns - _AT - inset)
        yield from _lines(each, total, depth + 1 - is_only * bool(depth), columns)
    if left:
        n_bytes, n_blocks = (sum(column) for column in zip(*left, strict=True))
        blanks = " " * (2 * min(depth, _DEEPEST))
        yield f"{_figures(n_bytes, n_blocks, total)}{blanks}{n_left:,} smaller stack{'s' * (n_left != 1)}"


def _figures(n_bytes: int, n_blocks: int, total: int) -> str:
    share = 100 * n_bytes / total if total else 0
    return f"  {size(n_bytes):>10} {share:5.1f} % {n_blocks:>6} x  "
