"""`commlayer ctl pause` and `resume` on a live job: four hosts with two NICs each."""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import commlayer
from commlayer.tools import cli
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from commlayer.transport.native import Engine
from tests import ranks

HOSTS = 4
VALUES = 200_000
PAUSED = "eth1"
PATIENCE_S = 180.0
WINDOW_STEPS = 6
"""Steps between two changes, at least."""
LITTLE = 0.02
"""Largest share of a host's bytes on the paused interface: probes and acknowledgements."""

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(300)]


class Ramp(nn.Module):
    """On rank r each gradient is r + 1: after n steps of SGD with rate 1 each weight is exactly -n * mean(r + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VALUES))

    def forward(self, slope: float) -> torch.Tensor:
        return (self.weight * slope).sum()


def sent_bytes() -> dict[str, int]:
    """What each interface of this host has sent, as the kernel counts."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as file:
        rows = [line.replace(":", " ").split() for line in file.readlines()[2:]]
    return {row[0]: int(row[9]) for row in rows}


def call(*arguments: str) -> str:
    """The output of a command that succeeds, asked by the job's key: namespaces have no way to the Store."""
    engine = Engine.current()
    assert engine is not None
    where = ["--address", os.environ["COMMLAYER_TOP"], "--key", engine.key.hex()]
    done = CliRunner().invoke(cli.app, [*arguments, *where, "--json", "-"])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[-1]


def samples() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(call("top", "--once"))["ranks"]
    return found


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def pause_and_resume(state: commlayer.HookState) -> None:
    """Runs in a thread of rank 0, while the job trains."""
    wait_for(lambda: sum(bool(sample["hooks"]) for sample in samples()) == HOSTS)
    change(state, "pause", [PAUSED])
    wait_for(lambda: all(avoids(sample) for sample in samples()))  # a sample without a step has no data at all
    change(state, "resume", [])


def avoids(sample: dict[str, Any]) -> bool:
    """Whether nearly all data of a sample went over the other interface."""
    flow = {entry["interface"]: entry["bytes_s"] for entry in sample["interfaces"]}
    return bool(flow[PAUSED] < LITTLE * sum(flow.values()))


def change(state: commlayer.HookState, name: str, expected: list[str]) -> None:
    """Changes the interface, and waits for steps and samples after that."""
    assert json.loads(call("ctl", name, PAUSED, "--timeout", "120"))["ranks"] == HOSTS
    changed = state.steps
    wait_for(lambda: all(sample["paused"] == expected for sample in samples()))
    numbers = {sample["rank"]: sample["number"] for sample in samples()}
    wait_for(lambda: all(sample["number"] >= numbers[sample["rank"]] + 2 for sample in samples()))
    wait_for(lambda: state.steps >= changed + WINDOW_STEPS)


def paused(rank: int, size: int) -> dict[str, Any]:
    """Trains until rank 0's thread has ended; returns what each interface has sent in the three parts of the job."""
    with ranks.job(rank, size):
        model = DistributedDataParallel(Ramp())
        state = commlayer.HookState()
        model.register_comm_hook(state, commlayer.allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                pause_and_resume(state)
            except BaseException as error:  # the main thread raises it
                errors.append(error)

        thread = threading.Thread(target=ask)
        if rank == 0:
            thread.start()
        engine = Engine.current()
        assert engine is not None
        mean = (1 + size) / 2
        go_on, marks = torch.ones(1), []
        while go_on.item() > 0:
            model(float(rank + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model.module.weight, torch.full((VALUES,), -mean * state.steps))
            go_on.fill_(float(rank != 0 or thread.is_alive()))
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
            marks.append((PAUSED in engine.routes.paused, sent_bytes()))
        if rank == 0:
            thread.join()
            if errors:
                raise errors[0]
        starts = [index for index in range(1, len(marks)) if marks[index][0] != marks[index - 1][0]]
        assert len(starts) == 2, "paused once, and resumed once"
        bounds = [(0, starts[0] - 1), (starts[0], starts[1] - 1), (starts[1], len(marks) - 1)]
        parts = [
            {name: marks[last][1][name] - marks[first][1][name] for name in ("eth0", "eth1")} for first, last in bounds
        ]
        return {"starts": starts, "parts": parts}


def test_a_paused_interface_carries_no_data_until_it_is_resumed() -> None:
    link = Link(rate_bps=200e6)  # on links without a limit the CPU decides how the bytes spread
    with Network(Scenario(hosts=HOSTS, nics=(link, link))) as network:
        environ = {**network.rendezvous(), "COMMLAYER_TOP": f"{network.address(0)}:29600"}
        places = [network.name(host) for host in range(HOSTS)]
        found = ranks.run(paused, HOSTS, timeout_s=240, environ=environ, places=places)
    assert all(rank["starts"] == found[0]["starts"] for rank in found), "all ranks changed at the same steps"
    for rank in found:
        before, during, after = rank["parts"]
        assert during["eth1"] < LITTLE * during["eth0"], rank
        assert during["eth0"] > VALUES, rank
        for part in (before, after):
            assert part["eth1"] > 0.1 * part["eth0"], rank
