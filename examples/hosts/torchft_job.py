"""torchft: of three replicas one is killed, two go on without it, and it comes back with their parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from commlayer.torchft import ProcessGroupCommlayer


def replica(backend: str, number: int, *, dies: bool) -> None:
    pg = ProcessGroupCommlayer() if backend == "commlayer" else ProcessGroupGloo()  # the one line for commlayer
    torch.manual_seed(number)  # the first replica's parameters go to all
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    kept: dict[str, Any] = {"net": net, "adam": torch.optim.AdamW(net.parameters(), lr=1e-2)}
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    load, save = lambda s: [kept[k].load_state_dict(s[k]) for k in s], lambda: {k: kept[k].state_dict() for k in kept}
    meeting = dist.TCPStore("localhost", int(os.environ["MEETING"]), is_master=False, wait_for_workers=False)
    manager: Any = Manager(pg, load, save, 2, use_async_quorum=False, replica_id=f"r{number}")
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, kept["adam"])
    losses, sizes = list[float](), list[int]()
    meeting.set(sys.argv[2], "ready")
    meeting.wait(["0", "1", "2 dies"])
    while sizes[-5:] != [3] * 5 or manager.current_step() < 8:
        if dies and manager.current_step() >= 4:
            os.kill(os.getpid(), 9)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * number + manager.current_step()))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses, sizes = [*losses, loss.item()][:4], [*sizes, manager.num_participants()]
    total = float(sum(map(torch.sum, net.parameters())))
    print(json.dumps({"backend": backend, "losses": losses, "sizes": sizes, "sum": total}))
    manager.shutdown(wait=False)


if __name__ == "__main__" and len(sys.argv) > 2:
    replica(sys.argv[1], int(sys.argv[2][0]), dies=sys.argv[2].endswith("dies"))
elif __name__ == "__main__":
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=9000, heartbeat_timeout_ms=1000)
    meeting = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"TORCHFT_LIGHTHOUSE": server.address(), "MEETING": str(meeting.port)}
    command = [sys.executable, __file__, sys.argv[1] if len(sys.argv) > 1 else "gloo"]
    lives = [subprocess.Popen([*command, life], stdout=subprocess.PIPE, text=True) for life in ("0", "1", "2 dies")]
    assert lives.pop().wait() == -9
    lives.append(subprocess.Popen([*command, "2"], stdout=subprocess.PIPE, text=True))
    ends = [json.loads(each.communicate()[0].splitlines()[-1]) for each in lives]
    assert (len({end["sum"] for end in ends}), {2, 3} <= set(ends[0]["sizes"])) == (1, True), ends
    print(json.dumps(ends[0]))
