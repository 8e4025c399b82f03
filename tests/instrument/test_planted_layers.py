"""Activations that checkpoints would save, told by the layers of a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, Plan, kinds
from pyalloc import trace
from pyalloc.analysis import checkpoints
from pyalloc.analysis.advice import advise
from pyalloc.analysis.meaning import in_all_layers, layers_of
from pyalloc.common import units


def test_what_a_function_makes_once_and_keeps_is_in_no_checkpoints_way(plan: Plan) -> None:
    """Like the workspace of cuBLASLt, which torch 2.9 made at a layer's first product."""
    for i in range(3):
        plan.event("phase_begin", "forward")
        for j in range(5):
            stack = plan.stack(7, "run")
            plan.event("alloc", addr=(j + 1) << 30, bytes=8 * MIB, stack=stack)
            if i == j == 0:
                plan.event("alloc", addr=1 << 40, bytes=MIB, stack=stack)
        plan.event("phase_end", "forward")
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=1 << 41, bytes=(4 if i else 5) * MIB)
        for address in (1 << 41, *((j + 1) << 30 for j in range(5))):
            plan.event("free_requested", addr=address)
        plan.event("phase_end", "backward")
    assert kinds(plan.done())["checkpoint"].saved_bytes == 33 * MIB


@pytest.mark.torch
@pytest.mark.parametrize(
    ("result", "step", "context"),
    [
        ("x + {}", "{}", ""),
        ("{}", "x + {}", ""),  # what the layer returns is added up and dropped
        # What it returns is dropped once the next layer has it in half precision.
        ("{}.float()", "{}", "with torch.autocast('cuda', dtype=torch.bfloat16): "),
        # torch's code for a default device is around each call.
        (
            "x + {}",
            "{}",
            "with torch.device('cuda'), torch.autocast('cuda', dtype=torch.bfloat16): ",
        ),
    ],
    ids=["residual", "residual_outside", "cast", "default_device"],
)
def test_checkpoints_save_what_is_said(
    record: Record, result: str, step: str, context: str
) -> None:
    program = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

        def forward(self, x):
            return RESULT

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = CALL
            return x

    model = Model().cuda()
    for _ in range(2):
        CONTEXT loss = model(torch.ones(4096, 256, device="cuda")).square().mean()
        loss.backward()
        model.zero_grad()
    """
    normed = "x" if context else "self.norm(x)"
    inside = f"self.down(nn.functional.gelu(self.up({normed})))"
    program = program.replace("RESULT", result.format(inside)).replace("CONTEXT ", context)
    program = program.replace("CALL", step.format("CALL"))
    before = record(program.replace("CALL", "layer(x)"))
    found, peak = kinds(before)["checkpoint"], trace.analyse(before).totals["peak_bytes"]
    after = record(program.replace("CALL", "checkpoint(layer, x, use_reentrant=False)"))
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    assert 0.9 * fell < (found.saved_bytes or 0) <= 1.05 * fell
    assert "checkpoint" not in kinds(after)


@pytest.mark.parametrize("is_called_in_turns", [True, False])
def test_calls_of_layers_are_counted_by_what_they_make(
    plan: Plan, is_called_in_turns: bool
) -> None:
    """A line makes two blocks in a call: a copy in half precision and a result.  Two calls each, of other sizes."""
    sizes = (8, 16), (12, 24)
    calls = [(layer, n) for n in range(2) for layer in range(4)]
    for layer, n in calls if is_called_in_turns else sorted(calls):
        plan.event("phase_begin", "forward")
        plan.event("phase_begin", f"module:layers.{layer}.up")
        for i, size in enumerate(sizes[n if is_called_in_turns else 0]):
            address = (100 + 20 * layer + 10 * n + i) << 30
            plan.event("alloc", addr=address, bytes=size * MIB, stack=plan.stack(7))
        plan.event("phase_end", f"module:layers.{layer}.up")
        plan.event("phase_end", "forward")
    analysis = trace.analyse(plan.done())
    members = {
        f"layers.{layer}": [b for b in analysis.peak.blocks if b.module == f"layers.{layer}.up"]
        for layer in range(4)
    }
    assert checkpoints._passes(members, analysis) == 2
    once = {
        layer: sorted(blocks, key=lambda b: b.alloc_event)[:2] for layer, blocks in members.items()
    }
    assert checkpoints._passes(once, analysis) == 1


@pytest.mark.parametrize("phase", ["forward", "inference"])
def test_a_librarys_model_is_told_by_its_layers(plan: Plan, phase: str) -> None:
    """One line of the user's own allocated all of it, so the line alone says nothing."""
    library = "/venv/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py"
    own = plan.stack(7, "main")
    texts = [plan.writer.string(text) for text in ("Layer.forward", library)]
    stacks = {line: plan.writer.stack(own, *texts, line) for line in (20, 30)}
    plan.event("phase_begin", phase)
    for layer in range(4):
        for line, module in ((20, "attention"), (30, "output.0")):
            name = f"module:encoder.layer.{layer}.{module}"
            plan.event("phase_begin", name)
            address = (layer + 1) << 32 | line << 24
            plan.event("alloc", addr=address, bytes=line * MIB, stack=stacks[line])
            plan.event("phase_end", name)
    plan.event("phase_end", phase)
    path = plan.done()
    found = kinds(path).get("checkpoint")
    assert (found is None) == (phase == "inference")  # which has no backward
    if found is not None:
        assert found.text.startswith(
            "Activations in the 4 modules encoder.layer.* hold 200.0 MiB at the peak, at most 50.0 MiB in one of them. "
            "model.gradient_checkpointing_enable() would"
        )
        assert found.saved_bytes == 60 * MIB  # what goes into the next layer stays, and one layer's
    analysis = trace.analyse(path)
    rows = [(row.name, row.bytes >> 20) for row in analysis.by_module(analysis.peak.blocks)]
    assert rows == [("encoder.layer.*.output.0", 120), ("encoder.layer.*.attention", 80)]
    (line, _) = analysis.by_line(analysis.peak.blocks)
    assert line.name == "me/model.py:7 main > bert/modeling_bert.py:30 Layer.forward"


def test_a_librarys_line_is_told_where_no_line_is_the_users(plan: Plan) -> None:
    """As when a checkpoint makes a layer again on a thread of autograd's."""
    packages = "/venv/lib/python3.11/site-packages"
    stack = 0
    for name, file, line in (
        ("Layer.forward", f"{packages}/transformers/models/bert/modeling_bert.py", 20),
        ("forward", f"{packages}/torch/nn/modules/linear.py", 134),
    ):
        texts = [plan.writer.string(text) for text in (name, file)]
        stack = plan.writer.stack(stack, *texts, line)
    for phase in ("forward", "module:encoder.layer.3.mlp"):
        plan.event("phase_begin", phase)
    plan.event("alloc", addr=1 << 30, bytes=20 * MIB, stack=stack)
    analysis = trace.analyse(plan.done())
    (line,) = analysis.by_line(analysis.peak.blocks)
    assert line.name == "bert/modeling_bert.py:20 Layer.forward"
    (maker,) = analysis.by_maker(analysis.peak.blocks)
    assert maker.name == "activations: encoder.layer.*"


def _layers_of_a_library(
    plan: Plan, layers: Sequence[str], library: str, sizes: tuple[int, int] = (20, 30)
) -> None:
    """Each layer keeps so many MiB of its inside and its output."""
    file = f"/venv/lib/python3.11/site-packages/{library}/models/unet.py"
    texts = [plan.writer.string(text) for text in ("Layer.forward", file)]
    stacks = [plan.writer.stack(plan.stack(7, "main"), *texts, line) for line in (20, 30)]
    for i, layer in enumerate(layers):
        for j, part in enumerate(("in", "out")):
            plan.event("phase_begin", f"module:{layer}.{part}")
            address = (2 * i + j + 1) << 30
            plan.event("alloc", addr=address, bytes=sizes[j] * MIB, stack=stacks[j])
            plan.event("phase_end", f"module:{layer}.{part}")


def test_checkpoints_are_for_layers_not_for_the_operators_beside_them(plan: Plan) -> None:
    """A ResNet as an nn.Sequential: its layers come after a convolution and before a pooling layer."""
    plan.event("phase_begin", "forward")
    for n, module in enumerate(("0.0", "0.1.a", "0.1.b", "0.2.a", "0.2.b", "1.0")):
        plan.event("phase_begin", f"module:{module}")
        plan.event("alloc", addr=(n + 1) << 30, bytes=40 * MIB, stack=plan.stack(n))
        plan.event("phase_end", f"module:{module}")
    plan.event("phase_end", "forward")
    told = kinds(plan.done())["checkpoint"].text
    assert told.startswith("Activations in the 2 modules 0.* hold 160.0 MiB at the peak")


def test_a_norm_at_the_end_of_a_layer_is_its_output_not_what_it_keeps_besides(plan: Plan) -> None:
    """A batch norm makes its output and then the means and deviations, as in a ResNet, whose shortcut has one, too."""
    parts = (("conv", 20 * MIB), ("norm", 30 * MIB), ("norm", 512), ("shortcut", 512))
    plan.event("phase_begin", "forward")
    for layer in range(4):
        for n, (part, n_bytes) in enumerate(parts):
            plan.event("phase_begin", f"module:layer1.{layer}.{part}")
            address = (4 * layer + n + 1) << 30
            plan.event("alloc", addr=address, bytes=n_bytes, stack=plan.stack(len(part)))
            plan.event("phase_end", f"module:layer1.{layer}.{part}")
    plan.event("phase_end", "forward")
    told = kinds(plan.done())["checkpoint"]
    assert told.saved_bytes is not None
    assert told.saved_bytes // MIB == 60  # three of what convolutions make


@pytest.mark.parametrize(
    ("story", "saved"),
    [
        ("a20 b25 c30", 3 * 45),
        # Added up outside: the sum stays, and the last layer is made again when it is gone.
        ("a20 b25 c30 x30 -c", 4 * 45),
        ("a20 ~c b25 c30", 3 * (45 - 30)),  # freed in the next layer, whose input it is
        ("a20 b30 c30 -c", 3 * 20),  # a shortcut, added to what is returned
    ],
)
def test_a_checkpoint_keeps_what_goes_in_and_what_comes_out(
    plan: Plan, story: str, saved: int
) -> None:
    """Each of four layers makes so many MiB (x: a function does), frees (-), and frees what the last one made (~)."""
    alive: dict[tuple[int, str], int] = {}
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    for layer, word in itertools.product(range(4), story.split()):
        if word[0] in "-~":
            made = alive.pop((layer - (word[0] == "~"), word[1]), None)
            if made is not None:
                plan.event("free_requested", addr=made)
            continue
        module = f"module:layers.{layer}.{word[0]}"
        if word[0] != "x":
            plan.event("phase_begin", module)
        address = alive[layer, word[0]] = (plan.time + 1) << 20
        n_bytes = int(word[1:]) * MIB
        plan.event("alloc", addr=address, bytes=n_bytes, stack=plan.stack(ord(word[0])))
        if word[0] != "x":
            plan.event("phase_end", module)
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    for address in reversed(alive.values()):
        plan.event("free_requested", addr=address)
    plan.event("phase_end", "backward")
    found = advise(trace.analyse(plan.done()))
    assert [each.saved_bytes for each in found if "layers.*" in each.text] == [saved * MIB]


def stack_through(plan: Plan, *calls: tuple[str, str]) -> int:
    """A stack of main() and what it calls in libraries: names, and modules' files."""
    stack = plan.stack(7, "main")
    for name, file in calls:
        path = f"/venv/lib/python3.11/site-packages/{file}.py"
        stack = plan.writer.stack(stack, plan.writer.string(name), plan.writer.string(path), 20)
    return stack


def test_layers_of_all_stages_are_told_together(plan: Plan) -> None:
    """As in a ResNet: no stage holds enough by itself.  What is around them is not a sequence, either."""
    stack = stack_through(
        plan,
        ("ResNet.forward", "torchvision/models/resnet"),
        ("Sequential.forward", "torch/nn/modules/container"),
        ("Bottleneck.forward", "torchvision/models/resnet"),
    )
    plan.event("alloc", addr=1 << 40, bytes=200 * MIB, stack=plan.stack(8))
    plan.event("phase_begin", "forward")
    for n, module in enumerate(
        f"net.layer{n // 2}.{n % 2}.{part}" for n in range(8) for part in "ab"
    ):
        plan.event("phase_begin", f"module:{module}")
        plan.event("alloc", addr=(n + 1) << 30, bytes=10 * MIB, stack=stack)
        plan.event("phase_end", f"module:{module}")
    plan.event("phase_end", "forward")
    (told,) = (each for each in advise(trace.analyse(plan.done())) if each.kind == "checkpoint")
    assert told.text.startswith(
        "Activations in the 8 modules net.layer*.* hold 160.0 MiB at the peak, at most 20.0 MiB in one of them. "
        "torch.utils.checkpoint around each would"
    )
    assert told.saved_bytes == 70 * MIB


@pytest.mark.parametrize(("creates_graph", "held"), [(True, 90), (False, 180)])
def test_checkpoints_save_nothing_of_a_pass_that_is_differentiated_twice(
    plan: Plan, creates_graph: bool, held: int
) -> None:
    """As by a gradient penalty: its backward pass makes again what the second one needs, which then stays."""
    plan.event("user", f"create_graph={creates_graph}")
    plan.event("step", "step")
    for at in (10, 30):
        plan.event("phase_begin", "forward")
        for n in range(9):
            plan.event("phase_begin", f"module:net.{n}")
            plan.event("alloc", addr=(at + n) << 30, bytes=10 * MIB, stack=plan.stack(7))
            plan.event("phase_end", f"module:net.{n}")
        plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=1 << 30, bytes=10 * MIB)
    plan.event("phase_end", "backward")
    plan.event("phase_begin", "backward")
    for address in (1, *range(38, 29, -1), *range(18, 9, -1)):
        plan.event("free_requested", addr=address << 30)
    plan.event("phase_end", "backward")
    told = kinds(plan.done())["checkpoint"].text
    assert told.startswith(f"Activations in the 9 modules net.* hold {held}.0 MiB at the peak.")


def test_what_a_librarys_module_makes_inside_a_sequence_is_no_module_of_it(plan: Plan) -> None:
    stack = stack_through(
        plan, ("forward", "torch/nn/modules/container"), ("Layer.forward", "library/layers")
    )
    for n in range(9):
        plan.event("alloc", addr=(n + 1) << 30, bytes=10 * MIB, stack=stack)
    told = kinds(plan.done())["checkpoint"].text
    assert told.startswith("9 activations of Layer.forward hold 90.0 MiB at the peak.")


@pytest.mark.parametrize(
    ("layers", "sizes", "named"),
    [
        (["down.0", "down.1", "up.0", "up.1"], (20, 30), "down.*, up.*"),
        # Around up.0 as a whole it would be made again as a whole.
        (
            ["down.0.net.0", *(f"up.0.net.{i}" for i in range(6))],
            (20, 30),
            "up.0.net.*, down.0.net.0",
        ),
        (["a.0", "a.1", "a.2", "b.0", "c.0", "d.0", "e.0"], (20, 30), "a.*, b.0, c.0 and 2 more"),
        # Layers within layers, because they save about as much.
        ([f"a.{i // 4}.b.{i % 4}" for i in range(24)], (40, 1), "a.*.b.*"),
    ],
)
def test_a_librarys_switch_is_for_all_layers_of_the_model(
    plan: Plan, layers: list[str], sizes: tuple[int, int], named: str
) -> None:
    plan.event("phase_begin", "forward")
    _layers_of_a_library(plan, layers, "diffusers", sizes)
    plan.event("phase_end", "forward")
    n, each = len(layers), sum(sizes)
    items = [item for item in advise(trace.analyse(plan.done())) if item.kind == "checkpoint"]
    assert [item.saved_bytes for item in items] == [(n - 1) * sizes[0] * MIB]
    assert items[0].text.startswith(
        f"Activations in the {n} modules {named} hold {units.size(n * each * MIB)} at the peak, at most {each}.0 MiB "
        "in one of them. model.enable_gradient_checkpointing() would"
    )


@pytest.mark.parametrize(("later", "spared"), [(60, 4), (0, 3)])
def test_the_last_layer_is_not_made_again_while_the_logits_are_there(
    plan: Plan, later: int, spared: int
) -> None:
    """Only when backward has done with what was made after it, which may be most of the peak."""
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    _layers_of_a_library(plan, [f"layers.{i}" for i in range(4)], "transformers")
    if later:
        plan.event("alloc", addr=64 << 30, bytes=later * MIB, stack=plan.stack(8))
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=65 << 30, bytes=later * MIB or MIB)
    if later:
        plan.event("free_requested", addr=64 << 30)
    plan.event("free_requested", addr=65 << 30)
    for address in range(8, 0, -1):
        plan.event("free_requested", addr=address << 30)
    plan.event("phase_end", "backward")
    assert kinds(plan.done())["checkpoint"].saved_bytes == spared * 20 * MIB


@pytest.mark.parametrize("n_layers", [1, 4])
def test_the_sequences_of_several_layers_are_not_one(plan: Plan, n_layers: int) -> None:
    """Layers that are called one by one, each a model of its own, have an nn.Sequential each."""
    stack = plan.stack(7, "FF.forward")
    for name, file in ("forward", "container"), ("forward", "linear"):
        path = f"/venv/lib/python3.11/site-packages/torch/nn/modules/{file}.py"
        stack = plan.writer.stack(stack, *map(plan.writer.string, (name, path)), 9)
    plan.event("step", "step")
    for layer in range(n_layers):
        plan.event("phase_begin", "forward")
        for i in range(8):
            plan.event("phase_begin", f"module:seq.part{chr(97 + i)}")
            plan.event("alloc", addr=(10 * layer + i + 1) << 30, bytes=8 * MIB, stack=stack)
            plan.event("phase_end", f"module:seq.part{chr(97 + i)}")
        plan.event("phase_end", "forward")
    plan.event("alloc", addr=1 << 40, bytes=MIB)
    plan.event("phase_begin", "backward")
    for layer in reversed(range(n_layers)):
        for i in reversed(range(8)):
            plan.event("free_requested", addr=(10 * layer + i + 1) << 30)
    plan.event("phase_end", "backward")
    told = kinds(plan.done())["checkpoint"].text
    assert ("checkpoint_sequential" in told) == (n_layers == 1)
    assert ("activations of FF.forward" in told) == (n_layers > 1)


def test_modules_that_advice_is_for_have_a_star_where_they_differ() -> None:
    assert checkpoints._family(["0.4.1", "0.5.1", "0.5.0"]) == "0.*.*"
    assert checkpoints._family(["layers.0", "layers.1"]) == "layers.*"
    assert checkpoints._family(["0", "1"]) == "*"
    assert checkpoints._family(["mid.resnets.0"]) == "mid.resnets.0"
    assert checkpoints._family(["layer1.0", "layer10.1", "layer10.0"]) == "layer*.*"


@pytest.mark.parametrize(
    ("module", "everywhere", "layers"),
    [
        ("layers.3.mlp.fc1", "layers.*.mlp.fc1", "layers.*"),
        ("up.1.blocks.20.norm", "up.*.blocks.*.norm", "up.*"),
        (
            "0.model.layer.3.norm",
            "*.model.layer.*.norm",
            "0.model.layer.*",
        ),  # the only one in a sequence
        ("0.model.1.norm", "*.model.*.norm", "0.model.*"),
        ("0.conv", "*.conv", "*"),
        ("net.0", "net.0", "net.*"),
        ("layer1.fc", "layer1.fc", ""),
        ("", "", ""),
    ],
)
def test_names_of_numbered_modules(module: str, everywhere: str, layers: str) -> None:
    shared = {"layers", "up", "up.1.blocks", "0.model.layer"}
    assert (in_all_layers(module), layers_of(module, shared)) == (everywhere, layers)


def test_layers_in_a_sequence_of_other_things_are_told(plan: Plan) -> None:
    """As in sentence-transformers, whose model is an nn.Sequential of a transformer and a pooling layer."""
    library = "/venv/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py"
    texts = [plan.writer.string(text) for text in ("Layer.forward", library)]
    stack = plan.writer.stack(plan.stack(7, "main"), *texts, 20)
    plan.event("phase_begin", "forward")
    for n, module in enumerate(("0.model.layer.0.mlp", "0.model.layer.1", "1")):
        plan.event("phase_begin", f"module:{module}")
        plan.event("alloc", addr=(n + 1) << 30, bytes=(20, 20, 1)[n] * MIB, stack=stack)
        plan.event("phase_end", f"module:{module}")
    analysis = trace.analyse(plan.done())
    assert [row.name for row in analysis.by_maker(analysis.peak.blocks)] == [
        "activations: 0.model.layer.*, in main",
        "activations: *, in main",
    ]


@pytest.mark.parametrize(
    ("name", "category", "n", "made_in", "expected"),
    [
        ("run", "activations", 3, 2, False),
        ("run", "activations", 4, 2, True),
        ("run", "parameters", 4, 2, False),
        ("run", "activations", 4, 1, True),  # and kept for the step of the peak
        ("run", "activations", 4, 0, False),  # something else keeps what is older
        ("MultiheadAttention", "activations", 4, 2, True),
    ],
)
def test_four_tensors_of_a_function_are_enough(
    plan: Plan, name: str, category: str, n: int, made_in: int, expected: bool
) -> None:
    for step in range(3):
        plan.event("step", "step", arg=step)
        if step == made_in:
            plan.event("phase_begin", "forward")
            for i in range(n):
                plan.event("alloc", addr=(i + 1) << 30, bytes=20 * MIB, stack=plan.stack(7, name))
                plan.event("category", category, addr=(i + 1) << 30)
            plan.event("phase_end", "forward")
    plan.event("alloc", addr=1 << 40, bytes=MIB, stack=plan.stack(8))
    found = kinds(plan.done()).get("checkpoint")
    assert (found is not None) == expected
    if found is not None:
        assert found.saved_bytes == 60 * MIB
        assert ("pyalloc.ops has fused attention" in found.text) == (name != "run")


@pytest.mark.parametrize(
    ("name", "n_lines", "expected"),
    [
        ("run", 2, "4 activations of run hold 80.0 MiB at the peak. torch.utils.checkpoint around it would"),
        ("<module>", 1, "4 activations of me/model.py:7 <module> hold 80.0 MiB"),
        ("<module>", 2, "4 activations of me/model.py:7 <module> and other lines hold 80.0 MiB"),
        ("<lambda>", 1, "4 activations of me/model.py:7 <lambda> hold 80.0 MiB"),
    ],
)  # fmt: skip
def test_what_is_made_outside_of_functions_is_told_by_its_lines(
    plan: Plan, name: str, n_lines: int, expected: str
) -> None:
    """No checkpoint goes around a whole script."""
    stacks = [plan.stack(7 + i, name) for i in range(n_lines)]
    plan.event("phase_begin", "forward")
    for i in range(4):
        plan.event("alloc", addr=(i + 1) << 30, bytes=20 * MIB, stack=stacks[i % n_lines])
    plan.event("phase_end", "forward")
    plan.event("alloc", addr=1 << 40, bytes=MIB, stack=plan.stack(20))
    told = kinds(plan.done())["checkpoint"].text
    assert told.startswith(expected)
    assert ("torch.utils.checkpoint around each call there would" in told) == (name != "run")


def test_a_librarys_model_of_a_snapshot_is_told_by_its_functions(plan: Plan) -> None:
    """Without marks of modules, as in torch's own history."""
    packages = "/venv/lib/python3.11/site-packages"

    def stack(*frames: tuple[str, str]) -> int:
        number = plan.stack(7, "main")
        for name, file in frames:
            texts = [plan.writer.string(text) for text in (name, f"{packages}/{file}")]
            number = plan.writer.stack(number, *texts, 20)
        return number

    model, linear = "timm/models/vision_transformer.py", "torch/nn/modules/linear.py"
    made = stack(("VisionTransformer.__init__", model), ("__init__", linear))
    kept = stack(("Attention.forward", model), ("forward", linear))
    plan.event("alloc", addr=1 << 32, bytes=10 * MIB, stack=made)
    for i in range(5):
        plan.event("alloc", addr=(i + 2) << 32, bytes=20 * MIB, stack=kept)
    path = plan.done()
    told = kinds(path)["checkpoint"].text
    assert told.startswith(
        "5 activations of Attention.forward hold 100.0 MiB at the peak. model.set_grad_checkpointing() would recompute"
    )
    assert "pyalloc.ops" not in told  # which that model cannot call
    analysis = trace.analyse(path)
    rows = {row.name: row.bytes >> 20 for row in analysis.by_category(analysis.peak.blocks)}
    assert rows == {"activations": 100, "parameters": 10}


def test_the_parts_of_one_sequence_stay_apart(plan: Plan) -> None:
    for i, size in enumerate((30, 20, 10)):
        plan.event("phase_begin", f"module:{i}")
        plan.event("alloc", addr=(i + 1) << 30, bytes=size * MIB, stack=plan.stack(7))
        plan.event("phase_end", f"module:{i}")
    path = plan.done()
    analysis = trace.analyse(path)
    assert [row.name for row in analysis.by_module(analysis.peak.blocks)] == ["0", "1", "2"]
    assert "checkpoint" not in kinds(path)


@pytest.mark.parametrize("file", ["flex_attention", "auto_functionalize"])
def test_scores_of_flex_attention_that_is_not_compiled_are_told(plan: Plan, file: str) -> None:
    """Compiled, it is one kernel, and this file of torch's makes nothing."""
    stack = stack_through(plan, ("sdpa_dense", f"torch/_higher_order_ops/{file}"))
    plan.event("step", "step")
    plan.event("phase_begin", "forward")
    plan.event("alloc", addr=1 << 30, bytes=100 * MIB, stack=plan.stack(7))
    for n in range(3):
        plan.event("alloc", addr=(n + 2) << 30, bytes=60 * MIB, stack=stack)
        plan.event("alloc", addr=(n + 7) << 30, bytes=10 * MIB, stack=plan.stack(8))
        plan.event("free_requested", addr=(n + 2) << 30)
    plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    for n in range(2):
        plan.event("alloc", addr=(n + 12) << 30, bytes=60 * MIB, stack=stack)
    for n in range(2):
        plan.event("free_requested", addr=(n + 12) << 30)
    plan.event("phase_end", "backward")
    found = kinds(plan.done()).get("flex_attention")
    assert (found and found.saved_bytes) == (120 * MIB if file == "flex_attention" else None)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_only_layers_that_a_checkpoint_is_around_get_their_own(plan: Plan, n_layers: int) -> None:
    """In place of one around a layer, checkpoints around experts in it would keep the rest of the layer."""
    checkpoint = "/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py"
    inside, result = (plan.stack(line, "recompute_fn", checkpoint) for line in (7, 8))
    plan.event("step", "step")
    for name in ("forward", "backward"):
        plan.event("phase_begin", name)
        if name == "forward":
            plan.event("phase_end", name)
    plan.event("phase_begin", "forward")
    for i in range(8):
        module = f"module:layers.{i * n_layers // 8}.experts.{i}.up"
        plan.event("phase_begin", module)
        plan.event("alloc", addr=(i + 1) << 30, bytes=20 * MIB, stack=inside)
        plan.event("alloc", addr=(i + 21) << 30, bytes=MIB, stack=result)
        plan.event("phase_end", module)
    plan.event("phase_end", "forward")
    for i in reversed(range(8)):
        plan.event("free_requested", addr=(i + 1) << 30)
        plan.event("free_requested", addr=(i + 21) << 30)
    plan.event("phase_end", "backward")
    found = kinds(plan.done()).get("checkpoint")
    assert (found is not None) == (n_layers > 1)
    assert found is None or "instead of the one around all of them" in found.text
