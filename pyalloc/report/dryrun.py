"""What a dry run found, for people: figures, verdict, what differs from a card, the next command."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator, Sequence

from pyalloc.common import console, units
from pyalloc.outside import hostcuda
from pyalloc.outside.dryrun import OUT_OF_MEMORY, DeviceUse, Result
from pyalloc.report.text import wrapped

# A card with less than this left over may not hold the CUDA context and the libraries' own memory.
_MARGIN = 2**30
# So many processes are shown one by one, counted for each device that they use.
_MOST_USES = 32
# Exit codes of programs that people, `timeout` or batch systems ended; a program that fails has others.
_FROM_OUTSIDE = {128 + each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def _size(value: int | None) -> str:
    return "unknown" if value is None else units.size(value)


def _apart(one: int, other: int) -> tuple[str, str]:
    """Two sizes, to the byte if they would read the same."""
    texts = _size(one), _size(other)
    return texts if texts[0] != texts[1] else (f"{one:,} bytes", f"{other:,} bytes")


def _typed(size: int) -> str:
    """A size as people would type it."""
    for name, unit in (("GB", 2**30), ("MiB", 2**20)):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _gave_up(result: Result) -> bool:
    """Did it probably catch an out-of-memory error and end because of it, as launchers and scripts do?"""
    has_failed = 0 < result.exit_code < 128 or (result.exit_code == 0 and not result.devices)
    return result.ooms > 0 and not result.error and has_failed


def _was_stopped(result: Result) -> bool:
    """Was it stopped from outside while all was well, like a long training of which a few steps are enough?"""
    is_well = result.ooms == 0 and bool(result.devices)
    return result.exit_code in _FROM_OUTSIDE and is_well


def _verdict(result: Result) -> str:
    memory = _size(result.memory)
    if result.no_addresses:
        return "unknown: this process may not reserve enough address space for a device's memory"
    if result.error == OUT_OF_MEMORY:
        return _refusal(result, memory)
    if result.exit_code != 0 or _gave_up(result):
        return _failure(result, memory)
    if not result.devices and _has_untold(result):
        return f"unknown: the process that used the device {_became(result)}"
    if not result.devices:
        return "the program used no device memory"
    how = ""
    if result.ooms > 0:
        how = f", after {_errors(result)} that the program caught"
    elif any(each.size > result.memory for each in result.shared().values()):
        how = ", but only if its processes do not peak at the same time"
    return f"fits {memory}{how}"


def _refusal(result: Result, memory: str) -> str:
    needed = ""
    if _is_too_much(result):
        memory, more = _apart(result.memory, result.needed_bytes)
        needed = f"; even with nothing wasted it needed {more}"
    where = "the limit that was set" if result.limited else memory
    return f"does not fit {where}: the program died of torch.OutOfMemoryError{needed}"


def _failure(result: Result, memory: str) -> str:
    end = f"the program {_end(result.exit_code)}"
    if result.wanted_devices:
        end = f"the program asked for a device that --devices {result.n_devices} does not provide"
    if _gave_up(result):
        return f"probably does not fit {memory}: {end} after {_errors(result)}"
    known = f"fits {memory} so far" if _was_stopped(result) else "unknown"
    return f"{known}: {end}"


def _errors(result: Result) -> str:
    return f"{result.ooms} out-of-memory error{'s' * (result.ooms != 1)}"


def _end(code: int) -> str:
    """How a program ended; code: as a shell reports it."""
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with exit code {code}"


def _next_command(result: Result) -> str:
    words = [part for part in result.command if part != "--"]
    program = console.joined(words)
    plan = f" --plan {console.quoted(result.plan)}" if result.plan else ""

    def again(memory: int, allocator: str) -> str:
        n_devices = max(result.n_devices, min(result.wanted_devices, console.ON_ONE_MACHINE))
        devices = f" --devices {n_devices}" if n_devices > 1 else ""
        rest = f"--allocator {allocator}{plan} {program}"
        return f"pyalloc dryrun --memory {_typed(memory)}{devices} {rest}"

    if _first(result) or result.wanted_devices:
        return again(result.memory, result.allocator)
    is_refused = not (result.fits or _was_stopped(result))
    if _is_too_much(result) or (_is_last(result) and is_refused):
        memory = 2 * result.memory
        while memory < result.needed_bytes:
            memory *= 2
        return again(memory, result.allocator)
    if not _is_last(result):
        return again(result.memory, "pyalloc")
    if result.replaced:
        return f"python {program}" if _is_script(words[0]) else program
    return f"pyalloc run{plan} {program}"


def _is_script(program: str) -> bool:
    """Is it a script that only pyalloc's commands run without `python` before it, not a shell?"""
    return program.endswith(".py") and shutil.which(program) is None


def _is_last(result: Result) -> bool:
    """Is there no other allocator to try?"""
    return result.allocator == "pyalloc" or result.replaced


def _is_too_much(result: Result) -> bool:
    """Could no allocator have served it?"""
    return not result.fits and result.needed_bytes > result.memory


def _first(result: Result) -> str:
    """What must be done before the same command can end better; "": nothing."""
    if result.unreached or result.no_addresses or result.unwritten:
        return _first_for_figures(result)
    is_short = result.error == OUT_OF_MEMORY or _gave_up(result)
    is_known = is_short or bool(result.wanted_devices)  # why it ended
    if result.exit_code != 0 and not is_known and not _was_stopped(result):
        return _first_after(result)
    if not result.devices and _has_untold(result):
        return (
            "let all processes end by themselves before the program does (for a Pool: close() and "
            f"join()){_or_record(result)}"
        )
    if not result.devices and not is_known:
        return 'let the program move something to "cuda", for example with model.to("cuda")'
    if result.has_lost_path:
        return "let PYTHONPATH keep what it had: PYTHONPATH=folder:$PYTHONPATH"
    is_limit = result.limited and _is_last(result)
    return "raise or remove the limit" if is_limit else ""


def _first_for_figures(result: Result) -> str:
    """The same where something keeps the program from having figures."""
    if result.unreached:
        return "leave out that option"
    if result.no_addresses:
        return f"lift the limit: {hostcuda.LIFT}"
    if result.unwritten_error == errno.EFBIG:
        return f"lift the limit: {hostcuda.LIFT_FILES}"
    folder = console.quoted(result.temporary)
    return f"make room in {folder}, or set TMPDIR to a folder that has some"


def _first_after(result: Result) -> str:
    """The same for a program that ended too early, for whatever reason."""
    if result.exit_code == 128 + signal.SIGKILL:  # it left no messages
        return "check whether this machine itself ran out of memory (dmesg, journalctl -k)"
    if result.exit_code not in _FROM_OUTSIDE or result.devices:
        return "look at the messages above"
    if result.exit_code != 128 + signal.SIGINT and _is_mute(result):
        return f"stop it with SIGINT (Ctrl-C){_or_record(result)}"
    return "let it run until it has used the device"


def _or_record(result: Result) -> str:
    """The other way to learn what a process used that cannot report it, unless that way was taken."""
    if result.is_recorded:
        return ""
    return ", or add --record: recordings stay readable in any case"


def _has_untold(result: Result) -> bool:
    """Did a process begin to use a device, and report nothing?"""
    return bool(result.killed or result.still_running or result.unwritten)


def _became(result: Result) -> str:
    """What became of that process."""
    if result.unwritten:
        return f"could not write its figures ({_why_unwritten(result)})"
    return "was killed" if result.killed else "is still running"


def _why_unwritten(result: Result) -> str:
    return os.strerror(result.unwritten_error)


def _is_mute(result: Result) -> bool:
    """Was the program itself killed before it could report anything?"""
    return result.device_calls == 0 and result.exit_code > 128


def summary(result: Result) -> str:
    """What to print at the end, for people."""
    allocator = "the program's own" if result.replaced else result.allocator
    asked, allocated = _size(result.peak_requested_bytes), _size(result.peak_allocated_bytes)
    is_told = bool(result.peak_requested_bytes)  # cudaMallocAsync does not report it
    # A freed block that another stream still uses counts as requested, not as allocated.
    is_less = (result.peak_requested_bytes or 0) < (result.peak_allocated_bytes or 0)
    rounding = f" ({asked} requested, the rest is rounding)" * (
        is_told and is_less and asked != allocated
    )
    figures = [
        ("peak allocated", f"{allocated}{rounding}"),
        ("peak reserved", _size(result.peak_reserved_bytes)),
        ("device bytes", f"{_size(result.peak_device_bytes)} at most, as the CUDA runtime counted"),
        (
            "device calls",
            f"{result.device_calls:,}, including {result.memory_calls:,} for memory and "
            f"{result.launches:,} kernel{'s' * (result.launches != 1)} (which computed nothing)",
        ),
    ]
    if result.device_calls == 0:
        is_mute = _is_mute(result)
        told = "none: the program was ended before it could report them (SIGINT, Ctrl-C, lets it)"
        called = f"the process that called CUDA {_became(result)}"
        nothing = called if _has_untold(result) else "the program did not call CUDA"
        figures = [("figures", told if is_mute else f"none: {nothing}")]
    figures.append(("verdict", _verdict(result)))
    lines = [
        wrapped(
            f"pyalloc dryrun: PyTorch {result.torch}, {allocator} allocator, {_size(result.memory)} per device",
            first="",
        ),
        *(wrapped(value, f"  {name:<17}", " " * 19) for name, value in figures),
    ]
    if len(result.devices) > 1:
        lines += [wrapped(text, "    ", "      ") for text in _uses(result.devices)]
    lines += [wrapped(remark, rest="    ") for remark in _remarks(result)]
    if _first(result):
        lines.append(wrapped(f"first: {_first(result)}", rest="    "))
    lines.append(f"  next: {_next_command(result)}")  # in one line, to be copied
    return "\n".join(lines)


def _remark_on_reads(result: Result) -> str:
    copies = "1 copy" if result.dtoh_copies == 1 else f"{result.dtoh_copies:,} copies"
    read = f"the program read {_size(result.dtoh_bytes)} back from the device in {copies}"
    if result.known_copies >= result.dtoh_copies:
        return f"note: {read}; these values are right, although no kernel ran"
    is_some = result.known_copies > 0
    known = f", {result.known_copies:,} of them with correct values" * is_some
    others = "the others" if is_some else "these values"
    return (
        f"warning: {read}{known}; no kernel ran, so sizes and errors that depend on {others} are "
        "wrong"
    )


def _uses(uses: Sequence[DeviceUse]) -> Iterator[str]:
    """What each process took of each device; of very many those that took most."""
    by_size = sorted(uses, key=lambda use: use.peak_device_bytes, reverse=True)
    others = by_size[_MOST_USES:]
    for use in (use for use in uses if use not in others):
        yield (
            f"process {use.pid} device {use.device}: allocated {_size(use.peak_allocated_bytes)}, "
            f"reserved {_size(use.peak_reserved_bytes)}, device bytes {_size(use.peak_device_bytes)}"
        )
    if others:
        most = _size(others[0].peak_device_bytes)
        yield f"{len(others)} other{'s' * (len(others) > 1)}: at most {most} of device bytes; --json FILE has them all"


def _remarks(result: Result) -> list[str]:
    """What differs from a card, or is unknown."""
    found = []
    for device, (n, at_once, size) in result.shared().items():
        memory, together = _apart(result.memory, size)
        most = f", at most {at_once} at a time" * (at_once < n)
        found.append(
            f"{'warning' if size > result.memory else 'note'}: {n} processes used device {device}{most}, each with "
            f"{memory} of its own here; on one card they need up to {together} in total"
        )
    left = result.memory - result.peak_device_bytes
    if result.fits and left < _MARGIN:
        found.append(
            "note: a card also has to hold the CUDA context (usually a few hundred MiB), NCCL's buffers and cuDNN's "
            f"workspaces; they are not counted here, and {_size(left)} are left for them"
        )
    managed = max((use.peak_managed_bytes for use in result.devices), default=0)
    if managed > 0:
        found.append(
            f"note: {_size(managed)} of managed memory (cudaMallocManaged, as in paged optimizers) are not counted; a "
            "card holds as much of it as it has room for, and the host the rest"
        )
    if result.unfollowed:
        found.append(
            f"note: with PyTorch {result.torch}, numbers that the program changes in place on the device count as "
            "unknown; PyTorch 2.9 and newer can follow them"
        )
    if result.masks > 0:
        found.append(
            f"note: {result.masks:,} mask{'s' * (result.masks != 1)} (used as indices or by nonzero()) counted as all "
            "true; on a card they may select less"
        )
    if result.distinct > 0:
        found.append(
            f"note: {result.distinct:,} call{'s' * (result.distinct != 1)} of unique() or coalesce() treated all "
            "elements as different; on a card there may be fewer"
        )
    if result.guessed > 0:
        found.append(
            f"warning: the sizes of {result.guessed:,} tensor{'s' * (result.guessed != 1)} are guesses, for one_hot(), "
            "bincount() (one class assumed), repeat_interleave() (once each), pack_padded_sequence() or ctc_loss() "
            "(the full length); a card may need more or less memory"
        )
    if result.dtoh_copies > 0:
        found.append(_remark_on_reads(result))
    for pids, why in (
        (result.killed, "killed, for example by a Pool's terminate() or a launcher"),
        (result.still_running, "still running, because nothing waited for it"),
        (
            result.unwritten,
            f"they could not be written to {result.temporary} ({_why_unwritten(result)})",
        ),
    ):
        if pids and not _is_mute(result):
            told = ", ".join(map(str, pids))
            found.append(f"warning: figures of process {told} are missing: {why}")
    if result.unreached:
        found.append(f"warning: torch's figures are missing: {result.unreached}")
    elif result.untold:
        why = (
            ": the program replaced PYTHONPATH, through which pyalloc enters" * result.has_lost_path
        )
        found.append(
            f"warning: torch's figures of process {', '.join(map(str, result.untold))} are missing{why}"
            + ("; it may not have run on pyalloc" if result.allocator == "pyalloc" else "")
        )
    return found
