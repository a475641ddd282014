"""COMMLAYER_THREADS=2: a firewall that lets through the packets of one engine of a rank, and none of the other's."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

from commlayer.errors import AbortedError, PeerLostError
from commlayer.tools.emulate.network import Network
from commlayer.transport.native import Engine
from tests import ranks

from .scene import PEER_TIMEOUT_S, SLACK_S, Seen, begin, mark, witness

pytestmark = pytest.mark.needs_root

LONG = 1 << 19


def engine(which: str) -> Engine:
    first = Engine.current()
    assert first is not None
    assert first.second is not None
    return first if which == "first" else first.second


@contextmanager
def deaf(which: str) -> Iterator[None]:
    """The firewall of this host drops what comes for one engine of this process."""
    ports = [port["port"] for port in engine(which).ports.entries]
    _firewall("-A", ports)
    try:
        yield
    finally:
        _firewall("-D", ports)


def _firewall(action: str, ports: list[int]) -> None:
    for port in ports:
        command = f"iptables {action} INPUT -p udp --dport {port} -j DROP"
        subprocess.run(command.split(), check=True, capture_output=True)


def _loses(rank: int, size: int, which: str) -> tuple[Seen, Seen]:
    begin(rank, size)
    dist.all_reduce(torch.ones(LONG))
    dist.barrier()

    def reduce() -> None:
        end = time.monotonic() + PEER_TIMEOUT_S + SLACK_S
        while time.monotonic() < end:
            dist.all_reduce(torch.ones(LONG))

    with deaf(which) if rank == 1 else nullcontext():
        if rank == 1:
            mark()
        return witness(reduce), witness(lambda: dist.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_rank_whose_engine_hears_nothing(network: Network, which: str) -> None:
    """Both engines fail on both ranks: also short operations, which the second engine has no part in."""
    places = [network.name(host) for host in (0, 1)]
    ended = ranks.outcomes(_loses, 2, which, environ={"COMMLAYER_THREADS": "2"}, places=places)
    kinds = {PeerLostError.__name__, AbortedError.__name__}
    for long, short in ranks.results(ended, set()):
        assert long.error in kinds, long
        assert long.seconds < PEER_TIMEOUT_S + SLACK_S
        assert short.error == long.error, short
        assert "rank" in long.text
