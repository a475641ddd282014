"""Joining groups: its errors, and its leaks."""

import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from commlayer.errors import CommError, ConfigError, PeerLostError
from commlayer.transport import joining
from commlayer.transport.base import DType
from commlayer.transport.description import PEERS_MAX, check_peer
from tests.engine.cases import Case, run
from tests.world import PATIENCE_S, Exchange, World, flat, open_descriptors, until


@pytest.mark.parametrize("step", ["memory", "mapped", "open"])
def test_a_start_that_fails_leaves_nothing_behind(step: str) -> None:
    class LostError(Exception):
        pass

    def failing(exchange: Exchange) -> Callable[[int], Callable[[str, bytes], list[bytes]]]:
        def meet(rank: int) -> Callable[[str, bytes], list[bytes]]:
            def all_gather(name: str, value: bytes) -> list[bytes]:
                values = exchange(rank)(name, value)
                if name == step:
                    raise LostError
                return values

            return all_gather

        return meet

    with World([(0, 1)], "none") as world:
        world.open_group().__exit__()  # watches the processes, for good
        before = open_descriptors()
        with pytest.raises(LostError):
            world.open_group(failing(Exchange(2)))
        assert open_descriptors() == before
        with world.open_group() as team:
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]


def test_engines_leave_nothing_behind() -> None:
    with World([(0, 1), (2,)]) as world, world.open_group():
        pass
    before = open_descriptors()
    with World([(0, 1), (2,)], "udp") as world, world.open_group() as team:
        world.on_each(lambda rank: run(team[rank]))
    assert open_descriptors() == before


def test_a_meter_that_is_none_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with World([(0, 1), (2,)], "udp") as world:
        world.descriptions[1] |= {"meter": world.descriptions[1]["meter"] + 1000}
        with world.open_group() as team:
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [6.0, 6.0, 6.0]
    assert [text for text in caplog.messages if "meter of rank 1" in text and "its queue alone" in text]
    assert "meter of rank 0" not in caplog.text


def test_without_shared_memory_the_network_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    share = joining._share_memory

    def refuse(local: Any, members: Any, descriptions: Any, exchange: Any) -> tuple[int, str]:
        fd, problem = share(local, members, descriptions, exchange)
        return fd, "rank 1 has none" if members.rank == 1 else problem

    monkeypatch.setattr(joining, "_share_memory", refuse)
    with World([(0, 1, 2)]) as world, world.open_group() as team:
        assert team[0].hosts == ((0,), (1,), (2,))
        assert world.on_each(lambda rank: float(run(team[rank])[0])) == [6.0] * 3
        assert world.engines[0].stats()["packets_sent"] > 0
    assert "no shared memory (rank 1 has none)" in caplog.text


@pytest.mark.parametrize("wire", ["mem", "udp", "ofi"])
def test_packets_are_as_large_as_both_ends_can_send(request: pytest.FixtureRequest, wire: str) -> None:
    if wire == "ofi":
        request.getfixturevalue("libfabric")
    with World(flat(3), wire, mtus=[1500, 1000, 9000]) as world, world.open_group() as team:
        assert [description["packet_bytes"] for description in world.descriptions][:2] == [1432, 928]
        assert [group.packet_bytes for group in team.groups] == [928] * 3
        assert [group.largest_packet_bytes for group in team.groups] == [1432] * 3  # between ranks 0 and 2
        for numel in (10, 1000, 300_000):
            case = Case("all_reduce", DType.F32, numel)
            sums = world.on_each(lambda rank: run(team[rank], case))  # noqa: B023
            assert all((total == 6.0).all() for total in sums)
        if wire == "mem":  # a port may still get packets for the closed engine of another test, which had it before
            assert [engine.stats()["packets_foreign"] for engine in world.engines] == [0] * 3


def life(former: World | None, recorded: list[bytes], muted: threading.Event | None = None, **config: Any) -> World:
    """A world of two that goes on with the job and the key of a former one; notes the packets of rank 0 to rank 1, and
    loses them while it is muted."""
    world = World(flat(2), "udp", **config)
    world.paired = True
    if former is not None:
        world.job, world.key = former.job, former.key
    port = world.descriptions[1]["ports"][0]
    to = (port["address"], port["port"])
    relay = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    relay.bind((port["address"], 0))
    port["port"] = relay.getsockname()[1]

    def carry() -> None:
        while packet := relay.recv(65536):
            recorded.append(packet)
            if muted is None or not muted.is_set():
                relay.sendto(packet, to)
        relay.close()

    world.threads.submit(carry)
    return world


def stop(world: World) -> None:
    """Ends the relay of a life."""
    port = world.descriptions[1]["ports"][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.sendto(b"", (port["address"], port["port"]))


def test_packets_of_a_former_life_count_as_forged_in_the_next() -> None:
    recorded: list[bytes] = []
    with life(None, recorded) as former:
        with former.open_group() as team:
            assert former.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]
        stop(former)
    replayed = [*recorded]
    assert replayed
    with life(former, recorded) as world:
        with world.open_group() as team, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as enemy:
            port = world.engines[1].describe()["ports"][0]
            for packet in replayed:
                enemy.sendto(packet, (port["address"], port["port"]))
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]
            until(lambda: world.engines[1].stats()["packets_forged"] == len(replayed))
        stop(world)


def test_a_process_that_came_again_is_told_from_its_former_life() -> None:
    with World(flat(2)) as world, world.open_group():
        world.descriptions[1]["life"] = "another"
        with pytest.raises(CommError, match=r"rank 0 of group 'group 2': rank 1 has left the job and come again"):
            world.threads.submit(world.open_group, lambda _: lambda _, value: [value] * 2).result(PATIENCE_S)


def test_a_pair_of_lives_has_a_key_of_its_own() -> None:
    ends = [{"peer": peer, "life": life} for peer, life in ((1, "a"), (2, "b"), (2, "c"), (11, "a"))]
    keys = {joining.pair_key(bytes(16), one, other) for one, other in itertools.combinations(ends, 2)}
    assert len(keys) == 6
    assert joining.pair_key(bytes(16), ends[0], ends[1]) == joining.pair_key(bytes(16), ends[1], ends[0])
    assert joining.pair_key(bytes(16), ends[0], ends[1]) != joining.pair_key(bytes(15) + b"1", ends[0], ends[1])


def test_a_lost_peer_is_met_again_in_a_new_group() -> None:
    muted = threading.Event()
    with life(None, [], muted, peer_timeout_s=0.3) as world:
        teams = [world.open_group()]
        for number in range(1, 3):  # all groups stay open
            muted.set()
            with pytest.raises(PeerLostError):
                run(teams[-1][1])
            assert world.engines[1].incarnations()["0"] == (number - 1, False)
            muted.clear()
            for _ in range(2):
                teams.append(world.open_group())
                assert world.on_each(lambda rank: float(run(teams[-1][rank])[0])) == [3.0, 3.0]
                assert [engine.incarnations() for engine in world.engines] == [
                    {"1": (number, True)},
                    {"0": (number, True)},
                ]
        for team in teams:
            team.__exit__()
        stop(world)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("packet_bytes", 1433),
        ("packet_bytes", 0),
        ("packet_bytes", -8),
        ("packet_bytes", 1 << 40),
        ("packet_bytes", "1432"),
        ("peer", -1),
        ("peer", 1 << 16),
        ("pid", 0),
        ("bell", "b" * 32),
        ("meter", -2),
        ("shm", None),
        ("ports", [{"address": "127.0.0.2"}]),
        ("ports", [None]),
        ("life", 5),
        ("host", None),
    ],
)
def test_a_description_that_is_none_is_refused(name: str, value: object) -> None:
    with World(flat(2)) as world:
        good = world.descriptions[1]
        world.descriptions[1] = {**good, name: value}
        with pytest.raises(
            CommError, match=r"rank [01] of group 'group 1': rank 1 describes itself with .*same version"
        ):
            world.open_group()
        world.descriptions[1] = {key: good[key] for key in good if key != name}
        with pytest.raises(CommError, match=f"rank 1 describes itself with {name}='missing'"):
            world.open_group()
        world.descriptions[1] = good
        with world.open_group() as team:  # the refused ones have changed nothing
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]


def test_a_world_has_a_limit() -> None:
    check_peer(PEERS_MAX - 1)
    with pytest.raises(ConfigError, match=r"rank 65535 of the job: commlayer supports at most 65535 ranks"):
        check_peer(PEERS_MAX)
    with World(flat(2)) as world:
        world.descriptions[1]["peer"] = PEERS_MAX - 1
        world.descriptions[1]["life"] = world.engines[1].life
        with world.open_group() as team:
            assert world.on_each(lambda rank: float(run(team[rank])[0])) == [3.0, 3.0]


def test_no_path() -> None:
    with World(flat(2)) as world:
        world.descriptions[1]["ports"] = []
        with pytest.raises(
            ConfigError, match=r"rank 0 of group 'group 1': no network path leads to rank 1.*no address"
        ):
            world.threads.submit(world.open_group, lambda _: lambda _, value: [value] * 2).result(PATIENCE_S)


def test_group_hosts() -> None:
    ranks = [{"host": host, "shm": shm} for host, shm in [("b", True), ("a", True), ("b", True), ("a", False)]]
    assert joining.group_hosts(ranks) == ((0, 2), (1,), (3,))
