"""cuBLAS's workspace, which torch allocates below a line of the program, does not count for that line."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB, Plan, kinds, pyalloc
from pyalloc import trace
from pyalloc.analysis.findings import gives_workspaces_back, workspace_sizes
from pyalloc.analysis.meaning import CUBLAS_WORKSPACES, Analysis

LINEAR = "/x/site-packages/torch/nn/modules/linear.py"
PROGRAM = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(BATCH, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def caching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 keeps it only if it is told to, earlier versions always."""
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")


def labelled(found: Analysis) -> list[tuple[str, int]]:
    """What is a workspace at the peak: where it was made, and its bytes."""
    blocks = [block for block in found.peak.blocks if found.category(block) == "workspace"]
    return [(str(found.place(block.stack) or ""), block.bytes) for block in blocks]


@pytest.mark.torch
@ALLOCATORS
@pytest.mark.parametrize("stacks", ["python", "all"])
def test_it_is_told_from_activations(record: Record, allocator: str, stacks: str) -> None:
    path = record(PROGRAM.replace("BATCH", "64"), "--allocator", allocator, "--stacks", stacks)
    found = trace.analyse(path)
    [(of_backward, n), (where, m)] = sorted(labelled(found))
    assert "program.py:11 Net.forward" in where and of_backward == "" and n == m == 32 * MIB
    names = [row.name for row in found.contributors(found.peak)]
    assert "workspace (cuBLAS)" in names and not any("32.0 MiB" in name for name in names)
    assert not kinds(path).keys() & {"checkpoint", "stale", "no_grad"}


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["default device", "mode", "subclass", "nested"])
def test_one_below_what_is_called_for_torchs_functions_is_one(record: Record, kind: str) -> None:
    """Pyro's layers with set_default_device(): the innermost line is torch's own mode, which names no product."""
    path = record(
        f"""
        import torch
        class Mode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {{}}))
        class Subclass(torch.Tensor):
            pass
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
        x = torch.randn(64, 512, device="cuda")
        if {kind == "default device"}:
            torch.set_default_device("cuda")
        elif {kind == "mode"}:
            Mode().__enter__()
        elif {kind == "nested"}:
            x = torch.nested.nested_tensor([x[:9], x[9:]], layout=torch.jagged)
        else:
            x = x.as_subclass(Subclass)
        for step in range(4):
            y = model(x)
        kept = torch.empty(8 << 20, device="cuda")
        """
    )
    [(_, n)] = labelled(trace.analyse(path))
    assert n == 32 * MIB


@pytest.mark.torch
@pytest.mark.parametrize(("batch", "held"), [(16384, 384), (64, 0)])
def test_activations_of_its_size_stay_activations(record: Record, batch: int, held: int) -> None:
    """Batches with activations of 32 MiB each, outputs that are kept to the end, tensors made before."""
    found = trace.analyse(record(f"""
    import torch
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
    cache = [torch.zeros(8 * 2**20, device="cuda") for _ in range(3)]
    kept = [model(torch.randn({batch}, 512, device="cuda")) for _ in range(3)]
    """))  # fmt: skip
    assert [n for _, n in labelled(found)] == [32 * MIB]
    activations = [b for b in found.peak.blocks if found.category(b) == "activations"]
    assert sum(b.bytes for b in activations) >= held * MIB


@pytest.mark.torch
@pytest.mark.parametrize(
    "product",
    [
        "torch.mv(a, a[0])",
        "a[0].dot(a[0])",
        "torch.cdist(a, a)",
        "torch.linalg.pinv(a)",
        "torch.bmm(a[None], a[None])",  # which torch 2.14 looks at in Python
        'torch.einsum("bixy,ioxy->boxy", *[torch.ones(8, 8, 12, 12, device="cuda") + 0j] * 2)',  # after a copy
    ],
)
def test_products_with_vectors_and_by_other_names(record: Record, product: str) -> None:
    """The power iteration of spectral_norm() calls torch.mv()."""
    found = trace.analyse(record(f"""
    import torch
    a = torch.ones(64, 64, device="cuda")
    found = {product}
    """))  # fmt: skip
    assert [n for _, n in labelled(found)] == [32 * MIB]


@pytest.mark.torch
def test_one_that_goes_with_its_product_is_known(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.15 has it by default."""
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE")
    found = trace.analyse(record("""
    import torch
    a = torch.ones(64, 64, device="cuda")
    found = torch.mv(a, a[0])
    """))  # fmt: skip
    assert [n for _, n in labelled(found)] == [32 * MIB]


IN_BACKWARD = """
import torch
a = torch.ones(64, 64, device="cuda", requires_grad=True)
(a * a).mm(a).sum().backward()
"""


@pytest.mark.torch
@ALLOCATORS
@pytest.mark.parametrize("stacks", ["python", "all"])
def test_one_that_goes_with_its_product_in_backward_is_known(
    record: Record, monkeypatch: pytest.MonkeyPatch, allocator: str, stacks: str
) -> None:
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE")
    found = trace.analyse(record(IN_BACKWARD, "--allocator", allocator, "--stacks", stacks))
    if not gives_workspaces_back(found.notes):
        pytest.skip("torch before 2.15 keeps cuBLAS's workspace")
    assert [n for _, n in labelled(found)] == [32 * MIB]
    [holder] = [row.name for row in found.contributors(found.peak) if row.bytes == 32 * MIB]
    assert holder == "workspace (cuBLAS)"


@pytest.mark.torch
@pytest.mark.parametrize(("setting", "n"), [("", MIB), ("64", 65536)])
def test_that_of_cublaslt_goes_with_its_product(
    record: Record, monkeypatch: pytest.MonkeyPatch, setting: str, n: int
) -> None:
    """A product with a bias uses cuBLASLt."""
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE")
    if setting:
        monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", setting)
    found = trace.analyse(record("""
    import torch
    model = torch.nn.Linear(64, 64).cuda()
    found = model(torch.ones(64, 64, device="cuda"))
    """))  # fmt: skip
    if not gives_workspaces_back(found.notes):
        pytest.skip("torch before 2.15 keeps cuBLAS's workspace")
    assert [n for _, n in labelled(found)] == [n]


# What a backward pass of loss() computes first: on a thread of autograd's, whose Python is what it calls there.
FIRST_IN_BACKWARD = {
    "bmm": "return torch.bmm(x[None], weight[None])",  # passes through Python in torch 2.14
    "function": "return Product.apply(x, weight)",
    "given": "return Given.apply(x, weight)",
    "checkpoint": "return checkpoint(product, x, weight, use_reentrant=False)",
    "reentrant": "return checkpoint(product, x, weight, use_reentrant=True)",
}


@pytest.mark.torch
@pytest.mark.parametrize("has_optimizer", [True, False])
@pytest.mark.parametrize("first", FIRST_IN_BACKWARD)
def test_that_of_autograds_thread_is_known_by_whatever_needs_it_first(
    record: Record, first: str, has_optimizer: bool
) -> None:
    path = record(f"""
    import torch
    from torch.utils.checkpoint import checkpoint

    def product(x, weight):
        return x @ weight

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight.T, x.T @ grad

    class Given(Product):
        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
            torch.mm(grad, weight.T, out=d_x)
            return d_x, d_weight.addmm_(x.T, grad)

    def loss(x):
        {FIRST_IN_BACKWARD[first]}

    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    optimizers = [torch.optim.SGD([weight], lr=0.1)] * {has_optimizer:d}
    for step in range(3):
        loss(torch.ones(64, 64, device="cuda", requires_grad=True)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        weight.grad = None
    """)  # fmt: skip
    assert [n for _, n in labelled(trace.analyse(path))] == [32 * MIB] * 2
    assert "zero_grad" not in kinds(path)


@pytest.mark.torch
def test_a_gradient_of_its_size_without_an_optimizer_is_none(record: Record) -> None:
    """The first product of autograd's thread is that gradient; its tensor lives beside it."""
    found = trace.analyse(record("""
    import torch
    x = torch.ones(64, 64, device="cuda")
    weight = torch.ones(64, 8 << 14, device="cuda", requires_grad=True)
    for step in range(3):
        (x @ weight).sum().backward()
    """))  # fmt: skip
    gradients = [b.bytes for b in found.peak.blocks if found.category(b) == "gradients"]
    assert 32 * MIB in gradients


@pytest.mark.torch
def test_the_oom_file_does_not_blame_the_line(record: Record) -> None:
    source = PROGRAM.replace("BATCH", "(64, 64, 64, 2**24)[step]")
    path = record(source, "--memory", "1GB", expect=None)
    told = path.with_name("out.oom.txt").read_text()
    assert "workspace (cuBLAS)" in told and "activations: Net.forward" not in told


@pytest.mark.torch
def test_a_setting_of_its_size_is_known(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    found = trace.analyse(record(PROGRAM.replace("BATCH", "64")))
    assert [n for _, n in labelled(found)] == [8_519_680] * 2


@pytest.mark.parametrize(
    ("setting", "sizes"),
    [
        ("", (32 * MIB, 8_519_680)),
        (":4096:8", (32 * MIB,)),
        (":16:8", (131_072,)),
        ("nonsense", (32 * MIB, 8_519_680)),
        (":0:0", (0,)),
    ],
)
def test_sizes(setting: str, sizes: tuple[int, ...]) -> None:
    assert workspace_sizes({"CUBLAS_WORKSPACE_CONFIG": setting} if setting else {}) == sizes


@pytest.mark.torch
def test_a_size_that_the_program_sets_is_known(record: Record) -> None:
    """Before the recording, and in it: only handles that are used afterwards have one."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch has no such function")
    source = PROGRAM.replace("BATCH", "64")
    before = source.replace("import torch\n", "import torch\nSET(20_000_000)\n", 1)
    inside = source.replace("for step", "SET(20_000_000)\nfor step")
    for program in (before, inside):
        path = record(program.replace("SET", "torch.backends.cuda.cublas_workspace_size"))
        assert [n for _, n in labelled(trace.analyse(path))] == [20_000_256] * 2


def test_sizes_that_torch_said() -> None:
    notes = {"cublas_workspace": "33554432,1000", "CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
    assert workspace_sizes(notes) == (32 * MIB, 1024)
    assert workspace_sizes({"cublas_workspace": "many"}) == CUBLAS_WORKSPACES


def by_hand(plan: Plan, **changed: object) -> Path:
    """A product's result and the workspace after it, then steps that free everything else."""
    given = {"gap": False, "dropped_at": -1, "again_at": -1, "bytes": 32 * MIB, "name": "forward"}
    given.update({"forward_drops_at": -1, **changed})
    linear = plan.stack(134, str(given["name"]), LINEAR)
    plan.event("user", "optimizers=SGD")
    for step in range(6):
        plan.event("step", "step", arg=step)
        plan.event("phase_begin", "forward")
        plan.event("alloc", addr=1 << 30, bytes=MIB, stack=linear)
        if step == 0:
            if given["gap"]:
                plan.event("alloc", addr=3 << 30, bytes=MIB, stack=plan.stack(9))
            plan.event("alloc", addr=2 << 30, bytes=int(str(given["bytes"])), stack=linear)
        if step == given["again_at"]:
            plan.event("alloc", addr=7 << 30, bytes=int(str(given["bytes"])), stack=linear)
        if step == given["forward_drops_at"]:
            plan.event("free_requested", addr=2 << 30)
        plan.event("phase_end", "forward")
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=4 << 30, bytes=MIB)
        if step == 0:
            plan.event("alloc", addr=5 << 30, bytes=32 * MIB)  # on autograd's thread
            plan.event("alloc", addr=6 << 30, bytes=32 * MIB)  # a gradient
        plan.event("free_requested", addr=1 << 30)
        plan.event("free_requested", addr=4 << 30)
        plan.event("phase_end", "backward")
        plan.event("category", "gradients", addr=6 << 30)
        if step == given["dropped_at"]:
            plan.event("free_requested", addr=2 << 30)
    return plan.done()


@pytest.mark.parametrize(
    ("changed", "n"),
    [
        ({}, 2),
        ({"gap": True}, 1),  # not the second of its line: only backward's is one
        ({"bytes": 31 * MIB}, 1),
        ({"dropped_at": 2}, 1),  # a pass's, until a later pass
        ({"dropped_at": 3}, 2),
        ({"again_at": 2}, 2),  # its stream has one
        ({"dropped_at": 5}, 2),  # given back by _cuda_clearCublasWorkspaces()
        ({"name": "reset_parameters"}, 1),
    ],
)
def test_only_what_is_all_of_it_is_one(plan: Plan, changed: dict[str, object], n: int) -> None:
    found = trace.analyse(by_hand(plan, **changed))
    assert len(found.workspaces) == n
    gradient = next(block for block in found.peak.blocks if block.address == 6 << 30)
    assert found.category(gradient) == "gradients"


@pytest.mark.parametrize(("between", "expected"), [(0, 1), (1, 0)])
def test_one_that_is_freed_at_once_is_one(plan: Plan, between: int, expected: int) -> None:
    """A product's result of that size lives while something is computed from it."""
    linear = plan.stack(134, "forward", LINEAR)
    plan.event("alloc", addr=1 << 30, bytes=MIB, stack=linear)
    plan.event("alloc", addr=2 << 30, bytes=32 * MIB, stack=linear)
    for _ in range(between):
        plan.event("alloc", addr=3 << 30, bytes=512, stack=linear)
    plan.event("free_requested", addr=2 << 30)
    assert len(trace.analyse(plan.done()).workspaces) == expected


def backward_by_hand(plan: Plan, **changed: object) -> Path:
    """A product in autograd, as torch 2.15 makes it, while an activation of the workspace's size lives."""
    given = {"torch": "2.15.0+cu132", "cache": "", "bytes": 32 * MIB, "between": "", **changed}
    plan.event("user", f"torch={given['torch']}")
    if given["cache"]:
        plan.event("user", f"TORCH_CUBLAS_WORKSPACE_CACHE={given['cache']}")
    plan.event("alloc", addr=1 << 30, bytes=32 * MIB, stack=plan.stack(3))
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=2 << 30, bytes=MIB)
    plan.event("alloc", addr=3 << 30, bytes=512)
    if given["between"] == "pages":
        plan.event("segment_map", addr=4 << 30, bytes=32 * MIB)
    if given["between"] == "free":
        plan.event("free_requested", addr=3 << 30)
    plan.event("alloc", addr=4 << 30, bytes=int(str(given["bytes"])))
    if given["between"] == "alloc":
        plan.event("alloc", addr=5 << 30, bytes=512)
    plan.event("free_requested", addr=4 << 30)
    plan.event("phase_end", "backward")
    return plan.done()


@pytest.mark.parametrize(
    ("changed", "n"),
    [
        ({}, 1),
        ({"between": "pages"}, 1),
        ({"between": "alloc"}, 0),  # something is computed from it
        ({"between": "free"}, 0),  # the first of its node: a gradient that is added to another
        ({"bytes": 31 * MIB}, 0),
        ({"torch": "2.14.1"}, 0),
        ({"torch": "2.16.0a0"}, 1),
        ({"torch": "of mine"}, 0),
        ({"cache": "1"}, 0),
        ({"cache": "0"}, 1),
    ],
)
def test_one_that_is_freed_at_once_in_backward(
    plan: Plan, changed: dict[str, object], n: int
) -> None:
    found = trace.analyse(backward_by_hand(plan, **changed))
    assert len(found.workspaces) == n


def test_it_is_no_gradient_of_an_activation_of_its_size(plan: Plan) -> None:
    found = trace.analyse(backward_by_hand(plan))
    assert [row.name for row in found.by_line(found.peak.blocks) if row.bytes == 32 * MIB] == [
        "me/model.py:3 work"
    ]
    assert not any("gradient" in row.name for row in found.by_line(found.peak.blocks))


COMPILED = """\
buf1 = extern_kernels.convolution(arg0, arg1)
extern_kernels.mm(arg0, arg1, out=buf0)
buf2 = empty_strided_cuda((8388608, ), (1, ), torch.float32)
"""


@pytest.mark.parametrize(
    ("forward", "backward", "n"),
    [
        (2, 2, 2),  # autograd's thread has one of its own
        (3, 2, 1),
        (1, 2, 1),  # a result
        (3, 3, 0),
    ],
)
@pytest.mark.parametrize("is_cleared", [False, True])
def test_those_of_compiled_passes(
    plan: Plan, tmp_path: Path, is_cleared: bool, forward: int, backward: int, n: int
) -> None:
    """CUDA-graph trees give them back after each warm-up; a product whose result is given allocates nothing else."""
    file = tmp_path / "ab" / f"c{'a' * 51}.py"
    file.parent.mkdir()
    file.write_text(COMPILED)
    for i, (phase, line) in enumerate((("forward", forward), ("backward", backward)), 1):
        stack = plan.stack(line, "call", str(file))
        plan.event("phase_begin", phase)
        plan.event("alloc", addr=i << 30, bytes=32 * MIB, stack=stack)
        plan.event("alloc", addr=9 << 30, bytes=MIB, stack=plan.stack(3))
        plan.event("free_requested", addr=9 << 30)
        plan.event("phase_end", phase)
    plan.event("alloc", addr=9 << 30, bytes=MIB, stack=plan.stack(3))
    for i in range(1, 3) if is_cleared else ():
        plan.event("free_requested", addr=i << 30)
    found = trace.analyse(plan.done())
    # What stays to the end and is no result is one by that alone.
    assert len(found.workspaces) == n + (forward == 1 and not is_cleared)


def test_one_that_autotuning_needed_first(plan: Plan) -> None:
    """Nothing else that is made there stays."""
    tuning = "/x/site-packages/torch/_inductor/runtime/benchmarking.py"
    plan.event("alloc", addr=1 << 30, bytes=32 * MIB, stack=plan.stack(290, "_callable", tuning))
    plan.event("alloc", addr=2 << 30, bytes=32 * MIB, stack=plan.stack(716, "bench", tuning))
    plan.event("free_requested", addr=2 << 30)
    plan.event("alloc", addr=2 << 30, bytes=64 * MIB, stack=plan.stack(3))
    assert len(trace.analyse(plan.done()).workspaces) == 1


@pytest.mark.parametrize(
    ("said", "goes", "expected"),
    [
        (f"{MIB}", True, 1),
        (f"5,{MIB}", True, 1),
        (f"{MIB}", False, 0),  # it could be anything
        (f"{2 * MIB}", True, 0),
        ("", True, 0),  # a torch that does not say so keeps it
    ],
)
def test_cublaslts_that_is_freed_at_once(plan: Plan, said: str, goes: bool, expected: int) -> None:
    linear = plan.stack(134, "forward", LINEAR)
    if said:
        plan.event("user", f"cublaslt_workspace={said}")
    plan.event("alloc", addr=1 << 30, bytes=512, stack=linear)
    plan.event("alloc", addr=2 << 30, bytes=MIB, stack=linear)
    if goes:
        plan.event("free_requested", addr=2 << 30)
    assert len(trace.analyse(plan.done()).workspaces) == expected


def test_one_that_was_made_after_the_peak_is_known_at_the_end(plan: Plan) -> None:
    plan.event("alloc", addr=9 << 30, bytes=200 * MIB, stack=plan.stack(1))  # while it loads
    plan.event("free_requested", addr=9 << 30)
    found = trace.analyse(by_hand(plan))
    end = found.moments[max(found.moments)]
    assert found.peak.allocated_bytes == 200 * MIB
    assert "workspace (cuBLAS)" in [row.name for row in found.contributors(end)]


@pytest.mark.parametrize("changed", [{}, {"dropped_at": 3}, {"forward_drops_at": 3}])
def test_who_held_memory_has_each_once(plan: Plan, changed: dict[str, object]) -> None:
    """Over the run: what is a workspace's is nobody else's, also if a later pass frees it."""
    found = trace.analyse(by_hand(plan, **changed))
    rows = found.stays_by_category()
    assert found.totals["peak_event"] in found.marks
    for mark, event in enumerate(found.marks):
        held = [(stay.bytes, what) for stay, what in rows if stay.first <= mark <= stay.last]
        counted = [stay for stay in found.stays if stay.first <= mark <= stay.last]
        assert sum(n for n, _ in held) == sum(stay.bytes for stay in counted)
        if event == found.totals["peak_event"]:
            assert sum(n for n, what in held if what == "workspace") == 64 * MIB
    assert all(stay.bytes > 0 and stay.blocks > 0 for stay, _ in rows)


def test_lines_and_modules_are_not_blamed(plan: Plan) -> None:
    path = by_hand(plan)
    out = " ".join(pyalloc("top", path, "-q").split())
    assert "cuBLAS workspace, first needed at modules/linear.py:134" in out


@pytest.mark.parametrize("n", [2, 4])
def test_many_streams_have_many_workspaces(plan: Plan, n: int) -> None:
    """One is needed, and a second one is nothing unusual."""
    cublas = plan.stack(9, name="allocateCUDABlasWorkspace", file="CUDABlas.cpp")
    for stream in range(n):
        plan.event("alloc", addr=(stream + 1) << 30, bytes=32 * MIB, stack=cublas, stream=stream)
    plan.event("alloc", addr=16 << 30, bytes=100 * MIB, stack=plan.stack(1))
    found = kinds(plan.done())
    assert ("workspaces" in found) == (n > 2)
    if n > 2:
        assert found["workspaces"].saved_bytes == 96 * MIB
        assert found["workspaces"].text.startswith("4 cuBLAS workspaces hold 128.0 MiB at the peak")


@pytest.mark.parametrize("n", [1, 3])
def test_a_workspace_for_each_device_and_thread_is_no_many_streams(plan: Plan, n: int) -> None:
    """Autograd's thread has one, too.  Only streams beyond the first of each device are too many."""
    cublas = plan.stack(9, name="allocateCUDABlasWorkspace", file="CUDABlas.cpp")
    places = [(device, 0) for device in range(4)] + [(3, stream) for stream in range(1, n)]
    for i, (device, stream) in enumerate(places * 2):
        where = {"device": device, "stream": stream, "stack": cublas}
        plan.event("alloc", addr=(i + 1) << 30, bytes=32 * MIB, **where)
    found = kinds(plan.done())
    assert ("workspaces" in found) == (n > 1)
    if n > 1:
        assert found["workspaces"].saved_bytes == 2 * (n - 1) * 32 * MIB
        assert "12 cuBLAS workspaces hold 384.0 MiB" in found["workspaces"].text
