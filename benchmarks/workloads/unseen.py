"""Loops recorded after the allocator's constants were chosen, to see whether they hold for other programs."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .common import Block, Gpt, Run, next_token_loss, tokens, train_step, workload


def pooled(trunk: Gpt, ids: torch.Tensor) -> torch.Tensor:
    """Mean of the last hidden states, shape (batch, width)."""
    x = trunk.embed(ids)
    for block in trunk.blocks:
        x = block(x)
    return trunk.norm(x).mean(1)


@workload(
    "contrastive pairs: two towers, representations first without gradients, then again in parts"
)
def contrastive(run: Run) -> None:
    """A large batch whose gradient passes through the similarity matrix, then through one part after the other."""
    text = Gpt(384, 6, 6, 8000).cuda()
    image = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(64, 192, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(192, 384, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).cuda()
    towers = nn.ModuleList([text, image])
    adam = torch.optim.AdamW(towers.parameters())
    for number in run.steps(24):
        run.step(number)
        parts = [run.rng.randint(8, 77) for _ in range(run.rng.randint(3, 6))]
        captions = [tokens(64, length, 8000) for length in parts]
        side = run.rng.choice([160, 192, 224])
        pictures = [torch.empty(64, 3, side, side).cuda() for _ in parts]
        with torch.no_grad():
            left = torch.cat([pooled(text, ids) for ids in captions])
            right = torch.cat([image(picture) for picture in pictures])
        left, right = (x.requires_grad_() for x in (left, right))
        likeness = left @ right.T
        target = torch.arange(len(likeness)).cuda()
        nn.functional.cross_entropy(likeness, target).backward()
        adam.zero_grad(set_to_none=True)
        for ids, picture, by_text, by_image in zip(
            captions, pictures, left.grad.split(64), right.grad.split(64), strict=True
        ):
            pooled(text, ids).backward(by_text)
            image(picture).backward(by_image)
        adam.step()


@workload(
    "distillation: a large teacher without gradients, a student, a copy of it that follows slowly"
)
def distillation(run: Run) -> None:
    """Teacher logits are kept for a few batches; the student's moving average is evaluated."""
    teacher = Gpt(1024, 16, 12, 16000).cuda()
    student = Gpt(512, 8, 6, 16000).cuda()
    average = copy.deepcopy(student)
    adam = torch.optim.AdamW(student.parameters())
    for number in run.steps(16):
        run.step(number)
        kept = []
        with torch.no_grad():
            for _ in range(run.rng.randint(2, 4)):
                ids = tokens(run.rng.randint(2, 6), run.rng.randint(100, 512), 16000)
                kept.append((ids, teacher(ids).log_softmax(-1)))
        for ids, wanted in kept:
            own = student(ids)
            soft = nn.functional.kl_div(
                own.log_softmax(-1), wanted, log_target=True, reduction="batchmean"
            )
            train_step(student, adam, soft + next_token_loss(own, ids))
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if number % 4 == 3:
            with torch.no_grad():
                average(tokens(4, run.rng.randint(200, 700), 16000)).argmax(-1)


@workload("beam search: caches that grow by a step and are sorted anew, requests come and go")
def beam_search(run: Run) -> None:
    """At every step keys and values of each layer are gathered by beam, and the newest appended."""
    width, beams = 768, 6
    layers = nn.ModuleList(Block(width, 12) for _ in range(8)).cuda()
    head = nn.Linear(width, 24000).cuda()
    requests: list[tuple[int, list[torch.Tensor]]] = []
    with torch.no_grad():
        for number in run.steps(160):
            run.step(number)
            if len(requests) < 5 and run.rng.random() < 0.5:
                prompt = run.rng.randint(20, 700)
                caches = [torch.empty(2, beams, prompt, width).cuda() for _ in layers]
                requests.append((run.rng.randint(10, 90), caches))
            going = []
            for left, caches in requests:
                x = torch.empty(beams, 1, width).cuda()
                order = torch.zeros(beams, dtype=torch.long).cuda()
                grown = []
                for layer, cache in zip(layers, caches, strict=True):
                    query, key, value = layer.qkv(layer.norm1(x)).chunk(3, -1)
                    joined = torch.cat([cache[:, order], torch.stack([key, value])], 2)
                    scores = query @ joined[0].transpose(-1, -2)
                    x = x + layer.out(scores.softmax(-1) @ joined[1])
                    x = x + layer.mlp(layer.norm2(x))
                    grown.append(joined)
                head(x).log_softmax(-1).flatten().topk(beams)
                if left > 1:
                    going.append((left - 1, grown))
            requests = going


@workload(
    "super-resolution: growing crops, a perceptual loss of a frozen network, full images in between"
)
def super_resolution(run: Run) -> None:
    """Crops grow from phase to phase; every few steps, whole images of any size run without gradients."""
    body = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *(
            layer
            for _ in range(12)
            for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2, inplace=True))
        ),
        nn.Conv2d(64, 48, 3, padding=1),
        nn.PixelShuffle(4),
    ).cuda()
    judge = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1)
    ).cuda()
    judge.requires_grad_(False)
    adam = torch.optim.Adam(body.parameters())
    for number in run.steps(48):
        run.step(number)
        side = (32, 48, 64, 96)[number // 12]
        small = torch.empty(16, 3, side, side).cuda()
        large = torch.empty(16, 3, 4 * side, 4 * side).cuda()
        made = body(small)
        loss = (made - large).abs().mean() + (judge(made) - judge(large)).square().mean()
        train_step(body, adam, loss)
        if number % 6 == 5:
            with torch.no_grad():
                for _ in range(4):
                    body(
                        torch.empty(1, 3, run.rng.randint(64, 400), run.rng.randint(64, 400)).cuda()
                    )
