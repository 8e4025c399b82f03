"""How fast and how lean pyalloc.ops is beside torch's own forms.

``python -m benchmarks.ops`` runs everything on the CPU; ``--only`` picks parts, ``--device cuda`` the GPU.
Every answer is first compared with float64.  Peers take turns with the op in the same process, all of them with
fresh outputs.  Prints one JSON line per row, with the ratio to the fastest peer and its target.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.helping import HelpFormatter
from benchmarks.ops.additive import additive, seq2seq
from benchmarks.ops.attention import attention, halves, masks, sweep
from benchmarks.ops.measure import Bench
from benchmarks.ops.spherical import spherical, spherical_memory, spherical_shapes
from pyalloc import ops
from pyalloc.ops._library import ISA_NAMES

PARTS: dict[str, Callable[[Bench], None]] = {
    "spherical": spherical,
    "shapes": spherical_shapes,
    "memory": spherical_memory,
    "additive": additive,
    "seq2seq": seq2seq,
    "attention": attention,
    "masks": masks,
    "sweep": sweep,
    "halves": halves,
}
CPU_ONLY = {"memory", "seq2seq"}


def measured(bench: Bench, part: str) -> bool:
    """Runs a part; returns whether it completed.  A wrong answer or an error does not end the others."""
    try:
        PARTS[part](bench)
    except (Exception, SystemExit) as error:
        bench.row(part, failed=f"{type(error).__name__}: {error}"[:600])
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(PARTS),
        default=list(PARTS),
        metavar="PART",
        help=", ".join(sorted(PARTS)),
    )
    parser.add_argument(
        "--isa",
        choices=ISA_NAMES,
        help="a narrower instruction set than there is",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write all rows to this file, after each")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    args = parser.parse_args()
    if args.json is not None and args.json.exists() and not args.force:
        parser.error(f"{args.json} exists; --force overwrites it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; leave --device out for the CPU")
    if args.isa is not None:
        ops.set_cpu_isa(args.isa)
    torch.manual_seed(args.seed)
    bench = Bench(args.device, args.rounds, not args.no_compile, args.seed, args.json)
    parts = [part for part in args.only if args.device == "cpu" or part not in CPU_ONLY]
    failed = [part for part in parts if not measured(bench, part)]
    print(
        f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB",
        file=sys.stderr,
    )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
