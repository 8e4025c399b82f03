"""Runs a program on the host-memory CUDA runtime, and finds out how much memory it needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyalloc import _bootstrap
from pyalloc.common import console, files, processes, pythons
from pyalloc.common.config import PLAN, TORCH_CONF, Config
from pyalloc.errors import UsageError
from pyalloc.install import check_torch_settings
from pyalloc.outside import hostcuda, launching

ALLOCATORS = ("native", "expandable", "pyalloc")
# Driver and runtime calls that take or release device memory: an allocator's cost.
_MEMORY_CALLS = re.compile(
    r"^(cudaMalloc|cudaFree|cudaMallocAsync|cudaFreeAsync|cudaMallocManaged|"
    r"cuMem(Alloc|Free|Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)\w*)$"
)
OUT_OF_MEMORY = "OutOfMemoryError"
_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


@dataclass(frozen=True)
class Options:
    """What to run, and on what.  memory: bytes of each device; is_recorded: pyalloc must get into the program.

    plan: a file for pyalloc; "": the environment's, if it names one.
    """

    command: tuple[str, ...]
    memory: int = 80 * 2**30
    devices: int = 1
    allocator: str = "native"
    is_recorded: bool = False
    plan: str = ""


@dataclass(frozen=True)
class DeviceUse:
    """One device of one process, in bytes.  requested, allocated and reserved are torch's figures, None if unknown.

    physical: which of --devices it is; device: its number in the process, which may only see some of them.
    peak_managed_bytes: of managed memory, which peak_device_bytes does not contain.
    began_ns, ended_ns: when the process began to use a device (0: unknown), and when it ended.
    """

    pid: int
    device: int
    physical: int
    capacity: int
    peak_device_bytes: int
    peak_requested_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    began_ns: int = 0
    ended_ns: int = 0
    peak_managed_bytes: int = 0


class Shared(NamedTuple):
    """A device that several processes used: how many, at most how many at a time, and what their peaks add up to."""

    processes: int
    at_once: int
    size: int


@dataclass(frozen=True)
class Result:
    """What a dry run found.

    fits: the program succeeded and no process died of lack of memory.  ooms: out-of-memory errors, caught or not.
    limited: it died at a limit that was set below the device's size.  needed_bytes: bytes requested from the device at
    the last out-of-memory error, including the refused request; 0: there was none.
    memory_calls: calls that take, map or release device memory.  dtoh_copies: copies from the device to the host;
    known_copies: those whose values are right although no kernel ran.
    processes: all that began to use a device.  untold: processes without torch's figures; if they were to use pyalloc,
    they did not.  has_lost_path: one of these was given a PYTHONPATH without pyalloc.  killed: processes that began to
    use a device and left no figures; still_running: those that were not waited for.  unwritten: those that could not
    write their figures; unwritten_error: why not, an errno; temporary: the folder for temporary files.
    replaced: the program chose an allocator itself.
    masks: masks used as indices and taken as all true.  distinct: calls that ask which elements differ, answered with
    all.  guessed: tensors of labels, counts or lengths that made no sense and were replaced.
    unreached: why pyalloc could not get into the program; torch's figures are missing then.
    no_addresses: a process may not reserve the addresses for a device's memory, so every request failed.
    wanted_devices: how many the program needs, if it died of asking for one that does not exist.
    plan: the named file.  is_recorded: a recording was asked for.  unfollowed: this torch is too old for in-place
    changes to be followed.
    """

    command: tuple[str, ...]
    allocator: str
    torch: str
    exit_code: int
    fits: bool
    ooms: int
    error: str
    limited: bool
    memory: int
    n_devices: int
    devices: tuple[DeviceUse, ...]
    peak_requested_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_device_bytes: int
    memory_calls: int
    device_calls: int
    launches: int
    dtoh_copies: int
    dtoh_bytes: int
    missing: tuple[str, ...]
    processes: tuple[int, ...] = ()
    untold: tuple[int, ...] = ()
    has_lost_path: bool = False
    killed: tuple[int, ...] = ()
    still_running: tuple[int, ...] = ()
    unwritten: tuple[int, ...] = ()
    unwritten_error: int = 0
    temporary: str = ""
    replaced: bool = False
    masks: int = 0
    distinct: int = 0
    guessed: int = 0
    known_copies: int = 0
    needed_bytes: int = 0
    wanted_devices: int = 0
    unreached: str = ""
    plan: str = ""
    is_recorded: bool = False
    unfollowed: bool = False
    no_addresses: bool = False

    def shared(self) -> dict[int, Shared]:
        """Devices that several processes used at a time.

        In a dry run each process has every device to itself; on a card they share it.
        """
        users: dict[int, list[DeviceUse]] = {}
        for use in self.devices:
            users.setdefault(use.physical, []).append(use)
        found = {}
        for device, uses in sorted(users.items()):
            # Most are there when one begins.
            there = [
                [use for use in uses if use.began_ns <= new.began_ns <= use.ended_ns]
                for new in uses
            ]
            at_once = max(map(len, there))
            size = max(sum(use.peak_device_bytes for use in each) for each in there)
            if at_once > 1:
                found[device] = Shared(len(uses), at_once, size)
        return found

    def to_json(self) -> str:
        """All figures, bytes as integers."""
        return json.dumps(asdict(self), indent=2)


def _interpreter(command: list[str]) -> str:
    """The Python that the command runs, as far as can be told: the command itself, or the one in a script's #! line."""
    found = shutil.which(command[0]) or sys.executable
    if re.match(f"{pythons.PROGRAM}$", Path(found).name):
        return found
    with open(found, "rb") as file:
        first = file.readline(200)
    pattern = rf"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(\S*{pythons.PROGRAM})(?:\s|$)"
    named = re.match(os.fsencode(pattern), first)
    return (shutil.which(os.fsdecode(named[1])) if named else None) or sys.executable


def child_environment(options: Options, torch: hostcuda.Torch, folder: str) -> dict[str, str]:
    """The environment in which the program runs dry and writes its figures to the folder."""
    env = hostcuda.environment(
        _bootstrap.environment(dict(os.environ)), torch, zeros=True, folder=Path(folder)
    )
    env["PYALLOC_HOSTCUDA_MEMORY"] = str(options.memory)
    env["PYALLOC_HOSTCUDA_DEVICES"] = str(options.devices)
    env["PYALLOC_HOSTCUDA_COUNTERS"] = f"{folder}/device.%p.json"
    env[_bootstrap.REPORT] = folder
    env.pop(_bootstrap.INSTALL, None)
    env.pop("CUDA_VISIBLE_DEVICES", None)  # the program sees exactly --devices
    if options.allocator == "pyalloc":
        env[_bootstrap.INSTALL] = "1"
    if options.plan:
        env[PLAN] = os.path.abspath(options.plan)
    if options.allocator == "expandable":
        numbers = tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2])
        # The name changed in 2.10.  Newer versions warn about the old name, which wins if both are set.
        name = "PYTORCH_ALLOC_CONF" if numbers >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
        for each in {name} | (env.keys() & TORCH_CONF):
            before = env.get(each, "")
            env[each] = (
                f"{before},expandable_segments:True" if before else "expandable_segments:True"
            )
    return env


def _is_foreground() -> bool:
    """Does the terminal's Ctrl-C reach the child without our help?"""
    try:
        with open("/dev/tty", "rb") as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _started(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the program and forwards signals to it, even those that arrive while it starts."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if not children:
            early.append(number)
        elif number != signal.SIGINT or not _is_foreground():
            children[0].send_signal(number)

    before = {number: signal.getsignal(number) for number in _FORWARDED}
    # The program inherits ignored signals (nohup), so forwarding those from the start does no harm.
    late = [number for number, handler in before.items() if handler == signal.SIG_IGN]
    try:
        for number in _FORWARDED - set(late):
            signal.signal(number, forward)
        children.append(subprocess.Popen(command, env=env))
        for number in late:
            signal.signal(number, forward)
        for each in early:
            children[0].send_signal(each)
        yield children[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: Options, at_start: Callable[[], None] = lambda: None) -> Result:
    """Runs the program to its end and sums up.

    Args:
        options: what to run.
        at_start: called after all checks, just before the program starts.

    Raises:
        UsageError: an option cannot be honoured.
        ConfigError, InstallError: the environment has a setting that pyalloc does not know, or another allocator.
        HostCudaError: there is no PyTorch with CUDA, or the runtime does not support it.
    """
    if options.allocator not in ALLOCATORS:
        raise UsageError(
            f"--allocator must be one of {', '.join(ALLOCATORS)}, not {options.allocator!r}"
        )
    if not 1 <= options.devices <= console.ON_ONE_MACHINE:
        raise UsageError(
            f"--devices must be from 1 to {console.ON_ONE_MACHINE}, not {options.devices}"
        )
    command = launching.command("dryrun", None, options.command)
    if options.allocator == "pyalloc":
        Config.of(plan=options.plan or None)  # report a mistake here, not in each child
        check_torch_settings()
    unreached = ""
    try:
        launching.check_reached(command)
    except UsageError as error:
        if options.allocator == "pyalloc" or options.is_recorded:
            raise
        unreached = str(error)
    hostcuda.check_limits(options.memory)
    torch = hostcuda.find_torch(_interpreter(command))
    absent = hostcuda.missing(torch)
    if absent:
        print(
            f"pyalloc dryrun: PyTorch {torch.version} imports {len(absent)} CUDA functions that a dry run does not "
            f"provide; calling one of them is an error: {', '.join(absent)}",
            file=sys.stderr,
        )
    with _folder() as folder:
        env = child_environment(options, torch, str(folder))
        at_start()
        sys.stdout.flush()
        with _started(command, env) as child:
            code = child.wait()
        found = _sum_up(options, torch, tuple(absent), code, folder)
        return replace(found, unreached=unreached)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the figures.  Renames it before removal: a process that nobody waited for may still write to it."""
    with files.temporary_folder("pyalloc-dryrun-") as outer:
        folder = Path(outer) / "told"
        folder.mkdir()
        folder.chmod(0o700)  # whatever the umask
        (folder / _bootstrap.SPARE).touch()
        try:
            yield folder
        finally:
            with contextlib.suppress(FileNotFoundError):  # swept away with old files
                folder.rename(folder.with_name("over"))


def _load(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def _begun(folder: Path) -> set[int]:
    """The processes that began to use a device."""
    return {int(path.suffix[1:]) for path in folder.glob("begun.*")}


def _unwritten(folder: Path) -> dict[int, int]:
    """The processes that could not write their figures, and the errno of each."""
    names = (path.name.split(".") for path in folder.glob("unwritten.*"))
    return {int(pid): int(error) for _, pid, error in names}


def _uses(
    counters: list[dict[str, Any]], reports: dict[int, dict[str, Any]], folder: Path
) -> Iterator[DeviceUse]:
    """The devices that a process took memory from, by the runtime's counters and, if there are any, torch's figures."""
    for process in counters:
        pid = process["pid"]
        told = reports.get(pid, {}).get("devices", {})
        began, ended = (
            path.stat().st_mtime_ns if path.exists() else 0
            for path in (folder / f"begun.{pid}", folder / f"device.{pid}.json")
        )
        for index, device in enumerate(process["devices"]):
            peaks = told.get(str(index), {})
            used = device["peak_bytes"], device["peak_managed_bytes"], peaks.get("reserved", 0)
            if any(used):
                yield DeviceUse(
                    pid=pid,
                    device=index,
                    physical=device["physical"],
                    capacity=device["capacity"],
                    peak_device_bytes=device["peak_bytes"],
                    peak_requested_bytes=peaks.get("requested"),
                    peak_allocated_bytes=peaks.get("allocated"),
                    peak_reserved_bytes=peaks.get("reserved"),
                    began_ns=began,
                    ended_ns=ended,
                    peak_managed_bytes=device["peak_managed_bytes"],
                )


def _sum_up(
    options: Options, torch: hostcuda.Torch, absent: tuple[str, ...], code: int, folder: Path
) -> Result:
    failed = _unwritten(folder)
    begun = _begun(folder) | failed.keys()
    running = {pid for pid in begun if processes.is_there(pid)}  # ask first: one may end now
    counters = _load(folder, "device.*.json")
    counted = {int(process["pid"]) for process in counters}
    told_nothing = begun - counted
    reports = {int(report["pid"]): report for report in _load(folder, "torch.*.json")}
    unwritten = failed.keys() - (counted & reports.keys())  # what another attempt wrote is there
    uses = tuple(_uses(counters, reports, folder))
    untold = {use.pid for use in uses if use.pid not in reports} - unwritten
    errors = [report["error"] for report in reports.values() if report["error"]]
    errors.sort(key=lambda error: error != OUT_OF_MEMORY)  # other errors may result from it
    ooms = sum(
        peaks.get("ooms", 0) for report in reports.values() for peaks in report["devices"].values()
    )
    out_of_memory = OUT_OF_MEMORY in errors
    calls = [(name, n) for process in counters for name, n in process["calls"].items()]
    return Result(
        command=options.command,
        allocator=options.allocator,
        torch=torch.version,
        exit_code=code if code >= 0 else 128 - code,
        fits=code == 0 and not out_of_memory and bool(uses),
        ooms=max(ooms, int(out_of_memory)),
        error=errors[0] if errors else "",
        limited=any(report["limited"] for report in reports.values()),
        memory=options.memory,
        n_devices=options.devices,
        devices=uses,
        peak_requested_bytes=_most([use.peak_requested_bytes for use in uses]),
        peak_allocated_bytes=_most([use.peak_allocated_bytes for use in uses]),
        peak_reserved_bytes=_most([use.peak_reserved_bytes for use in uses]),
        peak_device_bytes=_most([use.peak_device_bytes for use in uses]) or 0,
        memory_calls=sum(n for name, n in calls if _MEMORY_CALLS.match(name)),
        device_calls=sum(n for name, n in calls if re.match(r"_*cu(da)?[A-Z]", name)),
        launches=sum(device["launches"] for process in counters for device in process["devices"]),
        dtoh_copies=sum(process["dtoh_copies"] for process in counters),
        dtoh_bytes=sum(process["dtoh_bytes"] for process in counters),
        missing=absent,
        processes=tuple(sorted(begun | counted)),
        untold=tuple(sorted(untold)),
        has_lost_path=any(
            process["pid"] in untold and not process["on_python_path"] for process in counters
        ),
        killed=tuple(sorted(told_nothing - running - unwritten)),
        still_running=tuple(sorted((told_nothing & running) - unwritten)),
        unwritten=tuple(sorted(unwritten)),
        unwritten_error=max((failed[pid] for pid in unwritten), default=0),
        temporary=str(folder.parent.parent),
        replaced=options.allocator != "pyalloc"
        and any(report["backend"] != "native" for report in reports.values()),
        plan=options.plan,
        is_recorded=options.is_recorded,
        unfollowed=any(report.get("unfollowed", False) for report in reports.values()),
        no_addresses=any(process.get("addresses_refused", False) for process in counters),
        needed_bytes=max((report.get("needed", 0) for report in reports.values()), default=0),
        wanted_devices=max((report.get("wanted", 0) for report in reports.values()), default=0),
        **{
            name: sum(report.get(name, 0) for report in reports.values())
            for name in ("masks", "distinct", "guessed", "known_copies")
        },
    )


def _most(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
