"""Plans: addresses for the requests of a program that repeats itself, computed from a recording of it.

A plan has each device's requests before the first repeated step, and those of that step, each with a place.  A block
that recurs in each step has the same place in all of them.  If some blocks live until after the next of their kind
(results that a variable holds until it gets the next ones), two steps are planned, in which they have two places.
Placing blocks with known lives is dynamic storage allocation (csrc/replay/placement.h); this file finds the blocks.
"""

from __future__ import annotations

import itertools
import json
import os
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyalloc import _core, trace
from pyalloc.common import ranked, units
from pyalloc.errors import PlanError
from pyalloc.traces.caveats import has_beginning
from pyalloc.traces.convert import NAMES
from pyalloc.traces.moments import rounded

Progress = Callable[[int, int], object]

_FORMAT = 3
_KEY = "pyalloc_plan"
_ANYWHERE = _EVERY_DEVICE = 2**64 - 1
_LEAST_ASKED = 0.01  # of all bytes: a device with fewer requested is not planned
_ROUNDS = 20_000  # of placing, unless they take more than some seconds
_MOST_EVENTS = 2**18  # read from a recording: three steps of the longest plan
_GRAM = 16  # consecutive requests that identify a place in the program
_CANDIDATES = 24  # periods to try
_BATCHES = 64  # a step may be made of so many like batches, of which none tells how many there are
# Of the requests, so many are as a period later; fewer are a loop within the program, no step.
_LEAST_SHARE = 1 / 8


@dataclass(frozen=True)
class Place:
    """Of one request.

    Attributes:
        size: bytes, rounded as the allocator rounds them.
        offset: bytes from the plan's beginning; None: anywhere.
        life: number of requests of PLAN_FROM bytes or more until its free, its own included; 0: it is never freed.
    """

    size: int
    offset: int | None
    life: int


@dataclass(frozen=True)
class Part:
    """Places in the order of one device's requests.

    Attributes:
        device: whose; None: of any (the program used one, and ranks that follow its plan use others).
        places: of the program's beginning and of one step.
        period: number of places, at the end, that belong to the step or steps; 0: the program does not repeat itself.
        turns: how many steps these are.
        live_bytes: the most bytes with a place that are alive at once.
        extent_bytes: the end of the highest place.
        elsewhere: share of the bytes requested on other streams and in private pools, which are not planned.
    """

    device: int | None
    places: tuple[Place, ...]
    period: int
    turns: int
    live_bytes: int
    extent_bytes: int
    elsewhere: float = 0.0

    def figures(self) -> dict[str, Any]:
        """All fields except the places."""
        return {
            "device": self.device,
            "live_bytes": self.live_bytes,
            "extent_bytes": self.extent_bytes,
            "elsewhere": self.elsewhere,
            "period": self.period,
            "turns": self.turns,
        }


@dataclass(frozen=True)
class Plan:
    """What a program's devices are asked for.

    Attributes:
        parts: one for each device; one for any of them where the program used one.
    """

    parts: tuple[Part, ...]

    def packed(self) -> bytes:
        """The plan in the allocator's format (csrc/module_layout.c)."""
        numbers = array("Q")
        for part in self.parts:
            device = _EVERY_DEVICE if part.device is None else part.device
            numbers.extend((device, part.period, len(part.places)))
            for place in part.places:
                offset = _ANYWHERE if place.offset is None else place.offset
                numbers.extend((offset, place.size, place.life))
        return numbers.tobytes()

    def to_json(self) -> str:
        """The contents of a file."""
        parts = [
            part.figures()
            | {"places": [[place.size, place.offset, place.life] for place in part.places]}
            for part in self.parts
        ]
        content = {_KEY: _FORMAT, "devices": parts}
        return json.dumps(content, separators=(",", ":"))


def read(path: Path) -> Plan:
    """A plan from its file.

    Raises:
        PlanError: there is none, or it is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(
            f"{path}: {error.strerror}; --plan, install(plan=...) or PYALLOC_PLAN names this file"
        ) from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get(_KEY) != _FORMAT:
        hint = "to make one: pyalloc plan out.pya -o FILE"
        raise PlanError(f"{path} is not a plan, or one of another version of pyalloc; {hint}")
    try:
        plan = Plan(tuple(_part(part) for part in content["devices"]))
        _core.check_plan(plan.packed())
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = error if isinstance(error, PlanError) else "a field is missing or not a number"
        raise PlanError(f"{path} is damaged: {why}; make it again with pyalloc plan") from None
    return plan


def check(path: Path) -> None:
    """Reads the plans that processes will follow who are given this name.

    Raises:
        PlanError: there is none, or one is damaged.
    """
    plans = ranked.existing(path)
    for each in [path] * (os.path.exists(path) or not plans) + plans:
        read(each)


def _part(content: dict[str, Any]) -> Part:
    return Part(
        None if content["device"] is None else _number(content["device"]),
        tuple(_place(*row) for row in content["places"]),
        _number(content["period"]),
        _number(content["turns"]),
        _number(content["live_bytes"]),
        _number(content["extent_bytes"]),
        float(content["elsewhere"]),
    )


def _place(size: Any, offset: Any, life: Any) -> Place:
    return Place(_number(size), None if offset is None else _number(offset), _number(life))


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


@dataclass
class _Requests:
    """What one device was asked for on its first stream, outside of private pools; times count requests and frees."""

    sizes: list[int]
    born: list[int]
    died: list[int | None]
    n_changes: int = 0
    other_bytes: int = 0  # asked for on other streams, or in private pools
    is_cut: bool = False  # more events were in the recording

    def life(self, i: int) -> int | None:
        died = self.died[i]
        return None if died is None else died - self.born[i]


@dataclass(frozen=True)
class _Steps:
    """Requests [begin, begin + period) come again and again; so many turns of them are planned as one."""

    begin: int
    period: int
    turns: int = 1


def make(
    path: Path,
    *,
    device: int | None = None,
    progress: Progress | None = None,
    searching: Progress | None = None,
    placing: Progress | None = None,
    needs_steps: bool = False,
) -> Plan:
    """A plan from a recording that began with the program.

    Args:
        path: a trace.
        device: of which alone to plan the memory; None: of each that was asked for a percent of all bytes or more.
        progress: as trace.as_trace_file() calls it.
        searching: the same, of looking for steps: some seconds of many requests.
        placing: the same, of working out the places: some seconds of a long step.
        needs_steps: no plan of this one run alone.

    Raises:
        PlanError: it began later, or has no request, or more than a plan can hold; or no step repeats, and one has to.
        TraceError: the file is missing, damaged or of another kind.
    """
    with trace.as_trace_file(path, progress) as file:
        notes = trace.notes(file, progress)
        by_device = _requests_of(file)
    if by_device and not has_beginning(notes):
        raise PlanError(
            f"{path} begins when memory was already in use; a plan needs all of the program's requests, so record it "
            "from its start: pyalloc run --record out.pya python train.py"
        )
    asked_most = _asked_most(by_device)
    chosen = asked_most if device is None else [device] if device in by_device else []
    if not chosen:
        which = "it has no requests" if device is None else f"device {device} has no requests"
        raise PlanError(f"{path}: {which}, so there is nothing to plan")
    parts = []
    for each in chosen:
        steps = _steps_of(by_device[each], searching)
        if steps is not None or not needs_steps:
            whose = each if len(asked_most) > 1 else None
            parts.append(_planned(path, whose, by_device[each], steps, placing))
    if not parts:
        raise PlanError(f"{path}: no two consecutive steps make the same requests")
    return Plan(tuple(parts))


def _asked_most(by_device: dict[int, _Requests]) -> list[int]:
    asked = {device: sum(requests.sizes) for device, requests in by_device.items()}
    least = max(1, _LEAST_ASKED * sum(asked.values()))
    return sorted(each for each in asked if asked[each] >= least)


def _requests_of(file: Path) -> dict[int, _Requests]:
    """The requests, by device."""
    found: dict[int, _Requests] = {}
    streams: dict[int, int] = {}
    alive: dict[tuple[int, int], int] = {}  # request by device and address
    leaving: dict[tuple[int, int], int] = {}  # freed, but maybe pending on a stream
    routed: dict[int, set[tuple[int, int]]] = defaultdict(set)  # private pools, by device
    n_events = 0
    for kind, at, stream, address, size, more in _events(file):
        n_events += 1
        name = NAMES.get(kind)
        key = (at, address)
        if name == "pool_begin":  # twice, or ended without: torch refuses it, and goes on
            routed[at].add((address, more))
        elif name == "pool_end":
            routed[at].discard((address, more))
        elif name == "alloc" and size > 0:
            requests = found.setdefault(at, _Requests([], [], []))
            if routed[at] or streams.setdefault(at, stream) != stream:
                requests.other_bytes += size
                continue
            if n_events > _MOST_EVENTS:
                for each in found.values():
                    each.is_cut = True
                break
            leaving.pop(key, None)
            if key in alive:  # its free is not in the recording
                requests.died[alive[key]] = requests.n_changes
                requests.n_changes += 1
            alive[key] = len(requests.sizes)
            requests.sizes.append(rounded(size))
            requests.born.append(requests.n_changes)
            requests.died.append(None)
            requests.n_changes += 1
        elif name == "free_requested" and key in alive:
            leaving[key] = alive.pop(key)
            found[at].died[leaving[key]] = found[at].n_changes
            found[at].n_changes += 1
        elif name == "free_completed" and key in leaving:
            i = leaving.pop(key)
            if found[at].died[i] != found[at].n_changes - 1:  # something came in between
                found[at].died[i] = found[at].n_changes
                found[at].n_changes += 1
    return found


def _events(file: Path) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Kind, device, stream, address, bytes, and what else there is to the kind."""
    reader = _core.TraceReader(file)
    while True:
        columns = [memoryview(column) for column in reader.read()]
        if not columns[0]:
            return
        kinds, devices = columns[0], columns[1]
        streams, addresses, sizes, more = (columns[i].cast("Q") for i in (4, 5, 6, 7))
        yield from zip(kinds, devices, streams, addresses, sizes, more, strict=True)


def _steps_of(requests: _Requests, progress: Progress | None) -> _Steps | None:
    """The steps that cover most requests: each request equals the one a period later, and has the same life.

    A life that the recording's end cut short equals any life that would have reached beyond it.
    """
    best: tuple[int, _Steps] | None = None
    candidates = _candidates(requests)
    for done, period in enumerate(candidates, 1):
        begin, length = _longest(requests, period)
        if progress is not None:
            progress(done * len(requests.sizes), len(candidates) * len(requests.sizes))
        is_short = length < max(period, _LEAST_SHARE * len(requests.sizes))
        if is_short or (best is not None and length <= best[0]):
            continue
        # Small requests are found again by the large one before them: a step begins with a large one, if there is time.
        late = range(begin, begin + length - period + 1)
        begin = next((i for i in late if requests.sizes[i] >= _core.PLAN_FROM), begin)
        best = (length, _Steps(begin, period))
    return best[1] if best is not None else None


def _candidates(requests: _Requests) -> list[int]:
    """Possible periods: distances between equal runs of requests, the most frequent first."""
    latest: dict[tuple[int, ...], deque[int]] = defaultdict(lambda: deque(maxlen=_BATCHES))
    votes: Counter[int] = Counter()
    sizes = requests.sizes
    for i in range(_GRAM, len(sizes) + 1):
        earlier = latest[tuple(sizes[i - _GRAM : i])]
        votes.update(i - each for each in earlier)
        earlier.append(i)
    most = len(sizes) // 2
    chosen = [period for period, _ in votes.most_common() if period <= most]
    return chosen[:_CANDIDATES]


def _longest(requests: _Requests, period: int) -> tuple[int, int]:
    """Begin and length of the longest stretch of requests that equal the one a period later."""
    best_begin = best = begin = 0
    n = len(requests.sizes) - period
    for i in range(n):
        if not _is_alike(requests, i, i + period):
            begin = i + 1
        elif i + 1 - begin > best:
            best_begin, best = begin, i + 1 - begin
    return best_begin, best


def _is_alike(requests: _Requests, i: int, k: int) -> bool:
    if requests.sizes[i] != requests.sizes[k]:
        return False
    one, other = requests.life(i), requests.life(k)
    if one == other:
        return True
    if other is None:  # it lived as long as is known
        return one is not None and requests.born[k] + one >= requests.n_changes
    # A block that outlives the next of its kind has no place, or a different one each time.
    apart = requests.born[k] - requests.born[i]
    return (one is None or one > apart) and other > apart


def _planned(
    path: Path,
    device: int | None,
    requests: _Requests,
    steps: _Steps | None,
    placing: Progress | None,
) -> Part:
    n = len(requests.sizes) if steps is None else steps.begin + steps.period
    which = [(i, 0) for i in range(n)]  # requests, and how many steps later than recorded
    if not _fits(requests, which) or (steps is None and requests.is_cut):
        what = "beginning and one step make {} requests"
        if steps is None:
            what = "steps never repeat, so the plan would need all {} requests"
        whose = "" if device is None else f" on device {device}"
        raise PlanError(
            f"{path}: the program's {what.format(f'{n:,}')}{whose}; a plan holds at most {_core.PLAN_MOST:,} of "
            f"{units.size(_core.PLAN_FROM)} or more, and as many smaller ones"
        )
    if steps is not None and _waits(requests, steps):
        twice = which + [(i, 1) for i in range(steps.begin, n)]
        if _fits(requests, twice):
            which, steps = twice, replace(steps, turns=2)
    blocks = array("Q")
    placed = []
    for at, (i, turn) in enumerate(which):
        lives = _lives(requests, steps, i, turn)
        if lives is not None:
            placed.append(at)
            blocks.extend((requests.sizes[i], *lives))
    # It is called in any case: a Python function is where Ctrl-C is noticed.
    packed, live_bytes, extent_bytes = _core.place_blocks(
        blocks.tobytes(), _ROUNDS, placing or (lambda n_done, n_all: None)
    )
    sizes = [requests.sizes[i] for i, _ in which]
    offsets = _grown_late(sizes, dict(zip(placed, array("Q", packed), strict=True)), extent_bytes)
    lives_in_requests = _lives_in_requests(requests, n)
    places = tuple(
        Place(sizes[at], offsets.get(at), lives_in_requests[i]) for at, (i, _) in enumerate(which)
    )
    period, turns = (0, 1) if steps is None else (steps.period * steps.turns, steps.turns)
    elsewhere = requests.other_bytes / max(requests.other_bytes + sum(requests.sizes), 1)
    return Part(device, places, period, turns, live_bytes, extent_bytes, round(elsewhere, 4))


def _fits(requests: _Requests, which: list[tuple[int, int]]) -> bool:
    """Are there few enough requests for a plan?"""
    n_large = sum(requests.sizes[i] >= _core.PLAN_FROM for i, _ in which)
    return max(n_large, len(which) - n_large) <= _core.PLAN_MOST


def _length(requests: _Requests, steps: _Steps) -> int:
    """The length of one step, in requests and frees."""
    return requests.born[steps.begin + steps.period] - requests.born[steps.begin]


def _waits(requests: _Requests, steps: _Steps) -> bool:
    """Does a block live until after the next of its kind, but not until the one after that?"""
    length = _length(requests, steps)
    step = range(steps.begin, steps.begin + steps.period)
    return any(length < (requests.life(i) or 0) <= 2 * length for i in step)


def _grown_late(sizes: list[int], offsets: dict[int, int], extent_bytes: int) -> dict[int, int]:
    """The same upside down where less memory is needed at first: it is made up to the highest block so far."""

    def early(of: dict[int, int]) -> int:
        ends = (of[i] + sizes[i] for i in sorted(of))
        return sum(itertools.accumulate(ends, max))

    turned = {i: extent_bytes - offset - sizes[i] for i, offset in offsets.items()}
    return min(offsets, turned, key=early)


def _lives(
    requests: _Requests, steps: _Steps | None, i: int, turn: int
) -> tuple[int, int, int, int] | None:
    """A block's life within the planned steps and as many after them; None: it outlives those."""
    born, died = requests.born[i], requests.died[i]
    if steps is None:
        return born, requests.n_changes if died is None else died, 0, 0
    length = _length(requests, steps)
    whole = steps.turns * length
    end = requests.born[steps.begin] + 2 * whole  # everything after it is as before
    if i < steps.begin:
        return born, end if died is None else min(died, end), 0, 0
    if died is None or died - born > whole:
        return None
    born, died = born + turn * length, died + turn * length
    return born, died, born + whole, min(died + whole, end)


def _lives_in_requests(requests: _Requests, n: int) -> list[int]:
    """Large requests from each large one, itself included, to its free; 0: it stays, or is small."""
    ends = {requests.died[i]: i for i in range(n) if requests.died[i] is not None}
    born = {requests.born[i]: i for i in range(len(requests.sizes))}
    lives, n_large = [0] * n, 0
    at_birth: dict[int, int] = {}
    for change in range(requests.n_changes):
        i = born.get(change)
        if i is not None and requests.sizes[i] >= _core.PLAN_FROM:
            at_birth[i] = n_large
            n_large += 1
        k = ends.get(change)
        if k is not None and k in at_birth:
            lives[k] = n_large - at_birth[k]
    return lives
