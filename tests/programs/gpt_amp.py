"""A GPT with gradient checkpointing and AMP, varying lengths; knows nothing of allocators."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.first(x))
            .view(b, t, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.second(x))


torch.manual_seed(0)
embedding = nn.Embedding(2000, 256).cuda()
blocks = nn.ModuleList([Block(256, 4) for _ in range(4)]).cuda()
head = nn.Linear(256, 2000).cuda()
parameters = [*embedding.parameters(), *blocks.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters)
scaler = torch.amp.GradScaler(
    "cuda", enabled=False
)  # it would branch on values that a dry run does not compute
for step in range(6):
    tokens = torch.randint(0, 2000, (8, 64 + 37 * (step % 3))).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = embedding(tokens)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = head(x)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
