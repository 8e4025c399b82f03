"""pyalloc replay."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyalloc import planning, replaying, trace
from pyalloc.common import console
from pyalloc.common.config import ENVIRONMENT, Config
from pyalloc.common.units import MIB, size
from pyalloc.errors import TraceError
from pyalloc.report import text
from pyalloc.traces.caveats import notes_of, of_replays, unseen


class Command:
    """Replay a recording on other allocators; find the smallest memory.

    pyalloc replay out.pya [--policy native] [--limit 8GB] [--find-min]

    Nothing runs on a GPU: models of torch's allocators, and pyalloc itself, serve the requests on a simulated device.
    The exit code is 1 if no policy fits within --limit, or within a limit set by --conf.

    The table counts device calls (those that allocate, map or free device memory), how many of them come late (in the
    second half of the program), and the time that all of them would take by a cost model based on an H200.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """The trace and what to vary."""
        parser.add_argument("file", type=Path, help="a recording, or a snapshot written by torch")
        parser.add_argument(
            "--policy",
            action="append",
            choices=replaying.policies(),
            help="replay this policy only; may be repeated (default: all)",
        )
        parser.add_argument(
            "--limit",
            metavar="SIZE",
            help="memory of each device, e.g. 8GB (default: more than enough)",
        )
        parser.add_argument(
            "--find-min", action="store_true", help="find the smallest memory that is enough"
        )
        parser.add_argument(
            "--passes",
            type=_passes,
            default=1,
            metavar="N",
            help="replay the program N times in a row, to see where it settles (default: 1)",
        )
        parser.add_argument(
            "--conf",
            default="",
            metavar="KEY:VALUE,...",
            help="settings for the policy pyalloc; `pyalloc doctor` lists them",
        )
        parser.add_argument(
            "--plan",
            type=Path,
            metavar="FILE",
            help="a plan (a file that `pyalloc plan` wrote) for the policy pyalloc to follow",
        )
        console.add_output(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Prints one table."""
        console.prepare_output(args)
        names = args.policy or replaying.policies()
        limit = replaying.limit_of("--limit", args.limit) if args.limit else 0
        plan = None
        if args.conf:
            replaying.check_settings(names, "--conf")
        if args.plan is not None:
            replaying.check_settings(names, "--plan")
            Config(args.conf, str(args.plan))  # raises if these settings rule out a plan
            plan = planning.read(args.plan).packed()
        progress = console.Progress("replaying", "M operations", quiet=args.quiet)
        reading = console.Progress(f"reading {args.file.name}", quiet=args.quiet)
        with trace.program(args.file, reading) as program:
            reading.close()
            info = program.info()
            notes = notes_of(program.notes())
            caveats = unseen(notes, info) + of_replays(notes)
            n_ranks = console.ranks(notes)
            if info["n_devices"] > 1:
                caveats.append(
                    "Peaks are sums over the devices' own peaks; a limit or smallest memory is that of each device."
                )
            if n_ranks > 1:
                caveats.append(f"This is one of {n_ranks} ranks; another may need more.")
            if info["n_allocs"] == 0:
                raise TraceError(f"{args.file} has no allocations, so there is nothing to replay")
            results = replaying.compare(
                program,
                names,
                capacity=limit,
                options=args.conf,
                progress=progress,
                passes=args.passes,
                plan=plan,
            )
            least: dict[str, Any] = {}
            if args.find_min:
                for name in names:
                    search = console.Progress(
                        f"{name}: searching", "M operations", quiet=args.quiet
                    )
                    least[name] = replaying.find_min(
                        program,
                        name,
                        options=args.conf,
                        progress=search,
                        passes=args.passes,
                        plan=plan,
                    )
                    search.close()
        progress.close()
        data = {"file": str(args.file), "limit": limit, "program": info, "policies": results}
        data["caveats"] = caveats
        if args.find_min:
            data["find_min"] = least
        table = "\n".join(
            [_table(args, info, results, least), *(text.wrapped(each, "") for each in caveats)]
        )
        console.deliver(args, table, data, _next(args, info, least, notes))
        fits = any(result["completed"] for result in results.values())
        return 0 if fits and (not least or any(least.values())) else 1


def _passes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of passes from 1 to 1000")
    return int(text)


def _table(
    args: argparse.Namespace, info: dict[str, Any], results: dict[str, Any], least: dict[str, Any]
) -> str:
    memory = f"{args.limit} of memory" if args.limit else "unlimited memory"
    limit = next(int(each.value) for each in Config(args.conf).options if each.name == "limit")
    if limit and "pyalloc" in results:
        own = f"pyalloc limited to {size(limit)} by --conf"
        memory = own if len(results) == 1 and not args.limit else f"{memory}, {own}"
    memory += f", replayed {args.passes} times in a row" if args.passes > 1 else ""
    alive = f"{info['n_allocs']:,} requests, peak allocated {size(info['peak_live_bytes'])}"
    lines = [
        text.wrapped(f"{args.file.name}: {alive}; {memory}", ""),
        *text.compare(list(results.items()), args.passes),
    ]
    for name, result in results.items():
        if not result["completed"]:
            lines.append(
                f"{name}: out of memory at operation {result['failed_op']:,}, a request for "
                f"{size(result['failed_bytes'])}"
            )
    if least:
        lines += ["", f"{'smallest memory':<16}{'completes':>12}{'safe from':>12}{'margin':>10}"]
    for name, found in least.items():
        lines.append(
            f"{name:<16}{_mib(found['bytes']):>8,} MiB{_mib(found['safe_bytes']):>8,} MiB"
            f"{size(found['margin_bytes']):>10}"
            if found
            else f"{name:<16}  does not complete with any size"
        )
    if any(found and found["margin_bytes"] for found in least.values()):
        lines.append(
            text.wrapped(
                "More memory does not always help: some of the sizes tried between `completes` and `safe from` failed.",
                "",
            )
        )
    if least:
        lines.append(
            text.wrapped(
                "A card also has to hold the CUDA context (usually a few hundred MiB), NCCL's buffers and cuDNN's "
                "workspaces. Leave room for them.",
                "",
            )
        )
    if info["n_ooms"]:
        lines.append(
            text.wrapped(
                "The program ran out of memory while it was recorded. The recording does not contain the refused "
                "requests or what would have followed, so the program may need more than this.",
                "",
            )
        )
    return "\n".join(lines)


def _mib(n_bytes: int) -> int:
    """In MiB, rounded up, so that it is enough when passed as --memory."""
    return -(-n_bytes // MIB)


def _next(
    args: argparse.Namespace, info: dict[str, Any], least: dict[str, Any], notes: dict[str, str]
) -> str:
    if info["n_ooms"]:  # it would fail again with what is enough for the trace
        return f"pyalloc report {console.quoted(args.file)}"
    name = min((n for n in least if least[n]), key=lambda n: least[n]["bytes"], default="")
    if name:
        mib = _mib(least[name]["safe_bytes"])
        n_devices = max(info["n_devices"], min(console.ranks(notes), console.ON_ONE_MACHINE))
        devices = f" --devices {n_devices}" if n_devices > 1 else ""
        conf, plan = _settings(args) if name == "pyalloc" else ("", "")
        conf = f"{ENVIRONMENT}={conf} " if conf else ""
        rest = f"--allocator {name}{plan} {console.program(notes)}"
        return f"{conf}pyalloc dryrun --memory {mib}MiB{devices} {rest}"
    policies = "".join(f" --policy {each}" for each in args.policy or ())
    conf, plan = _settings(args)
    conf = f" --conf {conf}" if conf else ""
    passes = f" --passes {args.passes}" if args.passes > 1 else ""
    return f"pyalloc replay {console.quoted(args.file)} --find-min{policies}{conf}{plan}{passes}"


def _settings(args: argparse.Namespace) -> tuple[str, str]:
    """--conf and --plan of the policy pyalloc, as a user types them."""
    plan = f" --plan {console.quoted(args.plan)}" if args.plan else ""
    return console.quoted(args.conf) if args.conf else "", plan
