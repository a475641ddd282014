"""Which address talks to which: sensible pairs, and the same list at both ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.transport.paths import PATHS_MAX, Path, common_interface, pair_paths

LOOPBACK = "127.0.0.1/8"


def process(peer: int, *addresses: str, host: str | None = None) -> dict[str, Any]:
    """A description; the n-th address has UDP port 1000 * peer + n."""
    ports = []
    for number, text in enumerate(addresses):
        address, prefix = text.split("/")
        ports.append({"address": address, "prefix": int(prefix), "port": 1000 * peer + number, "running": True})
        ports[-1]["ifname"] = f"eth{number}"
        ports[-1]["loopback"] = address.startswith("127.") or address == "::1"
    return {"peer": peer, "host": host or f"host {peer}", "ports": ports}


def pairs(own: dict[str, Any], peer: dict[str, Any]) -> list[tuple[int, int]]:
    """(Own port, peer's port) of each path, checked for agreement with the other end's list."""
    there = [(path.port - 1000 * own["peer"], path.local) for path in pair_paths(peer, own)]
    here = [(path.local, path.port - 1000 * peer["peer"]) for path in pair_paths(own, peer)]
    assert here == there
    for path in pair_paths(own, peer):
        assert path.address == peer["ports"][path.port - 1000 * peer["peer"]]["address"]
    return here


def test_an_endpoint_of_libfabric_is_the_address() -> None:
    one, two = process(1, "10.0.0.1/24"), process(2, "10.0.0.2/24")
    one["ports"][0]["endpoint"], two["ports"][0]["endpoint"] = "", "0200abcd"
    assert pair_paths(one, two) == [Path(0, "0200abcd", 2000)]
    assert pair_paths(two, one) == [Path(0, "10.0.0.1", 1000)]


def test_one_interface_each() -> None:
    one, two = process(1, "10.0.0.1/24", LOOPBACK), process(2, "10.0.0.2/24", LOOPBACK)
    assert pair_paths(one, two) == [Path(0, "10.0.0.2", 2000)]
    assert pairs(one, two) == [(0, 0)]


PAIRED = {
    "any order": ("10.0.0.1/24 10.0.1.1/24", "10.0.1.2/24 10.0.0.2/24", [(0, 1), (1, 0)]),
    "one network": ("10.0.0.1/24 10.0.0.2/24", "10.0.0.3/24 10.0.0.4/24 10.0.0.5/24", [(0, 0), (1, 1)]),
    "shared network": ("10.0.0.1/24 172.16.0.1/16", "10.0.0.2/24 192.168.0.1/24", [(0, 0)]),
    "bridge": ("172.17.0.1/16 10.0.0.1/24", "172.17.0.1/16 10.0.0.2/24", [(1, 1)]),
    "routed": ("10.1.0.1/24 10.2.0.1/24", "10.3.0.1/24 10.4.0.1/24 10.5.0.1/24", [(0, 0), (1, 1)]),
    "families": ("10.1.0.1/24 2001:db8:1::1/64", "2001:db8:2::1/64 10.2.0.1/24", [(0, 1), (1, 0)]),
}
"""A shared network excludes the others; a bridge that every host has is no path."""


@pytest.mark.parametrize(("one", "two", "expected"), PAIRED.values(), ids=PAIRED)
def test_addresses_are_paired(one: str, two: str, expected: list[tuple[int, int]]) -> None:
    assert pairs(process(1, *one.split()), process(2, *two.split())) == expected


def test_several_ports_of_each_address_are_paired_in_rounds() -> None:
    one = process(1, "10.0.0.1/24", "10.0.1.1/24", LOOPBACK, "10.0.0.1/24", "10.0.1.1/24", "10.0.0.1/24")
    two = process(2, "10.0.1.2/24", "10.0.0.2/24", "10.0.1.2/24", "10.0.0.2/24", "10.0.0.2/24", "10.0.1.2/24")
    assert pairs(one, two) == [(0, 1), (1, 0), (3, 3), (4, 2), (5, 4)]


def test_no_address_is_left_out_for_the_second_port_of_another() -> None:
    addresses = [f"10.0.{i}.{{}}/24" for i in range(5)] * 3
    one, two = (process(peer, *(address.format(peer) for address in addresses)) for peer in (1, 2))
    assert pairs(one, two) == [(i, i) for i in range(PATHS_MAX)]


def test_no_common_family() -> None:
    assert pairs(process(1, "10.1.0.1/24", LOOPBACK), process(2, "2001:db8::1/64", LOOPBACK)) == []
    assert pairs(process(1), process(2, "10.1.0.1/24")) == []


def test_one_host_uses_loopback() -> None:
    one = process(1, "10.0.0.1/24", LOOPBACK, host="a")
    assert pairs(one, process(2, LOOPBACK, "10.0.0.1/24", host="a")) == [(1, 0)]
    assert pairs(one, process(2, "10.0.0.1/24", LOOPBACK, host="b")) == [(0, 0)]  # two hosts never do


def test_one_host_without_loopback() -> None:
    assert pairs(process(1, "10.0.0.1/24", host="a"), process(2, "10.0.0.1/24", host="a")) == [(0, 0)]


ADDRESSES = st.lists(
    st.sampled_from(["10.0.0.{}/24", "10.0.1.{}/24", "10.9.9.{}/16", "2001:db8::{}/64", "2001:db8:1::{}/64"]),
    max_size=PATHS_MAX,
)


@given(ADDRESSES, ADDRESSES, st.booleans(), st.booleans())
def test_both_ends_agree(first: list[str], second: list[str], same_host: bool, swapped: bool) -> None:
    one = process(1, *(pattern.format(i + 1) for i, pattern in enumerate(first)), LOOPBACK, host="a")
    two = process(
        2, LOOPBACK, *(pattern.format(i + 101) for i, pattern in enumerate(second)), host="a" if same_host else "b"
    )
    if swapped:
        one, two = two, one
    found = pairs(one, two)
    assert len(found) <= PATHS_MAX
    assert len({a for a, _ in found}) == len({b for _, b in found}) == len(found)
    families = [{":" in port["address"] for port in end["ports"] if not port["loopback"]} for end in (one, two)]
    assert bool(found) == (same_host or bool(families[0] & families[1]))
    for a, b in found:
        assert (":" in one["ports"][a]["address"]) == (":" in two["ports"][b]["address"])
        assert one["ports"][a]["loopback"] == two["ports"][b]["loopback"] == same_host


def common(*processes: dict[str, Any]) -> list[str]:
    return [common_interface(processes, rank) for rank in range(len(processes))]


def test_the_common_interface_reaches_all_ranks() -> None:
    two = ("10.0.0.{0}/24", "10.0.1.{0}/24", LOOPBACK)
    first, second, third = (process(peer, *(address.format(peer) for address in two)) for peer in (1, 2, 3))
    assert common(first, second, third) == ["eth0"] * 3
    second["ports"][0]["running"] = False
    assert common(first, second, third) == ["eth1"] * 3
    second["ports"][1]["running"] = False  # nothing to be had: any
    assert common(first, second, third) == ["eth0"] * 3
    assert common(process(1, *two[2:], host="a"), process(2, *two[2:], host="a")) == ["eth0"] * 2
    assert common(process(1), process(2)) == ["", ""]


def test_the_common_interface_has_another_name_or_network_on_each_host() -> None:
    bridge = "172.17.0.1/16"
    one, two = process(1, bridge, "10.0.0.1/24"), process(2, "10.0.0.2/24", bridge)
    assert common(one, two) == ["eth1", "eth0"]
    assert common(process(1, "10.0.0.1/24"), process(2, "10.0.1.1/24", LOOPBACK)) == ["eth0", "eth0"]
    same = process(2, "10.0.0.1/24", host=one["host"])  # two ranks of a host have one address
    assert common(process(1, "10.0.0.1/24"), same, process(3, "10.0.0.3/24")) == ["eth0"] * 3
