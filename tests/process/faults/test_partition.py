"""A network that is cut in two: the party with the Store goes on, the other ends with typed errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commlayer
from commlayer.tools.emulate.event import Event
from commlayer.tools.emulate.namespace import call
from commlayer.tools.emulate.network import Network
from tests import ranks

from .scene import SLACK_S, meeting

PEER_TIMEOUT_S = 1.0
STEPS = 40


def _job(
    rank: int, size: int, address: str, cut: Sequence[str], row_size: int = 1
) -> tuple[int, list[int], str, float]:
    """The Store is that of host 0, over the network: the one of the test needs none. `row_size`: the ranks between
    which FSDP2 shards the model."""
    store = dist.TCPStore(address, 29510 + row_size, None, rank == 0, wait_for_workers=False)
    ranks.init(rank, size, store=store, timeout=timedelta(seconds=30))
    model: Any = nn.Linear(10, 10)
    if row_size > 1:
        mesh = init_device_mesh("cpu", (size // row_size, row_size), mesh_dim_names=("rows", "shards"))
        fully_shard(model, mesh=mesh["shards"])
    text = ""
    try:
        with commlayer.elastic(model, torch.optim.SGD(model.parameters(), lr=0.1)) as job:
            for _ in job.batches(range(STEPS)):
                time.sleep(0.05)
                model(torch.ones(1, 10)).sum().backward()
                job.step()
                if job.steps == 10 and rank == 0:
                    meeting().set("cut", str(time.time()))
                    for command in cut:
                        call(command)
    except commlayer.CommError as error:
        text = str(error)
    return job.steps, job.members, text, time.time() - float(meeting().get("cut"))


def _shrinks(rank: int, size: int, address: str, cut: Sequence[str]) -> tuple[list[str], float]:
    """Each party wants to go on without the other."""
    store = dist.TCPStore(address, 29512, None, rank == 0, wait_for_workers=False)
    ranks.init(rank, size, store=store, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 0:
        meeting().set("cut", str(time.time()))
        for command in cut:
            call(command)
    texts = []

    def train() -> None:
        while True:
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)

    with pytest.raises(commlayer.PeerLostError):
        train()
    try:
        dist.shrink_group([0, 1] if rank == 2 else [2])
        dist.all_reduce(torch.ones(1))
    except commlayer.CommError as error:
        texts.append(str(error))
    return texts, time.time() - float(meeting().get("cut"))


def _cut_in_two(network: Network, job: Callable[..., Any], hosts: Sequence[int] = (0, 1, 2), *given: Any) -> list[Any]:
    """Host 2 alone on one side. What the ranks have returned, of which these are the `hosts`."""
    places = [network.name(host) for host in hosts]
    environ = {**network.rendezvous(), "COMMLAYER_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}
    cut = [f"ip -n {network.switch} link set {network.switch_port(2, nic)} down" for nic in range(2)]
    try:
        ended = ranks.outcomes(job, len(hosts), network.address(0), cut, *given, environ=environ, places=places)
    finally:
        network.apply(Event(0.0, "link_up", host=2))
    assert [outcome.error for outcome in ended] == [None] * len(hosts)
    return [outcome.result for outcome in ended]


@pytest.mark.needs_root
def test_an_elastic_job_goes_on_where_the_store_is(network: Network) -> None:
    *found, (steps, _, text, took_s) = _cut_in_two(network, _job)
    assert [result[:3] for result in found] == [(STEPS, [0, 1], "")] * 2
    assert steps < STEPS
    assert "rank 2: the job's Store does not answer" in text
    assert "or the network to its host" in text
    assert took_s < 4 * PEER_TIMEOUT_S + SLACK_S


@pytest.mark.needs_root
@pytest.mark.parametrize("hosts", [(0, 1, 2, 2), (0, 1, 2, 1)], ids=str)
def test_rows_go_on_where_the_store_is(network: Network, hosts: Sequence[int]) -> None:
    """Host 2 has a row of two ranks, or one of them."""
    *found, third, fourth = _cut_in_two(network, _job, hosts, 2)
    assert [result[:3] for result in found] == [(STEPS, [0, 1], "")] * 2
    for host, (steps, _, text, took_s) in zip(hosts[2:], (third, fourth), strict=True):
        assert steps < STEPS
        assert took_s < 4 * PEER_TIMEOUT_S + SLACK_S
        # By the silence of rank 2, or by the error of the engine, whichever comes first.
        assert host != 1 or "2 of its row, 2, 3, died" in text


@pytest.mark.needs_root
@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="torch 2.13 has shrink_group")
def test_a_group_shrinks_where_the_store_is(network: Network) -> None:
    *found, (texts, took_s) = _cut_in_two(network, _shrinks)
    assert [result[0] for result in found] == [[], []]
    assert len(texts) == 1
    assert "shrink_group: the job's Store does not answer" in texts[0]
    assert took_s < 4 * PEER_TIMEOUT_S + SLACK_S
