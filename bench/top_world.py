"""`commlayer top` and `ctl` on a job of 64 ranks (a minute, 10 GB).

    python -m bench.top_world             64 ranks, over UDP on loopback
    python -m bench.top_world --hosts 16  on emulated hosts with 200 Mbit/s each (root)

The ranks are forked from one process. One of them is slow: the table must name it. Then a change goes to all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlayer
from bench.harness.options import options
from commlayer.telemetry.collector import CHANGE
from commlayer.tools.bench.launch import free_port
from commlayer.tools.emulate import namespace
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from commlayer.tools.top.options import connect
from commlayer.tools.top.summary import summarize
from commlayer.tools.top.table import lines

PATIENCE_S = 150.0
SLEEP_S = 0.5
SLOW_S = 1.5


def train(rank: int, world: int, address: str, port: int, slow: int) -> None:
    """A rank: trains until it is killed."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, world, False, timedelta(seconds=PATIENCE_S))
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


def run(world: int, network: Network | None) -> None:
    """Starts the ranks, and watches them from the first host."""
    slow, pids = world // 2, []
    address = "127.0.0.1" if network is None else network.address(0)
    os.environ.update({"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo"} if network is None else network.rendezvous())
    os.environ.update(COMMLAYER_TOP=f"{address}:{free_port(address)}", COMMLAYER_PEER_TIMEOUT_S="60")
    server = dist.TCPStore(address, 0, world, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                with contextlib.nullcontext() if network is None else on_host(network, rank, world):
                    train(rank, world, address, server.port, slow)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    try:
        watch(f"{address}:{server.port}", world, slow)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def on_host(network: Network, rank: int, world: int) -> contextlib.AbstractContextManager[None]:
    """The calling thread runs on the host of a rank."""
    return namespace.inside(network.name(rank * network.scenario.hosts // world))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=0, help="emulated hosts; 0: loopback")
    given = parser.parse_args()
    if given.hosts == 0:
        run(given.ranks, None)
    else:
        scenario = dataclasses.replace(Scenario.read("clean200"), hosts=given.hosts)
        with Network(scenario) as network, on_host(network, 0, given.ranks):
            run(given.ranks, network)
    print(f"top and ctl work with {given.ranks} ranks on {given.hosts or 'no'} emulated hosts")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
