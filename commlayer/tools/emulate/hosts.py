"""Names of the emulated hosts: `host0`, `host1`, ... have their first NIC's address, `host0-eth1` is another NIC's."""

from __future__ import annotations

from collections.abc import Callable

FILE = "/etc/hosts"


def name(host: int, nic: int = 0) -> str:
    """The name of a host, or of one of its other NICs."""
    return f"host{host}" if nic == 0 else f"host{host}-eth{nic}"


def table(hosts: int, nics: int, address: Callable[[int, int], str]) -> str:
    """The text of /etc/hosts inside. `address` gives the address of a NIC of a host."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address(host, nic)} {name(host, nic)}" for host in range(hosts) for nic in range(nics)]
    return "".join(f"{line}\n" for line in lines)
