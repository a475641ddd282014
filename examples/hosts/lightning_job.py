"""PyTorch Lightning: Trainer with the DDP strategy. An integer metric is averaged over the ranks, too."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Job(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        self.log("count", torch.tensor(len(batch[0])), on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        assert self.trainer.callback_metrics["count"].item() == 32

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(backend: str | None) -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    x = torch.randn(512, 32)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32, shuffle=True)
    job = Job()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy(process_group_backend=backend)  # the one line for commlayer; None: Lightning chooses
    devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])  # torchrun's
    where: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}
    trainer = pl.Trainer(strategy=strategy, max_epochs=4, enable_checkpointing=False, **where, **quiet)
    trainer.fit(job, loader)
    total = sum(parameter.double().sum().item() for parameter in job.parameters())
    print(json.dumps({"backend": dist.get_backend(), "losses": job.losses, "sum": total}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
