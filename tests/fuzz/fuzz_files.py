"""Files that others wrote, read by pyalloc: whatever they hold, the answer is a result or a TraceError.

python tests/fuzz/fuzz_files.py [--seconds 30] [--seed 1] [--runs N] [--engine seeded|atheris] [FILE...]

Inputs are snapshots (changed as data, then pickled; or changed as bytes), traces and their xz form.  FILE: runs only
these inputs, to repeat a finding.  With atheris installed (pip install atheris), --engine atheris has libFuzzer choose
the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import lzma
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from pyalloc import trace  # noqa: E402
from pyalloc.analysis.comparing import Comparison, Side  # noqa: E402
from pyalloc.errors import PyallocError, TraceError  # noqa: E402
from pyalloc.report import compared, comparison, data, html, text  # noqa: E402
from pyalloc.traces import pickles  # noqa: E402

LIMIT_S = 120  # for one input; a longer one is a finding
MEMORY = 6 * 2**30  # address space of the process; requesting more is a finding
Snapshot = dict[str, Any]


def snapshot() -> Snapshot:
    """Small ones, as torch writes them."""
    frames = [{"name": "forward", "filename": "/home/me/model.py", "line": 7}]
    blocks = [
        {
            "address": 0x7F00000000 + i * 512,
            "size": 512,
            "requested_size": 100 + i,
            "frames": frames,
            "state": ("active_allocated", "inactive", "active_pending_free")[i % 3],
        }
        for i in range(6)
    ]
    entries = [
        {
            "action": action,
            "addr": 0x7F00000000 + i * 512,
            "size": 512 * (i + 1),
            "stream": 0,
            "frames": frames,
            "time_us": 1000 + i,
            "device_free": 5,
        }
        for i, action in enumerate(
            (
                "alloc",
                "free_requested",
                "free_completed",
                "segment_alloc",
                "oom",
                "snapshot",
                "alloc",
                "segment_free",
            )
        )
    ]
    segment = {
        "device": 0,
        "address": 0x7F00000000,
        "total_size": 1 << 21,
        "stream": 0,
        "blocks": blocks,
        "segment_type": "small",
        "is_expandable": False,
        "frames": frames,
    }
    return {
        "segments": [segment],
        "device_traces": [entries, []],
        "allocator_settings": {"expandable_segments": True},
    }


ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 2**31, 2**63, 2**64 - 1, 2**64, 2**100, 1.5, float("nan"), float("inf"), "", "alloc", "\0",
    "\ud800", "\x1b[2J</script>", "x" * 70000, b"bytes", [], {}, [[]], {"a": 1}, True, (), (1, 2), {1, 2},
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within it."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


def change_data(value: Snapshot, rng: random.Random) -> bytes:
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 5))):
        container, key = rng.choice(list(places(value)) or [(value, "segments")])
        what = rng.randrange(5)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif what == 2 and isinstance(container[key], int):
            container[key] += rng.choice((-1, 1, 511, 2**40))
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    return pickle.dumps(value, protocol=rng.choice((2, 4, 5)))


def change_bytes(value: bytes, rng: random.Random) -> bytes:
    out = bytearray(value)
    for _ in range(rng.choice((1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        what = rng.randrange(5)
        if what == 0:
            out[at : at + 1] = rng.randbytes(1)
        elif what == 1:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif what == 2:
            del out[at : at + rng.randrange(1, 40)]
        elif what == 3:
            out[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"r\xff\xff\xff")
            )
        else:
            end = rng.randrange(at, len(out) + 1)
            out[at:at] = out[at : min(end, at + 64)]
    return bytes(out)


def bases(folder: Path) -> list[bytes]:
    """The seeds of inputs: a snapshot, its trace, that trace compressed, and the corpus of the trace target."""
    path = folder / "base.pya"
    trace.write_snapshot(snapshot(), path)
    plain = path.read_bytes()
    path.unlink()
    corpus = sorted((Path(__file__).parent / "corpus/fuzz_trace").glob("*"))
    raw = [
        content[1:] for content in (p.read_bytes() for p in corpus) if content[:9] == b"\0PYATRACE"
    ]
    return [pickle.dumps(snapshot(), protocol=4), plain, lzma.compress(plain), *raw]


def try_one(content: bytes, folder: Path) -> str:
    """The outcome; raises anything that is not a TraceError."""
    path = folder / "input"
    path.write_bytes(content)
    signal.alarm(LIMIT_S)
    try:
        with contextlib.suppress(TraceError):
            pickles.loads(content)
        found = trace.analyse(path, moments=4)
        text.summary(found)
        data.summary(found)
        other = trace.analyse(path)
        told = Comparison(Side(other, other.peak, "one"), Side(found, found.peak, "other"))
        compared.summary(told, 10)
        for page in (html.page(found), comparison.page(told)):
            assert "\x1b[2J</script>" not in page
        with trace.program(path):
            pass
        outcome = "read"
    except PyallocError as error:
        assert isinstance(error, TraceError) and str(error), repr(error)
        outcome = "refused"
    finally:
        signal.alarm(0)
    left = [p.name for p in folder.iterdir() if p != path]
    assert not left, f"left behind: {left}"
    return outcome


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def keep(content: bytes) -> Path:
    """Keeps a finding for later."""
    folder = ROOT / "build/fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz_files.input"
    path.write_bytes(content)
    return path


def seeded(seconds: float, seed: int, runs: int | None = None) -> Counter[str]:
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="pyalloc-fuzz-") as name:
        folder = Path(name)
        known = bases(folder)
        while outcomes.total() < runs if runs is not None else time.monotonic() < end:
            half = rng.random() < 0.5
            content = change_data(snapshot(), rng) if half else change_bytes(rng.choice(known), rng)
            try:
                outcomes[try_one(content, folder)] += 1
            except BaseException:
                print(f"a finding; the input: {keep(content)} (seed {seed})", file=sys.stderr)
                raise
    return outcomes


def with_atheris(seconds: float) -> None:
    import atheris

    folder = Path(tempfile.mkdtemp(prefix="pyalloc-fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    (folder / "work").mkdir()
    for i, content in enumerate(bases(folder)):
        (corpus / str(i)).write_bytes(content)
    options = [sys.argv[0], f"-max_total_time={int(seconds)}", str(corpus)]
    atheris.Setup(options, lambda content: void(try_one(content, folder / "work")))
    atheris.Fuzz()


def void(_: object) -> None:
    """atheris accepts no result."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--engine", choices=("seeded", "atheris"), default="seeded")
    parser.add_argument("file", type=Path, nargs="*")
    args = parser.parse_args()
    limit()
    if args.file:
        with tempfile.TemporaryDirectory(prefix="pyalloc-fuzz-") as name:
            for path in args.file:
                print(path, try_one(path.read_bytes(), Path(name)))
        return 0
    if args.engine == "atheris":
        with_atheris(args.seconds)
        return 0
    outcomes = seeded(args.seconds, args.seed, args.runs)
    print(
        f"seeded fuzz_files: {outcomes.total()} inputs, {outcomes['read']} read, {outcomes['refused']} refused; "
        f"seed {args.seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
