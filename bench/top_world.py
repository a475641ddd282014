"""`commlayer top` and `ctl` on a job of 64 ranks: `python -m bench.top_world [--ranks 64]` (a minute, 10 GB).

The ranks are forked from one process and use UDP on loopback. One of them is slow: the table must name it. Then a
change goes to all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.telemetry.collector import CHANGE
from commlayer.tools.top.options import connect
from commlayer.tools.top.summary import summarize
from commlayer.tools.top.table import lines

PATIENCE_S = 150.0
SLEEP_S = 0.5
SLOW_S = 1.5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(rank: int, world: int, port: int, slow: int) -> None:
    """A rank: trains until it is killed."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=PATIENCE_S))
    dist.init_process_group("commlayer", store=store, rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model.register_comm_hook(commlayer.HookState(), commlayer.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        time.sleep(SLOW_S if rank == slow else SLEEP_S)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def watch(store: str, world: int, slow: int) -> dict[str, Any]:
    """Waits for all ranks and the name of the slow one."""
    begin_s = time.monotonic()
    while True:
        try:
            client = connect(store, None, None, None)
            break
        except ValueError:  # the job begins
            if time.monotonic() - begin_s > PATIENCE_S:
                raise
            time.sleep(1.0)
    found: dict[str, Any] = {}
    while time.monotonic() - begin_s < PATIENCE_S:
        time.sleep(1.0)
        asked_s = time.monotonic()
        answer = client.ask([b"view"], 10)[1]
        found = {**summarize(json.loads(answer)), "answer_s": time.monotonic() - asked_s, "bytes": len(answer)}
        job = found["job"]
        if job["live"] == world and job["slowest"] and job["slowest"]["rank"] == slow and job["policies"]:
            break
    print("\n".join(lines(found, limit=30)))
    print(f"\nthe answer: {found['bytes']} bytes in {1e3 * found['answer_s']:.0f} ms")
    assert found["job"]["live"] == world, "not all ranks send samples"
    assert found["job"]["slowest"]["rank"] == slow, "another rank is named"
    asked_s = time.monotonic()
    text = json.dumps({"name": "codec", "value": "int8", "timeout_s": 60}).encode()
    result: dict[str, Any] = json.loads(client.ask([CHANGE, text], 70)[1])
    print(f"ctl codec int8: {result} in {time.monotonic() - asked_s:.1f} s")
    assert result["applied"]
    assert (result["ranks"], len(result["steps"])) == (world, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    world = parser.parse_args().ranks
    slow = world // 2
    os.environ.update(COMMLAYER_SHM="0", COMMLAYER_IFNAME="lo", COMMLAYER_TOP=f"127.0.0.1:{free_port()}")
    os.environ.update(COMMLAYER_PEER_TIMEOUT_S="60")
    server = dist.TCPStore("127.0.0.1", 0, world, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                train(rank, world, server.port, slow)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    try:
        watch(f"127.0.0.1:{server.port}", world, slow)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    print(f"top and ctl work with {world} ranks")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
