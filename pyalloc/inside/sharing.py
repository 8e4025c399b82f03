"""torch's one history, shared: the program starts, stops, clears and reads it while a recording uses it.

torch's functions are replaced here, as hooks.py does on pyalloc.  The history itself stays on for the recording; the
program's part of it is kept aside whenever entries are moved to the recording's file.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyalloc.inside import history
from pyalloc.inside.hooks import Replacements

Entry = dict[str, Any]
_RECORD, _LEGACY = "_cuda_record_memory_history", "_cuda_record_memory_history_legacy"
_SNAPSHOT, _ENABLED = "_cuda_memorySnapshot", "_cuda_isHistoryEnabled"
_MOST_UNKNOWN = 1_000_000  # entries of a history whose max_entries nobody heard
_N_ARGUMENTS = 10  # of Asked; newer versions may have more
_CONTEXTS = (None, "state", "alloc", "all")  # each includes those before it


@dataclass(frozen=True)
class Asked:
    """How the program wants its history: the arguments of torch's call, in order."""

    enabled: str | None = "all"
    context: str | None = "all"
    stacks: str = "all"
    max_entries: int = sys.maxsize
    clear_history: bool = False
    compile_context: bool = False
    global_record_annotations: bool = False
    skip_actions: Sequence[str] = ()
    record_pinned_host_memory: bool = False
    record_cuda: bool = True

    @property
    def is_known(self) -> bool:
        """Does torch accept these arguments?  If not, torch itself must raise the error."""
        return (
            self.enabled in (None, "state", "all")
            and self.context in _CONTEXTS
            and self.stacks in ("python", "all")
            and isinstance(self.max_entries, int)
            and self.max_entries >= 0
            and not isinstance(self.skip_actions, str)
            and set(self.skip_actions) <= set(history.TORCHS)
        )

    @property
    def has_frames(self) -> bool:
        """Do its entries have stacks?"""
        return self.context in ("alloc", "all")

    def most(self) -> int:
        """How many entries it keeps, the latest ones."""
        return self.max_entries if self.enabled == "all" else 1


def _of_legacy(
    enabled: bool,
    record_context: bool = True,
    max_entries: int = 1,
    of_allocations: bool = False,
    has_cpp: bool = False,
    *newer: Any,
) -> Asked:
    """The same from the arguments of the call's older form."""
    context = "alloc" if of_allocations else "state"
    return Asked(
        "all" if enabled else None,
        context if record_context else None,
        "all" if has_cpp else "python",
        max_entries,
        *newer[: _N_ARGUMENTS - 5],
    )


@dataclass
class _Shared:
    """The program's part of the history.

    move: the recording's function that moves entries to its file and to keep(); None without a recording.
    switch: the recording's function that switches torch's history on as both want it, and keeps its entries.
    """

    replaced: Replacements = field(default_factory=Replacements)
    asked: Asked | None = None  # None: it is off
    move: Callable[[], None] | None = None
    switch: Callable[[], None] | None = None
    lock: Any = field(default_factory=threading.RLock)
    traces: list[deque[Entry]] = field(default_factory=list)
    host: deque[Entry] = field(default_factory=deque)
    annotations: deque[Entry] = field(default_factory=deque)
    ours: set[int] = field(default_factory=set)  # threads whose calls are the recording's
    # What replaced torch's functions.
    answers: list[Callable[..., Any]] = field(default_factory=list)

    def forget(self) -> None:
        """Drops all entries, as torch does when its history is stopped or cleared."""
        self.traces.clear()
        self.host.clear()
        self.annotations.clear()

    def note(self, asked: Asked) -> None:
        """The program asked for this, and torch accepted it."""
        is_off = asked.enabled is None
        if is_off or asked.clear_history:
            self.forget()
        if not asked.record_cuda:
            self.traces.clear()
            self.annotations.clear()
        if not asked.record_pinned_host_memory:
            self.host.clear()
        most = asked.most()
        self.traces = [deque(trace, most) for trace in self.traces]
        self.host, self.annotations = deque(self.host, most), deque(self.annotations, most)
        self.asked = None if is_off else asked


_shared = _Shared()


def _forget_in_child() -> None:
    """A forked child does not have the threads that held the lock or were inside ours()."""
    _shared.lock = threading.RLock()
    _shared.ours &= {threading.get_ident()}


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Inside the block, this thread's calls are not the program's: torch itself answers them."""
    me = threading.get_ident()
    if me in _shared.ours:
        yield
        return
    _shared.ours.add(me)
    try:
        yield
    finally:
        _shared.ours.discard(me)


def listen(torch: Any) -> None:
    """Replaces torch's functions, to know what the program asks for, before a recording and during one."""
    done = _shared.replaced
    if done.originals:
        return
    for name, answer in (
        (_RECORD, _record),
        (_LEGACY, _record_legacy),
        (_SNAPSHOT, _snapshot),
        (_ENABLED, _is_enabled),
    ):
        original = getattr(torch._C, name, None)
        if original is not None:
            _shared.answers.append(_bound(answer, original))
            done.put(torch._C, name, _shared.answers[-1])


def _bound(answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: answer(original, *given)


def begin(torch: Any, lock: Any, move: Callable[[], None], switch: Callable[[], None]) -> None:
    """A recording uses the history from now on, under its own lock."""
    listen(torch)
    if _shared.asked is None and torch._C._cuda_isHistoryEnabled():
        _shared.asked = Asked(max_entries=_MOST_UNKNOWN)
    _shared.lock, _shared.move, _shared.switch = lock, move, switch


def keep(traces: list[list[Entry]], host: list[Entry], annotations: list[Entry]) -> None:
    """Keeps the program's part of the new entries that are being moved to the file."""
    asked = _shared.asked
    if asked is None:
        return
    if asked.record_cuda:
        while len(_shared.traces) < len(traces):
            _shared.traces.append(deque(maxlen=asked.most()))
        for kept, trace in zip(_shared.traces, traces, strict=False):
            kept.extend(
                entry if asked.has_frames else {**entry, "frames": []}
                for entry in trace
                if entry["action"] not in asked.skip_actions
            )
        _shared.annotations.extend(annotations)
    _shared.host.extend(host)


def wanted(stacks: str) -> dict[str, Any]:
    """Arguments of torch's call that suit the program and a recording with these stacks: python, all or none."""
    context = None if stacks == "none" else "alloc"
    asked = _shared.asked
    if asked is None:
        return {
            "context": context,
            "stacks": "all" if stacks == "all" else "python",
            # Else torch listens to this thread alone, and no other could end that.
            "global_record_annotations": True,
        }
    # C++ frames make each move of the history slow: if the recording has stacks, it decides which.
    frames = asked.stacks if context is None else stacks
    return {
        "context": max(context, asked.context, key=_CONTEXTS.index),
        "stacks": frames,
        "compile_context": asked.compile_context,
        "global_record_annotations": asked.global_record_annotations,
        "record_pinned_host_memory": asked.record_pinned_host_memory,
    }


def is_on() -> bool:
    """Is torch's history on, for the program or for a recording?  Then live blocks have stacks."""
    import torch

    with ours():
        return bool(torch._C._cuda_isHistoryEnabled())


def leave() -> None:
    """The recording is over, or goes on in the parent process; the program's part gets a new lock."""
    _shared.move = _shared.switch = None
    _shared.lock = threading.RLock()


def hand_back(torch: Any) -> None:
    """After leave(): sets torch's history as the program wants it; it continues the entries kept here."""
    asked = _shared.asked
    with ours():
        # torch complains if the program has already switched it off.
        if torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(enabled=None)
        if asked is not None:
            switch_on(torch, vars(asked))
            return
    _shared.forget()
    on_top = [getattr(owner, name) for owner, name, _ in _shared.replaced.originals]
    if all(answer in _shared.answers for answer in on_top):  # else another allocator replaced them
        _shared.replaced.undo()
        _shared.answers.clear()


def switch_on(torch: Any, keywords: dict[str, Any], *, clear: bool = False) -> None:
    """Switches torch's history on, with the arguments that this version of torch has; clear: drops its entries."""
    function: Any = torch.cuda.memory._record_memory_history
    known = inspect.signature(inspect.unwrap(function)).parameters
    with ours():
        if clear and "clear_history" in known:
            keywords = {**keywords, "clear_history": True}
        elif clear:
            function(enabled=None)
        function(**{name: value for name, value in keywords.items() if name in known})


def _record(original: Callable[..., Any], *given: Any) -> None:
    try:
        asked = Asked(*given[:_N_ARGUMENTS])
    except TypeError:
        asked = Asked("?")
    _ask(original, given, asked)


def _record_legacy(original: Callable[..., Any], *given: Any) -> None:
    try:
        asked = _of_legacy(*given)
    except TypeError:
        asked = Asked("?")
    _ask(original, given, asked)


def _ask(original: Callable[..., Any], given: tuple[Any, ...], asked: Asked) -> None:
    if threading.get_ident() in _shared.ours:
        original(*given)
        return
    with _shared.lock:
        if _shared.move is not None:  # what happened so far is kept as the program asked before
            _shared.move()
        switch = _shared.switch
        if switch is None:
            original(*given)
            _shared.note(asked)
            return
        if asked.is_known:
            _shared.note(asked)
            switch()
            return
        try:
            original(*given)
        finally:
            switch()


def _snapshot(original: Callable[..., Any], *given: Any) -> dict[str, Any]:
    """A snapshot with the program's part of the history.  given: nothing, or one tuple (*pool id[, include_traces])."""
    pool = given[0] if given else None
    has_traces = pool is None or len(pool) < 3 or bool(pool[2])
    is_past = threading.get_ident() in _shared.ours
    if is_past or not has_traces or (_shared.move is None and not _shared.traces):
        return original(*given)  # type: ignore[no-any-return]
    with _shared.lock:
        if _shared.move is not None:
            _shared.move()
        result: dict[str, Any] = original(*given)
        told = result["device_traces"]
        if _shared.move is not None:  # what other threads did since comes with the next move
            told = [[] for _ in told]
            result |= {name: [] for name in history.OTHER_TRACES if name in result}
        kept = [*map(list, _shared.traces), *([] for _ in told[len(_shared.traces) :])]
        result["device_traces"] = [a + b for a, b in zip(kept, told, strict=False)]
        for name, mine in zip(
            history.OTHER_TRACES, (_shared.host, _shared.annotations), strict=True
        ):
            if name in result:
                result[name] = [*mine, *result[name]]
    return result


def _is_enabled(original: Callable[[], bool]) -> bool:
    if _shared.move is None or threading.get_ident() in _shared.ours:
        return original()
    return _shared.asked is not None and _shared.asked.record_cuda
