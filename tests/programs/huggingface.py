"""A transformers model with random weights and its Trainer, with memory metrics."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 48) % 500
        return {"input_ids": tokens, "labels": tokens}


model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=64, n_embd=128, n_layer=3, n_head=4))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=6,
        report_to=[],
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        max_grad_norm=0.0,
        disable_tqdm=True,
        skip_memory_metrics=False,
        gradient_checkpointing=True,
    )
    metrics = Trainer(model=model, args=arguments, train_dataset=Tokens()).train().metrics
assert metrics["train_mem_gpu_peaked_delta"] > 0, metrics
