"""Several sockets per interface: the paths between two processes, over real sockets, as their counters show them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from commlayer.errors import CommError
from commlayer.transport.base import DType
from commlayer.transport.native import Engine
from tests.engine.cases import Case, check, run
from tests.world import PATIENCE_S, Team, World, flat, until

PORTS = 4
LARGE = Case("all_reduce", DType.F32, 500_000)


@pytest.fixture
def world() -> Iterator[World]:
    """Two ranks."""
    with World(flat(2), "udp", ports=PORTS) as world:
        yield world


def reduce_both(world: World, team: Team) -> None:
    world.on_each(lambda rank: check(team[rank], LARGE, 0))


class Link:
    """A link of the fabric between rank 0 and rank 1's n-th socket: passes the packets of rank 0 on, or drops them."""

    def __init__(self, world: World, number: int, delay_s: float | None) -> None:
        """`delay_s` None: it loses everything."""
        self.came = 0
        self._delay_s = delay_s
        port = world.descriptions[1]["ports"][number]
        self._to = (port["address"], port["port"])
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.bind((port["address"], 0))
        self._socket.settimeout(0.001)
        port["port"] = self._socket.getsockname()[1]  # where rank 0 finds that socket of rank 1
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def _carry(self) -> None:
        held: deque[tuple[float, bytes]] = deque()
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._socket.recv(65536)
                self.came += 1
                if self._delay_s is not None:
                    held.append((time.monotonic() + self._delay_s, packet))
            while held and held[0][0] <= time.monotonic():
                self._socket.sendto(held.popleft()[1], self._to)


def came_on_each(engine: Engine, peer: int) -> bool:
    return all(path["packets_received"] > 0 for path in engine.routes.paths(peer))


def test_each_pair_of_sockets_is_a_path(world: World) -> None:
    sockets = [(port["address"], port["port"]) for port in world.descriptions[0]["ports"]]
    assert len(set(sockets)) == PORTS
    assert len({address for address, _ in sockets}) == 1
    with world.open_group() as team:
        reduce_both(world, team)
        for rank in (0, 1):
            engine, peer = world.engines[rank], 1 - rank
            until(partial(came_on_each, engine, peer))
            paths = engine.routes.paths(peer)
            assert [path["port"] for path in paths] == [port["port"] for port in world.descriptions[rank]["ports"]]
            assert not any(path["is_dead"] for path in paths)
            sent = sum(path["packets_sent"] for path in paths)
            assert engine.stats()["packets_sent"] >= sent > LARGE.numel * 4 / 2 / 1472


def test_the_sockets_of_an_interface_have_one_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [SimpleNamespace(port=port, delivered_bytes=5, arrived_bytes=7, is_dead=0) for port in range(PORTS)]
    counters = [(1, number, path) for number, path in enumerate(paths)]
    with world.open_group() as team:
        monkeypatch.setattr(world.engines[0].routes, "counters", lambda _: counters)
        assert team[0].rates() == (5, 7)


def test_a_link_that_loses_all_packets_is_given_up(world: World) -> None:
    with Link(world, 1, None) as link, world.open_group() as team:

        def it_alone_is_given_up() -> bool:
            reduce_both(world, team)  # which path a packet takes is chance: it may be another one for a whole operation
            return [path["is_dead"] for path in world.engines[0].routes.paths(1)] == [0, 1, 0, 0]

        # While the other engine has no core, a path that works may seem dead: it comes back.
        until(it_alone_is_given_up)
        reduce_both(world, team)
        paths = world.engines[0].routes.paths(1)
        assert paths[1]["packets_lost"] > 0
        assert paths[1]["deaths"] == 1
        assert time.monotonic() - PATIENCE_S < paths[0]["heard_us"] / 1e6 <= time.monotonic()
        assert link.came > 0


def test_the_load_goes_where_it_arrives_first(world: World) -> None:
    with Link(world, 0, 0.03), world.open_group() as team:
        world.on_each(lambda rank: run(team[rank]))  # the first packets measure the paths
        until(lambda: world.engines[0].routes.paths(1)[0]["round_trip_us"] > 30_000)

        def avoids_it() -> bool:
            sent = sent_on_each(world, team)
            return sent[0] < sum(sent) / 10

        until(avoids_it)  # on a busy machine the other paths may delay packets, too


def sent_on_each(world: World, team: Team) -> list[int]:
    """The packets of an all-reduce that rank 0 sends, by path."""
    routes = world.engines[0].routes
    before = routes.paths(1)
    reduce_both(world, team)
    return [new["packets_sent"] - old["packets_sent"] for old, new in zip(before, routes.paths(1), strict=True)]


def test_data_avoids_paused_interfaces(world: World) -> None:
    engine = world.engines[0]
    names = engine.ports.names()
    assert names == ["udp#0", "udp#1", "udp#2", "udp#3"]
    engine.routes.pause("udp#0", is_paused=True)  # holds for peers that come later, too
    with world.open_group() as team:
        until(partial(came_on_each, engine, 1))  # the paths have been tried
        engine.routes.pause("udp#3", is_paused=True)
        sent = sent_on_each(world, team)
        assert max(sent[0], sent[3]) < sum(sent) / 20  # probes may come
        assert engine.routes.paused == {"udp#0", "udp#3"}
        for name in names:
            engine.routes.pause(name, is_paused=True)
        assert sum(sent_on_each(world, team)) > LARGE.numel * 4 / 2 / 1472  # no other path is left
        for name in names:
            engine.routes.pause(name, is_paused=False)
        assert engine.routes.paused == set()
        until(lambda: min(sent_on_each(world, team)) > 0)


def test_an_unknown_peer_has_no_paths(world: World) -> None:
    with pytest.raises(CommError, match="no group of this process has rank 7"):
        world.engines[0].routes.paths(7)
