"""A process that paused for longer than the peer timeout is met again in new groups."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

import commlayer
from tests import ranks

UDP = {"COMMLAYER_SHM": "0", "COMMLAYER_IFNAME": "lo", "COMMLAYER_PEER_TIMEOUT_S": "0.5"}


@pytest.mark.parametrize("auth", ["full", "off"])
def test_a_process_that_paused_is_met_again(auth: str) -> None:
    ranks.run(_pause, 2, environ={**UDP, "COMMLAYER_AUTH": auth})


def _pause(rank: int, size: int) -> None:
    ranks.init(rank, size)
    store = ranks.store()
    first = dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(5000), group=first)
    if rank == 1:
        store.set("process", str(os.getpid()))
        store.wait(["lost"])
    else:
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(commlayer.PeerLostError):
            dist.all_reduce(torch.ones(5000), group=first)
        store.set("lost", "1")
        os.kill(process, signal.SIGCONT)
    for _ in range(2):  # WORLD and the failed group are still open
        group = dist.new_group()
        for _ in range(3):
            tensor = torch.full((5000,), rank + 1.0)
            dist.all_reduce(tensor, group=group)
            assert tensor.eq(3.0).all()
        dist.destroy_process_group(group)
    tensor = torch.full((5000,), rank + 1.0)
    dist.all_reduce(tensor)  # of WORLD nothing was under way
    assert tensor.eq(3.0).all()
    with pytest.raises(commlayer.CommError):
        dist.all_reduce(torch.ones(5000), group=first)
    dist.destroy_process_group()
