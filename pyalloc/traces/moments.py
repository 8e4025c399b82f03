"""What was alive at a moment of a trace, and in which device memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pyalloc import _core
from pyalloc.common.units import MIB

STEP = _core.ALIGN  # allocators round requests to this
PAGE = _core.PAGE  # physical memory comes in these
SMALL_SEGMENT = 2 * MIB  # torch's allocator has these only for requests up to 1 MiB
Segment = tuple[int, int, int, int, bool]  # address, bytes, stream, device, is it mapped by pages?


def rounded(size: int) -> int:
    """Bytes a request takes."""
    return (size + STEP - 1) // STEP * STEP


class Block(NamedTuple):
    """A live block.  bytes: rounded; phase, module: where it was requested; free_event: None if alive at the end.

    label: the program's name for it; pool: its private pool, 0: none; n_between: number of its device's requests
    between its own and its free, None if alive at the end; thread: the one that requested it, 0: not recorded.
    A tuple, because there may be millions: dataclasses take three times as long to make, and twice the memory.
    """

    address: int
    bytes: int
    stream: int
    alloc_event: int
    free_event: int | None
    stack: int
    category: str
    phase: str
    module: str
    step: int
    free_phase: str
    device: int
    label: str = ""
    pool: int = 0
    n_between: int | None = None
    thread: int = 0


@dataclass(frozen=True)
class Moment:
    """What was alive after so many events.  Events are counted from 0, so the last of them has a number one less.

    scan, number: its source.  Blocks are read on first use, because most moments never need them.
    """

    event: int
    allocated_bytes: int
    reserved_bytes: int
    segments: tuple[Segment, ...]
    # The private pool of a segment, by (device, address).
    pools: dict[tuple[int, int], int] = field(repr=False)
    scan: _core.Scan = field(repr=False, compare=False)
    number: int = field(repr=False, compare=False)
    device: int = -1  # only this one
    first_event: int = 0  # only what was allocated from it on

    @property
    def last_event(self) -> int:
        """The number, shown to people, of the event that it comes after; -1: it comes before the first."""
        return self.event - 1

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The live blocks, by device and address."""
        blocks = map(Block._make, self.scan.blocks(self.number))
        return tuple(block for block in blocks if self.device in (-1, block.device))

    @cached_property
    def pending(self) -> tuple[Block, ...]:
        """Freed blocks that cannot be reused yet, because other streams have work on them."""
        blocks = map(Block._make, self.scan.pending(self.number))
        return tuple(block for block in blocks if self.device in (-1, block.device))

    @cached_property
    def segment_requests(self) -> dict[tuple[int, int], tuple[int, str]]:
        """Stack and phase of the request that a segment was allocated for, if known, by (device, address)."""
        return self.scan.segment_requests(self.number)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the pending blocks."""
        return sum(block.bytes for block in self.pending)

    @cached_property
    def temporary_bytes(self) -> int:
        """Bytes of live blocks that are freed within one further request of their device."""
        return sum(
            block.bytes
            for block in self.blocks
            if block.n_between is not None and block.n_between <= 1
        )

    def stack_sums(self) -> list[tuple[int, str, int, int]]:
        """(stack, phase of what has none, bytes, blocks); not of one device."""
        self._refuse_device()
        if not self.first_event:
            return self.scan.stack_sums(self.number)
        sums: dict[tuple[int, str], list[int]] = {}
        for block in self.blocks:
            row = sums.setdefault((block.stack, "" if block.stack else block.phase), [0, 0])
            row[0] += block.bytes
            row[1] += 1
        return [(*key, row[0], row[1]) for key, row in sums.items()]

    @cached_property
    def by_stack(self) -> dict[int, tuple[int, int]]:
        """Bytes and blocks of each stack; not of one device."""
        table: dict[int, tuple[int, int]] = {}
        for stack, _, size, n in self.stack_sums():
            before = table.get(stack, (0, 0))
            table[stack] = before[0] + size, before[1] + n
        return table

    def pieces(self, smallest: int) -> tuple[list[Block], list[list[int]], int]:
        """A picture of all segments, in their order, in which what is smaller is part of what is before it.

        Not of one device.

        Returns:
            Blocks; of each segment bytes and a block's place in these (-1: idle, -2: pending), in turns; the largest
            idle piece.
        """
        self._refuse_device()
        rows, segments, largest = self.scan.pieces(self.number, smallest)
        return list(map(Block._make, rows)), segments, largest

    def of_device(self, device: int) -> Moment:
        """The part of it on one device."""
        segments = tuple(segment for segment in self.segments if segment[3] == device)
        blocks = tuple(block for block in self.blocks if block.device == device)
        part = replace(
            self,
            allocated_bytes=sum(block.bytes for block in blocks),
            segments=segments,
            reserved_bytes=sum(segment[1] for segment in segments),
            pools={key: pool for key, pool in self.pools.items() if key[0] == device},
            device=device,
        )
        vars(part)["blocks"] = blocks  # or they would be made once more
        return part

    def since(self, event: int) -> Moment:
        """The part of it that was allocated from that event on."""
        blocks = tuple(block for block in self.blocks if block.alloc_event >= event)
        part = replace(
            self, allocated_bytes=sum(block.bytes for block in blocks), first_event=event
        )
        vars(part)["blocks"] = blocks
        return part

    def _refuse_device(self) -> None:
        if self.device != -1:
            raise ValueError("a scan sums over all devices")

    def reserved_by_pool(self) -> dict[int, int]:
        """Device memory of each private pool."""
        sums: dict[int, int] = defaultdict(int)
        for address, size, _, device, _ in self.segments:
            sums[self.pools.get((device, address), 0)] += size
        sums.pop(0, None)
        return sums

    @cached_property
    def idle_pieces(self) -> list[tuple[Segment, int, int]]:
        """(segment, address, bytes) of the idle pieces of the segments, by device and address."""
        blocks = self.blocks
        if self.pending:
            both = (*blocks, *self.pending)
            blocks = tuple(sorted(both, key=lambda block: (block.device, block.address)))
        return _idle_pieces(self.segments, blocks)

    @cached_property
    def common_pieces(self) -> list[tuple[Segment, int, int]]:
        """Those outside of private pools, whose memory is not available to others."""
        return [each for each in self.idle_pieces if (each[0][3], each[0][0]) not in self.pools]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """(address, bytes) of the idle pieces of the segments."""
        return [piece[1:] for piece in self.idle_pieces]

    @property
    def common_gaps(self) -> list[tuple[int, int]]:
        """Those outside of private pools."""
        return [piece[1:] for piece in self.common_pieces]

    def unsplit(self, blocks: Iterable[Block]) -> list[tuple[Segment, int, int]]:
        """Rests of at most 1 MiB behind large ones of these blocks, which torch's allocator does not split off."""
        if any(mapped for *_, mapped in self.segments):
            return []  # expandable segments: all are
        ends = {(b.device, b.address + b.bytes) for b in blocks if b.bytes > MIB}
        ends.difference_update((segment[3], segment[0]) for segment in self.segments)
        small = (piece for piece in self.idle_pieces if piece[2] <= MIB)
        return [piece for piece in small if (piece[0][3], piece[1]) in ends]

    @property
    def unsplit_bytes(self) -> int:
        """Bytes of these, for the blocks in use."""
        return sum(n for *_, n in self.unsplit(self.blocks))

    @property
    def idle_bytes(self) -> int:
        """Reserved, and neither in use nor pending."""
        return max(self.reserved_bytes - self.allocated_bytes - self.pending_bytes, 0)

    @property
    def largest_gap(self) -> int:
        """Largest piece that a request could get."""
        return max((size for _, size in self.gaps), default=0)


def page_bytes(gaps: Iterable[tuple[int, int]]) -> int:
    """Bytes of idle pieces in whole pages, which can be mapped elsewhere."""
    return PAGE * sum(max((at + n) // PAGE - -(-at // PAGE), 0) for at, n in gaps)


def _idle_pieces(
    segments: Iterable[Segment], blocks: Sequence[Block]
) -> list[tuple[Segment, int, int]]:
    found, at, n = [], 0, len(blocks)
    for segment in sorted(segments, key=lambda s: (s[3], s[0])):
        address, size, _, device, _ = segment
        end, position = address + size, address
        while at < n and (blocks[at].device, blocks[at].address) < (device, address):
            at += 1
        while at < n and blocks[at].address < end and blocks[at].device == device:
            start, bytes_ = blocks[at][:2]
            if start > position:
                found.append((segment, position, start - position))
            position = max(position, start + bytes_)
            at += 1
        if position < end:
            found.append((segment, position, end - position))
    return found


def moments_of(scan: _core.Scan) -> list[Moment]:
    """Those a scan kept."""
    return [
        Moment(event, allocated, reserved, tuple(segments), scan.segment_pools(i), scan, i)
        for i, (event, allocated, reserved, segments) in enumerate(scan.moments())
    ]
