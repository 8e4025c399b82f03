"""What memory=tight|balanced|fast costs and saves, compared with torch's native allocator and expandable segments.

``python -m benchmarks.policies [TRACE ...] [--plot docs/policies.svg] [--json]``

Uses the policy models and the simulated device (csrc/replay; ``python -m benchmarks.memory`` checks them against
torch).  Shows, for each part of the suite, the geometric means of peak/live, min/live and modelled device time over
native's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks import plots
from benchmarks.helping import HelpFormatter
from benchmarks.memory import commit
from benchmarks.suite import suite
from pyalloc import _core

#: name in the table, policy of the replay, options
SETTINGS = (
    ("native", "native", ""),
    ("expandable", "expandable", ""),
    ("fast", "pyalloc", "memory:fast"),
    ("balanced", "pyalloc", "memory:balanced"),
    ("tight", "pyalloc", "memory:tight"),
    ("balanced, no shared pages", "pyalloc", "memory:balanced,shared_pages:False"),
    ("tight, no shared pages", "pyalloc", "memory:tight,shared_pages:False"),
)
PARTS = {
    "recorded": "recorded loops",
    "held-out": "held-out loops",
    "generated": "generated programs",
}


@dataclass(frozen=True)
class Point:
    """One trace under one setting."""

    trace: str
    kind: str
    setting: str
    peak_live: float
    min_live: float
    device_ms: float


def measure(names: list[str], folder: Path) -> list[Point]:
    """Every trace under every setting."""
    points = []
    traces = suite(names)
    for number, trace in enumerate(traces):
        program = _core.Program(trace.write(folder))
        info = program.info()
        live = info["peak_live_bytes"]
        for setting, policy, options in SETTINGS:
            ample = program.replay(policy, options=options, check=True)
            least = program.find_min(policy, options=options)
            assert ample["completed"] and not ample["n_violations"] and least is not None
            points.append(
                Point(
                    trace.name,
                    trace.kind,
                    setting,
                    ample["peak_bytes"] / live,
                    least["bytes"] / info["device_live_bytes"],
                    ample["device_ns"] / 1e6,
                )
            )
        print(f"[{number + 1}/{len(traces)}] {trace.name}", file=sys.stderr, flush=True)
    return points


@dataclass(frozen=True)
class Mean:
    """Geometric means over a part of the suite."""

    part: str
    setting: str
    peak_live: float
    min_live: float
    time: float
    n: int


def means(points: list[Point]) -> list[Mean]:
    """For each part and setting."""
    native_ms = {p.trace: p.device_ms for p in points if p.setting == "native"}
    result = []
    for part in PARTS:
        for setting, _, _ in SETTINGS:
            mine = [p for p in points if p.kind == part and p.setting == setting]
            if mine:
                result.append(
                    Mean(
                        part,
                        setting,
                        geometric_mean([p.peak_live for p in mine]),
                        geometric_mean([p.min_live for p in mine]),
                        geometric_mean([p.device_ms / native_ms[p.trace] for p in mine]),
                        len(mine),
                    )
                )
    return result


def table(found: list[Mean]) -> str:
    """The means as text."""
    lines = []
    for part, title in PARTS.items():
        mine = [mean for mean in found if mean.part == part]
        if mine:
            lines.append(
                f"{f'{title} ({mine[0].n})':28}{'peak/live':>10}{'min/live':>10}{'device time':>13}"
            )
            lines += [
                f"  {m.setting:26}{m.peak_live:10.3f}{m.min_live:10.3f}{m.time:12.2f}x"
                for m in mine
            ]
    return "\n".join(lines)


# Offsets of the points' names, so that those of neighbours do not overlap.
LABELS = {
    "native": ((0, -14), "center"),
    "expandable": ((0, 9), "center"),
    "fast": ((-5, -13), "right"),
    "balanced": ((0, -14), "center"),
    "tight": ((0, 7), "center"),
}


def plot(found: list[Mean], path: Path) -> None:
    """Memory against modelled device time, one panel for each part of the suite."""
    parts = [part for part in PARTS if any(mean.part == part for mean in found)]
    figure, panels = plots.subplots(len(parts))
    for panel, part in zip(panels, parts, strict=True):
        mine = [m for m in found if m.part == part and "shared" not in m.setting]
        for mean in mine:
            ours = mean.setting not in ("native", "expandable")
            panel.scatter(mean.time, mean.peak_live, color="tab:blue" if ours else "tab:grey")
            offset, side = LABELS[mean.setting]
            panel.annotate(
                mean.setting,
                (mean.time, mean.peak_live),
                textcoords="offset points",
                xytext=offset,
                ha=side,
                fontsize=9,
            )
        ours_sorted = sorted(
            (m for m in mine if m.setting in ("fast", "balanced", "tight")), key=lambda m: m.time
        )
        panel.plot(
            [m.time for m in ours_sorted],
            [m.peak_live for m in ours_sorted],
            "-",
            color="tab:blue",
            alpha=0.4,
        )
        panel.set_title(PARTS[part], fontsize=10)
        panel.set_xlabel("modelled device time, native = 1")
        panel.margins(0.22)
    panels[0].set_ylabel("peak reserved / peak live")
    plots.save(figure, path)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TRACE")
    plots.option(parser, "write a plot too")
    parser.add_argument(
        "--json", action="store_true", help="one JSON line for each part and setting"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = means(measure(arguments.names, Path(folder)))
    if arguments.json:
        for mean in found:
            print(json.dumps({**mean.__dict__, "commit": commit()}))
    else:
        print(table(found))
        print(f"simulated device, typical costs; generated programs with seed 1; commit {commit()}")
    if arguments.plot is not None:
        plot(found, arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
