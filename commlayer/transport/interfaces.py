"""The network interfaces that a process uses: those that seem to lead to other hosts, and loopback.

An interface here is an entry of `native.interfaces()`: one address of a network interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..config import Config
from .paths import PATHS_MAX

VIRTUAL = (
    *("docker", "podman", "br-", "veth", "virbr", "vmnet", "vboxnet", "lxc", "lxd"),  # containers, virtual machines
    *("cni", "cali", "cilium", "flannel", "kube", "weave"),  # Kubernetes
    *("tailscale", "wg", "tun", "tap", "zt"),  # VPNs
)
"""Prefixes of names. Such interfaces have the same addresses on every host, lead to this host only, or through a slow
tunnel; they are used only if COMMLAYER_IFNAME names them."""

Interface = dict[str, Any]

IP_UDP_HEADER_BYTES = {4: 28, 6: 48}
"""The bytes of both headers, one per version of IP."""


class Choice(NamedTuple):
    """The interfaces of a process."""

    used: list[Interface]
    left_out: list[str]
    """Names and addresses of the virtual ones that the default leaves out."""


def choose(config: Config, found: Sequence[Interface]) -> Choice:
    """Chooses among the interfaces of this host: at most PATHS_MAX, with loopback for the ranks of this host.

    Raises ConfigError if COMMLAYER_IFNAME matches no interface.
    """
    by_name: dict[str, Interface] = {}
    for interface in sorted(found, key=lambda port: port["version"]):  # IPv4 if there is a choice
        by_name.setdefault(interface["ifname"], interface)
    names = config.choose_interfaces(list(by_name))
    left_out = []
    if all(pattern.startswith("^") for pattern in config.ifname):
        outside = [name for name in names if not by_name[name]["loopback"]]
        names = [name for name in outside if not name.startswith(VIRTUAL)]
        left_out = [f"{name} {by_name[name]['address']}" for name in outside if name.startswith(VIRTUAL)]
    used = [by_name[name] for name in names][:PATHS_MAX]
    if config.wire == "ofi" and config.ofi_provider != "udp":
        return Choice([port for port in used if not port["loopback"]], left_out)  # hardware has no loopback interface
    loopback = next((port for port in by_name.values() if port["loopback"]), None)
    if loopback is not None and loopback not in used:
        used = [*used[: PATHS_MAX - 1], loopback]
    return Choice(used, left_out)


def moved(port: Interface, found: Sequence[Interface]) -> Interface | None:
    """The interface of a port among those that this host has now; None if it has gone, or has no such address."""
    return next(
        (interface for interface in found if all(interface[name] == port[name] for name in ("ifname", "version"))), None
    )


def spread(ports: Sequence[Interface], sockets: int) -> list[Interface]:
    """One entry per socket to open: `sockets` of them for each address except loopback. Each address comes once before
    any comes again."""
    outside = [port for port in ports if not port["loopback"]]
    return [dict(port) for port in (*ports, *(sockets - 1) * outside)]


def described(description: Mapping[str, Any]) -> str:
    """The interfaces of a process, from its description, for errors."""
    used = ", ".join(f"{port['ifname']} {port['address']}" for port in description["ports"]) or "no address"
    left_out = ", ".join(description.get("left_out", ()))
    return f"{used} (left out as virtual or VPN: {left_out})" if left_out else used
