"""How fast and how lean pyalloc.ops is beside torch's own forms.

``python -m benchmarks.ops`` runs everything on the CPU; ``--only`` picks parts, ``--device cuda`` the GPU.
Every answer is compared with float64 first; peers run interleaved with the op in the same process, all of them with
fresh outputs; one JSON line per row on stdout, with the ratio to the fastest peer and the target it is held to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.hostcuda import environment, why_not
from pyalloc import ops

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[], Any]


@dataclass
class Bench:
    """Settings of one run, and what it printed."""

    device: str
    rounds: int
    compile: bool
    seed: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Run) -> float:
        self.sync()
        begin = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - begin

    def times(self, runs: dict[str, Run]) -> dict[str, list[float]]:
        """Milliseconds of each, taken in turns so that a busy machine hurts all alike."""
        for run in runs.values():
            for _ in range(2):
                run()
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                taken[name].append(1e3 * self.seconds(run))
        return taken

    def compare(
        self, name: str, ours: Run, peers: dict[str, Run], *, target: float | None, **extra: Any
    ) -> float:
        taken = self.times({"ours": ours, **peers})
        medians = {key: statistics.median(values) for key, values in taken.items()}
        best = min(peers, key=lambda key: medians[key])
        ratio = medians[best] / medians["ours"]
        self.row(
            name,
            ratio=round(ratio, 3),
            target=target,
            met=None if target is None else ratio >= target,
            ours_ms=summary(taken["ours"]),
            peers_ms={key: summary(taken[key]) for key in peers},
            fastest_peer=best,
            **extra,
        )
        return ratio

    def row(self, name: str, **values: Any) -> None:
        row = {
            "benchmark": name,
            **values,
            "n": self.rounds,
            "seed": self.seed,
            "commit": commit(),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "isa": ops.cpu_isa(),
            "torch": torch.__version__,
            "load": round(os.getloadavg()[0], 2),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def compiled(self, functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The functions and, unless switched off, each of them through torch.compile."""
        if not self.compile:
            return functions
        return {**functions, **{f"compile({k})": torch.compile(f) for k, f in functions.items()}}


def summary(taken: Sequence[float]) -> dict[str, float]:
    ordered = sorted(taken)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(p99, 3),
        "least": round(ordered[0], 3),
    }


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def relative(a: Tensor, b: Tensor) -> float:
    b = b.double()
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30))


def check(
    name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> float:
    """The worst error against float64; SystemExit if it is over the larger of torch's twice and 1e-6."""
    worst = 0.0
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        error, bar = relative(mine, right), max(2 * relative(other, right), 1e-6)
        if not error <= bar:
            raise SystemExit(
                f"{name}: wrong answer, relative error {error:.2e} where {bar:.2e} is allowed"
            )
        worst = max(worst, error)
    return worst


def results(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def both(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> Run:
    """One forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def run() -> None:
        torch.autograd.grad(function(*leaves), leaves, grad)

    return run


def forward(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Run:
    def run() -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    return run


# --- PowerSpherical ------------------------------------------------------------------------------


def unit(*shape: int, device: str) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1)


def from_cosine(u: Tensor, kappa: Tensor, dim: int) -> Tensor:
    beta = (dim - 1) / 2
    alpha = kappa + beta
    log_c = -(
        (alpha + beta) * math.log(2)
        + torch.lgamma(alpha)
        - torch.lgamma(alpha + beta)
        + beta * math.log(math.pi)
    )
    return log_c + kappa * torch.log1p(u)


def by_bmm(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    """(T, L, M) from one batched product: the fastest eager form found."""
    u = torch.bmm(value.transpose(0, 1), loc.permute(1, 2, 0))
    return from_cosine(u, kappa.t()[:, None], value.shape[-1])


def by_einsum(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return from_cosine(torch.einsum("ltd,mtd->lmt", value, loc), kappa, value.shape[-1])


def by_product(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return from_cosine((value[:, None] * loc).sum(-1), kappa, value.shape[-1])


def mixture_bmm(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(by_bmm(value, loc, kappa) + weights.t()[:, None], 2).t()


def mixture_einsum(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(by_einsum(value, loc, kappa) + weights, 1)


def our_log_prob(value: Tensor, loc: Tensor, kappa: Tensor) -> Tensor:
    return ops.power_spherical_log_prob(value[:, None], loc, kappa)


def our_mixture(value: Tensor, loc: Tensor, kappa: Tensor, weights: Tensor) -> Tensor:
    return ops.power_spherical_mixture_log_prob(value, loc, kappa, weights, dim=0)


def spherical_inputs(n_l: int, n_m: int, n_t: int, dim: int, device: str) -> list[Tensor]:
    kappa = torch.rand(n_m, n_t, device=device) * 50
    weights = torch.log_softmax(torch.randn(n_m, n_t, device=device), 0)
    return [unit(n_l, n_t, dim, device=device), unit(n_m, n_t, dim, device=device), kappa, weights]


def spherical(b: Bench) -> None:
    n_l, n_m, n_t, dim = 128, 128, 512, 128
    small = spherical_inputs(n_l, n_m, 4, dim, b.device)
    error = check("log_prob", *checked(our_log_prob, by_einsum, small[:3], (n_l, n_m, 4)))
    mixed = check("mixture", *checked(our_mixture, mixture_einsum, small, (n_l, 4)))
    inputs = spherical_inputs(n_l, n_m, n_t, dim, b.device)
    case = f"L{n_l} M{n_m} T{n_t} D{dim} fp32"
    cpu = b.device == "cpu"
    peers = b.compiled({"bmm": by_bmm, "einsum": by_einsum})
    mixtures = b.compiled({"bmm": mixture_bmm, "einsum": mixture_einsum})
    lean = inputs[:3]
    product = {} if cpu else {"product": forward(by_product, lean)}
    b.compare(
        "power_spherical forward",
        forward(our_log_prob, lean),
        {**{k: forward(f, lean) for k, f in peers.items()}, **product},
        target=2.5 if cpu else None,
        case=case,
        error=error,
    )
    grad = torch.randn(n_t, n_l, n_m, device=b.device)
    transposed = {
        k: both(f, lean, grad if "bmm" in k else grad.permute(1, 2, 0)) for k, f in peers.items()
    }
    b.compare(
        "power_spherical forward+backward",
        both(our_log_prob, lean, grad.permute(1, 2, 0)),
        transposed,
        target=None,
        case=case,
        error=error,
    )
    b.compare(
        "mixture forward",
        forward(our_mixture, inputs),
        {k: forward(f, inputs) for k, f in mixtures.items()},
        target=4.0 if cpu else None,
        case=case,
        error=mixed,
    )
    grad = torch.randn(n_l, n_t, device=b.device)
    b.compare(
        "mixture forward+backward",
        both(our_mixture, inputs, grad),
        {k: both(f, inputs, grad) for k, f in mixtures.items()},
        target=3.5 if cpu else None,
        case=case,
        error=mixed,
    )


def checked(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    shape: tuple[int, ...],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Output and gradients of ours, of the peer, and of the peer in float64."""
    grad = torch.randn(shape, dtype=torch.float64, device=inputs[0].device)
    exact = results(theirs, [x.double() for x in inputs], grad)
    return results(ours, inputs, grad), results(theirs, inputs, grad), exact


def spherical_memory(b: Bench) -> None:
    """Growth of the resident set in a fresh process, against the size of the result."""
    for op, n_t in (("log_prob", 512), ("mixture", 512), ("log_prob", 8192), ("mixture", 8192)):
        source = f"""
import resource, torch
from benchmarks import ops as bench
inputs = [torch.randn(128, {n_t}, 128) for _ in "ab"]
inputs = [x.div_(x.norm(dim=-1, keepdim=True)) for x in inputs]
inputs += [torch.rand(128, {n_t}) * 50, torch.zeros(128, {n_t})]
run = bench.our_{op}
args = inputs[:3] if "{op}" == "log_prob" else inputs
run(*[x[:, :2].contiguous() for x in args])
# the high-water mark of making the inputs must not hide the op's growth
open("/proc/self/clear_refs", "w").write("5")
import re
def mark(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = mark("VmRSS")
out = run(*args)
print(mark("VmHWM") - before, out.numel() * 4)
"""
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True
        )
        grown, size = map(int, done.stdout.split())
        b.row(
            f"{op} memory",
            case=f"L128 M128 T{n_t} D128 fp32",
            grown_bytes=grown,
            result_bytes=size,
            product_bytes=128 * 128 * n_t * 128 * 4,
            ratio=round(grown / size, 3),
            # scratch does not grow with T: it shows only beside the mixture's small results
            target="<= 1.05" if op == "log_prob" else None,
            met=grown <= 1.05 * size if op == "log_prob" else None,
        )


# --- additive attention --------------------------------------------------------------------------


def eager_additive(query: Tensor, keys: Tensor, values: Tensor, v: Tensor) -> Tensor:
    score = torch.tanh(keys + query[:, None]) @ v
    return (torch.softmax(score, -1)[:, None] @ values).squeeze(1)


def additive(b: Bench) -> None:
    n_b, n_s, n_h = 80, 50, 1000
    shapes = [(n_b, n_h), (n_b, n_s, n_h), (n_b, n_s, 2 * n_h)]
    inputs = [
        *(torch.randn(s, device=b.device) for s in shapes),
        torch.randn(n_h, device=b.device) / 30,
    ]
    error = check(
        "additive", *checked(ops.additive_attention, eager_additive, inputs, (n_b, 2 * n_h))
    )
    case = f"B{n_b} S{n_s} H{n_h} values {2 * n_h} fp32, one step"
    peers = b.compiled({"eager": eager_additive})
    b.compare(
        "additive forward",
        forward(ops.additive_attention, inputs),
        {k: forward(f, inputs) for k, f in peers.items()},
        target=3.0 if b.device == "cpu" else None,
        case=case,
        error=error,
    )
    grad = torch.randn(n_b, 2 * n_h, device=b.device)
    b.compare(
        "additive forward+backward",
        both(ops.additive_attention, inputs, grad),
        {k: both(f, inputs, grad) for k, f in peers.items()},
        target=2.3 if b.device == "cpu" else 2.0,
        case=case,
        error=error,
    )
    additive_kept(b)


def additive_kept(b: Bench) -> None:
    """Bytes that 50 decoder steps keep for their backward beyond what the sequence itself holds."""
    n_b, n_s, n_h, steps = 80, 50, 1000, 50
    kept = {}
    for name, function in (("ours", ops.additive_attention), ("eager", eager_additive)):
        keys, values = (torch.randn(n_b, n_s, n_h, requires_grad=True) for _ in "ab")
        v = torch.randn(n_h, requires_grad=True)
        shared = {x.untyped_storage().data_ptr() for x in (keys, values, v)}
        found: dict[int, int] = {}
        alive = []

        def pack(x: Tensor, shared=shared, found=found, alive=alive) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in shared:
                found[storage.data_ptr()] = storage.nbytes()
                alive.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for _ in range(steps):
                query = torch.randn(n_b, n_h, requires_grad=True)
                alive.append(function(query, keys, values, v))
        kept[name] = sum(found.values())
    b.row(
        "additive kept for backward",
        case=f"B{n_b} T{n_s} D{n_h}, {steps} steps",
        kept_bytes=kept,
        ratio=round(kept["eager"] / kept["ours"], 1),
        target=40,
        met=kept["eager"] >= 40 * kept["ours"],
    )


def seq2seq(b: Bench) -> None:
    """The example on the host-memory device, with and without the op."""
    missing = why_not()
    if missing is not None:
        b.row("seq2seq memory", skipped=missing)
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("eager", []), ("ours", ["--fused"])):
            path = Path(folder) / f"{name}.json"
            command = [sys.executable, "examples/seq2seq.py", "--json", str(path), *options]
            subprocess.run(
                command,
                cwd=ROOT,
                env={**environment("80GB"), "PYTHONPATH": str(ROOT)},
                check=True,
                stdout=sys.stderr,
            )
            result = json.loads(path.read_text())
            at = {(r["step"], r["phase"]): r for r in result["rows"]}
            rows[name] = {
                "forward_growth_bytes": at[1, "forward"]["allocated_bytes"]
                - at[1, "start"]["allocated_bytes"],
                "peak_bytes": result["peak_allocated_bytes"],
            }
    for key, target in (("forward_growth_bytes", 0.35), ("peak_bytes", 0.14)):
        falls = 1 - rows["ours"][key] / rows["eager"][key]
        b.row(
            f"seq2seq {key}",
            ours=rows["ours"][key],
            eager=rows["eager"][key],
            falls=round(falls, 4),
            target=target,
            met=falls >= target,
        )


# --- scaled attention ----------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def our_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.scaled_attention(q, k, v, bias)


def attention(b: Bench) -> None:
    for n_b, n_h, n, d in ((2, 8, 1024, 64), (1, 8, 2048, 128)):
        small = [torch.randn(1, 2, 200, d, device=b.device) for _ in "qkv"]
        small.append(torch.randn(1, 2, 200, 200, device=b.device))
        error = check("attention", *checked(our_attention, sdpa, small, (1, 2, 200, d)))
        q, k, v = (torch.randn(n_b, n_h, n, d, device=b.device) for _ in "qkv")
        bias = torch.randn(n_b, n_h, n, n, device=b.device)
        grad = torch.randn(n_b, n_h, n, d, device=b.device)
        case = f"B{n_b} H{n_h} L{n} d{d} fp32"
        cpu = b.device == "cpu"

        def given(f: Callable[..., Tensor], bias: Tensor = bias) -> Callable[..., Tensor]:
            return lambda *qkv: f(*qkv, bias)

        for name, target, ours, peer in (
            ("forward", 1.6, forward(our_attention, (q, k, v)), forward(sdpa, (q, k, v))),
            (
                "forward with bias",
                1.5,
                forward(our_attention, (q, k, v, bias)),
                forward(sdpa, (q, k, v, bias)),
            ),
            (
                "forward+backward",
                1.7,
                both(our_attention, (q, k, v), grad),
                both(sdpa, (q, k, v), grad),
            ),
            (
                "forward+backward with bias",
                None,
                both(given(our_attention), (q, k, v), grad),
                both(given(sdpa), (q, k, v), grad),
            ),
            (
                "forward+backward with bias gradient",
                2.0,
                both(our_attention, (q, k, v, bias), grad),
                both(sdpa, (q, k, v, bias), grad),
            ),
        ):
            b.compare(
                f"attention {name}",
                ours,
                {"sdpa": peer},
                target=target if cpu else None,
                case=case,
                error=error,
            )


def sweep_shape(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Batches, heads, lengths and a head size, log-uniform, of at most 1.5 GFLOP."""
    while True:
        n_b, n_h = rng.choice((1, 1, 2, 3, 4, 8)), rng.choice((1, 2, 4, 6, 8, 12, 16))
        n_q, n_k = (max(1, round(2 ** rng.uniform(0, 11))) for _ in "qk")
        n_k = n_q if rng.random() < 0.6 else n_k
        d = rng.choice((1, 7, 16, 24, 32, 33, 40, 64, 64, 72, 80, 96, 100, 128, 128, 160, 200, 256))
        if n_b * n_h * n_q * n_k * d * 4 < 1.5e9:
            return n_b, n_h, n_q, n_k, d


def sweep(b: Bench, count: int = 200) -> None:
    """Forward and forward+backward of `count` shapes against SDPA; the slowest are listed."""
    rng = random.Random(b.seed)
    ratios: dict[str, list[tuple[float, str]]] = {"forward": [], "forward+backward": []}
    worst = 0.0
    for _ in range(count):
        n_b, n_h, n_q, n_k, d = sweep_shape(rng)
        q = torch.randn(n_b, n_h, n_q, d, device=b.device)
        k, v = (torch.randn(n_b, n_h, n_k, d, device=b.device) for _ in "kv")
        grad = torch.randn(q.shape, device=b.device)
        case = f"B{n_b} H{n_h} Lq{n_q} Lk{n_k} d{d}"
        first = [x[:1, :1] for x in (q, k, v)]
        exact = sdpa(*(x.double() for x in first))
        worst = max(worst, check(case, [our_attention(*first)], [sdpa(*first)], [exact]))
        for name, ours, peer in (
            ("forward", forward(our_attention, (q, k, v)), forward(sdpa, (q, k, v))),
            ("forward+backward", both(our_attention, (q, k, v), grad), both(sdpa, (q, k, v), grad)),
        ):
            ratios[name].append((sweep_ratio(b, ours, peer), case))
    for name, found in ratios.items():
        found.sort()
        b.row(
            f"attention sweep {name}",
            shapes=count,
            slower_than_0_9=sum(r < 0.9 for r, _ in found),
            met=found[0][0] >= 0.9,
            geometric_mean=round(math.exp(statistics.fmean(math.log(r) for r, _ in found)), 3),
            slowest=[(round(r, 3), case) for r, case in found[:8]],
            error=worst,
        )


def sweep_ratio(b: Bench, ours: Run, peer: Run) -> float:
    """Peer's over ours, medians of calls taken in turns for at least 20 ms in all."""
    ours(), peer()
    taken: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(taken[0]) < 7 or time.perf_counter() - begin < 0.02:
        taken[0].append(b.seconds(ours))
        taken[1].append(b.seconds(peer))
    return statistics.median(taken[1]) / statistics.median(taken[0])


PARTS: dict[str, Callable[[Bench], None]] = {
    "spherical": spherical,
    "memory": spherical_memory,
    "additive": additive,
    "seq2seq": seq2seq,
    "attention": attention,
    "sweep": sweep,
}
CPU_ONLY = {"memory", "seq2seq"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument(
        "--isa",
        choices=("scalar", "avx2", "avx512"),
        help="a narrower instruction set than there is",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    args = parser.parse_args()
    if args.json is not None and args.json.exists() and not args.force:
        parser.error(f"{args.json} exists; --force overwrites it")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; leave --device out for the CPU")
    if args.isa is not None:
        ops.set_cpu_isa(args.isa)
    torch.manual_seed(args.seed)
    bench = Bench(args.device, args.rounds, not args.no_compile, args.seed)
    for part in args.only:
        if args.device == "cpu" or part not in CPU_ONLY:
            PARTS[part](bench)
    if args.json is not None:
        args.json.write_text(json.dumps(bench.rows, indent=1) + "\n")
    print(
        f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
