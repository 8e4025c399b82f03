"""Streams, optimizers, distributions, reinforcement learning, graphs, speech, and a long mixture."""

from __future__ import annotations

import torch
from torch import nn

from .common import Gpt, Run, next_token_loss, tokens, train_step, workload


@workload("PowerSpherical mixture KL, eager: broadcast products of 1 GB and more")
def powerspherical(run: Run) -> None:
    """log-density of L samples under M components at T places, and the mixture's logsumexp."""
    dim = 128
    for number in run.steps(40):
        run.step(number)
        m, t, n = run.rng.randint(32, 128), run.rng.randint(64, 256), run.rng.randint(32, 128)
        loc = torch.empty(m, t, dim).cuda().requires_grad_()
        kappa = torch.empty(m, t).cuda().requires_grad_()
        sample = torch.empty(n, t, dim).cuda()
        unit = loc / loc.norm(dim=-1, keepdim=True)
        alpha = kappa + (dim - 1) / 2
        beta = torch.full_like(kappa, (dim - 1) / 2)
        log_c = -(
            (alpha + beta) * 0.69 + torch.lgamma(alpha) - torch.lgamma(alpha + beta) + beta * 1.14
        )
        inner = (sample[:, None] * unit[None]).sum(-1)
        log_p = log_c[None] + kappa[None] * torch.log1p(inner)
        loss = torch.logsumexp(log_p, 1).mean() - log_p.mean()
        loss.backward()


def pipeline(run: Run, n_streams: int, n_steps: int) -> None:
    """Batches prepared on side streams, used on the main one, results copied out on others."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    streams = [torch.cuda.Stream() for _ in range(n_streams - 1)]
    main = torch.cuda.current_stream()
    waiting: list[tuple[torch.Tensor, torch.cuda.Stream]] = []
    for number in run.steps(n_steps):
        run.step(number)
        while len(waiting) < 2 * len(streams):
            stream = streams[len(waiting) % len(streams)]
            with torch.cuda.stream(stream):
                raw = torch.empty(run.rng.randint(512, 6000), 2048, device="cuda")
                ready = (raw - raw.mean(0)) * 0.5
                waiting.append((ready, stream))
        batch, stream = waiting.pop(0)
        main.wait_stream(stream)
        batch.record_stream(main)
        output = model(batch)
        train_step(model, optimizer, output.square().mean())
        side = run.rng.choice(streams)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            summary = output.detach().softmax(-1)
            output.record_stream(side)
            del summary
        del batch, output


@workload("two streams with record_stream")
def streams2(run: Run) -> None:
    """Prefetch and compute."""
    pipeline(run, 2, 60)


@workload("three streams with record_stream")
def streams3(run: Run) -> None:
    """Prefetch, compute, copy out."""
    pipeline(run, 3, 60)


@workload("ten streams with record_stream")
def streams10(run: Run) -> None:
    """Nine side streams, each with memory of its own."""
    pipeline(run, 10, 80)


@workload("wide layers, Adam's state first appears at step 1")
def late_state(run: Run) -> None:
    """Gradients are accumulated throughout step 0, so the state is created when freed activations have left holes."""
    model = nn.Sequential(
        nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 8192), nn.GELU(), nn.Linear(8192, 4096)
    )
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for number in run.steps(30):
        run.step(number)
        batch = torch.empty(run.rng.randint(1000, 9000), 4096).cuda()
        loss = model(batch).square().mean()
        if number == 0:
            loss.backward()
            continue
        train_step(model, optimizer, loss)


@workload("a long mixture: five small models trained in turn, over a million operations")
def mixture(run: Run) -> None:
    """Models of different kinds share a process for many steps; now and then one is replaced."""
    models = [Gpt(256, 4, 4, 2000).cuda() for _ in range(3)]
    adams = [torch.optim.AdamW(model.parameters()) for model in models]
    mlp = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU()))
    ).cuda()
    conv = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(6))).cuda()
    others = [
        (mlp, torch.optim.SGD(mlp.parameters(), lr=0.1)),
        (conv, torch.optim.Adam(conv.parameters())),
    ]
    for number in run.steps(900):
        run.step(number)
        if number % 150 == 149:
            which = run.rng.randrange(3)
            models[which] = Gpt(
                run.rng.choice([192, 256, 320]), 4, run.rng.randint(3, 6), 2000
            ).cuda()
            adams[which] = torch.optim.AdamW(models[which].parameters())
        for model, adam in zip(models, adams, strict=True):
            ids = tokens(run.rng.randint(1, 16), run.rng.randint(16, 200))
            train_step(model, adam, next_token_loss(model(ids), ids))
        batch = torch.empty(run.rng.randint(64, 8192), 512).cuda()
        train_step(others[0][0], others[0][1], mlp(batch).square().mean())
        side = run.rng.randint(16, 128)
        train_step(
            others[1][0], others[1][1], conv(torch.empty(4, 16, side, side).cuda()).square().mean()
        )


@workload("reinforcement learning: long rollouts kept, then several epochs over parts of them")
def ppo(run: Run) -> None:
    """Rollouts of many small tensors, stacked, then mini-batches."""
    policy = nn.Sequential(
        nn.Linear(376, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 18)
    ).cuda()
    adam = torch.optim.Adam(policy.parameters())
    for number in run.steps(6):
        run.step(number)
        rollout = []
        with torch.no_grad():
            for _ in range(run.rng.randint(64, 192)):
                seen = torch.empty(1024, 376, device="cuda")
                rollout.append((seen, policy(seen).softmax(-1)))
        seen = torch.cat([a for a, _ in rollout])
        acted = torch.cat([b for _, b in rollout])
        del rollout
        for _ in range(3):
            index = torch.randperm(seen.shape[0]).cuda()
            for part in index.split(16384):
                ratio = policy(seen[part]).softmax(-1) / acted[part]
                train_step(policy, adam, -ratio.clamp(0.8, 1.2).mean())


@workload("graph network, nodes and edges differ from graph to graph")
def graphs(run: Run) -> None:
    """Gather, message, scatter; sizes over two orders of magnitude."""
    width = 256
    layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(6)).cuda()
    head = nn.Linear(width, 40).cuda()
    parts = nn.ModuleList([layers, head])
    adam = torch.optim.Adam(parts.parameters())
    for number in run.steps(40):
        run.step(number)
        nodes = int(2 ** run.rng.uniform(9, 15.5))
        edges = int(nodes * run.rng.uniform(2, 9))
        source, target = (torch.randint(nodes, (edges,)).cuda() for _ in range(2))
        x = torch.empty(nodes, width).cuda()
        for layer in layers:
            message = torch.relu(layer(torch.cat([x[source], x[target]], -1)))
            x = x + torch.zeros_like(x).index_add(0, target, message)
        train_step(parts, adam, head(x).square().mean())


@workload("speech: convolutions, transformer, CTC-like head, utterances sorted into buckets")
def speech(run: Run) -> None:
    """Long inputs, strong reduction, batches of very different shapes; validation in between."""
    front = nn.Sequential(
        nn.Conv1d(80, 512, 5, stride=2), nn.GELU(), nn.Conv1d(512, 512, 5, stride=2), nn.GELU()
    ).cuda()
    trunk = Gpt(512, 8, 10, 64).cuda()
    head = nn.Linear(512, 5000).cuda()
    parts = nn.ModuleList([front, trunk, head])
    adam = torch.optim.AdamW(parts.parameters())

    def logits(frames: int, batch: int) -> torch.Tensor:
        x = front(torch.empty(batch, 80, frames).cuda()).transpose(1, 2)
        for block in trunk.blocks:
            x = block(x)
        return head(x).log_softmax(-1)

    for number in run.steps(14):
        run.step(number)
        frames = run.rng.choice([300, 500, 900, 1400, 2400])
        train_step(
            parts, adam, logits(frames + run.rng.randint(0, 99), max(1, 14000 // frames)).mean()
        )
        if number % 5 == 4:
            with torch.no_grad():
                for _ in range(3):
                    logits(run.rng.randint(200, 2600), 4).argmax(-1)


@workload("training and serving in turn, cached memory given back between them")
def trimmed(run: Run) -> None:
    """torch.cuda.empty_cache() at every change of phase, as careful scripts do."""
    model = Gpt(512, 8, 8, 8000).cuda()
    adam = torch.optim.AdamW(model.parameters())
    for number in run.steps(8):
        run.step(number)
        for _ in range(2):
            ids = tokens(8, run.rng.randint(64, 512))
            train_step(model, adam, next_token_loss(model(ids), ids))
        torch.cuda.empty_cache()
        with torch.no_grad():
            for _ in range(4):
                model(tokens(run.rng.randint(1, 48), run.rng.randint(32, 400))).argmax(-1)
        torch.cuda.empty_cache()
