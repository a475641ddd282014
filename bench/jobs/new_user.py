"""An ordinary DDP job with a bug of the user's choice: bench.new_user runs it on two hosts.

torchrun --nnodes=2 --nproc-per-node=2 ... bench/jobs/new_user.py --bug stuck
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUGGY = 3
"""The rank that has the bug."""
AT = 20
"""The step in which the bug shows."""


def load_batch(rank: int, step: int, bug: str) -> Tensor:
    if rank == BUGGY and bug == "slow":
        time.sleep(0.1)
    if rank == BUGGY and bug == "stuck" and step == AT:
        time.sleep(3600)  # acts as a file system that does not answer
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 512, generator=generator)


def log_metrics(loss: Tensor, rank: int, step: int, bug: str) -> None:
    if rank == BUGGY and step == AT:
        if bug == "skip":
            return
        if bug == "other":
            dist.broadcast(loss, 0)
            return
        if bug == "kill":
            os.kill(os.getpid(), signal.SIGKILL)  # does as the kernel's out-of-memory killer
    dist.all_reduce(loss)
    if rank == 0 and step % AT == 0:
        print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", choices=["none", "slow", "stuck", "skip", "other", "kill", "late"], default="none")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    if os.environ["RANK"] == str(BUGGY) and options.bug == "late":
        time.sleep(3600)
    dist.init_process_group("commlayer")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps + 1):
        batch = load_batch(rank, step, options.bug)
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log_metrics(loss.detach(), rank, step, options.bug)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
