"""Hugging Face Accelerate. `Accelerator(cpu=True)` cannot be told a backend, but uses the group that is there."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(backend: str | None) -> None:
    if backend:  # the one line for commlayer
        dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    x = torch.randn(512, 32)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    seen = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index])).tolist()
    assert seen == list(range(accelerator.num_processes))
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(json.dumps({"backend": dist.get_backend(), "losses": losses, "sum": total}))
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
