"""PyTorch Lightning: Trainer with ModelParallelStrategy, FSDP2 over two replicas of two tensor-parallel ranks."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Job(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        tensor, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        parallelize_module(self.net, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.net, mesh=data)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(backend: str | None) -> None:
    pl.seed_everything(0, verbose=False)
    x = torch.randn(512, 32)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32, shuffle=True)
    job = Job()
    strategy = ModelParallelStrategy(2, 2, process_group_backend=backend)  # the one line for commlayer
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options |= {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, max_epochs=4, **options)
    trainer.fit(job, loader)
    total = sum(parameter.full_tensor().double().sum().item() for parameter in job.parameters())
    print(json.dumps({"backend": dist.get_backend(), "losses": job.losses, "sum": total}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
