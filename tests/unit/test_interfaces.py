"""The network interfaces that a process uses."""

import itertools
from typing import Any

import pytest

from commlayer.config import Config
from commlayer.errors import ConfigError
from commlayer.transport import interfaces, joining
from commlayer.transport.members import Members
from commlayer.transport.paths import PATHS_MAX

VIRTUAL = [
    *("docker0", "podman1", "br-1a2b3c", "veth9f0a1b2", "virbr0", "cni0", "flannel.1", "cali12ab", "cilium_host"),
    *("tailscale0", "wg0", "tun0", "tap0"),
]


def interface(name: str, address: str) -> dict[str, Any]:
    version = 6 if ":" in address else 4
    prefix = {"prefix": 24, "mtu": 1500, "running": True, "version": version}
    return {"ifname": name, "address": address, "loopback": name == "lo", **prefix}


LOOPBACK = interface("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("ifname", "chosen"),
    [
        ((), ["10.0.0.1", "10.0.1.1", "127.0.0.1"]),
        (("eth1",), ["10.0.1.1", "127.0.0.1"]),
        (("^eth1",), ["10.0.0.1", "127.0.0.1"]),
        (("docker*",), ["172.17.0.1", "127.0.0.1"]),
        (("docker0", "eth0"), ["10.0.0.1", "172.17.0.1", "127.0.0.1"]),
        (("*", "^eth0"), ["10.0.1.1", "172.17.0.1", "127.0.0.1"]),
        (("lo",), ["127.0.0.1"]),
    ],
)
def test_interfaces_are_chosen(ifname: tuple[str, ...], chosen: list[str]) -> None:
    found = [
        interface("lo", "::1"),
        LOOPBACK,
        interface("eth0", "2001:db8::1"),
        interface("eth0", "10.0.0.1"),
        interface("eth1", "10.0.1.1"),
        interface("docker0", "172.17.0.1"),
    ]
    used = interfaces.choose(Config(ifname=ifname), found).used
    assert sorted(port["address"] for port in used) == sorted(chosen)


@pytest.mark.parametrize("name", VIRTUAL)
def test_a_virtual_interface_is_used_only_by_name(name: str) -> None:
    found = [LOOPBACK, interface("eth0", "10.0.0.1"), interface(name, "100.64.0.1")]
    used, left_out = interfaces.choose(Config(), found)
    assert [port["ifname"] for port in used] == ["eth0", "lo"]
    assert left_out == [f"{name} 100.64.0.1"]
    used, left_out = interfaces.choose(Config(ifname=(name,)), found)
    assert [port["ifname"] for port in used] == [name, "lo"]
    assert left_out == []


@pytest.mark.parametrize("name", ["br0", "bond0", "enp5s0", "ens5", "ib0", "eth0.100", "wlan0", "team0"])
def test_an_interface_of_the_host_is_used(name: str) -> None:
    assert [port["ifname"] for port in interfaces.choose(Config(), [interface(name, "10.0.0.1")]).used] == [name]


def test_where_nothing_is_left_the_error_names_the_excluded() -> None:
    found = [LOOPBACK, interface("docker0", "172.17.0.1"), interface("tailscale0", "100.64.0.1")]
    used, left_out = interfaces.choose(Config(), found)
    own = {"host": "a", "peer": 0, "ports": [{**port, "port": 1} for port in used], "left_out": left_out}
    peer = {"host": "b", "peer": 1, "ports": [{**interface("eth0", "10.0.0.2"), "port": 1}]}
    with pytest.raises(ConfigError) as caught:
        joining._add_peer(None, Members("0", 0, [0, 1]), 1, own, peer, None)  # type: ignore[arg-type]  # needs none yet
    assert (
        "this host has lo 127.0.0.1 (left out as virtual or VPN: docker0 172.17.0.1, tailscale0 100.64.0.1), that one "
        "eth0 10.0.0.2; name interfaces that reach each other with COMMLAYER_IFNAME"
    ) in str(caught.value)


def test_loopback_stays_among_many() -> None:
    found = [interface(f"eth{i}", f"10.0.{i}.1") for i in range(12)] + [interface("lo", "::1")]
    used = interfaces.choose(Config(), found).used
    assert len(used) == PATHS_MAX
    assert used[-1]["loopback"]


@pytest.mark.parametrize(("provider", "loopback"), [("udp", True), ("verbs", False), ("", False)])
def test_only_the_udp_provider_has_a_loopback(provider: str, loopback: bool) -> None:
    found = [interface("eth0", "10.0.0.1"), LOOPBACK]
    used = interfaces.choose(Config(wire="ofi", ofi_provider=provider), found).used
    assert any(port["loopback"] for port in used) is loopback


def test_loopback_has_one_socket() -> None:
    ports = [interface("eth0", "a"), LOOPBACK, interface("eth1", "b")]
    spread = interfaces.spread(ports, 3)
    assert [port["address"] for port in spread] == ["a", "127.0.0.1", "b", "a", "b", "a", "b"]
    assert all(one is not other for one, other in itertools.combinations(spread, 2))
