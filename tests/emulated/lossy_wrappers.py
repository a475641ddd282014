"""One rank of a job on a lossy network, for test_lossy_wrappers.py: gradients in 16 bits, by torch's wrappers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.loss.operation_policy import PapersPolicy
from tests.emulated.lossy_training import STEPS, Drift, account


def train(policy: commlayer.Policy, wrap: Callable[..., Any]) -> dict[str, object]:
    """Gradients are small whole numbers, which 16 bits hold exactly."""
    rank = dist.get_rank()
    drift = Drift()
    model = DistributedDataParallel(drift, bucket_cap_mb=1)
    state, hook = commlayer.HookState(policy), wrap(commlayer.allreduce_hook)
    # DDP refuses a bf16 hook of torch's on the CPU, by its name
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = list(drift.weights)
    exact = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        directions = [(2 * torch.randn(weight.shape, generator=generator)).round() for weight in weights]
        optimizer.zero_grad()
        model(directions).backward()
        optimizer.step()
        for total, direction in zip(exact, directions, strict=True):
            total += direction
    return account(weights, exact, state)


def main() -> None:
    rank, size, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29500, size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    papers = PapersPolicy(loss_bound=0.1)
    found = {
        "fp16": train(commlayer.Policy(loss_bound=0.1), fp16_compress_wrapper),
        "bf16": train(commlayer.Policy(loss_bound=0.1), bf16_compress_wrapper),
        "papers": train(papers, fp16_compress_wrapper),
    }
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
