"""A sequence model whose batches are copied on a stream of their own, with record_stream."""

import torch
from torch import nn

torch.manual_seed(0)
torch.backends.cudnn.enabled = False
model = nn.GRU(64, 128, batch_first=True).cuda()
optimizer = torch.optim.Adam(model.parameters())
copies = torch.cuda.Stream()


def load(step: int) -> torch.Tensor:
    host = torch.zeros(16, 20 + 5 * (step % 4), 64, pin_memory=True)
    with torch.cuda.stream(copies):
        return host.cuda(non_blocking=True)


following = load(0)
for step in range(12):
    torch.cuda.current_stream().wait_stream(copies)
    batch = following
    batch.record_stream(torch.cuda.current_stream())
    following = load(step + 1)
    model(batch)[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
