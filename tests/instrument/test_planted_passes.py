"""Forward passes that keep tensors for a backward that never comes, and such as only look so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from instrument.conftest import Record
from instrument.tools import LOOP, MIB, Plan, kinds
from pyalloc import trace


@pytest.mark.torch
@pytest.mark.parametrize(
    ("batch", "keep"), [(256, "out = {}"), (8192, "out = {}"), (4096, "outs.append({}.mean())")]
)
def test_forgotten_no_grad(record: Record, batch: int, keep: str) -> None:
    """With small batches, the peak is the training's and stays."""
    call = keep.format(f'model(torch.randn({batch}, 512, device="cuda"))')
    program = LOOP + f"""
    outs = []
    for step in range(3):
        train_step(torch.randn(1024, 512, device="cuda"))
    for step in range(4):
        GUARD
            {call}
    """  # fmt: skip
    before = record(program.replace("GUARD", "if True:"))
    found, peak = kinds(before)["no_grad"], trace.analyse(before).totals["peak_bytes"]
    assert "4 forward passes" in found.text and "no_grad" in found.text
    assert batch == 256 or "checkpoint" not in kinds(before)
    after = record(program.replace("GUARD", "with torch.no_grad():"))
    assert "no_grad" not in kinds(after)
    fell = peak - trace.analyse(after).totals["peak_bytes"]
    assert found.saved_bytes is not None and 0.85 * fell <= found.saved_bytes <= 1.02 * fell
    assert ("lies elsewhere and would not change" in found.text) == (batch == 256)


@pytest.mark.torch
@pytest.mark.parametrize("allocator", ["native", "pyalloc"])
def test_graphed_callables_have_a_backward(record: Record, allocator: str) -> None:
    """By torch.autograd.grad, which is no phase: neither their warm-ups nor their capture is an evaluation."""
    path = record(
        """
        import torch
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
        x = torch.randn(1024, 512, device="cuda", requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(model, (x,))
        for step in range(3):
            graphed(torch.randn(1024, 512, device="cuda")).sum().backward()
        """,
        "--allocator",
        allocator,
    )
    assert "no_grad" not in kinds(path)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_backward_that_is_no_phase(plan: Plan, evaluates: bool) -> None:
    """Updates by hand, and an evaluation after them."""
    for number in range(6):
        forward(plan, number, [4, 4, 4])
        if number < 3 or not evaluates:
            plan.event("alloc", addr=1 << 20, bytes=MIB)  # on one of autograd's threads
            plan.event("free_requested", addr=1 << 20)
        dropped(plan, number, range(3))
    found = kinds(plan.done())
    assert ("no_grad" in found) == evaluates
    assert not evaluates or found["no_grad"].text.startswith("3 forward passes in a row")


def test_forgotten_no_grad_in_a_phase_of_the_programs_own(plan: Plan) -> None:
    for i in range(4):
        outer = "eval" if i < 3 else "backward"  # the last forward is a checkpoint's
        for name in (outer, "forward"):
            plan.event("phase_begin", name)
        for j in range(3):
            plan.event("alloc", addr=(10 * i + j + 1) << 24, bytes=MIB, stack=plan.stack(7))
        for name in ("forward", outer):
            plan.event("phase_end", name)
    # The last of a run may belong to the step whose backward follows.
    assert "2 forward passes" in kinds(plan.done())["no_grad"].text


def forward(plan: Plan, number: int, sizes: Sequence[int]) -> None:
    """A pass that keeps blocks of so many MiB."""
    plan.event("phase_begin", "forward")
    for i, size in enumerate(sizes):
        address = (10 * number + i + 1) << 30
        plan.event("alloc", addr=address, bytes=size * MIB, stack=plan.stack(7))
    plan.event("phase_end", "forward")


def dropped(plan: Plan, number: int, places: Sequence[int]) -> None:
    """What lies at these places, of what that pass kept."""
    for i in places:
        plan.event("free_requested", addr=(10 * number + i + 1) << 30)


def test_every_evaluation_without_no_grad_counts(plan: Plan) -> None:
    """One after each epoch: the peak falls only if all of them keep nothing."""
    for _ in range(3):
        for number in range(4):
            forward(plan, number, [4, 4, 4])
        for number in range(4):
            dropped(plan, number, (2, 1, 0))
        forward(plan, 4, [1])
        plan.event("phase_begin", "backward")
        dropped(plan, 4, [0])
        plan.event("phase_end", "backward")
    found = kinds(plan.done())["no_grad"]
    assert found.text.startswith("4 forward passes in a row keep 12.0 MiB each")
    assert found.saved_bytes == 44 * MIB  # what the running operation needs stays


@pytest.mark.parametrize(("graphs_go", "saved"), [(True, 32), (False, 112)])
def test_what_passes_return_stays_without_gradients(
    plan: Plan, graphs_go: bool, saved: int
) -> None:
    """Whether a list holds it detached, beside the last pass's graph, or with all graphs."""
    for number in range(6):
        forward(plan, number, [4, 8, 8, 2])
        if graphs_go and number:
            dropped(plan, number - 1, (2, 1, 0))
    for number in range(6):
        if number == 5 or not graphs_go:
            dropped(plan, number, (2, 1, 0))
        dropped(plan, number, [3])
    found = kinds(plan.done())["no_grad"]
    assert found.saved_bytes == saved * MIB


def test_what_passes_keep_beside_the_training_that_follows_counts_each_time(plan: Plan) -> None:
    """As the log-probabilities that a policy's rollouts collect; one step of the peak, the other a little lower."""
    for _ in range(3):
        for number in range(4):
            dropped(plan, number, (2, 1, 0))
        for number in range(4):
            forward(plan, number, [4, 4, 4])
        for size in 8, 6:
            forward(plan, 4, [size])
            plan.event("phase_begin", "backward")
            dropped(plan, 4, [0])
            plan.event("phase_end", "backward")
            plan.event("phase_begin", "optimizer")
            plan.event("phase_end", "optimizer")
    found = kinds(plan.done())["no_grad"]
    assert found.text.startswith("4 forward passes in a row keep 12.0 MiB each")
    assert found.saved_bytes == 48 * MIB  # of 56: what training itself takes stays


def test_a_graph_that_is_kept_for_some_steps_each_time(plan: Plan) -> None:
    """A hidden state that is detached at every third step only: the peak comes again and again."""
    plan.event("user", "retain_graph=True")
    for step in range(9):
        plan.event("step", "step", arg=step)
        for number in range(3):
            forward(plan, 3 * (step % 3) + number, [4, 4, 4])
        plan.event("phase_begin", "backward")
        plan.event("alloc", addr=1 << 45, bytes=MIB)
        plan.event("free_requested", addr=1 << 45)
        plan.event("phase_end", "backward")
        plan.event("phase_begin", "optimizer")
        plan.event("phase_end", "optimizer")
        for number in range(9 if step % 3 == 2 else 0):
            dropped(plan, number, range(3))
    found = kinds(plan.done())
    assert "no_grad" not in found
    assert (
        found["retain_graph"].saved_bytes == 48 * MIB
    )  # of two steps, but for the last pass of each


def test_results_that_are_dropped_at_once_are_not_kept_for_backward(plan: Plan) -> None:
    """As of the last layer, called by itself for a part of the rows at a time in a checkpoint."""
    for _ in range(3):
        forward(plan, 0, [4, 4, 4, 4])
        for number in range(1, 9):
            forward(plan, number, [4])
            dropped(plan, number, [0])
        plan.event("phase_begin", "backward")
        dropped(plan, 0, range(4))
        plan.event("phase_end", "backward")
        plan.event("alloc", addr=1 << 40, bytes=100 * MIB)  # the peak, of something else
        plan.event("free_requested", addr=1 << 40)
    assert "no_grad" not in kinds(plan.done())


@pytest.mark.parametrize(("depth", "is_told"), [(6, True), (4, False)])
def test_passes_of_two_models_are_no_parts_of_a_batch(
    plan: Plan, depth: int, is_told: bool
) -> None:
    """A generator and its critic, both an nn.Sequential and called in one line."""
    plan.event("step", "step")
    for number, n_layers in enumerate((6, depth)):
        plan.event("phase_begin", "forward")
        for layer in range(n_layers):
            plan.event("phase_begin", f"module:{layer}")
            address = (10 * number + layer + 1) << 30
            plan.event("alloc", addr=address, bytes=4 * MIB, stack=plan.stack(7))
            plan.event("phase_end", f"module:{layer}")
        plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=1 << 40, bytes=MIB)
    for number, n_layers in ((1, depth), (0, 6)):
        dropped(plan, number, range(n_layers))
    plan.event("phase_end", "backward")
    assert ("one_backward" in kinds(plan.done())) == is_told


def test_what_a_pass_frees_itself_is_not_kept(plan: Plan) -> None:
    for number in range(3):
        plan.event("phase_begin", "forward")
        for i in range(3):
            address = (10 * number + i + 1) << 30
            plan.event("alloc", addr=address, bytes=4 * MIB, stack=plan.stack(7))
        plan.event("alloc", addr=1 << 40, bytes=16 * MIB, stack=plan.stack(8))
        plan.event("free_requested", addr=1 << 40)
        plan.event("phase_end", "forward")
    assert kinds(plan.done())["no_grad"].saved_bytes == 32 * MIB  # all but what is at work


def test_an_output_that_a_variable_holds_is_not_kept_for_backward(plan: Plan) -> None:
    """Like a generator's, large beside the activations of a discriminator."""
    for _ in range(3):
        forward(plan, 0, [40, 1, 1])
        forward(plan, 1, [2, 2, 2])
        forward(plan, 2, [2, 2, 2])
        plan.event("phase_begin", "backward")
        dropped(plan, 0, [1, 2])
        for number in (1, 2):
            dropped(plan, number, range(3))
        plan.event("phase_end", "backward")
        dropped(plan, 0, [0])
    assert "no_grad" not in kinds(plan.done())


def test_a_generator_is_kept_for_its_own_loss(plan: Plan) -> None:
    """The discriminator's backward no longer goes through it: fake.detach()."""
    for _ in range(3):
        # The generator, and the discriminator for real and for generated input.
        for number in range(3):
            forward(plan, number, [4, 4, 4, 4])
        plan.event("phase_begin", "backward")
        for number in (1, 2):
            dropped(plan, number, range(4))
        plan.event("phase_end", "backward")
        plan.event("phase_begin", "optimizer")
        plan.event("phase_end", "optimizer")
        forward(plan, 3, [4, 4, 4, 4])
        plan.event("phase_begin", "backward")
        for number in (0, 3):
            dropped(plan, number, range(4))
        plan.event("phase_end", "backward")
    assert "no_grad" not in kinds(plan.done())


@pytest.mark.parametrize(("size", "kept"), [(4, "A forward pass keeps 20.0 MiB for"), (1, "")])
def test_a_pass_whose_output_is_detached_at_once(plan: Plan, size: int, kept: str) -> None:
    """Like a generator's, while its critic trains, of which both passes have a backward.

    A single one is told only where the peak lies beside it.
    """
    for _ in range(3):
        forward(plan, 0, [size] * 5)
        dropped(plan, 0, range(4))  # the output stays
        for number in (1, 2):
            forward(plan, number, [2, 1, 1])
        plan.event("phase_begin", "backward")
        for number in (1, 2):
            dropped(plan, number, range(3))
        plan.event("phase_end", "backward")
        dropped(plan, 0, [4])
    found = kinds(plan.done())
    assert ("no_grad" in found) == bool(kept)
    if kept:
        assert found["no_grad"].text.startswith(kept)
        assert "is detached" in found["no_grad"].text
        assert found["no_grad"].saved_bytes == 8 * MIB  # to the critic's passes beside the output


def test_an_evaluation_before_a_training_step_is_not_kept_for_it(plan: Plan) -> None:
    """The backward of the step frees its own pass, not the evaluation's."""
    for _ in range(3):
        for number in range(4):
            forward(plan, number, [4, 4, 4, 4])
        plan.event("phase_begin", "backward")
        dropped(plan, 3, range(4))
        plan.event("phase_end", "backward")
        plan.event("phase_begin", "optimizer")
        plan.event("phase_end", "optimizer")
        forward(plan, 4, [4, 4, 4, 4])
        plan.event("phase_begin", "backward")
        dropped(plan, 4, range(4))
        plan.event("phase_end", "backward")
        for number in range(3):
            dropped(plan, number, range(4))
    assert kinds(plan.done())["no_grad"].text.startswith("3 forward passes in a row")


def test_outputs_that_a_list_holds_are_not_kept_for_backward(plan: Plan) -> None:
    """A small net has few other blocks beside each."""
    for _ in range(3):
        for number in range(4):
            forward(plan, number, [4, 4, 1])
        plan.event("phase_begin", "backward")
        for number in range(4):
            dropped(plan, number, [0, 1])
        plan.event("phase_end", "backward")
        for number in range(4):
            dropped(plan, number, [2])
    assert "no_grad" not in kinds(plan.done())


def test_nothing_is_made_again_for_a_backward_that_never_comes(plan: Plan) -> None:
    for i in range(6):
        plan.event("phase_begin", "forward")
        for j in range(5):
            stack = plan.stack(7, "run")
            plan.event(
                "alloc", addr=(i % 2 * 10 + j + 1) << 30, bytes=(8 + (i == 3)) * MIB, stack=stack
            )
        plan.event("phase_end", "forward")
        if i:
            for j in range(5):
                plan.event("free_requested", addr=((i - 1) % 2 * 10 + j + 1) << 30)
    assert kinds(plan.done()).keys() == {"no_grad"}  # no checkpoint


def test_passes_whose_backward_comes_at_the_end_are_not_called_idle(plan: Plan) -> None:
    """Like the steps of a recurrent net, or the three parts of one loss."""
    for i in range(4):
        plan.event("phase_begin", "forward")
        for j in range(3):
            plan.event("alloc", addr=(10 * i + j + 1) << 24, bytes=MIB, stack=plan.stack(7))
        plan.event("phase_end", "forward")
    plan.event("phase_begin", "backward")
    plan.event("alloc", addr=1 << 40, bytes=20 * MIB)
    for i in range(4):
        for j in range(3):
            plan.event("free_requested", addr=(10 * i + j + 1) << 24)
    plan.event("phase_end", "backward")
    assert "no_grad" not in kinds(plan.done())
