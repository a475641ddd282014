"""A DDP job that keeps each step in a file, for torchrun to start again: bench.elastic kill runs it.

torchrun --nproc-per-node=4 --max-restarts=1 bench/jobs/restarted.py FOLDER STEPS COMPUTE_S

The last rank dies after half of the steps. In the next life each rank writes when it has made a step, and ends. The job
is on commlayer: on gloo, ranks find the addresses of their former life in the agent's Store, and end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path, steps: int, compute_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Linear(1000, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    kept, died, first = folder / "state", folder / "died", 0
    if kept.exists():
        state = torch.load(kept)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(first, steps):
        time.sleep(compute_s)
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        if step == steps // 2 and rank == size - 1 and not died.exists():
            died.write_text(str(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if died.exists() and first:
            (folder / f"made {rank}").write_text(str(time.time()), encoding="utf-8")
            break
        if rank == 0:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "next")
            (folder / "next").replace(kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
