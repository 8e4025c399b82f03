"""Language models: GPT in six forms, seq2seq, decoding with a cache, mixture of experts, an LSTM."""

from __future__ import annotations

import torch
from torch import nn

from .common import Block, Gpt, Run, next_token_loss, tokens, train_step, workload

VOCABULARY = 16000


@workload("GPT, batch 8, length 512, AdamW")
def gpt_fixed(run: Run) -> None:
    """The same shapes at each step."""
    model = Gpt(1024, 16, 12, VOCABULARY).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(8):
        run.step(number)
        ids = tokens(8, 512)
        train_step(model, optimizer, next_token_loss(model(ids), ids))


@workload("GPT, batch and length vary from step to step")
def gpt_varying(run: Run) -> None:
    """Batches filled to about the same number of tokens."""
    model = Gpt(1024, 16, 12, VOCABULARY).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(14):
        run.step(number)
        length = run.rng.randint(64, 768)
        ids = tokens(max(1, 4096 // length), length)
        train_step(model, optimizer, next_token_loss(model(ids), ids))


@workload("GPT with activation checkpointing, varying lengths")
def gpt_checkpointed(run: Run) -> None:
    """Activations of a block are recomputed in backward."""
    model = Gpt(1024, 16, 16, VOCABULARY, checkpoint=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(10):
        run.step(number)
        ids = tokens(8, run.rng.randint(128, 768))
        train_step(model, optimizer, next_token_loss(model(ids), ids))


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features)."""
        return self.base(x) + self.up(self.down(x))


@workload("GPT, LoRA fine-tuning in bfloat16, varying lengths")
def gpt_lora(run: Run) -> None:
    """Frozen weights, small trained ones."""
    model = Gpt(1536, 16, 16, VOCABULARY).cuda().bfloat16().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Lora(block.qkv, 8).bfloat16()
        block.out = Lora(block.out, 8).bfloat16()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for number in run.steps(10):
        run.step(number)
        ids = tokens(4, run.rng.randint(100, 900))
        train_step(model, optimizer, next_token_loss(model(ids), ids))


@workload("GPT, four micro-batches of varying length to a step")
def gpt_accumulate(run: Run) -> None:
    """Gradients stay alive between backward passes."""
    model = Gpt(1024, 16, 12, VOCABULARY).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(5):
        run.step(number)
        optimizer.zero_grad(set_to_none=True)
        for _ in range(4):
            ids = tokens(4, run.rng.randint(128, 640))
            (next_token_loss(model(ids), ids) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Attention(nn.Module):
    """Additive attention over encoder states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(2 * width, width, bias=False)
        self.query = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """query: (batch, width); keys, values: (batch, time, ...); returns (batch, 2 width)."""
        scores = self.score(torch.tanh(self.query(query)[:, None] + keys)).squeeze(-1)
        return (scores.softmax(-1)[:, None] @ values).squeeze(1)


@workload("GRU encoder and decoder with additive attention, varying lengths, Adam")
def seq2seq(run: Run) -> None:
    """The forum model with sentences of 10 to 50 words."""
    width, embedding, vocabulary, batch = 1000, 500, 30000, 80
    with torch.backends.cudnn.flags(enabled=False):
        embed = nn.Embedding(vocabulary, embedding).cuda()
        encoder = nn.GRU(embedding, width, batch_first=True, bidirectional=True).cuda()
        attention = Attention(width).cuda()
        cell = nn.GRUCell(embedding + 2 * width, width).cuda()
        head = nn.Linear(width, vocabulary).cuda()
        parts = nn.ModuleList([embed, encoder, attention, cell, head])
        optimizer = torch.optim.Adam(parts.parameters())
        for number in run.steps(9):
            run.step(number)
            source = tokens(batch, run.rng.randint(10, 50))
            target = tokens(batch, run.rng.randint(10, 50))
            values, _ = encoder(embed(source))
            keys = attention.key(values)
            state = values[:, -1, :width]
            outputs = []
            for t in range(target.shape[1]):
                context = attention(state, keys, values)
                state = cell(torch.cat([embed(target[:, t]), context], -1), state)
                outputs.append(head(state))
            logits = torch.stack(outputs, 1)
            loss = nn.functional.cross_entropy(logits.reshape(-1, vocabulary), target.reshape(-1))
            train_step(parts, optimizer, loss)


@workload("decoding with a KV cache, requests come and go")
def decode(run: Run) -> None:
    """Each request's cache grows by concatenation, in blocks of its own, and is freed with the request."""
    layers, heads, size = 3, 32, 64
    width = heads * size
    model = Gpt(width, heads, layers, VOCABULARY).cuda().half().requires_grad_(False)
    caches: list[list[torch.Tensor]] = []
    left: list[int] = []
    with torch.no_grad():
        for number in run.steps(70):
            run.step(number)
            while len(caches) < 24 and run.rng.random() < 0.5:
                prompt = run.rng.randint(16, 700)
                x = model.embed(tokens(1, prompt))
                caches.append([])
                for block in model.blocks:
                    caches[-1].append(
                        block.qkv(block.norm1(x)).view(prompt, 3, heads, size)[:, 1:].clone()
                    )
                    x = block(x)
                left.append(run.rng.randint(8, 60))
            for request in range(len(caches) - 1, -1, -1):
                x = model.embed(tokens(1, 1))
                for layer, block in enumerate(model.blocks):
                    q, k, v = block.qkv(block.norm1(x)).view(1, 3, heads, size).unbind(1)
                    grown = torch.cat([caches[request][layer], torch.stack([k, v], 1)])
                    caches[request][layer] = grown
                    keys, values = grown.unbind(1)
                    scores = torch.einsum("qhd,khd->hqk", q, keys).softmax(-1)
                    y = torch.einsum("hqk,khd->qhd", scores, values).reshape(1, 1, width)
                    x = x + block.out(y)
                    x = x + block.mlp(block.norm2(x))
                model.head(model.norm(x)).argmax(-1)
                left[request] -= 1
                if left[request] == 0:
                    del caches[request], left[request]


class Experts(nn.Module):
    """Feed-forward experts; the host draws how many tokens each gets."""

    def __init__(self, width: int, n: int, run: Run) -> None:
        super().__init__()
        self.run = run
        self.router = nn.Linear(width, n)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(n)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, length, width)."""
        flat = x.reshape(-1, x.shape[-1])
        weights = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        shares = [self.run.rng.expovariate(1.0) for _ in self.experts]
        for number, expert in enumerate(self.experts):
            n = min(flat.shape[0], 1 + int(2 * flat.shape[0] * shares[number] / sum(shares)))
            index = torch.randperm(flat.shape[0])[:n].cuda()
            chosen = expert(flat[index]) * weights[index, number : number + 1]
            out = out.index_add(0, index, chosen)
        return out.view_as(x)


@workload("mixture of 8 experts, random routing, AdamW")
def moe(run: Run) -> None:
    """Sizes of the experts' batches differ at every step."""
    width = 1024
    model = Gpt(width, 16, 6, VOCABULARY)
    for block in model.blocks:
        block.mlp = Experts(width, 8, run)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(9):
        run.step(number)
        ids = tokens(8, 512)
        train_step(model, optimizer, next_token_loss(model(ids), ids))


@workload("LSTM language model, truncated backpropagation, SGD")
def lstm_lm(run: Run) -> None:
    """State is carried from piece to piece; pieces differ in length."""
    width = 1500
    with torch.backends.cudnn.flags(enabled=False):
        embed = nn.Embedding(VOCABULARY, width).cuda()
        lstm = nn.LSTM(width, width, num_layers=2, batch_first=True).cuda()
        head = nn.Linear(width, VOCABULARY).cuda()
        parts = nn.ModuleList([embed, lstm, head])
        optimizer = torch.optim.SGD(parts.parameters(), lr=1.0, momentum=0.9)
        state = None
        for number in run.steps(12):
            run.step(number)
            ids = tokens(64, run.rng.choice([35, 35, 35, run.rng.randint(10, 45)]))
            y, state = lstm(embed(ids), state)
            state = tuple(part.detach() for part in state)
            train_step(parts, optimizer, next_token_loss(head(y), ids))


@workload("encoder with masked and pooled heads, two tasks in turn")
def two_tasks(run: Run) -> None:
    """One trunk, a large head and a small one."""
    trunk = nn.Sequential(
        nn.Embedding(VOCABULARY, 768), *(Block(768, 12) for _ in range(12))
    ).cuda()
    words, label = nn.Linear(768, VOCABULARY).cuda(), nn.Linear(768, 1000).cuda()
    parts = nn.ModuleList([trunk, words, label])
    optimizer = torch.optim.AdamW(parts.parameters())
    for number in run.steps(12):
        run.step(number)
        if number % 3 == 2:
            ids = tokens(64, run.rng.randint(32, 96))
            loss = nn.functional.cross_entropy(label(trunk(ids).mean(1)), tokens(64, 1).squeeze(1))
        else:
            ids = tokens(16, run.rng.randint(128, 384))
            loss = next_token_loss(words(trunk(ids)), ids)
        train_step(parts, optimizer, loss)
