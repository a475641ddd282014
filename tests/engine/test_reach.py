"""Packets that are tried when a group is made, over real sockets: a direction or a path that loses all is named."""

import contextlib
import socket
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commlayer.config import Config
from commlayer.errors import UnreachableError
from commlayer.transport import reach
from commlayer.transport.joining import join
from commlayer.transport.members import Members
from tests.engine.cases import run
from tests.world import Exchange, World, flat

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 0.6)
    monkeypatch.setattr(reach, "PATH_PATIENCE_S", 0.4)


@contextlib.contextmanager
def world_of(size: int, **config: Any) -> Iterator[World]:
    with World(flat(size), "udp", peer_timeout_s=0.6, **config) as world:
        yield world


@contextlib.contextmanager
def lost(world: World, rank: int, number: int = 0) -> Iterator[str]:
    """A context in which groups are made whose packets to the n-th socket of `rank` are lost; gives its address."""
    port = world.descriptions[rank]["ports"][number]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind((port["address"], 0))
        port["port"] = nobody.getsockname()[1]  # where the others send
        yield f"{port['address']}:{port['port']}"


def refusals(world: World, exchange: Callable[[int], Any]) -> list[str]:
    """The errors of all ranks that make a group, without the names of the ranks that raise them."""

    def refusal(rank: int) -> str:
        described, members = world.descriptions, Members("g", rank, range(world.size))
        with pytest.raises(UnreachableError) as caught:
            join(world.engines[rank], members, described, exchange(rank), job=world.job, key=world.key, group=77)
        start = f"rank {rank} of group 'g': "
        assert str(caught.value).startswith(start)
        return str(caught.value).removeprefix(start)

    return world.on_each(refusal)


def test_a_direction_that_loses_all_is_named_on_all_ranks() -> None:
    with world_of(3) as world, lost(world, 1) as one:
        start = time.monotonic()
        errors = refusals(world, Exchange(3))
        assert time.monotonic() - start < 25.0
        # Nothing reaches rank 1, neither from rank 0 nor from rank 2, and rank 1 reaches both.
        zero, two = (f"127.0.0.{rank + 1}:{world.descriptions[rank]['ports'][0]['port']} via udp" for rank in (0, 2))
        expected = (
            f"no UDP packet from rank 0 ({HOST}, {zero}) to rank 1 ({HOST}, {one}), no UDP packet from rank 2 ({HOST}, "
            f"{two}) to rank 1 ({HOST}, {one}) in 0.6 s: firewall of {HOST}, or the wrong interface? "
            f"(COMMLAYER_IFNAME, COMMLAYER_PORT_RANGE)"
        )
        assert errors == [expected] * 3


def test_both_directions_are_named() -> None:
    with world_of(2) as world, lost(world, 0) as zero, lost(world, 1) as one:
        errors = refusals(world, Exchange(2))
        assert errors[0] == errors[1]
        assert f"no UDP packet from rank 0 ({HOST}, {zero} via udp) to rank 1 ({HOST}, {one})" in errors[0]
        assert f"no UDP packet from rank 1 ({HOST}, {one} via udp) to rank 0 ({HOST}, {zero})" in errors[0]


def test_both_directions_are_named_where_hosts_have_many_ranks() -> None:
    """One pair of ranks for each pair of hosts and direction."""
    hosts = [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    engine: Any = types.SimpleNamespace(config=Config())
    tried = reach.Reach(engine, Members("", 0, range(9)), hosts, [])
    pairs = [(source, target) for source in hosts[0] for target in hosts[1]]
    assert tried._one_of_each([*pairs, *(pair[::-1] for pair in pairs), (8, 1), (8, 0)]) == [(0, 4), (4, 0), (8, 0)]


def test_a_path_that_loses_all_beside_a_working_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with world_of(2, ports=2) as world, lost(world, 1, 1) as path, world.open_group() as team:
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]
        other = world.descriptions[0]["ports"][1]["port"]
    remedy = "in 0.4 s; other paths work: firewall, or the wrong interface? (COMMLAYER_IFNAME, COMMLAYER_PORT_RANGE)"
    assert f"rank 0 of group 'group 1': no UDP packet to rank 1 ({HOST}, {path} via udp) {remedy}" in caplog.text
    assert f"rank 1 of group 'group 1': no UDP packet from rank 0 ({HOST}, 127.0.0.1:{other} via udp) {remedy}" in (
        caplog.text
    )


def test_ranks_that_come_late_are_waited_for() -> None:
    meet = Exchange(3)

    def late(rank: int) -> Callable[[str, bytes], list[bytes]]:
        def exchange(step: str, value: bytes) -> list[bytes]:
            values = meet(rank)(step, value)
            if rank == 2 and step == "mapped":
                time.sleep(1.0)  # it adds its peers late, and drops their packets until then
            return values

        return exchange

    with world_of(3) as world, world.open_group(late) as team:
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [6.0] * 3


def test_packets_are_tried_once_and_only_between_hosts() -> None:
    steps: list[str] = []

    def noting(size: int) -> Callable[[int], Callable[[str, bytes], list[bytes]]]:
        steps.clear()
        meet = Exchange(size)

        def of_rank(rank: int) -> Callable[[str, bytes], list[bytes]]:
            def exchange(step: str, value: bytes) -> list[bytes]:
                steps.append(step)
                return meet(rank)(step, value)

            return exchange

        return of_rank

    with World([(0, 1), (2,)], "udp") as world, world.open_group(noting(3)), world.open_group(noting(3)):
        assert steps.count("open") == 3
        assert "reached" not in steps
    with World([(0, 1)], "udp") as world, world.open_group(noting(2)):
        assert "reached" not in steps


def test_a_lossy_network_is_no_firewall(caplog: pytest.LogCaptureFixture) -> None:
    with World(flat(4), loss=0.3) as world, world.open_group() as team:
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [10.0] * 4
    assert "firewall" not in caplog.text
