"""Receiver credit (`COMMLAYER_CREDIT_BYTES`) in real processes: two ranks on each of two hosts, and links with loss."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlayer
from commlayer.tools.emulate.link import Link
from commlayer.tools.emulate.network import Network
from commlayer.tools.emulate.scenario import Scenario
from tests import ranks

HOSTS = (0, 0, 1, 1)
NUMEL = 200_000
CREDIT = {"COMMLAYER_CREDIT_BYTES": "65536", "COMMLAYER_PEER_TIMEOUT_S": "1"}
pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(400)]


def on_lossy_links(function: Any, environ: dict[str, str]) -> list[ranks.Outcome]:
    with Network(Scenario(hosts=2, nics=(Link(loss=0.02, rate_bps=200e6),))) as network:
        places = [network.name(host) for host in HOSTS]
        return ranks.outcomes(
            function, len(HOSTS), timeout_s=150, environ={**network.rendezvous(), **environ}, places=places
        )


def collectives(rank: int, size: int) -> int:
    """Returns the grants that this rank has sent."""
    with ranks.job(rank, size):
        for call in range(5):
            tensor = torch.arange(NUMEL).add_(rank + call)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, torch.arange(NUMEL).add_(call).mul_(size).add_(sum(range(size))))
            dist.broadcast(tensor, call % size)
            gathered = [torch.empty(NUMEL, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(gathered, tensor.add_(rank))
            for other, part in enumerate(gathered):
                assert torch.equal(part, tensor.sub(rank).add_(other))
            received = torch.empty(size * NUMEL, dtype=torch.int64)
            dist.all_to_all_single(received, torch.arange(size).repeat_interleave(NUMEL).add_(10 * rank))
            assert torch.equal(received, torch.arange(size).mul_(10).add_(rank).repeat_interleave(NUMEL))
        return commlayer.stats()["grants_sent"]


def killed(rank: int, size: int) -> None:
    ranks.init(rank, size)
    dist.all_reduce(torch.ones(NUMEL))
    if rank == size - 1:
        work = dist.all_reduce(torch.ones(20 * NUMEL), async_op=True)  # takes a second on these links
        assert not work.is_completed()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(commlayer.PeerLostError):
        dist.all_reduce(torch.ones(20 * NUMEL))


def test_collectives_are_right() -> None:
    """Every rank receives something from the other host, and nothing is granted without the setting."""
    for environ in (CREDIT, {}):
        ended = on_lossy_links(collectives, environ)
        assert [outcome.error for outcome in ended] == [None] * len(HOSTS)
        if environ:
            assert all(outcome.result > 0 for outcome in ended)
        else:
            assert all(outcome.result == 0 for outcome in ended)


def test_a_killed_rank_is_lost() -> None:
    *others, _ = on_lossy_links(killed, CREDIT)
    assert [other.error for other in others] == [None] * (len(HOSTS) - 1)
