"""Lightning Fabric: a loop of one's own, with Fabric's DDP strategy."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from lightning_fabric import Fabric, seed_everything
from lightning_fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(backend: str | None) -> None:
    strategy = DDPStrategy(process_group_backend=backend)  # the one line for commlayer; None: Fabric chooses
    devices, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])  # torchrun's
    fabric = Fabric(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    seed_everything(0, verbose=False)
    x = torch.randn(512, 32)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        losses.append(torch.as_tensor(mean).item())
    assert torch.as_tensor(fabric.all_reduce(torch.tensor(7), reduce_op="mean")).item() == 7  # an integer
    total = sum(parameter.double().sum().item() for parameter in net.parameters())
    print(json.dumps({"backend": dist.get_backend(), "losses": losses, "sum": total}))
    fabric.barrier()  # gloo's threads release the last operation's tensors; without this, the end can hang
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
