"""The paths between two processes: pairs of a local address and an address of the peer.

Each end computes the list by itself. Both must come to the same order, because packets name their path by number.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PATHS_MAX = 8
"""Most paths between two processes, and most addresses of one (`CL_PEER_PATHS_MAX`)."""


class Path(NamedTuple):
    """A path from the local port with this index to an address and port of the peer."""

    local: int
    address: str
    """Numeric, or libfabric's address of the endpoint with the wire `ofi`."""
    port: int


def pair_paths(own: Mapping[str, Any], peer: Mapping[str, Any]) -> list[Path]:
    """The paths from the process described by `own` to that described by `peer` (see `Engine.describe`).

    Processes of one host use loopback. Otherwise addresses of the same network are paired one to one; hosts without a
    common network (routed hosts) pair their n-th addresses. If both addresses of a pair have several ports, their n-th
    ports are paired; each pair of addresses has one path before any has a second. Empty if the processes share no
    address family.
    """
    swapped = own["peer"] > peer["peer"]
    first, second = (peer, own) if swapped else (own, peer)
    ones, twos = _sockets(first["ports"]), _sockets(second["ports"])
    addresses = [first["ports"][one[0]] for one in ones], [second["ports"][two[0]] for two in twos]
    pairs = _pairs(*addresses, same_host=own["host"] == peer["host"])
    sockets = [list(zip(ones[i], twos[j], strict=False)) for i, j in pairs]
    rounds = [ports[n] for n in range(PATHS_MAX) for ports in sockets if n < len(ports)]
    paths = []
    for one, two in rounds[:PATHS_MAX]:
        local, remote = (two, one) if swapped else (one, two)
        port = peer["ports"][remote]
        paths.append(Path(local, port.get("endpoint") or port["address"], port["port"]))
    return paths


def common_interface(descriptions: Sequence[Mapping[str, Any]], rank: int) -> str:
    """The interface by which a rank reaches all others, for users of a single one (gloo); empty if there is none.

    Ranks of one host use loopback. Otherwise it is in the first network in which every rank has a working interface;
    all ranks find the same network. Without a common network (routed hosts) it is each rank's first working interface.
    """
    hosts = {description["host"] for description in descriptions}
    if len(hosts) == 1:
        ports = sorted(descriptions[rank]["ports"], key=lambda port: not port["loopback"])
        return str(ports[0]["ifname"]) if ports else ""
    usable = [_usable(description["ports"]) for description in descriptions]
    for network in map(_network, usable[0]):
        inside = [next((port for port in ports if _network(port) == network), None) for ports in usable]
        # An address that two hosts have is private to each host (a container bridge).
        if None not in inside and len({port["address"] for port in inside if port}) == len(hosts):
            found = inside[rank]
            break
    else:
        found = usable[rank][0] if usable[rank] else None
    return "" if found is None else str(found["ifname"])


def _usable(ports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ports that seem to lead to other hosts: those with a working link, or else those outside loopback, or all."""
    outside = [port for port in ports if not port["loopback"]]
    return [port for port in outside if port["running"]] or outside or list(ports)


def _sockets(ports: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The indices of the ports of each address."""
    found: dict[str, list[int]] = {}
    for index, port in enumerate(ports):
        found.setdefault(port["address"], []).append(index)
    return list(found.values())


def _pairs(first: Sequence[Any], second: Sequence[Any], same_host: bool) -> list[tuple[int, int]]:
    if same_host:
        pairs = [(i, j) for i, a in enumerate(first) for j, b in enumerate(second) if a["loopback"] and b["loopback"]]
        if pairs:
            return pairs[:1]
    else:
        first_usable = [i for i, port in enumerate(first) if not port["loopback"]]
        second_usable = [j for j, port in enumerate(second) if not port["loopback"]]
        return _match(first, second, first_usable, second_usable)
    return _match(first, second, list(range(len(first))), list(range(len(second))))


def _match(first: Sequence[Any], second: Sequence[Any], mine: list[int], theirs: list[int]) -> list[tuple[int, int]]:
    pairs = []
    free = list(theirs)
    for i in mine:
        # An address that both have is private to each host (a container bridge): it leads nowhere.
        shared = [j for j in free if _network(first[i]) == _network(second[j])]
        shared = [j for j in shared if first[i]["address"] != second[j]["address"]]
        if shared:
            pairs.append((i, shared[0]))
            free.remove(shared[0])
    if pairs:
        return pairs
    routed: list[tuple[int, int]] = []
    for version in (4, 6):
        ours = [i for i in mine if _family(first[i]) == version]
        routed += zip(ours, [j for j in theirs if _family(second[j]) == version], strict=False)
    return [(i, j) for i, j in routed if first[i]["address"] != second[j]["address"]] or routed


def _family(port: Mapping[str, Any]) -> int:
    return ipaddress.ip_address(port["address"]).version


def _network(port: Mapping[str, Any]) -> object:
    return ipaddress.ip_interface(f"{port['address']}/{port['prefix']}").network
