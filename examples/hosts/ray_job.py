"""Ray Train: two workers here, or one on each node of ray_nodes.py. Ray makes the group; nobody imports commlayer."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn


def train() -> dict[str, Any]:
    """Runs on each worker."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(8):
        inputs = torch.randn(32, 32, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return {"backend": dist.get_backend(), "losses": losses}


def main(backend: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        head = os.environ.get("RAY_ADDRESS", "")
        here = {"address": "local", "num_cpus": 3, "include_dashboard": False}
        ray.init(**({"_node_ip_address": head.split(":")[0]} if head else here), log_to_driver=False)
        trainer = TorchTrainer(
            train,
            torch_config=TorchConfig(backend=backend),  # the one line for commlayer; None: Ray chooses
            scaling_config=ray.train.ScalingConfig(
                num_workers=int(os.environ.get("WORKERS", "2")),
                placement_strategy="STRICT_SPREAD" if head else "PACK",
            ),
            run_config=ray.train.RunConfig(storage_path=folder, name="job"),
        )
        result: Any = trainer.fit()  # its metrics are None without a checkpoint
        print(json.dumps(result.return_value))  # that of rank 0
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
