"""Training programs invented from a seed: a model, what it keeps for backward, and its author's habits.

None was looked at when a constant of the allocator was chosen.  They request sizes in the order that training does
(transformers, convolutions, recurrence, odd models), but are not recordings: torch is not involved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.workloads.generated import MIB, Operation, log_size
from pyalloc.traces.moments import rounded

#: streams by number: where the model runs, where inputs arrive, where gradients are exchanged
MODEL, INPUT, EXCHANGE = range(3)
LEAST_PEAK, MOST_PEAK = 100 * MIB, 40 * 1024 * MIB
MOST_OPERATIONS = 60_000


@dataclass(frozen=True)
class Layer:
    """Bytes of its weights, and of each tensor it keeps per sample: times length, and times length squared."""

    weights: tuple[int, ...]
    kept: tuple[tuple[float, float], ...]
    is_recurrent: bool = False  # keeps each tensor once per eight steps of the sequence

    def sizes(self, batch: int, length: int) -> list[int]:
        """Bytes of the tensors kept for a batch."""
        found = [
            max(1, int(batch * (line * length + square * length * length)))
            for line, square in self.kept
        ]
        return [max(1, s // length) for s in found] * (length // 8) if self.is_recurrent else found


@dataclass(frozen=True)
class Habits:
    """What differs from one author to another."""

    batch: int
    length: int
    varies: str
    n_steps: int
    n_accumulated: int
    optimizer: str
    is_checkpointed: bool
    keeps_gradients: bool
    frees_in_any_order: bool
    routes_at_random: bool
    has_workspaces: bool
    has_second_copy: bool
    exchanges: bool
    prefetches: bool
    evaluates_every: int
    saves_every: int
    holds_every: int
    n_queued: int

    @staticmethod
    def draw(rng: random.Random) -> Habits:
        """Draws habits at random, usual ones more often."""
        return Habits(
            batch=rng.choice((2, 4, 8, 16, 32)),
            length=rng.choice((64, 128, 256, 512, 1024)),
            varies=rng.choice(
                ("no", "no", "length", "length", "batch", "both", "rising", "buckets")
            ),
            n_steps=rng.choice((12, 20, 30)),
            n_accumulated=rng.choice((1, 1, 1, 4)),
            optimizer=rng.choice(("sgd", "momentum", "adam", "adam", "adapters")),
            is_checkpointed=rng.random() < 0.25,
            keeps_gradients=rng.random() < 0.3,
            frees_in_any_order=rng.random() < 0.3,
            routes_at_random=rng.random() < 0.15,
            has_workspaces=rng.random() < 0.6,
            has_second_copy=rng.random() < 0.15,
            exchanges=rng.random() < 0.2,
            prefetches=rng.random() < 0.4,
            evaluates_every=rng.choice((0, 0, 5, 9)),
            saves_every=rng.choice((0, 0, 0, 7)),
            holds_every=rng.choice((0, 0, 0, 1, 2)),
            n_queued=rng.choice((0, 0, 0, 0, 0, 0, 5)),
        )


def transformer(rng: random.Random, n: int, width: int, item: int) -> list[Layer]:
    """Attention, with or without its probabilities kept, and two products of four times the width."""
    row = width * item
    square = max(1, width // 64) * item if rng.random() < 0.5 else 0
    kept: list[tuple[float, float]] = [(part * row, 0.0) for part in (3, 1, 1, 4, 4, 1)]
    kept += [(0.0, square)] if square else []
    weights = (3 * width * row, width * row, 4 * width * row, 4 * width * row, row, row, 4 * row)
    return [Layer(weights, tuple(kept))] * n


def convolutions(rng: random.Random, n: int, width: int, item: int) -> list[Layer]:
    """Five stages: channels double while the picture halves."""
    layers = []
    for i in range(n):
        stage = 5 * i // n
        channels = (width // 8) << stage
        weights = (9 * channels * channels * item, channels * item, channels * item)
        pixels = channels * item / 4**stage
        layers.append(Layer(weights, ((0.0, pixels),) * rng.choice((2, 3, 4))))
    return layers


def recurrence(rng: random.Random, n: int, width: int, item: int) -> list[Layer]:
    """Small tensors for every few steps of the sequence."""
    kept = ((4.0 * width * item, 0.0),) * rng.choice((1, 2))
    return [Layer((8 * width * width * item, 8 * width * item), kept, is_recurrent=True)] * n


def odd(rng: random.Random, n: int, width: int, item: int) -> list[Layer]:
    """Layers that are all different."""
    return [
        Layer(
            tuple(log_size(rng, 1024, 32 * MIB) for _ in range(rng.randint(1, 5))),
            tuple(
                (rng.choice((8, 16, 100, 333, width)) * item, 0.0) for _ in range(rng.randint(1, 6))
            ),
        )
        for _ in range(n)
    ]


MODELS = (transformer, transformer, convolutions, recurrence, odd)


@dataclass
class Training:
    """The requests of one program, as they are made."""

    rng: random.Random
    layers: list[Layer]
    habits: Habits
    vocabulary: int  # bytes of a row of logits, which is kept for each position
    operations: list[Operation] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    live_bytes: int = 0
    peak_bytes: int = 0
    n_blocks: int = 0
    gradients: dict[int, list[int]] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)

    @property
    def weights(self) -> list[int]:
        """Bytes of each weight, layer by layer."""
        return [size for layer in self.layers for size in layer.weights]

    def alloc(self, size: int, stream: int = MODEL) -> int:
        """Allocates a block."""
        block = self.n_blocks
        self.n_blocks += 1
        self.live[block] = rounded(size)
        self.live_bytes += self.live[block]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.operations.append(("alloc", block, size, stream))
        return block

    def free(self, *blocks: int) -> None:
        """Frees blocks in this order."""
        for block in blocks:
            self.live_bytes -= self.live.pop(block)
            self.operations.append(("free", block))

    def passing(self, sizes: list[int]) -> None:
        """Allocates blocks of all these sizes, then frees them."""
        self.free(*[self.alloc(size) for size in sizes])

    def kept_by(self, number: int, batch: int, length: int) -> list[int]:
        """Bytes of the tensors that a layer keeps this time."""
        sizes = self.layers[number].sizes(batch, length)
        if self.habits.routes_at_random:
            sizes = [max(1, int(size * self.rng.uniform(0.3, 1.7))) for size in sizes]
        return sizes

    def forward(self, batch: int, length: int) -> list[tuple[int, list[int], list[int]]]:
        """Runs forward; for each layer: its number, the sizes of its tensors, and the blocks it keeps."""
        saved = []
        for number in range(len(self.layers)):
            sizes = self.kept_by(number, batch, length)
            blocks = []
            for i, size in enumerate(sizes):
                workspace = (
                    self.alloc(size // 2 + 1) if self.habits.has_workspaces and i % 2 == 0 else None
                )
                blocks.append(self.alloc(size))
                if workspace is not None:
                    self.free(workspace)
            if self.habits.is_checkpointed and number % 4 != 3:
                self.free(*blocks[:-1])
                blocks = blocks[-1:]
            saved.append((number, sizes, blocks))
        return saved

    def backward(self, saved: list[tuple[int, list[int], list[int]]], gradient: int) -> None:
        """Runs backward, from the last layer to the first, and frees what they kept."""
        for number, sizes, blocks in reversed(saved):
            again = [self.alloc(size) for size in sizes[: len(sizes) - len(blocks)]]
            for size in reversed(sizes):
                following = self.alloc(size)
                self.free(gradient)
                gradient = following
            self.weigh(number)
            done = again + blocks
            if self.habits.frees_in_any_order:
                self.rng.shuffle(done)
            self.free(*done)
        self.free(gradient)

    def weigh(self, number: int) -> None:
        """Makes the gradients of a layer's weights; adds them to existing ones."""
        if self.habits.optimizer == "adapters":
            sizes = [size // 64 + 512 for size in self.layers[number].weights[:2]]
        else:
            sizes = list(self.layers[number].weights)
        blocks = [self.alloc(size) for size in sizes]
        if self.habits.exchanges:
            bucket = self.alloc(sum(sizes), EXCHANGE)
            self.operations += [("record", block, EXCHANGE) for block in blocks]
            self.free(bucket)
        if number in self.gradients:
            self.free(*blocks)
        else:
            self.gradients[number] = blocks

    def shape(self, step: int) -> tuple[int, int]:
        """The number of samples of this step, and their length."""
        batch, length = self.habits.batch, self.habits.length
        varies = self.habits.varies
        if varies in ("length", "both"):
            length = self.rng.randint(length // 8, length)
        if varies == "buckets":
            length = length * self.rng.randint(1, 4) // 4
        if varies == "rising":
            length = max(8, length * (step + 1) // self.habits.n_steps)
        if varies in ("batch", "both"):
            batch = self.rng.randint(max(1, batch // 2), batch)
        if varies == "no" and step % 10 == 9:
            batch = max(1, batch // 3)
        return batch, length

    def learn(self, batch: int, length: int) -> None:
        """One forward and backward."""
        stream = INPUT if self.habits.prefetches else MODEL
        given = self.alloc(batch * length * 512, stream)
        if stream != MODEL:
            self.operations.append(("record", given, MODEL))
        saved = self.forward(batch, length)
        logits = self.alloc(batch * length * self.vocabulary)
        gradient = self.alloc(batch * length * self.vocabulary)
        self.free(logits)
        self.backward(saved, gradient)
        self.free(given)

    def update(self, is_first: bool) -> None:
        """The optimizer's step; the first creates its state."""
        weights = self.weights
        n_states = {"momentum": 1, "adam": 2}.get(self.habits.optimizer, 0)
        if is_first:
            for size in weights * n_states:
                self.alloc(size)
        if n_states == 2:
            for first in range(0, len(weights), 16):
                self.passing(weights[first : first + 16])
        if not self.habits.keeps_gradients:
            for blocks in self.gradients.values():
                self.free(*blocks)
            self.gradients.clear()

    def evaluate(self) -> None:
        """Five forwards, keeping only what the next layer reads."""
        for _ in range(5):
            length = self.rng.randint(self.habits.length // 4, self.habits.length)
            before: list[int] = []
            for number in range(len(self.layers)):
                blocks = [self.alloc(s) for s in self.kept_by(number, self.habits.batch, length)]
                self.free(*before, *blocks[:-1])
                before = blocks[-1:]
            self.passing([self.habits.batch * length * self.vocabulary])
            self.free(*before)

    def linger(self, step: int) -> None:
        """Allocates blocks that outlive the step."""
        habits = self.habits
        if habits.holds_every and step % habits.holds_every == 0:
            self.alloc(self.rng.choice((512, 4096, 65_536)))
        if habits.n_queued:
            self.queue.append(self.alloc(habits.batch * 256 * 1024))
            if len(self.queue) > habits.n_queued:
                self.free(self.queue.pop(0))

    def run(self) -> None:
        """Runs the whole program."""
        habits = self.habits
        for size in self.weights * (1 + habits.has_second_copy):
            self.alloc(size)
        for step in range(habits.n_steps):
            for _ in range(habits.n_accumulated):
                self.learn(*self.shape(step))
            self.update(is_first=step == 0)
            self.linger(step)
            if habits.evaluates_every and step % habits.evaluates_every == 4:
                self.evaluate()
            if habits.saves_every and step % habits.saves_every == 6:
                self.passing(self.weights)


def invent(seed: int) -> Training | None:
    """The program of this seed; None if it is too small, too large or too long to be of interest."""
    rng = random.Random(seed)
    habits = Habits.draw(rng)
    item = rng.choice((2, 4, 4))
    width = rng.choice((256, 512, 768, 1024, 1536, 2048))
    layers = rng.choice(MODELS)(rng, rng.choice((6, 12, 24, 40)), width, item)
    vocabulary = item * rng.choice((10, 1000, 32_000, 50_257))
    if vocabulary > 1000 * item:  # an embedding table for the words
        layers = [Layer((vocabulary * width,), ((float(width * item), 0.0),)), *layers]
    training = Training(rng, layers, habits, vocabulary)
    training.run()
    is_fit = LEAST_PEAK <= training.peak_bytes <= MOST_PEAK
    return training if is_fit and len(training.operations) <= MOST_OPERATIONS else None
