"""What a trace means: who holds the memory at the peak, what is idle, why it ran out.  Data in, data out."""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pyalloc import _core
from pyalloc.analysis import categories
from pyalloc.common.units import MIB, size
from pyalloc.traces import caveats, source, stays
from pyalloc.traces.facts import Advice, Oom, Phase, Row, time_of
from pyalloc.traces.moments import Block, Moment, moments_of
from pyalloc.traces.source import Frame, Place
from pyalloc.traces.stays import Stay
from pyalloc.traces.told import Told, shown

_TUNING = "autotuning of kernels"
_FAMILY_SHARE = 0.05  # a tensor of at least this share of the peak is a contributor of its own
CUBLAS_WORKSPACES = (32 * MIB, 8_519_680)  # torch's defaults: on Hopper and later, on older cards
_ALONE = 0.9  # share of what numbered modules hold: one that has more is no layer among others
_EARLIER = (  # by whether it was never freed
    "in use before the history began, freed later",
    "in use from before the history to its end",
)
FORWARDS = ("forward", "loss")  # phases
MODEL = ("parameters", "gradients", "optimizer state", "buffers")  # categories
HOLDERS = (*MODEL, "workspace")


@dataclass
class Analysis:
    """All that the reports show."""

    path: Path
    totals: dict[str, Any]
    bins: list[tuple[int, ...]]
    phases: list[Phase]
    steps: list[tuple[int, int, int, int, int]]
    stacks: list[tuple[int, ...]]
    stackless: list[tuple[str, Sequence[int]]]  # of stack 0, by phase
    ooms: list[tuple[int, ...]]
    which_oom: int  # the one that is reported; -1: the last
    notes: dict[str, str]
    moments: dict[int, Moment]
    scan: _core.Scan
    # The step of the peak, or the events around it: bins as above, and the largest blocks.
    window_end: int
    window_bins: list[tuple[int, ...]]
    spans: list[Block]
    # Single events: of that step, unless there are too many, and around the moments.
    told: list[Told]
    marks: list[int]  # events between which the stays below tell who held memory
    stays: list[Stay]
    growths: list[tuple[Any, ...]]  # of reserved memory: rows of pyalloc.analysis.reserved.Piece
    replays: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The replays, and the advice that was made with them.
    advised: tuple[dict[str, dict[str, Any]], list[Advice]] | None = None
    reductions: list[tuple[Block, int]] = field(default_factory=list)
    unmarked: list[int] = field(default_factory=list)  # events of backwards that are no phases
    workspaces: set[int] = field(default_factory=set)  # cuBLAS's, by the event of their allocation
    _renamed: dict[Frame, Frame] = field(default_factory=dict)
    _frames: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    _each_frame: dict[Frame, Frame] = field(default_factory=dict)
    _wheres: dict[int, str] = field(default_factory=dict)
    _places: dict[int, Place | None] = field(default_factory=dict)
    _makers: dict[tuple[int, str], str] = field(default_factory=dict)  # by stack and module
    # By stack: of a function that makes nothing else, and of all functions.
    _categories: dict[int, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: Path,
        first: _core.Scan,
        second: _core.Scan,
        at: list[int],
        marks: list[int],
        window_end: int,
        which_oom: int = 0,
    ) -> Analysis:
        """Combines the first pass, which counted, and the second, which looked at moments and marks."""
        # The scan counts steps from 1 on; 0 is before the first.
        phases = [Phase(first.text(row[0]), row[1] - 1, *row[2:]) for row in first.phases()]
        totals = first.totals()
        totals["peak_phase"] = _phase_of_peak(phases, totals)
        notes = caveats.notes_of(first.notes())
        moments = dict(zip(at, moments_of(second), strict=True))
        return cls(
            path=path,
            totals=totals,
            bins=list(first.bins()),
            phases=phases,
            steps=list(first.steps()),
            stacks=list(first.stacks()),
            stackless=[(phase, row) for phase, *row in first.stackless()],
            ooms=list(first.ooms()),
            which_oom=which_oom,
            notes=notes,
            moments=moments,
            scan=second,
            window_end=window_end,
            window_bins=list(second.bins()),
            spans=sorted(map(Block._make, second.spans()), key=lambda b: b.alloc_event),
            told=list(shown(map(Told._make, second.told()))),
            marks=marks,
            stays=stays.of(second),
            growths=second.growths(),
        )

    # ---- looking things up ----

    @property
    def peak(self) -> Moment:
        """The moment with the most allocated bytes."""
        return self.moments[self.totals["peak_event"]]

    @cached_property
    def heights(self) -> list[tuple[int, int]]:
        """Moments, each with the most bytes allocated from it to the next.

        No block of the peak begins or ends between two of them.  There are as many as blocks alive at the peak, so
        they are read only when needed.
        """
        return self.scan.heights()

    @property
    def has_segments(self) -> bool:
        """Does the trace have segments, that is reserved memory?"""
        return bool(self.totals["n_segment_events"])

    @property
    def is_empty(self) -> bool:
        """Does it have no memory at all?"""
        return not self.totals["n_allocs"] and not self.ooms and not self.totals["peak_bytes"]

    @property
    def is_moment(self) -> bool:
        """Is it a snapshot without a history?  Then it tells of one moment, and its events came in another order."""
        return self.notes.get("history") in caveats.STATE_ONLY

    @property
    def caveats(self) -> list[str]:
        """Sentences about what the trace cannot tell, if it matters."""
        unsplit = self.peak.unsplit_bytes if caveats.is_from_torch(self.notes) else 0
        return caveats.of(self.notes, self.totals, is_empty=self.is_empty, unsplit=unsplit)

    @cached_property
    def oom(self) -> Oom | None:
        """The out-of-memory error that is reported; None if there was none."""
        for event, asked, free, _, _, _, device in self.ooms and [self.ooms[self.which_oom]]:
            moment = self.moments.get(event)
            if moment is not None:
                where = f" on device {device}" if len(self.totals["device_peak"]) > 1 else ""
                where += time_of(self.which_oom, len(self.ooms))
                capacity = self.totals["capacity"].get(device, 0)
                from_torch = caveats.is_from_torch(self.notes)
                return Oom(moment.of_device(device), asked, free, where, capacity, from_torch)
        return None

    def frames(self, stack: int) -> tuple[Frame, ...]:
        """A stack's frames, innermost first."""
        known = self._frames.get(stack)
        if known is None:
            # Stacks share most of their frames: keep one object of each.
            told = source.without_bootstrap(self.scan.frames(stack)) if stack else []
            named = (self._renamed.get(frame, frame) for frame in told)
            known = tuple(self._each_frame.setdefault(frame, frame) for frame in named)
            self._frames[stack] = known
        return known

    def rename(self, frames: dict[Frame, Frame]) -> None:
        """Replaces frames from now on, by the lines to which they moved in the recording it is compared with."""
        self._renamed = frames
        for known in (self._frames, self._wheres, self._places, self._makers, self._categories):
            known.clear()

    def place(self, stack: int) -> Place | None:
        """The user's line of a stack."""
        if stack not in self._places:
            self._places[stack] = source.place(self.frames(stack))
        return self._places[stack]

    def where(self, stack: int) -> str:
        """The user's line of a stack and the innermost line of the library that it called; "" without frames."""
        known = self._wheres.get(stack)
        if known is None:
            known = self._wheres[stack] = self._where(stack)
        return known

    def _where(self, stack: int) -> str:
        own, further = self.place(stack), source.inside(self.frames(stack))
        if source.is_tuning(self.frames(stack)):
            is_users = own is not None and not source.is_foreign(own.file)
            return f"{own} > {_TUNING}" if is_users else _TUNING
        both = own is not None and further is not None and own != further
        return f"{own} > {further}" if both else str(own or "")

    # ---- categories ----

    def category(self, block: Block) -> str:
        """What a block holds: as recorded, else inferred from its phases and stack."""
        if block.category or block.alloc_event in self.workspaces:
            return block.category or "workspace"
        known = self._categories.get(block.stack)
        if known is None:  # there are far more blocks than stacks
            frames = self.frames(block.stack)
            known = categories.by_function(frames), categories.by_frames(frames)
            self._categories[block.stack] = known
        by_function, by_frames = known
        return by_function or categories.by_phase(block, self._is_beyond_backward) or by_frames

    def stays_by_category(self) -> list[tuple[Stay, str]]:
        """Each stay with the category() of its blocks."""
        workspaces = [b for b in self.peak.blocks if b.alloc_event in self.workspaces]
        if len(workspaces) < len(self.workspaces):  # reading the end's blocks may take long
            end = self.moments[max(self.moments)]
            workspaces = [b for b in end.blocks if b.alloc_event in self.workspaces]
        found = [
            (stays.over(block, self.marks)._replace(bytes=block.bytes, blocks=1), "workspace")
            for block in workspaces
        ]
        known: dict[tuple[int, str, str, str], str] = {}
        for stay in stays.without(self.stays, workspaces, self.marks):
            key = stay[4:8]
            if key not in known:  # lived too long for a temporary of forward
                stack, phase, free_phase, category = key
                known[key] = self.category(
                    Block(0, 0, 0, -1, None, stack, category, phase, "", -1, free_phase, 0)
                )
            what = known[key]
            if what == "backward temporaries" and stay.is_freed_later and self._is_single:
                what = "gradients"
            found.append((stay, what))
        return found

    @cached_property
    def _backwards(self) -> list[Phase]:
        """The outermost backward phases."""
        found: list[Phase] = []
        for phase in self.phases:
            if phase.name == "backward" and (not found or phase.begin >= found[-1].end):
                found.append(phase)
        return found

    def _is_of_backward(self, event: int) -> bool:
        at = bisect.bisect(self._backwards, event, key=lambda phase: phase.begin) - 1
        return at >= 0 and event < self._backwards[at].end

    @property
    def _is_single(self) -> bool:
        """Is no backward differentiated?  Then a block made in one backward and freed in a later one is a gradient."""
        return self.notes.get("create_graph") == "False"

    def _is_beyond_backward(self, since: int, until: int) -> bool:
        """Is a block made after event `since` of a backward and freed at `until`, in a later one, a gradient?"""
        if not self._is_single:
            return False
        at = bisect.bisect(self._backwards, since, key=lambda phase: phase.begin) - 1
        return at >= 0 and until > self._backwards[at].end

    # ---- blame ----

    def by_category(self, blocks: Iterable[Block]) -> list[Row]:
        """Bytes of each category, largest first."""
        return _rows((self.category(block), block) for block in blocks)

    def by_line(self, blocks: Iterable[Block]) -> list[Row]:
        """Bytes of each line of the user's code, largest first."""
        held = list(blocks)
        return _rows(zip(self.labels(held), held, strict=True))

    def labels(self, blocks: Sequence[Block]) -> list[str]:
        """The line of the user's code for each block, or whatever else is known."""
        guesses = self._gradients_of(blocks)
        return [self._line(block, guesses) for block in blocks]

    def _line(self, block: Block, guesses: dict[int, str]) -> str:
        where = self.where(block.stack)
        if where:
            is_workspace = block.alloc_event in self.workspaces
            return f"cuBLAS workspace, first needed at {where}" if is_workspace else where
        if block.alloc_event in guesses:
            return f"gradient of the tensor made at {guesses[block.alloc_event]} (same size)"
        if not block.stack and block.alloc_event < self.n_before:
            return _EARLIER[block.free_event is None]
        return self.nameless(block.stack, block.phase)

    def line_of(self, told: Told) -> str:
        """The line of the user's code for an event, or whatever else is known about its stack."""
        where = self.where(told.stack)
        if where or told.stack:
            return where or self.nameless(told.stack)
        made = told.alloc_event
        is_known = made is not None and self._is_of_backward(made)
        return self.nameless(0, "backward") if is_known else ""

    @cached_property
    def n_before(self) -> int:
        """Number of first events that only describe what existed when the history began."""
        return caveats.n_before(self.notes)

    def nameless(self, stack: int, phase: str = "") -> str:
        """What is known about a stack without a Python line."""
        return source.nameless(self.frames(stack), phase)

    def name(self, stack: int, phase: str = "") -> str:
        """The line of the user's code for a stack, else nameless()."""
        return str(self.place(stack) or self.nameless(stack, phase))

    def _gradients_of(self, blocks: Sequence[Block]) -> dict[int, str]:
        """Names for backward's blocks without a stack: gradients of earlier activations of the same size."""
        makers: dict[int, str] = {}
        found: dict[int, str] = {}
        for block in sorted(blocks, key=lambda b: b.alloc_event):
            where = self.where(block.stack)
            if block.alloc_event in self.workspaces:
                continue
            if where and block.bytes >= MIB:
                makers.setdefault(block.bytes, where)
            elif not where and block.phase in ("backward", "") and block.bytes in makers:
                found[block.alloc_event] = makers[block.bytes]
        return found

    def by_module(self, blocks: Iterable[Block]) -> list[Row]:
        """Bytes of each module, or of the same module in all layers, if the recording marked modules."""
        # A cuBLAS workspace does not belong to the module that happened to use it first.
        held = [
            block._replace(module="") if block.alloc_event in self.workspaces else block
            for block in blocks
        ]
        members: dict[str, set[str]] = defaultdict(set)
        modules = {block.module for block in held}
        for module in modules:
            members[in_all_layers(module)].add(module)

        def name(module: str) -> str:
            # A layer itself, next to layers that have modules inside.
            layer = in_all_layers(f"{module}.")
            family = in_all_layers(module)
            if any(each.startswith(layer) for each in members):
                family = layer[:-1]
            elif len(members[family]) == 1:
                family = module
            return family

        names = {module: name(module) for module in modules}
        return _rows(
            (names[b.module] if b.module else f"(no module: {self.category(b)})", b) for b in held
        )

    def by_stream(self, blocks: Iterable[Block]) -> list[Row]:
        """Bytes requested on each stream, largest first."""
        return _rows((self.stream_name(block), block) for block in blocks)

    def stream_name(self, of: Block | Stay) -> str:
        """The stream on which it was requested."""
        several = len(self.totals["device_peak"]) > 1
        stream = f"stream {of.stream:#x}" if of.stream else "default stream"
        return stream + f" of device {of.device}" * several

    def by_thread(self, blocks: Iterable[Block]) -> list[Row]:
        """Bytes that each thread requested, largest first; empty if threads were not recorded."""
        held = list(blocks)
        if not any(block.thread for block in held):
            return []
        return _rows((self.thread_name(block.thread), block) for block in held)

    def thread_name(self, thread: int) -> str:
        """The thread's name from the recording."""
        if not thread:
            return "(in use before the recording)"
        name = self._threads.get(thread)
        return f"{name} (thread {thread})" if name else f"thread {thread}"

    @cached_property
    def _threads(self) -> dict[int, str]:
        return self.scan.threads()

    @staticmethod
    def by_label(blocks: Iterable[Block]) -> list[Row]:
        """Bytes of each label that the program set through torch's memory metadata; empty if it set none."""
        held = list(blocks)
        if not any(block.label for block in held):
            return []
        return _rows((block.label or "(no label)", block) for block in held)

    def by_block(self, blocks: Iterable[Block]) -> list[Row]:
        """Single blocks, largest first: who made it, its address and its age."""
        held = list(blocks)
        several = len(self.totals["device_peak"]) > 1
        rows = [
            Row(
                f"{label}, at {block.address:#x}"
                + f" of device {block.device}" * several
                + (f", made in {block.phase}" if block.phase else "")
                + (f", step {block.step}" if block.step >= 0 else "")
                + f", event {block.alloc_event:,}",
                block.bytes,
                1,
            )
            for block, label in zip(held, self.labels(held), strict=True)
        ]
        return sorted(rows, key=lambda row: -row.bytes)

    def by_pool(self, moment: Moment) -> list[Row]:
        """Bytes in use in each private pool, and outside of them; empty if there is no private pool."""
        reserved = moment.reserved_by_pool()
        if not reserved and not any(block.pool for block in moment.blocks):
            return []
        rows = _rows((self.pool_name(block.pool), block) for block in moment.blocks)
        empty = {self.pool_name(pool) for pool in reserved} - {row.name for row in rows}
        return [*rows, *(Row(name, 0, 0) for name in sorted(empty))]

    def idle_pools(self, moment: Moment) -> list[Row]:
        """Idle device memory of each private pool, largest first."""
        idle = moment.reserved_by_pool()
        for block in (*moment.blocks, *moment.pending):
            if block.pool in idle:
                idle[block.pool] -= block.bytes
        rows = [Row(self.pool_name(pool), n, 0) for pool, n in idle.items() if n > 0]
        return sorted(rows, key=lambda row: (-row.bytes, row.name))

    def pool_name(self, pool: int) -> str:
        """The pool's id as torch prints it."""
        return f"private pool {self.pool_id(pool)}" if pool else "(no private pool)"

    def pool_id(self, pool: int) -> tuple[int, int]:
        """The id of a private pool; (0, 0): none."""
        return self._pools[pool - 1] if pool else (0, 0)

    @cached_property
    def _pools(self) -> list[tuple[int, int]]:
        return self.scan.pools()

    @staticmethod
    def by_size(blocks: Iterable[Block]) -> list[Row]:
        """Bytes of each size class (powers of two), largest first."""

        def name(n_bytes: int) -> str:
            top = max(1024, 1 << max(n_bytes - 1, 1).bit_length())
            return f"up to {top // 2**20} MiB" if top >= MIB else f"up to {top // 1024} KiB"

        return _rows((name(block.bytes), block) for block in blocks)

    def contributors(self, moment: Moment) -> list[Row]:
        """The few things a person would name: large tensors of the same size, state, functions."""
        limit = max(moment.allocated_bytes * _FAMILY_SHARE, MIB)
        families: dict[int, list[Block]] = defaultdict(list)
        rest: list[tuple[str, Block]] = []
        for block in moment.blocks:
            if block.bytes >= limit and self.category(block) not in HOLDERS:
                families[block.bytes].append(block)
            else:
                rest.append((self._contributor(block, {}), block))
        named = [(self._family(blocks), block) for blocks in families.values() for block in blocks]
        return _rows([*rest, *named])

    def by_maker(self, blocks: Sequence[Block]) -> list[Row]:
        """Contributors without their sizes, so that they have the same name in other runs."""
        guesses = self._gradients_of(blocks)
        return _rows((self._contributor(block, guesses), block) for block in blocks)

    def _contributor(self, block: Block, guesses: dict[int, str]) -> str:
        category = self.category(block)
        if category in HOLDERS:
            return self._holder(category, block)
        key = block.stack, block.module
        if key not in self._makers:
            self._makers[key] = self._maker_in_python(block)
        return f"{category}: {self._makers[key] or self._line(block, guesses)}"

    def _maker_in_python(self, block: Block) -> str:
        if source.is_tuning(self.frames(block.stack)):
            return _TUNING
        where = self.place(block.stack)
        if where is None:
            return ""
        further = source.inside(self.frames(block.stack))
        if further is None:
            return f"{where.function} ({source.short_file(where.file)})"
        # A library's whole model comes from one line of the user: its layers say more.
        layer = layers_of(block.module, self._shared) or block.module or further.function
        return layer if further == where else f"{layer}, in {where.function}"

    @cached_property
    def _shared(self) -> frozenset[str]:
        """What has numbered modules none of which holds nearly all of it at the peak, such as `model.layers`."""
        held: dict[str, Counter[str]] = defaultdict(Counter)
        for block in self.peak.blocks:
            for name, number in _numbered(block.module):
                held[name][number] += block.bytes
        return frozenset(
            name for name, each in held.items() if max(each.values()) < _ALONE * each.total()
        )

    def _holder(self, category: str, block: Block) -> str:
        name = self._optimizer(block.stack) if "state" in category else ""
        if block.alloc_event in self.workspaces:
            name = "cuBLAS"
        elif source.is_bucket(self.frames(block.stack)):
            name = "DistributedDataParallel's buckets"
        elif source.is_gathered(self.frames(block.stack)):
            name = "gathered by FSDP"
        return f"{category} ({name})" if name else category

    def _optimizer(self, stack: int) -> str:
        """The class of the optimizer whose code is in a stack, out of those that the recording noted."""
        name = source.optimizer(self.frames(stack))
        known = self.notes.get("optimizers", "").split(", ")
        if name == "Adam":  # AdamW's step is in the same file
            name = " or ".join(each for each in ("Adam", "AdamW") if each in known or known == [""])
        # State may be made where the step's own code is not seen: by a class of the program's, or in a dry run.
        is_derived = name not in known and len(known) == 1
        return known[0] or name if is_derived else name

    def _family(self, blocks: list[Block]) -> str:
        parts: list[str] = []
        for block in sorted(blocks, key=lambda b: b.alloc_event):
            where = self.where(block.stack)
            module = f" ({block.module})" if block.module else ""
            text = f"{where}{module}" if where else self._nameless(block, blocks)
            if text not in parts:
                parts.append(text)
        each = " each" * (len(blocks) > 1)
        return f"{size(blocks[0].bytes)}{each}: " + "; ".join(parts)

    def _nameless(self, block: Block, family: list[Block]) -> str:
        """What a block without a stack is, judged by its size and phase."""
        if block.phase != "backward":
            return self._line(block, {})
        if any(self.where(other.stack) for other in family) or self.category(block) == "gradients":
            return "gradient, made in backward"
        is_workspace = block.bytes in CUBLAS_WORKSPACES
        return "made in backward" + (" (cuBLAS's workspace has this size)" if is_workspace else "")


def _phase_of_peak(phases: list[Phase], totals: dict[str, Any]) -> str:
    """The innermost phase at the peak; for a pass that a checkpoint repeats in backward, it is backward."""
    peak, innermost = totals["peak_event"], str(totals["peak_phase"])
    around = {phase.name for phase in phases if phase.begin < peak <= phase.end}
    return "backward" if innermost in FORWARDS and "backward" in around else innermost


def in_all_layers(module: str) -> str:
    """`layers.3.mlp` becomes `layers.*.mlp`: the module in all of the numbered ones around it."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", module)


def layers_of(module: str, shared: Collection[str]) -> str:
    """`model.layers.3.mlp` becomes `model.layers.*`; "" if no module around it is numbered.

    Of numbered modules within one another: the outermost whose siblings hold something too, else the innermost.
    """
    around = [name for name, _ in _numbered(module)]
    chosen = next((name for name in around if name in shared), around[-1] if around else None)
    return "" if chosen is None else f"{chosen}.*".removeprefix(".")


def _numbered(module: str) -> Iterator[tuple[str, str]]:
    """The numbered modules around one, outermost first: what they are in, and the number."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            yield ".".join(parts[:i]), part


def _rows(named: Iterable[tuple[str, Block]]) -> list[Row]:
    sums: dict[str, list[int]] = {}
    for name, block in named:
        pair = sums.setdefault(name, [0, 0])
        pair[0] += block.bytes
        pair[1] += 1
    rows = [Row(name, size, n) for name, (size, n) in sums.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.name))
