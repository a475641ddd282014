"""The sockets of an engine: the size of their datagrams, and their names."""

from typing import Any

import pytest

from commlayer.transport.ports import Ports


def interface(name: str, address: str, mtu: int = 1500) -> dict[str, Any]:
    version = 6 if ":" in address else 4
    return {"ifname": name, "address": address, "prefix": 24, "mtu": mtu, "loopback": name == "lo", "version": version}


@pytest.mark.parametrize(
    ("ports", "mtu", "expected"),
    [
        ([interface("eth0", "10.0.0.1"), interface("lo", "127.0.0.1", 65536)], 0, 1472),
        ([interface("eth0", "10.0.0.1", 9000), interface("eth1", "2001:db8::1")], 0, 1452),
        ([interface("eth0", "10.0.0.1", 9000)], 1400, 1372),
        ([interface("lo", "127.0.0.1", 65536)], 0, 8972),
        ([], 0, 1472),
    ],
)
def test_datagram_bytes(ports: list[dict[str, Any]], mtu: int, expected: int) -> None:
    assert Ports(ports, 1).datagram_bytes(mtu) == expected


def test_sockets_of_one_interface_have_numbers() -> None:
    used = [interface("eth0", "10.0.0.1"), interface("eth1", "10.0.1.1"), interface("lo", "127.0.0.1")]
    assert Ports(used, 1).names() == ["eth0", "eth1", "lo"]
    ports = Ports(used, 2)
    assert ports.names() == ["eth0#0", "eth1#0", "lo", "eth0#1", "eth1#1"]
    assert [ports.address(number) for number in (0, 3)] == ["10.0.0.1", "10.0.0.1"]
