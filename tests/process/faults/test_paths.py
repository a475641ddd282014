"""Interfaces and paths that fail, between two hosts."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commlayer.tools.emulate.event import Event
from commlayer.tools.emulate.network import Network
from tests import ranks

from .scene import PEER_TIMEOUT_S, SLACK_S, Seen, Site, begin, mark, note, survived, watch, witness

pytestmark = pytest.mark.needs_root

REPAIR_S = 0.2
"""The longest delay that the loss of one of two paths may cause."""


def call(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def link(network: Network, interface: str, state: str) -> None:
    call(f"ip -n {network.name(1)} link set {interface} {state}")


def drop(network: Network, interface: str, action: str) -> None:
    """Drops all packets in and out of an interface; no end is told."""
    for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o")):
        call(f"ip netns exec {network.name(1)} iptables -{action} {chain} {direction} {interface} -j DROP")


WAYS = {"interface down": (link, "down", "up"), "path loses everything": (drop, "A", "D")}


@contextlib.contextmanager
def broken_later(network: Network, way: str, interfaces: list[str], began: Path) -> Iterator[None]:
    """Breaks the interfaces of host 1 a second after the ranks made the file `began`, for the rest of the body."""
    change, broken, fixed = WAYS[way]
    over = threading.Event()

    def break_them() -> None:
        while not began.exists() and not over.wait(0.05):
            pass
        over.wait(1.0)
        for interface in interfaces:
            change(network, interface, broken)

    thread = threading.Thread(target=break_them)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for interface in interfaces:
            change(network, interface, fixed)


def reduce(numel: int) -> None:
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    assert tensor.sum().item() == 2 * numel


def _begin(rank: int, size: int, began: Path) -> None:
    begin(rank, size)  # ends with a barrier
    began.touch()


def _lives(rank: int, size: int, began: Path, numel: int) -> Seen:
    _begin(rank, size, began)
    return watch(lambda: reduce(numel), 2.5)


@pytest.mark.parametrize("numel", [1000, 1 << 20], ids=["4 KB", "4 MiB"])
@pytest.mark.parametrize("way", WAYS)
def test_one_of_two_paths_is_not_missed(network: Network, way: str, numel: int, tmp_path: Path) -> None:
    site = Site("two hosts, two paths", (0, 1), network)
    began = tmp_path / "began"
    with broken_later(network, way, ["eth1"], began):
        seen = survived(site.outcomes(_lives, began, numel, COMMLAYER_IFNAME="eth*"))
    for outcome in seen.values():
        assert outcome.error is None
        assert outcome.seconds < REPAIR_S + SLACK_S
    size = "4 KB" if numel == 1000 else "4 MiB"
    note(f"{way}, one of two, {size} all-reduces", site.name, seen, REPAIR_S)


def _starts(rank: int, size: int) -> float:
    start = time.monotonic()
    ranks.init(rank, size, timeout=timedelta(seconds=30))
    took_s = time.monotonic() - start
    reduce(1 << 16)
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size,), check_invariants=True)
    dist.all_reduce(sparse)  # gloo's
    assert sparse.to_dense().tolist() == [1.0] * size
    dist.barrier()
    return took_s


def test_a_job_starts_with_one_of_two_interfaces_down(network: Network) -> None:
    """Both variables name all interfaces, as with `commlayer emulate`."""
    site = Site("two hosts, two paths", (0, 1), network)
    names = {"COMMLAYER_IFNAME": "eth0,eth1", "GLOO_SOCKET_IFNAME": "eth0,eth1"}
    network.apply(Event(0.0, "link_down", host=1, nic=0))
    try:
        ended = site.outcomes(_starts, **names)
    finally:
        network.apply(Event(0.0, "link_up", host=1, nic=0))
    for rank, outcome in enumerate(ended):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
        assert outcome.result < SLACK_S


def _dies(rank: int, size: int, began: Path) -> Seen:
    _begin(rank, size, began)
    deadline = time.monotonic() + 30

    def until_it_fails() -> None:
        while time.monotonic() < deadline:
            mark()  # no operation ends after the fault: the last mark is at most one before it
            reduce(1000)

    return witness(until_it_fails)


@pytest.mark.parametrize("way", WAYS)
def test_the_only_path_is_the_peer(network: Network, way: str, tmp_path: Path) -> None:
    site = Site("two hosts", (0, 1), network)
    began = tmp_path / "began"
    with broken_later(network, way, ["eth0", "eth1"], began):
        seen = survived(site.outcomes(_dies, began))
    for rank, outcome in seen.items():
        assert outcome.error == "PeerLostError", outcome
        assert f"(culprit: rank {1 - rank} on " in outcome.text
        assert "; its last packet came " in outcome.text
        assert " s ago over eth" in outcome.text
        assert outcome.seconds < PEER_TIMEOUT_S + SLACK_S
    note(f"{way}, all there are", site.name, seen, PEER_TIMEOUT_S)
