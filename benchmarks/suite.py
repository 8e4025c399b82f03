"""The traces of the suite: recorded ones unpacked, generated ones made, each as a plain .pya file.

``python -m benchmarks.suite FOLDER [NAME ...]`` writes them to a folder, for other tools.
"""

from __future__ import annotations

import argparse
import lzma
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.helping import HelpFormatter
from benchmarks.workloads.generated import GENERATED, Operation
from pyalloc import _core
from pyalloc.traces.convert import KINDS

TRACES = Path(__file__).resolve().parent / "traces"

#: recorded loops that no constant was chosen by; the last four were recorded after the constants were chosen
HELD_OUT = (
    *("lstm_lm", "two_tasks", "vit", "gan", "detector", "graphs", "speech"),
    *("contrastive", "distillation", "beam_search", "super_resolution"),
)


@dataclass(frozen=True)
class Trace:
    """A trace of the suite; ``kind`` is recorded, held-out or generated."""

    name: str
    kind: str

    def write(self, folder: Path) -> Path:
        """Writes the plain file into the folder, unless it is there; returns its path."""
        path = folder / f"{self.name}.pya"
        if not path.exists():
            part = path.with_suffix(".unpacked")
            if self.kind == "generated":
                generate(self.name, part)
            else:
                part.write_bytes(lzma.decompress((TRACES / f"{self.name}.pya.xz").read_bytes()))
            part.replace(path)
        return path


def suite(only: list[str] | None = None) -> list[Trace]:
    """All traces, or those named; ValueError for an unknown name."""
    recorded = sorted(path.name.removesuffix(".pya.xz") for path in TRACES.glob("*.pya.xz"))
    found = [Trace(name, "held-out" if name in HELD_OUT else "recorded") for name in recorded]
    found.sort(key=lambda trace: trace.kind == "held-out")
    found += [Trace(name, "generated") for name in GENERATED]
    unknown = set(only or []) - {trace.name for trace in found}
    if unknown:
        raise ValueError(f"no trace named {', '.join(sorted(unknown))}")
    return [trace for trace in found if not only or trace.name in only]


def generate(name: str, path: Path, seed: int = 1) -> None:
    """Writes a generated program as a trace."""
    write_operations(GENERATED[name](random.Random(zlib.crc32(name.encode()) + seed)), path)


def write_operations(operations: Iterable[Operation], path: Path) -> None:
    """Writes a generator's operations as a trace."""
    writer = _core.TraceWriter(path, overwrite=True)
    device_of: dict[int, int] = {}
    for clock, (what, *numbers) in enumerate(operations):
        first = numbers[0]
        addr = 512 * (first + 1)
        if what == "alloc":
            size, stream, *device = numbers[1:]
            device_of[first] = device[0] if device else 0
            writer.event(
                KINDS["alloc"],
                addr=addr,
                bytes=size,
                stream=stream,
                device=device_of[first],
                time_ns=clock,
            )
        elif what == "free":
            writer.event(
                KINDS["free_requested"], addr=addr, device=device_of.pop(first), time_ns=clock
            )
        elif what == "record":
            writer.event(KINDS["record_stream"], addr=addr, arg=numbers[1], time_ns=clock)
        else:
            writer.event(KINDS[what], addr=first, arg=0, time_ns=clock)
    writer.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for trace in suite(arguments.names):
        print(trace.write(arguments.folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
