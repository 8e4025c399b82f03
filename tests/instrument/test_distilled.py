"""A forward pass in each step, beside the training's, that keeps what no backward pass asks for."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, kinds
from pyalloc import trace

DISTILLED = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    def layers(n):
        return nn.Sequential(*[m for i in range(n) for m in (nn.Linear(512, 512), nn.ReLU())]).cuda()
    teacher, student = layers(12), layers(4)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    def train():
        x = torch.randn(8192, 512, device="cuda")
        optimizer.zero_grad()
        CALLS
        F.mse_loss(out, of_teacher.detach()).backward()
        optimizer.step()
    for step in range(4):
        TRAIN
"""
CALLS = {
    "first": "of_teacher = teacher(x); out = student(x)",
    "last": "out = student(x); of_teacher = teacher(x)",
}


def told(record: Record, program: str) -> tuple[int | None, int]:
    """How many bytes the advice on no_grad() promises, if there is any, and those of the peak."""
    path = record(program)
    found = kinds(path).get("no_grad")
    peak: int = trace.analyse(path).totals["peak_bytes"]
    return (found.saved_bytes if found else None), peak


@pytest.mark.torch
@pytest.mark.parametrize("order", list(CALLS))
@pytest.mark.parametrize("is_function", [True, False])
def test_a_teachers_pass_once_in_each_step(record: Record, is_function: bool, order: str) -> None:
    """Dropped when the function returns, or when the next step's takes its place."""
    text = DISTILLED.replace("TRAIN", "train()" if is_function else "break")
    if not is_function:
        text = text.replace("    def train():", "    for step in range(4):")
    calls = CALLS[order]
    said, before = told(record, text.replace("CALLS", calls))
    without = calls.replace("teacher(x)", "torch.no_grad()(teacher)(x)")
    nothing, after = told(record, text.replace("CALLS", without))
    fell = before - after
    assert nothing is None and said is not None
    assert fell > 0.2 * before
    assert 0.75 * fell <= said <= 1.05 * fell, (said / MIB, fell / MIB)


@pytest.mark.torch
def test_a_model_whose_results_are_held_is_trained_all_the_same(record: Record) -> None:
    """Backward frees none of what its function returned, but makes gradients."""
    program = DISTILLED.replace(
        "CALLS", "held = teacher(x); of_teacher, out = held[-1], student(x)"
    ).replace("TRAIN", "train()")
    program = program.replace("layers(12)", "Net()").replace(
        "    teacher,",
        """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512).cuda() for _ in range(12))
        def forward(self, x):
            held = [x]
            for layer in self.layers:
                held.append(layer(held[-1]).relu_())
            return held
    teacher,""",
    )
    found = kinds(record(program))
    assert "no_grad" in found
    trained = program.replace(".detach()", "").replace(
        "student.parameters()", "teacher.parameters()"
    )
    assert "no_grad" not in kinds(record(trained))


EVALUATED = """
    import torch
    from torch import nn
    layers = [m for i in range(8) for m in (nn.Linear(512, 512), nn.Dropout(0.1), nn.ReLU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(8192, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.set_grad_enabled(GRAD):
            out = model(torch.randn(8192, 512, device="cuda"))
        loss = out.square().mean().item()
        model.train()
"""


@pytest.mark.torch
def test_an_evaluation_of_one_batch_in_each_step(record: Record) -> None:
    """A variable holds it until the next: the passes of the training are freed by backward, but not this one."""
    said, before = told(record, EVALUATED.replace("GRAD", "True"))
    nothing, after = told(record, EVALUATED.replace("GRAD", "False"))
    fell = before - after
    assert nothing is None and said is not None
    assert fell > 0.2 * before
    assert 0.7 * fell <= said <= 1.02 * fell, (said / MIB, fell / MIB)


HELD = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    class Net(nn.Module):
        def __init__(self, n):
            super().__init__()
            layers = (nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(n))
            self.layers = nn.ModuleList(layers)
        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x
    teacher, student = Net(4).cuda(), Net(2).cuda()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8192, 512, device="cuda")
        with torch.set_grad_enabled(GRAD):
            wanted = teacher(x)
        optimizer.zero_grad()
        F.mse_loss(student(x), wanted.detach()).backward()
        optimizer.step()
"""
REPLAYED = """
    import torch
    from torch import nn
    layers = [nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 4)]
    model, target = (nn.Sequential(*layers).cuda() for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = torch.zeros(16384, 2048, dtype=torch.uint8, device="cuda")
    for step in range(4):
        which = torch.randint(0, 16384, (8192,), device="cuda")
        now, then = (states[which].float()[:, :512].contiguous() for _ in range(2))
        with torch.set_grad_enabled(GRAD):
            best = target(then).max(1).values
        optimizer.zero_grad()
        (model(now).max(1).values - best.detach()).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.torch
@pytest.mark.parametrize("program", [HELD, REPLAYED], ids=["teacher", "replay"])
def test_what_a_variable_holds_into_the_next_step_goes_with_the_rest(
    record: Record, program: str
) -> None:
    """Two steps' graphs beside one another, or one beside the data of the next."""
    said, before = told(record, program.replace("GRAD", "True"))
    nothing, after = told(record, program.replace("GRAD", "False"))
    fell = before - after
    assert nothing is None and said is not None
    assert fell > 0.1 * before
    assert 0.8 * fell <= said <= 1.05 * fell, (said / MIB, fell / MIB)


CACHED = """
    import torch
    from torch import nn
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys, self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256)
        def forward(self, x, cache, i):
            keys = self.keys(x)
            if i in cache:
                keys = torch.cat([cache[i], keys], 1)
            cache[i] = keys
            x = x + x @ keys.transpose(1, 2) @ keys
            return x + self.down(self.up(x).relu())
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(8))
        def forward(self, x, cache):
            for i, layer in enumerate(self.layers):
                x = layer(x, cache, i)
            return x[:, -1:].clone()
    model = Model().cuda()
    with torch.set_grad_enabled(GRAD):
        x, cache = torch.randn(32, 256, 256, device="cuda"), {}
        for token in range(24):
            x = model(x, cache)
"""


@pytest.mark.torch
def test_a_cache_that_grows_in_each_pass_stays(record: Record) -> None:
    said, before = told(record, CACHED.replace("GRAD", "True"))
    nothing, after = told(record, CACHED.replace("GRAD", "False"))
    fell = before - after
    assert nothing is None and said is not None
    assert fell > 0.4 * before
    assert 0.95 * fell <= said <= 1.03 * fell, (said / MIB, fell / MIB)


@pytest.mark.torch
@pytest.mark.parametrize("trained", [True, False])
def test_features_that_a_loss_compares_are_needed(record: Record, trained: bool) -> None:
    """They are all that their passes keep, and a function holds them; backward goes through the generator's pass."""
    said, _ = told(
        record,
        f"""
    import torch
    from torch import nn
    from torch.nn import functional as F
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
        def forward(self, x):
            found = [x]
            for layer in self.layers:
                found.append(F.relu(layer(found[-1]), inplace=True))
            return found[1:]
    features = Features().cuda().requires_grad_({trained})
    generator = nn.Sequential(*[m for i in range(3) for m in (nn.Linear(512, 512), nn.ReLU())]).cuda()
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    def train():
        x, y = (torch.randn(4096, 512, device="cuda") for _ in range(2))
        made, wanted = features(generator(x)), features(y)
        loss = sum(F.mse_loss(a, b.detach()) for a, b in zip(made, wanted))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for step in range(3):
        train()
    """,
    )
    assert said is None
