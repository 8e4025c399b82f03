"""The types that an analysis consists of: phases, out-of-memory errors, rows of tables, advice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pyalloc.traces.moments import Moment


@dataclass(frozen=True)
class Phase:
    """One occurrence of a phase.  n_: blocks made in it, left of them at its end, alive; step: -1 before the first."""

    name: str
    step: int
    depth: int
    begin: int
    end: int
    begin_ns: int
    end_ns: int
    begin_bytes: int
    end_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    n_made: int
    n_left: int
    left_bytes: int
    n_live_begin: int
    n_live_end: int


@dataclass(frozen=True)
class Oom:
    """An out-of-memory error.  moment: the state of its device only.

    where: " on device 1" if there are several, and which of several errors it is; capacity: of the device, 0: unknown;
    is_from_torch: raised by torch's own allocator.
    """

    moment: Moment
    asked: int
    free: int
    where: str = ""
    capacity: int = 0
    is_from_torch: bool = False

    @property
    def is_reserved_known(self) -> bool:
        """Does the trace have segments, or was no memory in use?"""
        return bool(self.moment.segments) or not self.moment.blocks

    @cached_property
    def idle_bytes(self) -> int:
        """Idle bytes outside of private pools."""
        return sum(n for _, n in self.moment.common_gaps)

    @cached_property
    def largest_gap(self) -> int:
        """The largest idle piece outside of private pools."""
        return max((n for _, n in self.moment.common_gaps), default=0)

    @property
    def usable_free(self) -> int:
        """Free memory of the device; 0 if it would have been enough, because then a limit forbade it."""
        return self.free if self.free < self.asked else 0

    @property
    def is_fragmented(self) -> bool:
        """Would idle and free memory together have been enough, in one piece?"""
        return bool(self.moment.segments) and self.idle_bytes + self.usable_free >= self.asked

    @property
    def outside_bytes(self) -> int:
        """Memory of the device that is neither free nor this allocator's."""
        if not self.capacity or not self.is_reserved_known:
            return 0
        return max(self.capacity - self.free - self.moment.reserved_bytes, 0)


def time_of(place: int, n: int) -> str:
    """Says which of several errors is reported; place: counted from 0, -1: the last."""
    if n <= 1:
        return ""
    names = {
        0: "the first of {n} times",
        n - 1: "the last of {n} times",
        -1: "the last of {n} times",
    }
    return f" ({names.get(place, 'time {at} of {n}').format(at=place + 1, n=n)})"


@dataclass(frozen=True)
class Row:
    """One line of a table of blame."""

    name: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class Advice:
    """What to do.  kind: a short name that stays the same; saved_bytes: about how much it would save, if known."""

    kind: str
    text: str
    saved_bytes: int | None = None
