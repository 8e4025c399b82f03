"""A Lightning module trained with its monitor of device statistics, which reads torch.cuda.memory_stats()."""

import csv
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger

lightning.seed_everything(0)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.zeros(64, 256)), batch_size=16
)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=2,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        callbacks=[DeviceStatsMonitor(cpu_stats=False)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), data)
    (metrics,) = Path(folder).rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
seen = [
    float(value)
    for row in rows
    for key, value in row.items()
    if "allocated_bytes.all.peak" in key and value
]
assert seen and min(seen) > 0, rows[:1]
