"""pyalloc export."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from pyalloc import export, trace
from pyalloc.common import console, recorded
from pyalloc.errors import UsageError
from pyalloc.traces.caveats import gap_of

_THEN = {
    "torch": "open it at pytorch.org/memory_viz, or run: python -m torch.cuda._memory_viz trace_plot {}",
    "perfetto": "open {} at ui.perfetto.dev",
    "tensorboard": "put {} into a log folder and run: tensorboard --logdir FOLDER",
    "csv": "pyalloc top {file}",
    "json": "pyalloc top {file}",
    "speedscope": "open {} at speedscope.app",
}


class Command:
    """Write a recording in another program's format.

    pyalloc export out.pya --to torch [-o FILE]

    csv has every event, json the figures of `pyalloc report`.  The others are for pytorch.org/memory_viz (torch),
    ui.perfetto.dev, speedscope.app (the peak by stack) and TensorBoard (the timeline).
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The trace and the format."""
        parser.add_argument("file", type=Path, help="a recording, or a snapshot written by torch")
        parser.add_argument(
            "--to", choices=sorted(export.FORMATS), required=True, help="the format to write"
        )
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="file to write (default: the recording's name with the format's suffix)",
        )
        parser.add_argument(
            "--no-source", action="store_true", help="leave out stacks and the command line"
        )
        parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
        parser.add_argument("--force", action="store_true", help="overwrite an existing file")

    def run(self, args: argparse.Namespace) -> int:
        """Writes FILE, or the recording's name with the format's suffix."""
        suffix, convert = export.FORMATS[args.to]
        target = args.output = args.output or recorded.made(args.file, suffix)
        _check_suffix(target, args.to)
        console.keep_inputs(args)  # the default may be the name of the snapshot itself
        console.check_output(target, args.force)
        progress = console.Progress(f"reading {args.file.name}", quiet=args.quiet)
        with (
            trace.as_trace_file(args.file, progress, no_source=args.no_source) as file,
            console.writing(target, args.force) as out,
        ):
            writes: Callable[[console.Progress], None]
            if convert is None:
                notes = trace.notes(file, progress)
                writes = functools.partial(export.to_csv, file, out)
            else:
                found = trace.analyse(file, n_bins=5000, progress=progress)
                found.path = args.file  # a snapshot was read through a temporary file
                notes = found.notes
                writes = functools.partial(convert, file, found, out)
            progress.close()
            writing = console.Progress(f"writing {target.name}", quiet=args.quiet)
            writes(writing)
            writing.close()
        if gap_of(notes):
            console.complain(f"pyalloc export: {args.file}: {gap_of(notes)}")
        console.tell(args, f"wrote {target}")
        console.tell(
            args,
            "next: "
            + _THEN[args.to].format(console.quoted(target), file=console.quoted(args.file)),
        )
        return 0


def _check_suffix(target: Path, form: str) -> None:
    """Raises UsageError if the name has the suffix of another format; any other name is allowed."""
    suffixes = {name: Path(f"x{suffix}").suffix for name, (suffix, _) in export.FORMATS.items()}
    suffix = target.suffix.lower()
    if suffix in suffixes.values() and suffix != suffixes[form]:
        raise UsageError(
            f"{target}: --to {form} writes {export.FORMATS[form][0]}, so the name must not end in {target.suffix}"
        )
    if form == "tensorboard" and "tfevents" not in target.name:
        raise UsageError(f"{target}: TensorBoard reads only files with tfevents in their names")
