"""torchft: one of three replicas is killed, the others go on without it, and it comes back with their parameters.

python examples/hosts/replicas.py examples/hosts/torchft_job.py commlayer     # starts the replicas
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from commlayer.torchft import ProcessGroupCommlayer

HERE = socket.gethostname() if "RANK" in os.environ else "localhost"


def replica(backend: str, number: int, *, dies: bool) -> None:
    pg = ProcessGroupCommlayer() if backend == "commlayer" else ProcessGroupGloo()  # the one line for commlayer
    torch.manual_seed(number)  # the first replica's parameters go to all
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    kept: dict[str, Any] = {"net": net, "adam": torch.optim.AdamW(net.parameters(), lr=1e-2)}
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    load, save = lambda s: [kept[k].load_state_dict(s[k]) for k in s], lambda: {k: kept[k].state_dict() for k in kept}
    last, port = int(os.environ["LAST"]), int(os.environ["MEETING_PORT"])
    meeting = dist.TCPStore(os.environ["MEETING"], port, is_master=False, wait_for_workers=False)
    manager: Any = Manager(pg, load, save, 2, use_async_quorum=False, replica_id=f"r{number}")
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, kept["adam"])
    losses, sizes = list[float](), list[int]()
    meeting.set(sys.argv[2], "ready")
    meeting.wait([*map(str, range(last)), f"{last} dies"])
    while sizes[-5:] != [last + 1] * 5 or manager.current_step() < 8:
        if dies and manager.current_step() >= 4:
            os.kill(os.getpid(), 9)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * number + manager.current_step()))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses, sizes = [*losses, loss.item()][:4], [*sizes, manager.num_participants()]
    total = float(sum(map(torch.sum, net.parameters())))
    meeting.set(f"end {number}", json.dumps({"backend": backend, "losses": losses, "sizes": sizes, "sum": total}))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    replica(sys.argv[1], int(sys.argv[2][0]), dies=sys.argv[2].endswith("dies"))
