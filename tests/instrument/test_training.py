"""Advice for a training: when it is followed, the peak falls as far as it said."""

from __future__ import annotations

import pytest

from instrument.conftest import Record
from instrument.tools import MIB, kinds
from pyalloc import trace

LAYERS = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential
    def layers(n, width):
        return nn.Sequential(*[m for i in range(n) for m in (nn.Linear(width, width, bias=False), nn.GELU())]).cuda()
"""
ZEROED_LATE = (
    LAYERS
    + """
    model = layers(4, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        BEFORE
        out = model(torch.randn(512, 1024, device="cuda"))
        loss = (out * out).mean()
        AFTER
        loss.backward()
        optimizer.step()
"""
)
FOREACH = (
    LAYERS
    + """
    model = layers(8, 1024)
    optimizer = torch.optim.AdamW(model.parameters()FUSED)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
"""
)
OF_OTHERS = (
    LAYERS
    + """
    class Signed(torch.optim.Optimizer):
        def __init__(self, parameters, foreach):
            super().__init__(parameters, {"lr": 0.1})
            self.groups = [list(parameters)] if foreach else [[each] for each in parameters]
        @torch.no_grad()
        def step(self):
            for group in self.groups:
                signs = torch._foreach_sign([each.grad for each in group])
                torch._foreach_add_(group, signs, alpha=-0.1)
                del signs
    model = layers(24, 512)
    optimizer = Signed(list(model.parameters()), foreach=FOREACH)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()
"""
)
LOGITS = (
    LAYERS
    + """
    body, head = layers(1, 256), nn.Linear(256, 16000, bias=False).cuda()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    targets = torch.zeros(2048, dtype=torch.long, device="cuda")

    def loss_of(hidden, targets):
        return F.cross_entropy(head(hidden).float(), targets)

    for step in range(3):
        optimizer.zero_grad()
        hidden = body(torch.randn(2048, 256, device="cuda"))
        LOSS
        loss.backward()
        optimizer.step()
"""
)
PARTS = "zip(hidden.chunk(8), targets.chunk(8))"
IN_PARTS = f"loss = sum(checkpoint(loss_of, *part, use_reentrant=False) for part in {PARTS})"
SHIFTED = "nll_loss(head(hidden)[:, :-1].log_softmax(-1).flatten(0, 1), targets.flatten())"
NAMED = "out = head(hidden); loss = F.cross_entropy(out, targets)"
BUCKETS = (
    LAYERS
    + """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = nn.parallel.DistributedDataParallel(layers(8, 1024), gradient_as_bucket_view=VIEW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def alone(_, bucket):
        result = torch.futures.Future()
        result.set_result(bucket.buffer())
        return result
    model.register_comm_hook(None, alone)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
)
ACCUMULATED = (
    LAYERS
    + """
    model = layers(4, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        total = 0
        for part in range(4):
            loss = model(torch.randn(4096, 512, device="cuda")).square().mean() / 4
            EACH
        ALL
        optimizer.step()
        optimizer.zero_grad()
"""
)
RETURNED = (
    LAYERS
    + """
    model = layers(8, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    for step in range(4):
        loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
        found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, found):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        DROPPED
"""
)
SEQUENCE = (
    LAYERS
    + """
    model = layers(8, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(8192, 512, device="cuda")
        CALL.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
TWICE = """
    import torch
    from torch import nn
    from torch.nn.utils.parametrizations import spectral_norm
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(512, 512, bias=False) for _ in range(2))
        def forward(self, x):
            return self.b(torch.relu(self.a(x)))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(6))
        def forward(self, x):
            for layer in self.layers:
                x = CALL
            return x
    def normed(n):
        return nn.Sequential(*[m for i in range(n) for m in (spectral_norm(nn.Linear(512, 512)), nn.LeakyReLU())])
    model = MODEL.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def of(x):
        return PASS
    for step in range(3):
        one = of(torch.randn(8192, 512, device="cuda"))
        other = of(torch.randn(8192, 512, device="cuda"))
        (one * other).sum().backward()
        del one, other
        optimizer.step()
        optimizer.zero_grad()
"""
WIDE = TWICE.replace("MODEL", "Net()").replace(
    "(nn.Linear(512, 512, bias=False) for _ in range(2))",
    "nn.Linear(512, 2048), nn.Linear(2048, 512)",
)
ONE_PASS = WIDE.replace('other = of(torch.randn(8192, 512, device="cuda"))', "other = 1")
ATTENTION = """
    import torch
    from torch import nn
    from torch.nn import functional as F
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.drop = nn.Linear(256, 768), nn.Linear(256, 256), nn.Dropout(0.1)
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            if FUSED:
                mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            else:
                weights = (q @ k.mT / 8).softmax(-1)
                weights = self.drop(weights)
                mixed = weights @ v
            return x + self.out(mixed.transpose(1, 2).flatten(2))
    model = nn.Sequential(*[Mix() for _ in range(3)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 1024, 256, device="cuda")).square().mean().backward()
        optimizer.step()
"""
LOADED = (
    LAYERS
    + """
    import io
    model, file = layers(4, 1024), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(fileWHERE)
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
RETAINED = (
    LAYERS
    + """
    model = layers(4, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        out = model(torch.randn(8192, 512, device="cuda"))
        out.square().mean().backward(RETAIN)
        optimizer.step()
"""
)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "program", "before", "after"),
    [
        (
            "zero_grad",
            ZEROED_LATE,
            {"BEFORE": "", "AFTER": "optimizer.zero_grad()"},
            {"BEFORE": "optimizer.zero_grad()", "AFTER": ""},
        ),
        ("foreach", FOREACH, {"FUSED": ""}, {"FUSED": ", fused=True"}),
        ("foreach", OF_OTHERS, {"FOREACH": "True"}, {"FOREACH": "False"}),
        ("logits", LOGITS, {"LOSS": "loss = loss_of(hidden, targets)"}, {"LOSS": IN_PARTS}),
        (
            "logits",
            LOGITS.replace(
                "F.cross_entropy(head(hidden).float(), targets)",
                "-head(hidden).float().log_softmax(-1).gather(-1, targets[:, None]).mean()",
            ),
            {"LOSS": "loss = loss_of(hidden, targets)"},
            {"LOSS": IN_PARTS},
        ),
        # Held by a variable until the next step has made its own, or gone once the loss is there.
        ("logits", LOGITS, {"LOSS": NAMED}, {"LOSS": IN_PARTS}),
        ("logits", LOGITS, {"LOSS": f"{NAMED}; del out"}, {"LOSS": IN_PARTS}),
        # The last position of each row predicts nothing.
        (
            "logits",
            LOGITS.replace("targets = torch.zeros(2048", "targets = torch.zeros(64, 31")
            .replace("2048, 256", "64, 32, 256")
            .replace("cross_entropy(head(hidden).float(), targets)", SHIFTED),
            {"LOSS": "loss = loss_of(hidden, targets)"},
            {"LOSS": IN_PARTS},
        ),
        ("buckets", BUCKETS, {"VIEW": "False"}, {"VIEW": "True"}),
        (
            "one_backward",
            ACCUMULATED,
            {"EACH": "total = total + loss", "ALL": "total.backward()"},
            {"EACH": "loss.backward()", "ALL": ""},
        ),
        (
            "checkpoint",
            SEQUENCE,
            {"CALL": "model(x)"},
            {"CALL": "checkpoint_sequential(model, 4, x, use_reentrant=False)"},
        ),
        (
            "checkpoint",
            TWICE.replace("MODEL", "Net()").replace("PASS", "model(x)"),
            {"CALL": "layer(x)"},
            {"CALL": "checkpoint(layer, x, use_reentrant=False)"},
        ),
        (
            "checkpoint",
            TWICE.replace("MODEL", "normed(4)").replace("CALL", "layer(x)"),
            {"PASS": "model(x)"},
            {"PASS": "checkpoint_sequential(model, 2, x, use_reentrant=False)"},
        ),
        (
            "checkpoint",
            TWICE.replace("MODEL", "nn.Sequential(Net(), nn.Linear(512, 64))").replace(
                "PASS", "model(x)"
            ),
            {"CALL": "layer(x)"},
            {"CALL": "checkpoint(layer, x, use_reentrant=False)"},
        ),
        # One checkpoint makes all layers again at once.
        (
            "checkpoint",
            ONE_PASS,
            {"CALL": "layer(x)", "PASS": "checkpoint(model, x, use_reentrant=False)"},
            {"CALL": "checkpoint(layer, x, use_reentrant=False)", "PASS": "model(x)"},
        ),
        ("attention", ATTENTION, {"FUSED": "False"}, {"FUSED": "True"}),
        ("loaded", LOADED, {"WHERE": ""}, {"WHERE": ', map_location="cpu"'}),
        ("stale", RETAINED, {"RETAIN": "retain_graph=True"}, {"RETAIN": ""}),
        ("stale", RETURNED, {"DROPPED": ""}, {"DROPPED": "del found, gradient"}),
    ],
    ids=[
        *(
            "zero_grad",
            "foreach",
            "another_librarys",
            "logits",
            "log_softmax",
            "logits_held",
            "logits_dropped",
            "logits_shifted",
            "buckets",
            "one_backward",
            "checkpoint",
            "called_twice",
        ),
        *("spectral_norm", "in_a_sequence", "around_all", "attention", "loaded", "stale"),
        "returned",
    ],
)
def test_the_peak_falls_as_said(
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    program: str,
    before: dict[str, str],
    after: dict[str, str],
) -> None:
    # torch 2.15 by default gives cuBLAS's workspace back after each product; backward may then be the peak with it.
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    found, peaks = [], []
    for words in (before, after):
        text = program
        for word, instead in words.items():
            text = text.replace(word, instead)
        path = record(text)
        found.append(kinds(path))
        peaks.append(trace.analyse(path).totals["peak_bytes"])
    said, fell = found[0][kind].saved_bytes or 0, peaks[0] - peaks[1]
    assert fell > 0.05 * peaks[0]
    assert 0.75 * fell <= said <= 1.15 * fell, (said / MIB, fell / MIB)
    assert kind not in found[1]
    assert kind == "zero_grad" or not any("zero_grad" in each for each in found)  # buckets stay


@pytest.mark.torch
@pytest.mark.parametrize(
    ("given", "net", "is_told"),
    [
        ("state", "layers(4, 512)", False),
        ("state.detach()", "layers(4, 512)", True),
        # The layers within are made again in backward, by calls of their own.
        ("state.detach()", "Net()", True),
    ],
)
def test_steps_of_a_recurrent_net_are_no_parts_of_a_batch(
    record: Record, given: str, net: str, is_told: bool
) -> None:
    """Each needs what the one before made, as its input says."""
    path = record(
        LAYERS
        + f"""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers(2, 512) for _ in range(4))
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x
    model = {net}.cuda()
    for step in range(2):
        total, state = 0, torch.randn(4096, 512, device="cuda")
        for part in range(4):
            state = model({given})
            total = total + state.square().mean()
        total.backward()
    """
    )
    assert ("one_backward" in kinds(path)) == is_told


@pytest.mark.torch
@pytest.mark.parametrize(("n_parts", "is_told"), [(4, True), (2, False)])
def test_passes_that_go_on_from_one_another_say_nothing_of_a_run_of_another_length(
    record: Record, n_parts: int, is_told: bool
) -> None:
    path = record(
        LAYERS
        + f"""
    model, other = layers(4, 512), layers(1, 512)
    for step in range(2):
        x = torch.randn(256, 512, device="cuda")
        other(other(x)).mean().backward()
        total = 0
        for part in range({n_parts}):
            total = total + model(torch.randn(8192, 512, device="cuda")).square().mean()
        total.backward()
    """
    )
    assert ("one_backward" in kinds(path)) == is_told


@pytest.mark.torch
def test_steps_of_a_recurrent_net_whose_state_is_a_dictionary(record: Record) -> None:
    path = record(
        LAYERS
        + """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers(4, 512)
        def forward(self, state):
            return {"hidden": [self.layers(state["hidden"][0])]}
    model = Net().cuda()
    for step in range(2):
        total, state = 0, {"hidden": [torch.randn(4096, 512, device="cuda")]}
        for part in range(4):
            state = model(state)
            total = total + state["hidden"][0].square().mean()
        total.backward()
    """
    )
    assert "one_backward" not in kinds(path)


@pytest.mark.torch
def test_a_checkpoint_around_all_of_it_is_not_proposed(record: Record) -> None:
    """Backward would compute everything again at once: the peak of SEQUENCE would stay."""
    text = kinds(record(SEQUENCE.replace("CALL", "model(x)")))["checkpoint"].text
    assert "checkpoint_sequential(sequence, 4, x" in text
    assert "around it" not in text


@pytest.mark.torch
def test_layers_of_two_passes_that_a_checkpoint_is_around_each_of(record: Record) -> None:
    """Around each layer, the pass whose turn comes later would keep what goes from layer to layer."""
    around = WIDE.replace("CALL", "layer(x)").replace(
        "PASS", "checkpoint(model, x, use_reentrant=False)"
    )
    assert "checkpoint" not in kinds(record(around))


@pytest.mark.torch
def test_what_a_function_makes_beside_a_sequence_is_none_of_its_modules(record: Record) -> None:
    path = record(
        LAYERS
        + """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = layers(1, 512)
        def forward(self, x):
            for _ in range(6):
                x = torch.sin(x) + x
            return self.last(x)
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(8192, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    )
    found = kinds(path).get("checkpoint")
    assert found is None or "checkpoint_sequential" not in found.text


@pytest.mark.torch
def test_gradients_that_no_optimizer_steps(record: Record) -> None:
    program = (
        LAYERS
        + """
    teacher, model = [layers(2, 1024), layers(2, 1024)], layers(1, 1024)
    for each in teacher:
        each.requires_grad_(TRAINED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(OTHER, lr=0.1)
    for step in range(4):
        x = torch.randn(256, 1024, device="cuda")
        (model(x) - teacher[0](x) - teacher[1](x)).square().mean().backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    """
    )
    own = "[torch.zeros(1, device='cuda')]"
    found = kinds(record(program.replace("TRAINED", "True").replace("OTHER", own)))
    assert found["unused_gradients"].text.startswith(
        "16.0 MiB of gradients belong to parameters that"
    )
    assert "in Sequential. " in found["unused_gradients"].text  # of both, named once
    # zero_grad() of an optimizer would not clear them.
    assert not found.keys() & {"zero_grad", "checkpoint"}
    for words in (("False", own), ("True", "nn.ModuleList(teacher).parameters()")):
        text = program.replace("TRAINED", words[0]).replace("OTHER", words[1])
        assert "unused_gradients" not in kinds(record(text))


@pytest.mark.torch
def test_gradients_of_a_training_that_is_over_are_old(record: Record) -> None:
    """requires_grad_(False) would not give them back."""
    path = record(
        LAYERS
        + """
    for model in (first := layers(4, 1024), second := layers(4, 1024)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
    """
    )
    assert "unused_gradients" not in kinds(path)


@pytest.mark.torch
def test_gradients_that_backward_is_making_are_not_old(record: Record) -> None:
    """The peak lies in a layer that a checkpoint computes again, when most gradients of this backward exist."""
    path = record(
        LAYERS
        + """
    class Layer(nn.Linear):
        def forward(self, x):
            torch.empty(16 << 20, device="cuda")
            return super().forward(x)
    layers = nn.ModuleList([Layer(1024, 1024) for _ in range(6)]).cuda()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(64, 1024, device="cuda")
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    )
    assert "zero_grad" not in kinds(path)
    assert trace.analyse(path).totals["peak_phase"] == "backward"


@pytest.mark.torch
def test_a_generator_waits_for_its_critics_second_pass(record: Record) -> None:
    """Its passes are no evaluation; the critic's is one, for real input, which it keeps to the next step."""
    program = (
        LAYERS
        + """
    encoder, decoder, critic = layers(3, 512), layers(3, 512), layers(4, 512)
    generates = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    judges = torch.optim.SGD(critic.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4096, 512, device="cuda")
        y = decoder(encoder(x))
        judges.zero_grad()
        (critic(x).mean() - critic(y.detach()).mean()).backward()
        judges.step()
        real, made = CALL(x), critic(y)
        generates.zero_grad()
        (made - real.detach()).square().mean().backward()
        generates.step()
"""
    )
    before = record(program.replace("CALL", "critic"))
    found, peak = kinds(before)["no_grad"], trace.analyse(before).totals["peak_bytes"]
    assert found.text.startswith("A forward pass keeps 64.0 MiB")
    after = record(program.replace("CALL", "torch.no_grad()(critic)"))
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    assert 0.5 * fell <= (found.saved_bytes or 0) <= 1.02 * fell
    assert "no_grad" not in kinds(after)
