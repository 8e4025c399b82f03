"""pyalloc top."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyalloc import trace, when
from pyalloc.analysis import asked, leaks
from pyalloc.analysis.meaning import Analysis
from pyalloc.common import console
from pyalloc.common.folding import clip
from pyalloc.common.units import size
from pyalloc.errors import UsageError
from pyalloc.report import data, stacks, text
from pyalloc.traces.facts import Row
from pyalloc.traces.moments import Moment

_GROUPS = (
    *("contributor", "line", "function", "module", "category", "size", "label", "stream", "thread"),
    *("pool", "block", "stack"),
)
_NEXT = {"line": "stack", "stack": "category"}  # what to group by next


class Command:
    """Show who holds the memory: by line, function, module and so on.

    pyalloc top out.pya [--by line] [--at peak|end|oom|step:N|TIME|EVENT]
    pyalloc top out.pya --since step:10         made since then and still held
    pyalloc top out.pya --over-time             of the whole run; what grows
    pyalloc top out.pya --by stack [--invert]   who called whom, as a tree
    pyalloc top out.pya --temporary             who makes what is freed at once
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The trace, the moment and the grouping."""
        parser.add_argument("file", type=Path, help="a recording, or a snapshot written by torch")
        parser.add_argument(
            "--by",
            choices=_GROUPS,
            default="line",
            metavar="WHAT",
            help=f"what to group by: {', '.join(_GROUPS)} (default: line)",
        )
        parser.add_argument(
            "--at",
            metavar="WHEN",
            help=f"{when.FORMS} (default: peak, with --since the end); {when.SEVERAL}",
        )
        parser.add_argument(
            "--since",
            metavar="WHEN",
            help="only what was allocated since then and is still held at --at; written as for --at: step:10, 90s",
        )
        parser.add_argument(
            "--invert",
            action="store_true",
            help="with --by stack: put the line that requested memory on top and its callers below",
        )
        parser.add_argument(
            "-n", type=console.count, default=20, metavar="N", help="number of rows (default: 20)"
        )
        console.add_device(parser)
        parser.add_argument(
            "--over-time",
            action="store_true",
            help="look at the whole run instead of one moment: what each line requested, and what grows by step",
        )
        parser.add_argument(
            "--temporary",
            type=_requests,
            nargs="?",
            const=1,
            metavar="N",
            help="show who makes what is freed within N further requests on its device (default: 1)",
        )
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints the table."""
        console.prepare_output(args)
        progress = console.Progress(f"reading {args.file.name}", quiet=args.quiet)
        with trace.read_once(args.file, progress):
            self._answer(args, progress)
        return 0

    @staticmethod
    def _answer(args: argparse.Namespace, progress: console.Progress) -> None:
        if args.since is not None and (
            args.over_time or args.temporary is not None or args.by == "pool"
        ):
            raise UsageError(
                "--since cannot be combined with --over-time, --temporary or --by pool"
            )
        if args.temporary is not None and (args.by != "line" or args.over_time):
            raise UsageError("--temporary is always by line; leave out --by and --over-time")
        if args.invert and (args.by != "stack" or args.over_time):
            raise UsageError("--invert needs --by stack, without --over-time")
        if args.over_time and (args.by != "line" or args.at is not None):
            raise UsageError("--over-time covers the whole run, by line; leave out --by and --at")
        args.at = args.at or ("peak" if args.since is None else "end")
        found = trace.analyse(
            args.file, device=args.device, temporary=args.temporary, progress=progress
        )
        progress.close()
        trace.check_device(found, args.device)
        if args.over_time:
            content, lines = _over_time(found, args.n)
        elif args.temporary is not None:
            content, lines = _temporary(found, args)
        elif args.by == "stack":
            content, lines = _by_stack(found, args)
        elif args.by == "function":
            content, lines = _by_function(found, args)
        else:
            content, lines = _by_group(found, args)
        other = _NEXT.get(args.by, "line")
        then = f"pyalloc top {console.quoted(args.file)} --by {other}"
        content["caveats"] = found.caveats
        lines += [text.wrapped(caveat) for caveat in found.caveats]
        if found.is_empty:
            then = console.RECORD
        console.deliver(args, "\n".join(lines), content, then)


def grouped(found: Analysis, moment: Moment, by: str) -> list[Row]:
    """Rows of one moment."""
    if by == "contributor":
        return found.contributors(moment)
    if by == "pool":
        return found.by_pool(moment)
    groups: dict[str, Any] = {
        "line": found.by_line,
        "module": found.by_module,
        "category": found.by_category,
        "size": found.by_size,
        "label": found.by_label,
        "block": found.by_block,
        "stream": found.by_stream,
        "thread": found.by_thread,
    }
    rows: list[Row] = groups[by](moment.blocks)
    return rows


def _moment(found: Analysis, args: argparse.Namespace) -> tuple[Moment, str]:
    event, title = when.moment(found, args.at)
    moment = _moment_at(found, event, args)
    if args.since is None:
        return moment, title
    first, _ = when.moment(found, args.since, "--since")
    if first > event:
        raise UsageError(f"--since {args.since} is later than --at {args.at}")
    part = moment.since(first)
    if not part.blocks:
        raise UsageError(
            f"nothing held {title} was allocated since {args.since}; a program holds little when it ends, so "
            "try --at peak or --at step:N"
        )
    held = size(part.allocated_bytes), size(moment.allocated_bytes)
    return part, f"{title}: {held[0]} of {held[1]} allocated since {args.since}"


def _moment_at(found: Analysis, event: int, args: argparse.Namespace) -> Moment:
    if event in found.moments:
        return found.moments[event]
    progress = console.Progress(f"reading {found.path.name} again", quiet=args.quiet)
    moments = trace.moments_at(found.path, [event], args.device, progress)
    progress.close()
    return moments[event]


_MISSING = {  # why a moment may have no rows
    "label": "nothing alive {} has a label; "
    'torch.cuda.memory._set_memory_metadata("...") labels what is allocated after it',
    "thread": "it does not say which thread requested what is alive {}; "
    "recordings on pyalloc do, those on torch's own allocator do not",
    "pool": "there is no private pool {}",
}


def _by_group(found: Analysis, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    moment, title = _moment(found, args)
    rows = grouped(found, moment, args.by)
    if args.by in _MISSING and not rows:
        raise UsageError(f"{args.file}: {_MISSING[args.by].format(title)}")
    content = {"at": args.at, "since": args.since, "by": args.by, "rows": data.table(rows, args.n)}
    lines = text.rows(f"{title}, by {args.by}", rows, moment.allocated_bytes, args.n)
    if args.by == "pool":
        content["idle"] = data.table(found.idle_pools(moment), args.n)
        lines += text.idle_pools(found, moment)
    return content, lines


def _by_stack(found: Analysis, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    moment, title = _moment(found, args)
    chains = stacks.of(found, moment)
    title += ", by stack"
    if args.invert:
        chains = stacks.inverted(chains)
        title += ", inverted"
    rows = [asdict(chain) for chain in chains[: args.n]]
    columns = text.WIDTH if args.output else max(console.columns(sys.stdout), text.WIDTH)
    lines = stacks.tree(
        title, chains, moment.allocated_bytes, args.n, is_inverted=args.invert, columns=columns
    )
    return {
        "at": args.at,
        "since": args.since,
        "by": args.by,
        "inverted": args.invert,
        "rows": rows,
    }, lines


def _by_function(found: Analysis, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    moment, title = _moment(found, args)
    functions = stacks.functions(found, moment)
    rows = [asdict(each) for each in functions[: args.n]]
    title += ", by function: its calls included, and by itself"
    lines = stacks.table(title, functions, moment.allocated_bytes, args.n)
    return {"at": args.at, "since": args.since, "by": args.by, "rows": rows}, lines


def _requests(words: str) -> int:
    """Argument type: how many requests a temporary block may outlive."""
    if not words.isdecimal() and Path(words).exists():
        raise argparse.ArgumentTypeError(
            f"{words!r} was taken for N; put the file before --temporary, or write --temporary=1"
        )
    n = console.index(words)
    if n > asked.LONGEST:
        raise argparse.ArgumentTypeError(f"{words!r}: N is at most {asked.LONGEST} requests")
    return n


def _temporary(found: Analysis, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    moment, title = _moment(found, args)
    then: dict[str, list[int]] = {}
    for block in moment.blocks:
        if block.n_between is not None and block.n_between <= args.temporary:
            row = then.setdefault(found.name(block.stack, block.phase), [0, 0])
            row[0] += block.bytes
            row[1] += 1
    lines = asked.by_line(found.stacks, found.stackless, found.name)
    rows = sorted(
        [(line, *then.get(line.name, (0, 0))) for line in lines if line.temporary],
        key=lambda row: (-row[1], -row[0].temporary_bytes),
    )
    peaks = [
        {"device": device, "peak_bytes": peak, "peak_without_bytes": without}
        for device, peak in found.totals["device_peak"].items()
        for without in [found.totals["device_peak_lasting"].get(device, 0)]
    ]
    content = {
        "at": args.at,
        "temporary": args.temporary,
        "lines": [
            {
                "name": line.name,
                "requests": line.temporary,
                "of_requests": line.requests,
                "bytes": line.temporary_bytes,
                "bytes_then": n_bytes,
                "blocks_then": n,
            }
            for line, n_bytes, n in rows[: args.n]
        ],
        "peaks": peaks,
    }
    return content, text.temporary(title, args.temporary, rows, found.totals, args.n)


def _over_time(found: Analysis, n: int) -> tuple[dict[str, Any], list[str]]:
    ordered = asked.by_line(found.stacks, found.stackless, found.name)[:n]
    lines = [f"{'in all':>12}{'requests':>10}{'not freed':>12}  line"]
    lines += [
        text.hung(
            f"{size(line.bytes):>12}{line.requests:>10,}{size(line.live_bytes):>12}", line.name
        )
        for line in ordered
    ]
    lines += ["", text.wrapped(leaks.verdict(found), "")]
    growth = leaks.growth(found)
    jumps = [] if growth else leaks.jumps(found)
    turn = leaks.turn(found)
    for grown in [*growth, *jumps][:n]:
        more = f"{size(grown.per_step)} per {turn}" if growth else f"{size(grown.bytes)} in all"
        lines.append(text.hung(f"  +{more}", grown.name))
        lines += [f"      called by {call}" for call in _callers(found, grown.stack)]
    content = {
        "lines": [
            {
                "name": line.name,
                "bytes": line.bytes,
                "requests": line.requests,
                "live_bytes": line.live_bytes,
            }
            for line in ordered
        ],
        "leak": leaks.verdict(found),
        "growth": [
            {
                "name": g.name,
                "bytes_per_step": g.per_step,
                "calls": stacks.calls(found, g.stack),
            }
            for g in growth
        ],
        "jumps": [
            {"name": g.name, "bytes": g.bytes, "calls": stacks.calls(found, g.stack)} for g in jumps
        ],
    }
    return content, lines


def _callers(found: Analysis, stack: int) -> list[str]:
    """The calls that led to the program's line of a stack, nearest first."""
    own = str(found.place(stack))
    before = itertools.takewhile(lambda call: call != own, stacks.calls(found, stack))
    return [clip(call, 62) for call in reversed(list(before))]
