"""What hooks mark in recordings of programs that mark nothing: phases, modules, categories, optimizers."""

from __future__ import annotations

import sys
import sysconfig
import threading
import warnings
import weakref
from pathlib import Path

import pytest
from dry_support import python_for

from instrument.conftest import Record
from instrument.tools import ALLOCATORS, MIB, kinds, pyalloc
from pyalloc import trace
from pyalloc.common.config import ANY_CHAINED
from pyalloc.inside import automarks, chained

pytestmark = pytest.mark.torch


@ALLOCATORS
def test_modules_without_memory_yet_are_recorded(record: Record, allocator: str) -> None:
    path = record("""
    import torch
    model = torch.nn.Sequential(torch.nn.LazyLinear(1000, device="cuda"), torch.nn.ReLU())
    assert model(torch.ones(4, 500, device="cuda")).shape == (4, 1000)
    """, "--allocator", allocator)  # fmt: skip
    found = trace.analyse(path)
    assert "parameters" in {row.name for row in found.by_category(found.peak.blocks)}


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="a model stays there until the next one's backward(), recorded or not",
)
def test_what_the_program_drops_is_not_kept_alive(record: Record) -> None:
    """A program that tries one model after the other needs the memory of one, recorded or not."""
    path = record("""
    import gc, torch
    def train():
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(16, 1024, device="cuda")).sum().backward()
            optimizer.step()
    peaks = []
    for _ in range(3):
        train()
        gc.collect()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[2], peaks
    """)  # fmt: skip
    found = trace.analyse(path)
    names = {block.module for block in found.peak.blocks}
    categories = {found.category(block) for block in found.peak.blocks}
    assert {"parameters", "optimizer state", "gradients"} <= categories
    assert names <= {"", "0", "1"}
    assert sum(mark.name == "optimizer" for mark in found.phases) == 6
    assert len(found.steps) >= 6  # every loop's steps count


@ALLOCATORS
def test_what_left_the_device_and_came_back_keeps_its_category(
    record: Record, allocator: str
) -> None:
    """State that was offloaded between steps comes back at its old address as another block."""
    path = record("""
    import torch
    model = torch.nn.Linear(1024, 1024, device="cuda", bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
    step()
    (state,) = optimizer.state.values()
    before = state["momentum_buffer"].data_ptr()
    state["momentum_buffer"] = state["momentum_buffer"].cpu()
    state["momentum_buffer"] = state["momentum_buffer"].cuda()
    assert state["momentum_buffer"].data_ptr() == before
    step()
    """, "--allocator", allocator)  # fmt: skip
    found = trace.analyse(path)
    end = found.moments[max(found.moments)].blocks
    told = sorted(block.category for block in end if block.bytes == 4 * MIB)
    assert told == ["gradients", "optimizer state", "parameters"]


def test_a_part_of_a_model_has_its_name_where_it_is_called_by_itself(record: Record) -> None:
    """As a checkpoint does in backward."""
    path = record("""
    import torch
    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Double(), Double()
        def forward(self, x):
            return self.second(self.first(x))
    model, x = Model(), torch.ones(4 << 20, device="cuda")
    model(x)
    kept = model.second(x)
    with torch.no_grad():
        evaluated = model.first(x)
    """)  # fmt: skip
    found = trace.analyse(path)
    end = found.moments[max(found.moments)].blocks
    assert [(b.phase, b.module) for b in end[1:]] == [
        ("forward", "second"), ("inference", "first"),
    ]  # fmt: skip
    assert [(p.name, p.depth) for p in found.phases] == [
        ("forward", 0), ("forward", 0), ("inference", 0),
    ]  # fmt: skip


def test_a_module_that_several_share_has_the_name_of_each_use(record: Record) -> None:
    """Ultralytics' convolutions share one activation; all of it was of whichever came first."""
    path = record("""
    import torch
    class Layer(torch.nn.Module):
        def __init__(self, act):
            super().__init__()
            self.act = act
        def forward(self, x):
            return self.act(x)
    act = torch.nn.GELU()
    model = torch.nn.Sequential(*[Layer(act) for _ in range(3)], act)
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    loss = model(x).sum()
    loss.backward()
    """)  # fmt: skip
    found = trace.analyse(path)
    assert {b.module for b in found.peak.blocks} >= {"0.act", "1.act", "2.act"}


def test_state_that_lies_deeper_is_the_optimizers(record: Record) -> None:
    """Heavyball's lies in dicts and lists in each parameter's state, and is made anew in each step."""
    path = record("""
    import torch
    class Deep(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                of_view = self.state[parameter].setdefault(0, {})
                of_view["average"] = torch.zeros_like(parameter)
                of_view["rotations"] = [None, (torch.zeros(512, 512, device="cuda"),)]
                of_view["itself"] = of_view
    model = torch.nn.Linear(1024, 1024, device="cuda", bias=False)
    optimizer = Deep(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """)  # fmt: skip
    found = trace.analyse(path)
    end = found.moments[max(found.moments)].blocks
    told = sorted(block.bytes for block in end if block.category == "optimizer state")
    assert told == [1 * MIB, 4 * MIB]


def test_tensors_without_memory_of_their_own_are_nobodys_error(record: Record) -> None:
    """A fake tensor says that it is on the device, and raises when it is asked for its address."""
    path = record("""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    side = torch.cuda.Stream()
    real = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    real.record_stream(side)
    with FakeTensorMode():
        fake = torch.empty(4, device="cuda")
        assert fake.is_cuda
    try:
        fake.record_stream(side)
    except RuntimeError as error:
        assert "data pointer" not in str(error), error
    """)  # fmt: skip
    assert trace.analyse(path).totals["n_record_streams"] == 1


def test_adamw_is_not_called_adam(record: Record) -> None:
    """Its steps run Adam's code."""
    path = record("""
    import torch
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    """)  # fmt: skip
    found = trace.analyse(path)
    end = found.moments[max(found.moments)]
    for told, name in ((None, "AdamW"), ("SGD, Adam", "Adam"), ("", "Adam or AdamW")):
        if told is not None:  # "": as in a snapshot
            found.notes["optimizers"] = told
        assert f"optimizer state ({name})" in {row.name for row in found.contributors(end)}


@ALLOCATORS
def test_gradients_that_are_asked_for_are_a_backward(record: Record, allocator: str) -> None:
    """Imported by name before the recording began, twice through the graph, by torch.func, within a backward."""
    source = """
    import torch
    from torch.autograd import grad

    net = torch.nn.Linear(256, 256).cuda()
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    with pyalloc.phase("penalty"):
        [slope] = grad(net(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    with pyalloc.phase("func"):
        torch.func.grad(lambda x: x.square().sum())(x.detach())

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                y = ctx.saved_tensors[0].detach().requires_grad_()
                return grad(y.square().sum(), y)[0] * g

    with pyalloc.phase("inner"):
        grad(Inner.apply(x).sum(), x)
    with pyalloc.phase("failing"):
        try:
            grad(x.detach().sum(), x)
        except RuntimeError:
            pass
    """
    found = trace.analyse(record(source.replace("import torch\n", "import torch, pyalloc\n", 1)))
    seen = {name: 0 for name in ("penalty", "func", "inner", "failing")}
    for outer in found.phases:
        if outer.name in seen:
            inside = [p for p in found.phases if outer.begin < p.begin and p.end < outer.end]
            seen[outer.name] = sum(phase.name == "backward" for phase in inside)
    assert seen == {"penalty": 2, "func": 1, "inner": 2, "failing": 1}
    assert "retain_graph" not in found.notes


def test_a_compiled_module_warns_of_no_hooks_that_the_program_has_not_made(tmp_path: Path) -> None:
    source = """
import warnings, torch
model = torch.compile(torch.nn.Linear(8, 8).cuda(), backend="eager")
with warnings.catch_warnings(record=True) as said:
    model(torch.ones(2, 8, device="cuda"))
said = [str(each.message) for each in said]
print("said", [each for each in said if "hook" in each])  # torch also says that Python 3.13.0 is slow
"""
    script = tmp_path / "program.py"
    script.write_text(source)
    out = pyalloc("dryrun", "--record", tmp_path / "out.pya", python_for(source), script)
    assert "said []\n" in out


def test_what_an_exception_ends_is_no_phase_for_ever(record: Record) -> None:
    """No hook hears of a step() that raises, as when memory runs out in it, nor of Ctrl-C in a module."""
    path = record("""
    import torch
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.is_interrupted = torch.nn.Linear(64, 64), False
        def forward(self, x):
            x = self.inner(x)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return x
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(4, 64, device="cuda")
    def step(closure=None):
        model(batch).sum().backward()
        optimizer.step(closure)
    def fail():
        raise RuntimeError("out of memory")
    for closure, model.is_interrupted in ((None, 0), (fail, 0), (fail, 0), (None, 1), (None, 0)):
        try:
            step(closure)
        except (RuntimeError, KeyboardInterrupt):
            pass
    optimizer.step(lambda: model(batch).sum())
    model.is_interrupted = True
    try:
        model(batch)
    except KeyboardInterrupt:
        torch.nn.Linear(64, 8).cuda()(batch)
    """)  # fmt: skip
    found = [(phase.name, phase.depth) for phase in trace.analyse(path).phases]
    whole = [("forward", 0), ("backward", 0), ("optimizer", 0)]
    failed, closure = whole[:2], [whole[0], whole[2]]
    assert found == [*whole, *failed, *failed, whole[0], *whole, *closure, whole[0], whole[0]]


@ALLOCATORS
@pytest.mark.parametrize("call", ["step(closure)", "step(closure=closure)"])
def test_what_a_closure_does_is_none_of_the_optimizers(
    record: Record, allocator: str, call: str
) -> None:
    """Lightning runs each training step, forward and backward, as the closure of the optimizer's step()."""
    path = record(
        f"""
        import torch
        from torch.nn.functional import cross_entropy
        model = torch.nn.Linear(64, 8192).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(torch.ones(512, 64, device="cuda")), torch.zeros(512, device="cuda").long())
            loss.backward()
            return loss
        for _ in range(4):
            optimizer.{call}
        """,
        "--allocator",
        allocator,
    )
    found = trace.analyse(path)
    assert [phase.name for phase in found.phases] == 4 * ["forward", "backward", "optimizer"]
    assert {phase.depth for phase in found.phases} == {0}
    held = {row.name: row.bytes >> 20 for row in found.by_category(found.peak.blocks)}
    assert held["activations"] == 16 and held["optimizer state"] == 4
    assert found.totals["peak_phase"] == "backward" and "logits" in kinds(path)


def test_modules_and_optimizers_of_any_kind_are_nobodys_error(record: Record) -> None:
    path = record("""
    import warnings, torch
    class Groups(torch.nn.Linear):
        def parameters(self):
            return [{"params": [self.weight], "lr": 0.1}, {"params": [self.bias], "lr": 0.2}]
    model = Groups(1024, 1024, device="cuda")
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    other = torch.nn.Linear(8, 8, device="cuda")
    weights = {name: 2 * parameter for name, parameter in other.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.functional_call(other, weights, torch.ones(4, 8, device="cuda"))
    optimizer.state = None
    optimizer.step()
    """)  # fmt: skip
    found = trace.analyse(path)
    end = found.moments[max(found.moments)].blocks
    assert sorted(b.category for b in end if b.bytes == 4 * MIB) == ["gradients", "parameters"]


def test_warnings_are_the_programs_own_again() -> None:
    marks, before = automarks.AutoMarks(None), list(warnings.filters)
    for _ in range(2):
        marks._ignore("of hooks")
    assert warnings.filters[1:] == before
    marks.remove()
    assert warnings.filters == before
    warnings.filterwarnings("ignore", "of hooks")
    before = list(warnings.filters)
    marks._ignore("of hooks")
    marks.remove()
    assert warnings.filters == before


class Model:
    """Of any kind."""


def test_models_are_looked_at_while_other_threads_use_new_ones() -> None:
    """Each one that a thread calls first is learned: a list of the known ones has to be copied in one go."""
    known: weakref.WeakValueDictionary[int, Model] = weakref.WeakValueDictionary()
    kept = [Model() for _ in range(20_000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        learning = threading.Thread(target=known.update, args=(dict(enumerate(kept)),))
        learning.start()
        while learning.is_alive():
            assert len(automarks._alive(known)) <= len(kept)
        learning.join()
    finally:
        sys.setswitchinterval(interval)
    assert automarks._alive(known) == kept


def test_runs_that_go_on_are_told_by_their_lengths_and_no_longer_once_there_are_many() -> None:
    runs = chained.Runs()
    told = []
    for length in (3, 2, 3, *range(4, 40)):
        for i in range(length):
            runs.add(i > 0)
        told.append(runs.end())
        runs.add(False)
        assert not runs.end()  # a single pass, which goes on from nothing
    assert told[:3] == ["3", "2,3", ""]
    assert told.count(ANY_CHAINED) == 1 and not any(told[told.index(ANY_CHAINED) + 1 :])
