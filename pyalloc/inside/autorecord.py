"""Recording without an edit: `pyalloc run` and `pyalloc dryrun` ask for it through environment variables."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import sys
from pathlib import Path
from typing import Any

from pyalloc._bootstrap import leaving
from pyalloc._bootstrap.importing import after_import
from pyalloc.common import console, pythons, ranked, recorded
from pyalloc.errors import UsageError
from pyalloc.inside import recording, sharing

PATH = "PYALLOC_RECORD"  # environment: record every process that uses CUDA to this file
STACKS = "PYALLOC_RECORD_STACKS"  # python, all (C++ too) or none
MARKS = "PYALLOC_RECORD_MARKS"  # "0": no automatic phases, steps and categories
TELLER = "PYALLOC_RECORD_TELLER"  # number of the process that says if nothing was recorded
_PROGRAM = re.compile(rf"{pythons.PROGRAM}|.*\.py")
NOTHING = (
    "nothing; no process used CUDA through torch, or the program replaced PYTHONPATH, through which pyalloc enters, "
    "or the file could not be written"
)


def prepare(path: Path, *, stacks: str, automatic: bool, force: bool) -> dict[str, str]:
    """Environment for processes that are to be recorded, for `pyalloc run` and `pyalloc dryrun`.

    Files of an earlier recording stay until remove_earlier().

    Raises:
        UsageError: the file or that of a rank exists and force is not given, or is being written; it is a folder, or
            none can be made there.
    """
    recorded.check_name(path)
    console.check_folder(path)
    for old in sorted(earlier(path)):
        if not old.is_file():
            raise UsageError(f"{old} is not a regular file and will not be overwritten")
        if not force:
            raise UsageError(f"{old} already exists{recorded.cut_off(old)}; --force overwrites it")
        _check_idle(old)
    return {PATH: str(path.absolute()), STACKS: stacks, MARKS: "1" if automatic else "0"}


def remove_earlier(path: Path | None) -> None:
    """Removes an earlier recording's files.  Call it when nothing else can keep the program from starting.

    Raises:
        UsageError: one of them is being written.
    """
    for old in earlier(path):
        _check_idle(old)
        old.unlink(missing_ok=True)


def _check_idle(old: Path) -> None:
    if recorded.is_being_written(old):
        raise UsageError(f"{old} is being written by another recording; name another file")


def earlier(path: Path | None) -> set[Path]:
    """Files that certainly belong to an earlier recording to `path`: --force removes nothing else."""
    if path is None:
        return set()
    # A second process's file has a pid in its name, but `out.7.pya` might be the user's own file.
    numbered = re.compile(
        rf"{re.escape(path.stem)}\.\d+({re.escape(path.suffix)}(\.part)?|\.oom\.txt)"
    )
    found = written(path) | _beside(path, r"\.oom\.txt")  # out-of-memory reports
    return {old for old in found if not numbered.fullmatch(old.name)}


def written(path: Path | None) -> set[Path]:
    """The files made by recordings to `path`, now or earlier: one per process; `.part` if it was cut off."""
    return set() if path is None else _beside(path, rf"{re.escape(path.suffix)}(\.part)?")


def _beside(path: Path, ending: str) -> set[Path]:
    """The files with this ending, one for each process that was recorded to `path`."""
    name = re.compile(rf"{re.escape(path.stem)}({ranked.RANK})?(\.\d+)?{ending}")
    try:
        return {each for each in path.parent.iterdir() if name.fullmatch(each.name)}
    except OSError:
        return set()


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `pyalloc run` and `pyalloc dryrun` share."""
    parser.add_argument(
        "--record",
        type=Path,
        metavar="OUT.pya",
        help="record the program's use of CUDA memory to this file",
    )
    prepare_choices(parser)


def prepare_choices(parser: argparse.ArgumentParser) -> None:
    """Adds those of them that say how to record, which `pyalloc attach` has, too."""
    parser.add_argument(
        "--stacks",
        choices=recording.STACK_CHOICES,
        default="python",
        help="which stacks to record: Python only, also C++ (all), or none (default: python)",
    )
    parser.add_argument(
        "--no-source",
        action="store_true",
        help="record neither stacks nor the command line, for files that you will share",
    )
    parser.add_argument(
        "--no-marks",
        action="store_true",
        help="do not hook the program's modules to mark phases, steps and categories",
    )
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def from_arguments(args: argparse.Namespace) -> dict[str, str]:
    """The environment that these arguments ask for.

    Raises:
        UsageError: they say how to record, but not to record; or the program was taken for the file; or see prepare().
    """
    if args.record is None:
        if says_how(args):
            raise UsageError(
                "--stacks, --no-source and --no-marks need a recording; add --record out.pya"
            )
        return {}
    # The program may exist, and must not be named as a file to overwrite.
    if _PROGRAM.fullmatch(args.record.name):
        raise UsageError(
            "--record needs the name of a file to write before the program: --record out.pya "
            f"{console.quoted(args.record)} ..."
        )
    stacks = stacks_of(args)
    return prepare(args.record, stacks=stacks, automatic=not args.no_marks, force=args.force)


def says_how(args: argparse.Namespace) -> bool:
    """Does one of the arguments say how to record?"""
    return bool(args.stacks != "python" or args.no_source or args.no_marks)


def stacks_of(args: argparse.Namespace) -> str:
    """Which stacks these arguments ask for.

    Raises:
        UsageError: they ask for C++ stacks and for no stacks.
    """
    if args.no_source and args.stacks == "all":
        raise UsageError("--stacks all and --no-source contradict each other; give one of them")
    return "none" if args.no_source else str(args.stacks)


def record_when_cuda_starts() -> None:
    """Starts the recording that the environment asks for, once torch starts CUDA in this process."""
    after_import("torch", _wait_for_cuda)
    if _is_teller():
        path = Path(os.environ[PATH])
        atexit.register(_tell_if_nothing, path, written(path))


def _wait_for_cuda(torch: Any) -> None:
    sharing.listen(torch)  # now: programs enable torch's history before they use CUDA
    torch.cuda._lazy_call(_start_from_environment)


def _is_teller() -> bool:
    return os.environ.get(TELLER) == str(os.getpid())


def _tell_if_nothing(path: Path, before: set[Path]) -> None:
    if _is_teller() and written(path) <= before:  # a child forked off has this to do at its end too
        console.complain(f"pyalloc: {path}: recorded {NOTHING}")


def _start_from_environment() -> None:
    if recording.is_active():
        return
    try:
        given = Path(os.environ[PATH])
        path, wanted = _own_path(given), ranked.own(given)
        stacks, automatic = os.environ.get(STACKS, "python"), os.environ.get(MARKS, "1") == "1"
        recording.check_stacks(stacks)
        try:
            _start(path, stacks, automatic)
        except UsageError:  # another process took the name at the same time
            path = _path_of_process(path)
            _start(path, stacks, automatic)
        leaving.before(recording.stop_at_exit)
        if _is_teller() and path != wanted:
            console.complain(f"pyalloc: recording to {path}, because another process took {wanted}")
    except Exception as error:
        print(f"pyalloc: this process is not being recorded: {error}", file=sys.stderr)


def _own_path(path: Path) -> Path:
    """A file for each rank; further processes without a rank get their pid."""
    path = ranked.own(path)
    return _path_of_process(path) if path.exists() or recorded.part(path).exists() else path


def _path_of_process(path: Path) -> Path:
    return path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")


def _start(path: Path, stacks: str, automatic: bool) -> None:
    is_extra = path.stem.endswith(f".{os.getpid()}")
    recording.Recorder(path, stacks, automatic, is_extra=is_extra).start()
