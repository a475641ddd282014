"""DeepSpeed on CPU (DS_ACCELERATOR=cpu), ZeRO stages 0 to 3 one after the other."""

from __future__ import annotations

import json
import logging
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

STEPS = 8


def train(stage: int, data: torch.Tensor) -> tuple[float, float]:
    """The mean loss of the last step, and the sum of the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for inputs in data.unbind():
        loss = nn.functional.mse_loss(engine(inputs), inputs.sin().sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        total = sum(parameter.double().sum().item() for parameter in model.parameters())
    engine.destroy()
    return mean.item() / dist.get_world_size(), total


def main(backend: str) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend=backend)  # the one line for commlayer
    data = torch.randn(STEPS, 32, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses, sums = zip(*(train(stage, data) for stage in range(4)), strict=True)
    print(json.dumps({"backend": dist.get_backend(), "losses": losses, "sum": sums}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gloo")
