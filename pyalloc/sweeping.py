"""Many replays (trace, policy, limit) on all cores, or on an existing Dask cluster."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pyalloc.errors import TraceError, UsageError


@dataclass(frozen=True)
class Point:
    """One replay.  limit: bytes of each device, 0: ample; conf: pyalloc's settings."""

    path: str
    policy: str
    limit: int
    conf: str = ""


def points(
    paths: Iterable[Path], policies: Iterable[str], limits: Iterable[int], confs: Iterable[str]
) -> list[Point]:
    """All combinations; settings apply to pyalloc only."""
    found = []
    for path, policy, limit in itertools.product(paths, policies, limits):
        own = confs if policy == "pyalloc" else [""]
        found += [Point(str(path), policy, limit, conf) for conf in own]
    return found


def run_point(point: Point) -> dict[str, Any]:
    """Runs one replay, in whatever process this is.  If it fails, "error" says why, and the others can go on."""
    from pyalloc import trace
    from pyalloc.traces import caveats

    try:
        with trace.program(Path(point.path)) as program:
            result = program.replay(point.policy, capacity=point.limit, options=point.conf)
            info, notes = program.info(), caveats.notes_of(program.notes())
    except TraceError as error:
        return {**asdict(point), "error": str(error)}
    return {
        **asdict(point),
        "peak_live_bytes": info["peak_live_bytes"],
        "caveats": caveats.unseen(notes, info) + caveats.of_replays(notes),
        **result,
    }


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed; otherwise it would wait for work for ever."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def on_cores(
    todo: list[Point], workers: int | None, progress: Callable[[int, int], object]
) -> Iterator[dict[str, Any]]:
    """Results in the order of the points.

    Raises:
        UsageError: a worker was killed.
    """
    results: dict[Point, dict[str, Any]] = {}
    # More workers than points would be started for nothing.
    n_workers = min(workers or len(os.sched_getaffinity(0)), max(len(todo), 1))
    pool = ProcessPoolExecutor(n_workers, initializer=_end_with_parent)
    try:
        waiting = {pool.submit(run_point, point): point for point in todo}
        for done, future in enumerate(as_completed(waiting), 1):
            results[waiting[future]] = future.result()
            progress(done, len(todo))
    except BrokenProcessPool:
        raise UsageError(
            "a worker was killed, most likely because the machine ran out of memory; use fewer --workers than "
            f"{n_workers}"
        ) from None
    finally:  # cancels what an error left; not by `with`, whose own shutdown() would take that back
        pool.shutdown(cancel_futures=True)
    return (results[point] for point in todo)


def on_dask(
    todo: list[Point], address: str, progress: Callable[[int, int], object]
) -> Iterator[dict[str, Any]]:
    """Does what on_cores() does on the cluster of the scheduler at this address, which must see the same files.

    Raises:
        UsageError: dask.distributed is not installed, or no scheduler answers.
    """
    try:
        from dask import distributed
    except ImportError:
        raise UsageError(
            "--dask needs dask.distributed (pip install distributed); without --dask, sweep uses all cores"
        ) from None
    try:
        client = distributed.Client(address, timeout=30)
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        # Its workers are in folders of their own.
        whole = [replace(point, path=os.path.abspath(point.path)) for point in todo]
        futures = client.map(run_point, whole, pure=False)
        for done, _ in enumerate(distributed.as_completed(futures), 1):
            progress(done, len(todo))
        return iter(client.gather(futures))
