"""accelerate's search for a batch size that fits."""

import torch
from accelerate.utils import find_executable_batch_size

tried = []


@find_executable_batch_size(starting_batch_size=256)
def train(batch_size: int) -> int:
    tried.append(batch_size)
    x = torch.empty(batch_size, 64 << 20, dtype=torch.uint8, device="cuda")
    return x.shape[0]


fits = train()
assert len(tried) > 1 and fits == tried[-1], tried
assert fits * (64 << 20) <= torch.cuda.mem_get_info()[1]
