"""Which pairs of hosts are measured, over which paths, and when: no host takes part in two measurements at once."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PARTNERS = 8
"""Hosts that each host is measured with; in smaller jobs all others."""
PATHS_MAX = 8
"""Paths of a pair of hosts: as many as the engine uses."""

Nic = Mapping[str, Any]
"""ifname, address, prefix (bits), mtu, port."""


def pairs(hosts: int, partners: int = PARTNERS) -> set[tuple[int, int]]:
    """The pairs to measure: all, or those of hosts whose numbers differ by certain distances from 1 to half of the
    hosts, which connect all of them."""
    if hosts - 1 <= partners:
        return {(one, other) for one in range(hosts) for other in range(one + 1, hosts)}
    count = max(1, partners // 2)
    farthest = hosts // 2
    distances = {max(1, round(farthest ** (number / max(1, count - 1)))) for number in range(count)}
    both = {(host, (host + distance) % hosts) for host in range(hosts) for distance in distances}
    return {(min(pair), max(pair)) for pair in both}


def rounds(wanted: Iterable[tuple[int, int]], hosts: int) -> list[list[tuple[int, int]]]:
    """The pairs in rounds, each host in one pair of a round at most: the tournament of all hosts where all meet."""
    odd = hosts - 1 + hosts % 2

    def place(pair: tuple[int, int]) -> int:
        one, other = pair
        return 2 * one % odd if other == odd else (one + other) % odd

    found: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for pair in sorted(wanted, key=lambda pair: (place(pair), pair)):
        number = next((number for number, hosts_of in enumerate(busy) if hosts_of.isdisjoint(pair)), len(found))
        if number == len(found):
            found.append([])
            busy.append(set())
        found[number].append(pair)
        busy[number].update(pair)
    return found


def network(nic: Nic) -> str:
    """The subnet of an interface."""
    return str(ipaddress.ip_interface(f"{nic['address']}/{nic['prefix']}").network)


def paths(ones: Sequence[Nic], others: Sequence[Nic]) -> list[tuple[Nic, Nic, str]]:
    """The paths between two hosts, with their networks: every two interfaces of one subnet. Hosts without a common one
    (routed hosts) use their n-th interfaces."""
    found = [
        (one, other, network(one))
        for one in ones
        for other in others
        if network(one) == network(other) and one["address"] != other["address"]
    ]
    if not found:
        for version in (4, 6):
            mine, theirs = (
                [nic for nic in nics if (":" in nic["address"]) == (version == 6)] for nics in (ones, others)
            )
            found += [(one, other, "routed") for one, other in zip(mine, theirs, strict=False)]
    return found[:PATHS_MAX]
