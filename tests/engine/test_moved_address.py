"""An interface that comes back with another address: groups that are made later use it, and reach peers there."""

from typing import Any

import pytest

from commlayer.transport import native
from commlayer.transport.base import DType
from tests.engine.cases import Case, check
from tests.world import Team, World, flat

CASE = Case("all_reduce", DType.F32, 50_000)


def reduce_on_all(world: World, team: Team) -> None:
    world.on_each(lambda rank: check(team[rank], CASE, 0))


def interfaces_with(*addresses: str) -> list[dict[str, Any]]:
    base = {"ifname": "udp", "prefix": 8, "mtu": 1500, "loopback": False, "running": True, "version": 4}
    return [{**base, "address": address} for address in addresses]


def describe_again(world: World, rank: int) -> dict[str, Any]:
    world.descriptions[rank] |= world.engines[rank].describe() | {"host": world.descriptions[rank]["host"]}
    return world.descriptions[rank]


def test_a_later_group_uses_the_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with World(flat(2), "udp") as world:
        first = world.open_group()
        reduce_on_all(world, first)
        before = dict(world.descriptions[1]["ports"][0])
        monkeypatch.setattr(native, "interfaces", lambda: interfaces_with("127.0.0.77"))
        after = describe_again(world, 1)["ports"][0]
        assert before["address"] == "127.0.0.2"
        assert (after["address"], after["ifname"]) == ("127.0.0.77", "udp")
        second = world.open_group()
        reduce_on_all(world, second)
        reduce_on_all(world, first)  # its paths lead to the new address, too
        assert world.engines[0].routes.paths(1)[0]["remote"] == f"127.0.0.77:{after['port']}"
        assert world.engines[1].routes.paths(0)[0]["address"] == "127.0.0.77"


@pytest.mark.parametrize("found", [[], interfaces_with("127.0.0.77", "127.0.0.2")], ids=["gone", "still there"])
def test_other_addresses_stay(found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is away may come back; one that has its address still is used as before."""
    with World(flat(2), "udp") as world:
        before = dict(world.descriptions[1]["ports"][0])
        monkeypatch.setattr(native, "interfaces", lambda: found)
        assert describe_again(world, 1)["ports"][0] == before
        reduce_on_all(world, world.open_group())
